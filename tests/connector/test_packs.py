"""Packs: what LMCache's own stores leave out lies in them, once, and is found again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_lmcache.connector.packs import BufferInfo, Pack, Shelf, dead_chunks
from leyline_lmcache.ranges import merge, subtract

CHUNK = 8


def info(length: int, lineage: bytes = b"", packs: tuple[Pack, ...] = ()) -> BufferInfo:
    return BufferInfo("buffer", np.arange(length), lineage, packs)


@st.composite
def packs(draw: st.DrawFn) -> Pack:
    cuts = sorted(draw(st.sets(st.integers(0, 200), min_size=2, max_size=12)))
    return tuple((a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False))


@given(packs(), st.integers(0, 200), st.integers(0, 200))
def test_places_are_the_positions_in_the_order_of_the_pack(pack: Pack, start: int, end: int) -> None:
    shelf = Shelf(info(200, b"l", (pack,)), pack)
    laid = [i for a, b in pack for i in range(a, b)]
    found = {}
    for place in shelf.places(start, end):
        for i in range(place.length):
            found[place.origin + i] = place.offset + i
    assert found == {position: offset for offset, position in enumerate(laid) if start <= position < end}


@given(packs(), st.integers(0, 200), st.integers(0, 200))
def test_chunks_hold_just_those_positions(pack: Pack, start: int, end: int) -> None:
    shelf = Shelf(info(200, b"l", (pack,)), pack)
    laid = [i for a, b in pack for i in range(a, b)]
    chunks = {i for a, b in shelf.chunks(start, end, CHUNK) for i in range(a, b)}
    assert chunks == {offset // CHUNK for offset, position in enumerate(laid) if start <= position < end}


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))
def test_of_a_prefix_only_whole_chunks_are_stored(length: int, start: int, end: int) -> None:
    (shelf,) = info(length).shelves()
    whole = length // CHUNK * CHUNK
    assert info(length).stored(CHUNK) == merge([(0, whole)])
    chunks = {i for a, b in shelf.chunks(start, end, CHUNK) for i in range(a, b)}
    assert chunks == {i // CHUNK for i in range(start, min(end, whole))}
    assert shelf.names(CHUNK).tolist() == list(range(whole))


def test_what_is_stored_of_a_lineage_is_in_its_packs_alone() -> None:
    some = info(100, b"l", (((3, 5), (40, 90)), ((10, 12),)))
    assert some.stored(CHUNK) == [(3, 5), (10, 12), (40, 90)]
    assert [shelf.pack for shelf in some.shelves()] == list(some.packs)


@given(packs(), packs())
def test_a_pack_is_named_by_its_buffer_and_its_runs(one: Pack, other: Pack) -> None:
    def names(pack: Pack, buffer: str = "buffer") -> list[int]:
        named = BufferInfo(buffer, np.arange(200), b"l", (pack,))
        return Shelf(named, pack).names(CHUNK).tolist()

    if not one or not other:
        return
    assert len(names(one)) % CHUNK == 0 and len(names(one)) >= sum(b - a for a, b in one)
    # All ids fit LMCache's signed 32 bits.
    assert all(0 <= word < 2**31 for word in names(one))
    assert (names(one)[:CHUNK] == names(other)[:CHUNK]) == (one == other)
    assert names(one)[:CHUNK] != names(one, "another")[:CHUNK]


@pytest.mark.parametrize("chunk", [1, 4, 8, 256])
def test_chunks_smaller_than_a_name_differ_too(chunk: int) -> None:
    pack, other = ((0, 40),), ((0, 41),)
    a = Shelf(info(50, b"l", (pack,)), pack).names(chunk)
    b = Shelf(info(50, b"l", (other,)), other).names(chunk)
    assert a[:chunk].tolist() != b[:chunk].tolist()
    assert not subtract([(0, 40)], list(other))


@given(packs(), packs(), st.integers(1, 16))
def test_dead_chunks_hold_nothing_that_lives(pack: Pack, dead: Pack, chunk: int) -> None:
    for some in (info(200), info(200, b"l", (pack,) if pack else ())):
        for shelf, chunks in dead_chunks(some, merge(dead), merge(dead), chunk):
            laid = list(range(200)) if shelf.pack is None else [i for a, b in shelf.pack for i in range(a, b)]
            gone = {i for a, b in chunks for i in range(a, b)}
            held = [set(laid[i * chunk : (i + 1) * chunk]) for i in range(shelf.size(chunk) // chunk)]
            inside = {p for a, b in dead for p in range(a, b)}
            assert gone == {i for i, each in enumerate(held) if each and each <= inside}


def test_chunks_that_were_dead_before_are_not_named_again() -> None:
    some = info(80)
    ((_, chunks),) = dead_chunks(some, [(0, 32)], [(16, 32)], 8)
    assert chunks == [(2, 4)]
