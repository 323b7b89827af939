"""Blocks for tests of the Redis tier."""

from __future__ import annotations

import random
from collections.abc import Sequence

from leyline_lmcache.connector.redis import KVKey


def key_of(number: int, model: str = "org/model", salt: str = "") -> KVKey:
    """A block's key."""
    return KVKey(model, number.to_bytes(8, "big"), rank=0x01000100, salt=salt)


def block(size: int, seed: int = 0) -> memoryview:
    """Random bytes that can be written to."""
    return memoryview(bytearray(random.Random(f"{size} {seed}").randbytes(size)))


def items(sizes: Sequence[int], first: int = 0, salt: str = "") -> list[tuple[KVKey, memoryview]]:
    """Blocks of these sizes under keys of their own."""
    return [(key_of(first + i, salt=salt), block(size, first + i)) for i, size in enumerate(sizes)]


def empty(of: Sequence[tuple[KVKey, memoryview]]) -> list[tuple[KVKey, memoryview]]:
    """Room for the same blocks."""
    return [(key, memoryview(bytearray(len(view)))) for key, view in of]
