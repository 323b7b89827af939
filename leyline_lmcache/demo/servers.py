"""The stack of the demo: stopped at the end, however it comes, or left running on request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from leyline_lmcache.demo.results import last_ops
from leyline_lmcache.journal import JournalReader, OpRecord
from leyline_lmcache.ops import OpKind
from leyline_lmcache.stack import Client, Progress, Stack, StackError, StackSpec, models
from leyline_lmcache.stack.state import down, up

_RANDOM = "mla"
_JOURNAL_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class Running:
    """Where the servers are.

    Attributes:
        url: of SGLang.
        journal_dir: of the plugin's journal.
    """

    url: str
    journal_dir: Path

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

    The pool is large enough that nothing is evicted: the full-context arm is then always a prefix hit, the
    fastest there can be.
    """
    return StackSpec(model=model, page_size=page_size, context_length=8192, max_total_tokens=49152)


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
            yield Running(stack.sglang_url, stack.journal_dir)
        return
    record = up(keep_as, spec, on_progress)
    try:
        yield Running(str(record.endpoints["sglang"]["url"]), Path(record.endpoints["journal_dir"]))
    except BaseException:
        down(keep_as)
        raise
