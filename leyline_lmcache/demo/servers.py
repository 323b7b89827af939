"""The stack of the demo: stopped at the end, however it comes, or left running on request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from leyline_lmcache.demo.results import last_ops
from leyline_lmcache.demo.scenario import Place
from leyline_lmcache.journal import JournalReader, OpRecord
from leyline_lmcache.ops import OpKind
from leyline_lmcache.stack import Client, Progress, Stack, StackError, StackSpec, models
from leyline_lmcache.stack.state import down, up

_RANDOM = "mla"
_JOURNAL_TIMEOUT_S = 3.0
_SETTLED_S = 0.25
_CHUNK = 16


@dataclass(frozen=True, slots=True)
class Running:
    """Where the servers are.

    Attributes:
        url: of SGLang.
        journal_dir: of the plugin's journal.
        lmcache_url, redis_url: of the tiers behind the GPU; None: there are none that edits can use.
    """

    url: str
    journal_dir: Path
    lmcache_url: str | None = None
    redis_url: str | None = None

    @property
    def has_tiers(self) -> bool:
        """KV can be driven off the GPU."""
        return self.lmcache_url is not None and self.redis_url is not None

    def displace(self, client: Client, place: Place) -> None:
        """Drive all KV to a tier, and nowhere nearer.

        Raises:
            StackError: SGLang does not empty its pool.
        """
        if place is Place.GPU:
            return
        assert self.lmcache_url is not None and self.redis_url is not None
        client.wait_idle()
        self._wait_stored()
        if not client.flush_cache():
            raise StackError("SGLang's cache could not be emptied: a request still runs")
        if place is Place.REDIS:
            httpx.post(f"{self.lmcache_url}/cache/clear", timeout=30, trust_env=False).raise_for_status()

    def _wait_stored(self) -> None:
        """Until no more keys come to Redis."""
        import redis

        with redis.Redis.from_url(str(self.redis_url)) as client:
            size, since = -1, time.monotonic()
            while time.monotonic() - since < _SETTLED_S:
                now = client.dbsize()
                if now != size:
                    size, since = now, time.monotonic()
                time.sleep(0.05)

    def client(self, model: str) -> Client:
        """A client of the SGLang server."""
        return Client(self.url, model=model)

    def ops_of(self, lineage: str) -> list[OpRecord]:
        """The journal's records of one edit. The journal is written behind the answer: wait for its end."""
        deadline = time.monotonic() + _JOURNAL_TIMEOUT_S
        while True:
            found = last_ops(JournalReader(self.journal_dir).records(), lineage)
            if any(record.op is OpKind.INVALIDATE for record in found) or time.monotonic() > deadline:
                return found
            time.sleep(0.05)


def choose_model() -> str:
    """The trained model if it is there, else a random one."""
    try:
        models.trained_dir()
    except StackError:
        return _RANDOM
    return models.TRAINED


def spec_of(model: str, page_size: int) -> StackSpec:
    """The stack: Redis, `lmcache server` and SGLang with the plugin.

    The pool is large enough that nothing is evicted but on purpose: the full-context arm is then always a
    prefix hit, the fastest there can be. The prompts are short, so LMCache's chunks have to be too. What
    comes from Redis stays in L1, so that a turn finds there what an earlier one had to bring.
    """
    return StackSpec(
        model=model,
        page_size=page_size,
        chunk_size=-(-_CHUNK // page_size) * page_size,
        context_length=8192,
        max_total_tokens=49152,
        l2="leyline",
        server_module=True,
        lmcache_args=("--l2-prefetch-policy", "retain"),
    )


@contextmanager
def servers(
    spec: StackSpec, on_progress: Callable[[Progress], None], keep_as: str | None = None
) -> Iterator[Running]:
    """Start the stack; stop it at the end, or leave it running under a name when all went well.

    Raises:
        StackError: it could not be started, or a stack of that name runs.
    """
    if keep_as is None:
        with Stack(spec, on_progress=on_progress) as stack:
            yield Running(stack.sglang_url, stack.journal_dir, stack.lmcache_url, stack.redis_url)
        return
    record = up(keep_as, spec, on_progress)
    try:
        ends = record.endpoints
        yield Running(
            str(ends["sglang"]["url"]),
            Path(ends["journal_dir"]),
            str(ends["lmcache"]["url"]),
            str(ends["redis"]["url"]),
        )
    except BaseException:
        down(keep_as)
        raise
