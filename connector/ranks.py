"""Tensor-parallel ranks decide alike: one of them asks ``lmcache server``, all are told the same.

Every rank makes the same calls in the same order, as SGLang's schedulers run in step. Clocks and answers
differ between processes, so nothing that depends on them is decided by each for itself.
"""

from __future__ import annotations

import time
from typing import Any, TypeVar

import torch

from . import wire

M = TypeVar("M", bound=wire.Message)


class Ranks:
    """The ranks of one engine.

    Args:
        connector: SGLang's ``UnifiedLMCacheMPConnector``; its process group is a CPU one.
    """

    def __init__(self, connector: Any) -> None:
        self._connector = connector
        self.count = int(connector.tp_size)
        self.leads = int(connector.tp_rank) == 0
        """This rank asks."""

    def tell(self, value: Any) -> Any:
        """The leader's value, on every rank."""
        if self.count == 1:
            return value
        box = [value if self.leads else None]
        group = self._connector.tp_group
        source = torch.distributed.get_global_rank(group, 0)
        torch.distributed.broadcast_object_list(box, src=source, group=group)
        return box[0]

    def largest(self, value: int) -> int:
        """Over all ranks."""
        if self.count == 1:
            return value
        votes = torch.tensor([value], dtype=torch.int64)
        torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MAX, group=self._connector.tp_group)
        return int(votes.item())

    def is_past(self, deadline: float) -> bool:
        """Whether the leader's clock has passed ``deadline`` (its ``time.monotonic``)."""
        return bool(self.largest(int(self.leads and time.monotonic() > deadline)))


_PENDING, _READY, _LATE = range(3)


class Call:
    """An RPC to the server module, made by the leading rank.

    Args:
        future: of LMCache's client; None on the other ranks.
        error: why it could not be submitted.
    """

    def __init__(self, ranks: Ranks, future: Any, error: str | None = None) -> None:
        self._ranks = ranks
        self._future = future
        self._error = error

    def ready(self, deadline: float) -> bool:
        """Whether the answer is there. Raises ``TimeoutError`` when it is not and the time is up."""
        state = _PENDING
        if self._ranks.leads:
            if self._error is not None or self._future.query():
                state = _READY
            elif time.monotonic() > deadline:
                state = _LATE
        state = self._ranks.largest(state)
        if state == _LATE:
            raise TimeoutError("lmcache server did not answer in time")
        return state == _READY

    def answer(self, kind: type[M], timeout_s: float = 0) -> M:
        """The answer, waited for at most ``timeout_s``.

        Raises:
            OSError: the call failed.
            WireError: the answer is not ours.
        """
        payload, error = self._ranks.tell(self._read(timeout_s) if self._ranks.leads else None)
        if error is not None:
            raise OSError(f"lmcache server: {error}")
        return wire.decode(payload, kind)

    def _read(self, timeout_s: float) -> tuple[bytes | None, str | None]:
        if self._error is not None:
            return None, self._error
        try:
            response = self._future.result(timeout=timeout_s)
        except Exception as error:
            return None, type(error).__name__
        return (response.payload, None) if response.success else (None, str(response.error))
