"""API keys, tenants and their salts."""

from __future__ import annotations

import logging

import httpx
import pytest

from .conftest import Start
from .servers import Running, Server

CHECK = """
auth: {mode: check, keys_env: KEYS}
salt_secret_env: SECRET
tenants:
  acme: {}
  other: {mode: off}
"""
KEYS = "acme key-one\nacme key-two  # the next one\nother key-three"


@pytest.fixture
def gateway(start: Start, server: Server) -> Running:
    return start([server], CHECK, KEYS=KEYS, SECRET="secret-of-salts")


def ask(gateway: Running, key: str | None, **more: object) -> httpx.Response:
    headers = {} if key is None else {"authorization": key}
    return gateway.chat(headers=headers, **more)


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer key-on", "Bearer key-one1", "key-one", "Basic key-one"],
)
def test_a_key_that_is_not_known_is_refused(gateway: Running, server: Server, header: str | None) -> None:
    answer = ask(gateway, header)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert not server.received


def test_models_need_a_key_too_and_the_probes_do_not(gateway: Running) -> None:
    assert gateway.client.get("/v1/models").status_code == 401
    for path in ("/health", "/ready", "/metrics"):
        assert gateway.client.get(path).status_code == 200


def test_tenants_have_salts_of_their_own_i7(gateway: Running, server: Server) -> None:
    keys = ("key-one", "key-two", "key-three")
    for key in keys:
        assert ask(gateway, f"Bearer {key}").status_code == 200
    one, two, three = (each.body for each in server.received)
    assert one["cache_salt"] == two["cache_salt"] != three["cache_salt"]
    assert one["session_id"] == two["session_id"] != three["session_id"]
    assert three["custom_params"]["leyline"]["mode"] == "off"
    # The key went no further.
    assert all("authorization" not in each.headers for each in server.received)


def test_a_salt_that_a_client_asks_for_leads_nowhere_else(gateway: Running, server: Server) -> None:
    ask(gateway, "Bearer key-three")
    others = server.received[0].body["cache_salt"]
    for wanted in (others, "x", "y"):
        ask(gateway, "Bearer key-one", cache_salt=wanted)
    salts = [each.body["cache_salt"] for each in server.received]
    assert len(set(salts)) == 4


def test_keys_passed_on_have_salts_of_their_own_too(start: Start, server: Server) -> None:
    gateway = start([server], "salt_secret_env: SECRET", SECRET="s")
    for key in ("Bearer a", "Bearer b", "Bearer a", None):
        ask(gateway, key)
    salts = [each.body["cache_salt"] for each in server.received]
    assert salts[0] == salts[2] and len(set(salts)) == 3
    assert [each.headers.get("authorization") for each in server.received] == [
        "Bearer a",
        "Bearer b",
        "Bearer a",
        None,
    ]


def test_without_a_secret_salts_are_the_clients(start: Start, server: Server) -> None:
    gateway = start([server])
    ask(gateway, None)
    ask(gateway, None, cache_salt="mine")
    assert "cache_salt" not in server.received[0].body
    assert server.received[1].body["cache_salt"] == "mine"


@pytest.mark.parametrize("field", ["rid", "session_params", "priority", "custom_logit_processor"])
def test_fields_that_could_reach_others_are_refused(gateway: Running, server: Server, field: str) -> None:
    answer = ask(gateway, "Bearer key-one", **{field: "x"})
    said = answer.json()["error"]
    assert (answer.status_code, said["code"], said["param"]) == (400, "field_not_allowed", field)
    assert not server.received


def test_a_sole_user_may_set_them(start: Start, server: Server) -> None:
    assert ask(start([server]), None, rid="x").status_code == 200
    assert server.received[0].body["rid"] == "x"
    assert ask(start([server], "refuse_fields: [rid]"), None, rid="x").status_code == 400


def test_no_secret_is_logged_or_counted(gateway: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    ask(gateway, "Bearer key-one")
    ask(gateway, "Bearer wrong-key")
    said = caplog.text + gateway.client.get("/metrics").text + repr(gateway.gateway.settings)
    for secret in ("key-one", "key-two", "key-three", "wrong-key", "secret-of-salts", "hello"):
        assert secret not in said
    assert "tenant=acme" in said
