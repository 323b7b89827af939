"""What a local stack consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

from leyline_lmcache.stack.errors import StackError

DTYPES = ("float32", "bfloat16", "float16", "auto")
DEVICES = ("auto", "cpu", "cuda")
L2S = ("resp", "leyline", "none")
ROLES = ("redis", "lmcache", "sglang")


@dataclass(frozen=True, slots=True)
class StackSpec:
    """One SGLang server and, unless left out, the ``lmcache server`` and the Redis behind it, on 127.0.0.1.

    Attributes:
        model: ``mla``, ``mla-512``, ``gqa`` (random, see `recipes`), ``tiny-mla`` (trained), or a folder.
        plugin: serve with Leyline's cache; without it, SGLang does not load the plugin at all.
        lmcache: start ``lmcache server`` and connect SGLang to it.
        redis: start Redis and give it to ``lmcache server`` as its L2; needs `lmcache`.
        redis_url: use this Redis (``redis://host:port``) instead of starting one.
        dtype: of weights and KV.
        device: ``auto`` takes a GPU if torch can use one.
        page_size: tokens per SGLang page.
        chunk_size: tokens per LMCache chunk.
        context_length: longest request in tokens.
        max_total_tokens: size of SGLang's KV pool in tokens.
        chunked_prefill_size: tokens per prefill step; None leaves it to SGLang.
        l1_size_gb: size of LMCache's CPU tier.
        mq_timeout_s: how long SGLang waits for an answer of ``lmcache server``.
        sglang_port, lmcache_port, lmcache_http_port, redis_port: 0 takes a free one.
        threads: OpenMP threads of SGLang on CPU; None leaves it to torch.
        log_level: of SGLang.
        metrics: let SGLang serve Prometheus metrics at ``/metrics``.
        leyline: settings of the plugin, as they stand in its YAML file.
        sglang_args, lmcache_args: further arguments, as they are.
        l2: what carries KV to Redis: LMCache's adapter (``resp``), ours (``leyline``), or nothing (``none``).
        l2_options: further keys of the adapter's configuration.
        server_module: load Leyline's module into ``lmcache server``.
        server_options: the module's configuration.
        env: further environment variables of SGLang and ``lmcache server``.
        start_timeout_s: for SGLang to become ready.
    """

    model: str = "mla"
    plugin: bool = True
    lmcache: bool = True
    redis: bool = True
    redis_url: str | None = field(default=None, repr=False)
    dtype: str = "float32"
    device: str = "auto"
    page_size: int = 1
    chunk_size: int = 256
    context_length: int = 8192
    max_total_tokens: int = 16384
    chunked_prefill_size: int | None = None
    l1_size_gb: float = 1.0
    mq_timeout_s: float = 5.0
    sglang_port: int = 0
    lmcache_port: int = 0
    lmcache_http_port: int = 0
    redis_port: int = 0
    threads: int | None = None
    log_level: str = "info"
    metrics: bool = True
    leyline: Mapping[str, Any] = field(default_factory=dict)
    sglang_args: tuple[str, ...] = ()
    lmcache_args: tuple[str, ...] = ()
    l2: str = "resp"
    l2_options: Mapping[str, Any] = field(default_factory=dict)
    server_module: bool = False
    server_options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 240.0

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("device", self.device, DEVICES)
        _one_of("l2", self.l2, L2S)
        sizes = ("page_size", "chunk_size", "context_length", "max_total_tokens")
        for name in (*sizes, "l1_size_gb", "mq_timeout_s", "start_timeout_s"):
            if getattr(self, name) <= 0:
                raise StackError(f"{name}: must be positive, is {getattr(self, name)}")
        for name in ("sglang_port", "lmcache_port", "lmcache_http_port", "redis_port"):
            if not 0 <= getattr(self, name) < 65536:
                raise StackError(f"{name}: must be between 0 and 65535, is {getattr(self, name)}")
        ports = [
            port
            for port in (self.sglang_port, self.lmcache_port, self.lmcache_http_port, self.redis_port)
            if port
        ]
        if len(set(ports)) != len(ports):
            raise StackError("sglang_port, lmcache_port, lmcache_http_port, redis_port: must differ")
        if self.chunk_size % self.page_size:
            raise StackError(
                f"chunk_size: must be a multiple of page_size {self.page_size}, is {self.chunk_size}"
            )
        if self.redis_url is not None and not self.redis_url.startswith("redis://"):
            raise StackError(f"redis_url: must look like redis://host:port, is {self.redis_url}")

    @property
    def roles(self) -> tuple[str, ...]:
        """The servers to start, in the order in which they depend on each other."""
        redis = self.lmcache and self.redis and self.redis_url is None and self.l2 != "none"
        wanted = {"redis": redis, "lmcache": self.lmcache, "sglang": True}
        return tuple(role for role in ROLES if wanted[role])

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as plain data."""
        plain = asdict(self)
        if self.redis_url is not None:
            plain["redis_url"] = without_password(self.redis_url)
        defaults = type(self)()
        return {
            f.name: plain[f.name] for f in fields(self) if getattr(self, f.name) != getattr(defaults, f.name)
        }


def without_password(url: str) -> str:
    """`url` as it may be shown."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{parts.username or ''}:***@{host}").geturl()


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise StackError(f"{name}: must be one of {', '.join(allowed)}, is {value}")
