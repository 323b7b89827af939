"""Options: every key checked, secrets kept out of sight."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from leyline_lmcache.connector.redis import OptionsError, RedisOptions
from leyline_lmcache.connector.redis.client import RedisClient
from leyline_lmcache.connector.redis.credentials import MissingSecret, PasswordSource

SECRET = "correct-horse-battery"


def of(environ: dict[str, str] | None = None, **values: Any) -> RedisOptions:
    return RedisOptions.of(values, environ or {})


def test_defaults_need_no_key() -> None:
    options = of()
    assert (options.host, options.port, options.db, options.ssl) == ("localhost", 6379, 0, False)
    assert options.where == "localhost:6379/0"


def test_every_option_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "redis.md").read_text()
    documented = set(re.findall(r"`([a-z_]+)`", text.partition("## Options")[2].partition("### Secrets")[0]))
    assert set(RedisOptions.known()) <= documented


def test_unknown_key_lists_the_known_ones() -> None:
    with pytest.raises(OptionsError, match=r"hots: unknown key; known keys are url, host, port"):
        of(hots="x")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://cache", {"host": "cache", "port": 6379, "db": 0, "ssl": False}),
        ("redis://cache:7000/3", {"host": "cache", "port": 7000, "db": 3}),
        ("redis://cache?db=4", {"db": 4}),
        ("redis://bob@[::1]:7000", {"host": "::1", "username": "bob"}),
        ("rediss://cache:7000", {"host": "cache", "ssl": True}),
        ("unix:///run/redis.sock?db=2", {"unix_socket_path": "/run/redis.sock", "db": 2}),
    ],
)
def test_url_is_taken_apart(url: str, expected: dict[str, Any]) -> None:
    options = of(url=url)
    assert {key: getattr(options, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"url": "http://x"}, "url: must begin with redis://, rediss://, unix://"),
        ({"url": "redis://x:port"}, "url: the port"),
        ({"url": "redis://x/zero"}, "url: the database"),
        ({"url": "redis://x?timeout=3"}, "url: unknown parameters timeout"),
        ({"url": "redis://x", "host": "y"}, "host: given both"),
        ({"port": 0}, "port: expected an integer from 1 to 65535, got 0"),
        ({"port": "6379"}, "port: expected an integer"),
        ({"port": True}, "port: expected an integer"),
        ({"ttl": 0}, "ttl: expected"),
        ({"socket_timeout": 0}, "socket_timeout: expected seconds"),
        ({"socket_timeout": 9.0, "task_timeout": 5.0}, "task_timeout: must be at least"),
        ({"breaker_base": 9.0}, "breaker_cap: must be at least"),
        ({"backoff_base": 9.0}, "backoff_cap: must be at least"),
        ({"prefix": "a:b"}, "prefix: expected"),
        ({"prefix": "a{b}"}, "prefix: expected"),
        ({"prefix": "a*"}, "prefix: expected"),
        ({"ssl": "yes"}, "ssl: expected true or false"),
        ({"ssl_cert_reqs": "maybe"}, "ssl_cert_reqs: expected one of none, optional, required"),
        ({"ssl": True, "ssl_ca_certs": "/no/such/file"}, "ssl_ca_certs: /no/such/file is not a file"),
        ({"ssl_keyfile": __file__}, "ssl_keyfile: needs ssl: true"),
        ({"sentinels": ["a:1"]}, "service_name: needed"),
        ({"sentinels": ["a"], "service_name": "m"}, r"sentinels\[0\]: expected \"host:port\""),
        ({"sentinels": [], "service_name": "m"}, "sentinels: expected a list"),
        ({"service_name": "m"}, "service_name: needs sentinels"),
        ({"sentinels": ["a:1"], "service_name": "m", "cluster": True}, "cluster: sentinels"),
        ({"startup_nodes": ["a:1"]}, "startup_nodes: needs cluster"),
        ({"cluster": True, "db": 1}, "db: a Redis Cluster"),
        ({"unix_socket_path": "/x", "host": "y"}, "unix_socket_path: excludes"),
        ({"password_file": "/x", "password_env": "Y"}, "password_file: password_env is given too"),
        ({"host": ""}, "host: expected text, got nothing"),
    ],
)
def test_wrong_value_is_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionsError, match=named):
        of(**values)


@pytest.mark.parametrize("key", ["password", "sentinel_password"])
def test_password_among_the_options_is_refused_without_repeating_it(key: str) -> None:
    with pytest.raises(OptionsError) as error:
        of(**{key: SECRET})
    assert f"{key}_file" in str(error.value) and SECRET not in str(error.value)


def test_password_in_a_url_option_is_refused_without_repeating_it() -> None:
    with pytest.raises(OptionsError) as error:
        of(url=f"redis://bob:{SECRET}@cache")
    assert "password_file" in str(error.value) and SECRET not in str(error.value)


def test_password_in_place_of_a_variable_is_not_repeated() -> None:
    with pytest.raises(OptionsError) as error:
        of(password_env=SECRET)
    assert SECRET not in str(error.value)


def test_environment_gives_address_and_secret() -> None:
    options = of({"LEYLINE_REDIS_URL": f"rediss://bob:{SECRET}@cache:7000/1"})
    assert (options.host, options.port, options.db, options.ssl) == ("cache", 7000, 1, True)
    assert options.username == "bob" and options.password.read({}) == SECRET
    assert SECRET not in repr(options) and SECRET not in options.where


def test_an_address_among_the_options_beats_the_environments() -> None:
    assert of({"LEYLINE_REDIS_URL": "redis://other"}, host="mine").host == "mine"


def test_environment_names_user_and_password() -> None:
    environ = {"LEYLINE_REDIS_USERNAME": "bob", "LEYLINE_REDIS_PASSWORD": SECRET}
    options = of(environ)
    assert options.username == "bob" and options.password.read(environ) == SECRET
    assert SECRET not in repr(options)


def test_a_named_variable_beats_the_default_one(tmp_path: Path) -> None:
    environ = {"LEYLINE_REDIS_PASSWORD": "wrong", "MINE": SECRET}
    assert of(environ, password_env="MINE").password.read(environ) == SECRET


def test_password_file_is_read_anew_each_time(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("first\n")
    source = of(password_file=str(file)).password
    assert source.read({}) == "first"
    file.write_text("second")
    assert source.read({}) == "second"
    file.unlink()
    with pytest.raises(MissingSecret, match=str(file)):
        source.read({})


def test_missing_variable_is_named() -> None:
    with pytest.raises(MissingSecret, match="NOWHERE"):
        PasswordSource(variable="NOWHERE").read({})


def test_nothing_shows_the_secret(caplog: pytest.LogCaptureFixture) -> None:
    """repr of options and client, status, log of a failure."""
    caplog.set_level(logging.DEBUG)
    options = of(
        {"LEYLINE_REDIS_URL": f"redis://bob:{SECRET}@127.0.0.1:1"}, breaker_base=10.0, breaker_cap=10.0
    )
    client = RedisClient(options)
    try:
        client.failed("redis", ConnectionError("nobody there"))
        shown = f"{options!r} {client!r} {client.status()} {caplog.text} {client._single!r}"
    finally:
        client.close()
    assert "nobody there" in shown and SECRET not in shown


def test_yaml_file(tmp_path: Path) -> None:
    file = tmp_path / "redis.yaml"
    file.write_text("sentinels: ['a:1', 'b:2']\nservice_name: main\nttl: 60\n")
    options = RedisOptions.load(file, {})
    assert options.sentinels == (("a", 1), ("b", 2)) and options.ttl == 60
    assert options.where == "sentinel main at a:1,b:2"
    file.write_text("- a\n")
    with pytest.raises(OptionsError, match="expected a mapping"):
        RedisOptions.load(file, {})
    file.write_text("a: [")
    with pytest.raises(OptionsError, match="not valid YAML"):
        RedisOptions.load(file, {})
    with pytest.raises(OptionsError, match="cannot be read"):
        RedisOptions.load(tmp_path / "none", {})
