"""Nodes that share one Redis, and how KV is driven from one tier to the next."""

from __future__ import annotations

import time
from typing import Any

import httpx
import redis

from leyline_lmcache.stack import Stack
from leyline_lmcache.stack.client import Client
from leyline_lmcache.stack.ports import PortLease


def shared(url: str) -> dict[str, Any]:
    """The module's configuration."""
    return {"redis": {"url": url}}


def free_port() -> int:
    """A port nobody uses."""
    lease = PortLease()
    try:
        return lease.take("redis")
    finally:
        lease.release()


def empty_gpu(client: Client) -> None:
    """Forget everything SGLang has cached."""
    client.wait_idle()
    if not client.flush_cache():
        raise RuntimeError("the cache could not be emptied")


def empty_l1(stack: Stack) -> None:
    """Forget everything ``lmcache server`` has in memory."""
    httpx.post(f"{stack.lmcache_url}/cache/clear", timeout=30).raise_for_status()


def wait_stored(stack: Stack, settled_s: float = 0.5) -> None:
    """Until no more keys come to Redis."""
    before, since = -1, time.monotonic()
    while time.monotonic() - since < settled_s:
        now = len(keys_of(stack))
        if now != before:
            before, since = now, time.monotonic()
        time.sleep(0.1)


def keys_of(stack: Stack) -> dict[bytes, int]:
    """Every key in Redis, with the length of its value."""
    assert stack.redis_url is not None
    with redis.Redis.from_url(stack.redis_url) as client:
        names = list(client.scan_iter(count=1000))
        pipe = client.pipeline(transaction=False)
        for name in names:
            pipe.strlen(name)
        sizes = pipe.execute(raise_on_error=False)
    return {name: size for name, size in zip(names, sizes, strict=True) if isinstance(size, int)}
