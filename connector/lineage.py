"""Tags that keep edited KV apart from exact KV in one radix tree (I1, I2).

A radix key is an array of int64 and a token id needs 32 bits, so tokens at and after an edit carry a
lineage tag in the high half: ``key[i] = tag << 32 | token``. Tag 0 is exact KV, and its keys are the
ordinary ones.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .origins import Origins

TAG_SHIFT = 32
EXACT = 0
_TOKEN_MASK = (1 << TAG_SHIFT) - 1
_LAST_TAG = (1 << 31) - 1

Tokens = npt.NDArray[np.int64]
"""Token ids, or tagged tokens, one int64 each."""


@dataclass(slots=True)
class Roundings:
    """How often the keys of a sequence were rotated one after another, as disjoint runs; 0 where nothing
    is said.

    Rotating from KV as it was first computed counts one. Taking over slots that were rotated before adds
    one (I4).
    """

    runs: list[tuple[int, int, int]] = field(default_factory=list)

    def most(self, start: int, end: int) -> int:
        """The largest count in ``[start, end)``."""
        return max((n for _, _, n in self.between(start, end)), default=0)

    def between(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """The runs inside ``[start, end)``, clipped."""
        clipped = ((max(a, start), min(b, end), n) for a, b, n in self.runs)
        return [(a, b, n) for a, b, n in clipped if a < b]

    def write(self, start: int, end: int, count: int) -> None:
        """Set ``[start, end)`` to ``count``."""
        kept: list[tuple[int, int, int]] = []
        for a, b, n in self.runs:
            if a < start:
                kept.append((a, min(b, start), n))
            if b > end:
                kept.append((max(a, end), b, n))
        if count and start < end:
            kept.append((start, end, count))
        self.runs = sorted(kept)


@dataclass(slots=True)
class Lineage:
    """One edited continuation: a tag and what is known of the KV under it.

    ``fingerprint`` names the edited view in every process; ``tag`` only in this one.
    """

    tag: int
    fingerprint: bytes
    roundings: Roundings = field(default_factory=Roundings)
    origins: Origins = field(default_factory=Origins)
    """What the fills of a request that has not been served yet have loaded for it."""

    @property
    def name(self) -> str:
        """Short stable name for logs and the journal."""
        return self.fingerprint.hex()[:12]


class LineageTable:
    """Tags by fingerprint: equal views share a tag, different views never do. Bounded; a tag is never used
    twice."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lineages: OrderedDict[bytes, Lineage] = OrderedDict()
        self._next = EXACT + 1

    def __len__(self) -> int:
        return len(self._lineages)

    def of(self, fingerprint: bytes) -> Lineage:
        """The lineage of a view, made on first sight.

        A lineage that fell out of the bound comes back under a new tag: its old KV is then unreachable and is
        evicted like any other.
        """
        lineage = self._lineages.get(fingerprint)
        if lineage is None:
            if self._next > _LAST_TAG:
                raise OverflowError("all 2**31 lineage tags of this process were used; restart the engine")
            lineage = self._lineages[fingerprint] = Lineage(self._next, fingerprint)
            self._next += 1
            while len(self._lineages) > self._capacity:
                self._lineages.popitem(last=False)
        else:
            self._lineages.move_to_end(fingerprint)
        return lineage

    def after(self, lineage: Lineage, length: int) -> Lineage:
        """The lineage of what is computed after the first ``length`` tokens of an edited view."""
        name = hashlib.blake2b(b"%b,%d" % (lineage.fingerprint, length), digest_size=16).digest()
        return self.of(name)


def as_tokens(ids: object) -> Tokens:
    """A copy of token ids as int64 (a copy: an exported ``array`` cannot grow while a view of it lives)."""
    if isinstance(ids, array) and ids.typecode == "q":
        return np.frombuffer(ids, dtype=np.int64).copy() if len(ids) else np.empty(0, np.int64)
    return np.array(ids, dtype=np.int64)


def untagged(keys: Tokens) -> Tokens:
    """The token ids of tagged keys."""
    return keys & _TOKEN_MASK


def tagged(tokens: Tokens, tag: int) -> Tokens:
    """Keys of plain token ids under a tag."""
    return tokens | (tag << TAG_SHIFT) if tag else tokens


def tag_at(keys: Tokens, position: int) -> int:
    """The tag of one key."""
    return int(keys[position]) >> TAG_SHIFT


def key_array(keys: Tokens) -> array[int]:
    """Keys in the type SGLang's ``RadixKey`` holds."""
    out = array("q")
    out.frombytes(np.ascontiguousarray(keys).tobytes())
    return out
