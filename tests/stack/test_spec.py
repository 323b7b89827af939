"""A wrong spec is refused at once, and the message names the field."""

from __future__ import annotations

from typing import Any

import pytest

from leyline_lmcache.stack import StackError, StackSpec
from leyline_lmcache.stack.lmcache import command, l2_adapter


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"dtype": "int8"}, "dtype"),
        ({"device": "tpu"}, "device"),
        ({"page_size": 0}, "page_size"),
        ({"max_total_tokens": -1}, "max_total_tokens"),
        ({"l1_size_gb": 0.0}, "l1_size_gb"),
        ({"sglang_port": 65536}, "sglang_port"),
        ({"sglang_port": 4000, "redis_port": 4000}, "redis_port"),
        ({"page_size": 48, "chunk_size": 256}, "chunk_size"),
        ({"redis_url": "localhost:6379"}, "redis_url"),
        ({"l2": "disk"}, "l2"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(StackError, match=rf"\b{named}\b"):
        StackSpec(**fields)


@pytest.mark.parametrize(
    ("fields", "roles"),
    [
        ({}, ("redis", "lmcache", "sglang")),
        ({"redis": False}, ("lmcache", "sglang")),
        ({"redis_url": "redis://127.0.0.1:6379"}, ("lmcache", "sglang")),
        ({"l2": "none"}, ("lmcache", "sglang")),
        ({"lmcache": False}, ("sglang",)),
    ],
)
def test_only_the_servers_that_are_needed(fields: dict[str, Any], roles: tuple[str, ...]) -> None:
    assert StackSpec(**fields).roles == roles


def test_a_record_holds_what_differs_from_the_defaults() -> None:
    spec = StackSpec(model="gqa", leyline={"min_reuse": 1})
    assert spec.to_json() == {"model": "gqa", "leyline": {"min_reuse": 1}}


def test_passwords_reach_lmcache_but_no_record() -> None:
    spec = StackSpec(redis_url="redis://me:s%2Fcret@127.0.0.1:7000")
    assert spec.to_json() == {"redis_url": "redis://me:***@127.0.0.1:7000"}
    adapter = l2_adapter(spec, spec.redis_url)
    assert adapter is not None
    assert (adapter["username"], adapter["password"], adapter["port"]) == ("me", "s/cret", 7000)
    assert "s%2Fcret" not in repr(spec)


def test_a_redis_password_reaches_our_adapter_through_the_environment_only() -> None:
    spec = StackSpec(l2="leyline")
    made = command(spec, "cpu", 1, 2, "redis://kv:s%40crt@cache:7000/1")
    assert "s%40crt" not in " ".join(made.argv) and "s@crt" not in " ".join(made.argv)
    assert made.env["LEYLINE_REDIS_PASSWORD"] == "s@crt"
    adapter = l2_adapter(spec, "redis://kv:s%40crt@cache:7000/1")
    assert adapter is not None and adapter["adapter_params"] == {"url": "redis://kv@cache:7000/1"}
