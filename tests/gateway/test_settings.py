"""The configuration, and what is said of mistakes in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from leyline_lmcache.gateway.settings import ConfigError, GatewaySettings, KeyCheck, Mode, Source

BACKEND = "backends: [{url: 'http://a:1'}]\n"
EVERYTHING = """
listen: {host: 0.0.0.0, port: 9000}
backends:
  - {name: one, url: "http://sglang-0:30000", api_key_env: BACKEND_KEY}
  - {name: two, url: "https://sglang-1/base/"}
auth: {mode: check, keys_env: KEYS}
salt_secret_env: SECRET
policies:
  tidy:
    - keep_tool_results: {keep: 2}
policy: tidy
mode: amortize
on_policy_error: refuse
tenants:
  acme: {concurrent: 3}
  other: {policy: none, mode: off}
session: {from: [header, head]}
limits: {body_bytes: 4096, concurrent: 9, body_s: 1, connect_s: 1, answer_s: 2, idle_s: 3, total_s: 4}
routing: {retries: 1, max_moved: 10}
health: {path: /health_generate, interval_s: 1, timeout_s: 2, failures: 3}
drain: {delay_s: 5, timeout_s: 30}
"""


def test_everything_can_be_said() -> None:
    environ = {"KEYS": "acme a\nother b\nthird c", "SECRET": "s", "BACKEND_KEY": "k"}
    read = GatewaySettings.parse(EVERYTHING, "gateway.yaml", environ)
    assert [(each.name, each.url, each.key) for each in read.backends] == [
        ("one", "http://sglang-0:30000", "k"),
        ("two", "https://sglang-1/base", None),
    ]
    assert (read.host, read.port, read.auth) == ("0.0.0.0", 9000, KeyCheck.CHECK)
    assert read.tenants["acme"].policy == "tidy" and read.tenants["acme"].concurrent == 3
    assert read.tenants["other"].policy is None and read.tenants["other"].mode is Mode.OFF
    # A key of a tenant of whom nothing else is said.
    assert read.tenants["third"].policy == "tidy" and read.tenants["third"].name == "third"
    assert read.sources == (Source.HEADER, Source.HEAD)
    assert (read.limits.body_bytes, read.limits.total_s, read.drain_delay_s) == (4096, 4.0, 5.0)
    assert (read.health_path, read.retries) == ("/health_generate", 1)


def test_keys_from_a_file(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# tenants\nacme one\n\n")
    text = f"{BACKEND}auth: {{mode: check, keys_file: '{keys}'}}"
    assert GatewaySettings.parse(text, "g", {}).keys == {"one": "acme"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "backends: expected at least one server"),
        ("- a", "expected a mapping of names to values"),
        ("a: [", "g.yaml:1: not valid YAML"),
        ("backends: 1", "g.yaml:1: backends: expected a list"),
        ("backends: [1]", r"g.yaml:1: backends\[0\]: expected a mapping"),
        ("backends:\n- {}", r"g.yaml:2: backends\[0\].url: is missing"),
        ("backends:\n- {url: 'ftp://x'}", r"backends\[0\].url: expected http"),
        ("backends:\n- {url: 'http://u:p@x'}", r"backends\[0\].url: expected http"),
        ("backends:\n- {url: 'http://x:99999'}", r"backends\[0\].url: expected http"),
        ("backends: [{url: 'http://a'}, {url: 'http://a'}]", "two of them have the same name"),
        (f"{BACKEND}limit: {{}}", "g.yaml:2: limit: unknown key; known keys are"),
        (f"{BACKEND}limits:\n  bodies: 1", "g.yaml:3: limits.bodies: unknown key"),
        (f"{BACKEND}limits:\n  body_bytes: 1", "g.yaml:3: limits.body_bytes: expected an integer from 1024"),
        (f"{BACKEND}limits: {{idle_s: true}}", "limits.idle_s: expected seconds"),
        (f"{BACKEND}limits: {{idle_s: .nan}}", "limits.idle_s: expected seconds"),
        (f"{BACKEND}listen: {{port: 70000}}", "listen.port: expected an integer from 0 to 65535"),
        (f"{BACKEND}mode: forget", "mode: expected one of amortize, off"),
        (f"{BACKEND}mode: amortize\nmode: off", "g.yaml:3: mode: is there twice"),
        (f"{BACKEND}policy: tidy", "policy: no policy 'tidy'; policies has none"),
        (f"{BACKEND}policies:\n  tidy:\n  - tidier", r"g.yaml:4: policies.tidy\[0\]: unknown policy"),
        (f"{BACKEND}policies: {{none: []}}", "policies.none: .* choose another name"),
        (f"{BACKEND}session: {{from: [cookie]}}", "session.from: expected a list of header, user, head"),
        (f"{BACKEND}session: {{from: header}}", "session.from: expected a list"),
        (f"{BACKEND}refuse_fields: rid", "refuse_fields: expected a list of names"),
        (f"{BACKEND}health: {{path: health}}", "health.path: expected a path"),
        (f"{BACKEND}tenants: {{a: {{}}}}", "tenants: nothing tells tenants apart; set auth.mode: check"),
        (f"{BACKEND}auth: {{mode: check}}", "auth.keys_file: is missing"),
        (f"{BACKEND}auth: {{mode: maybe}}", "auth.mode: expected one of pass, check"),
        (f"{BACKEND}auth: {{keys_env: KEYS}}", "auth.mode: keys are given, but passed on"),
        (f"{BACKEND}auth: {{mode: check, keys_env: NONE}}", "auth.keys_env: NONE: is empty"),
        (f"{BACKEND}auth: {{mode: check, keys_file: /nowhere}}", "auth.keys_file: /nowhere: cannot be read"),
        (f"{BACKEND}auth: {{mode: check, keys_env: K, keys_file: f}}", "expected one of them"),
        (f"{BACKEND}auth: {{mode: check, keys_env: KEYS}}", "salt_secret_env: expected a secret"),
        (f"{BACKEND}auth: {{mode: check, keys_env: ODD}}", "line 2: expected TENANT KEY, got 1 words"),
        (f"{BACKEND}auth: {{mode: check, keys_env: SAME}}", "line 2: the key of b is another tenant's too"),
    ],
)
def test_mistakes_are_named_i9(text: str, says: str) -> None:
    environ = {"KEYS": "a x, b y", "ODD": "a x\nsecret", "SAME": "a x\nb x"}
    with pytest.raises(ConfigError, match=says) as wrong:
        GatewaySettings.parse(text, "g.yaml", environ)
    assert "secret\n" not in str(wrong.value)


def test_urls_alone_are_enough() -> None:
    read = GatewaySettings.of_urls(["http://127.0.0.1:30000/"])
    assert read.backends[0].name == "127.0.0.1:30000" and read.auth is KeyCheck.PASS
    with pytest.raises(ConfigError, match=r"--backend: .*url: expected http"):
        GatewaySettings.of_urls(["127.0.0.1:30000"])
