"""Views and buffer ids: what the sessions in test_edit_scripts do not reach."""

from __future__ import annotations

import array
import dataclasses
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_lmcache.pieces import Edit, Piece, View, buffer_id
from leyline_lmcache.reasons import Fallback, FallbackReason

from .oracle import doc_of
from .strategies import SOME, views


def split(view: View) -> View:
    """The same view, from pieces of one token each."""
    return View(
        tuple(
            Piece(p.buffer, p.src_start + i if p.buffer else 0, 1)
            for p in view.pieces
            for i in range(p.length)
        )
    )


@SOME
@given(views, views)
def test_equal_content_is_equal_in_every_way(a: View, b: View) -> None:
    assert split(a) == a
    assert split(a).fingerprint() == a.fingerprint()
    assert hash(split(a)) == hash(a)
    same = doc_of(a) == doc_of(b)
    assert (a == b) is same
    assert (a.fingerprint() == b.fingerprint()) is same
    assert (a.first_change(b) == a.length == b.length) is same


@SOME
@given(views, st.data())
def test_parts_put_together_are_the_whole(view: View, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, view.length))
    head = view.truncate(cut)
    tail = tuple(piece for _, piece in view.between(cut, view.length))
    assert View((*head.pieces, *tail)) == view
    assert view.apply([Edit(cut, view.length, 0)]) == head
    assert view.punch(cut, view.length) == head.extend(view.length - cut)


@SOME
@given(views, st.integers(1, 9))
def test_alignment_is_idempotent_and_costs_less_than_a_block_a_side(view: View, size: int) -> None:
    aligned = view.aligned(size)
    assert aligned.aligned(size) == aligned
    assert aligned.length == view.length
    for start, end in aligned.holes():
        assert start % size == 0
        assert end % size == 0 or end == view.length
        assert any(s - start < size for s, e in view.holes() if start <= s and e <= end)
    assert view.aligned(1) == view


def test_views_are_immutable_values() -> None:
    view = View.of_buffer("a", 5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        view.length = 6  # type: ignore[misc]
    assert len({view, View.of_buffer("a", 5), View.of_buffer("a", 6)}) == 2


def test_a_hole_filled_has_no_shift_and_joins_its_neighbour() -> None:
    view = View.of_buffer("a", 10).apply([Edit(2, 4, 6)]).extend(3).filled("b")
    assert [(p.buffer, p.src_start, p.length) for p in view.pieces] == [
        ("a", 0, 2),
        ("b", 2, 6),
        ("a", 4, 6),
        ("b", 14, 3),
    ]
    assert [view.shift_at(i) for i in (0, 2, 8, 14)] == [0, 0, 4, 0]
    assert view.buffers() == {"a", "b"}
    assert View.of_buffer("a", 10).extend(5).filled("a") == View.of_buffer("a", 15)


def test_shift_of_a_hole_is_none() -> None:
    assert View.hole(3).shift_at(1) is None


def test_misuse_is_named() -> None:
    view = View.of_buffer("a", 5)
    for position in (-1, 5):
        with pytest.raises(IndexError, match="position"):
            view.shift_at(position)
    with pytest.raises(ValueError, match="5"):
        view.truncate(6)
    with pytest.raises(ValueError, match="length"):
        view.extend(-1)
    with pytest.raises(ValueError, match="start, end"):
        list(view.between(3, 2))
    with pytest.raises(ValueError, match="block_size"):
        view.aligned(0)
    with pytest.raises(ValueError, match="length"):
        Piece("a", 0, 0)
    with pytest.raises(ValueError, match="src_start"):
        Piece("a", -1, 2)
    with pytest.raises(ValueError, match="hole"):
        Piece(None, 1, 2)
    with pytest.raises(ValueError, match="length"):
        View.of_buffer("a", -1)
    for edit in (Edit(-1, 0, 0), Edit(3, 2, 0), Edit(0, 6, 0), Edit(0, 1, -1)):
        with pytest.raises(Fallback) as refused:
            view.apply([edit])
        assert refused.value.reason is FallbackReason.INVALID_DIRECTIVE


def test_zero_length_views() -> None:
    empty = View()
    assert empty.length == 0
    assert empty.truncate(0) == empty.aligned(16) == empty.filled("b") == empty.extend(0) == empty
    assert empty.apply([Edit(0, 0, 0)]) == empty
    assert empty.holes() == ()
    assert list(empty.between(0, 0)) == []
    assert empty.first_change(View.hole(3)) == 0


def test_fingerprints_keep_names_and_numbers_apart() -> None:
    docs = [
        View((Piece("a", 1, 11),)),
        View((Piece("a", 11, 1),)),
        View((Piece("a1", 1, 11),)),
        View((Piece("a,1", 1, 1),)),
        View((Piece("a", 1, 1), Piece("b", 1, 1))),
        View((Piece("a,1,1;p1:b", 1, 1),)),
        View.hole(1),
        View.hole(11),
        View(),
    ]
    assert len({v.fingerprint() for v in docs}) == len(docs)
    assert all(len(v.fingerprint()) == 16 for v in docs)


_PROGRAM = """
import array
from leyline_lmcache.pieces import *
print(buffer_id("m", "s", "", array.array("q", [1, 2, 3])))
print(View.of_buffer("a", 9).apply([Edit(2, 3, 4)]).fingerprint().hex())
"""


def test_names_are_the_same_in_every_process() -> None:
    seen = set()
    for seed in ("0", "1"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        run = subprocess.run(
            [sys.executable, "-c", _PROGRAM], env=env, capture_output=True, text=True, check=True
        )
        seen.add(run.stdout)
    here = (
        buffer_id("m", "s", "", array.array("q", [1, 2, 3]))
        + "\n"
        + View.of_buffer("a", 9).apply([Edit(2, 3, 4)]).fingerprint().hex()
        + "\n"
    )
    assert seen == {here}
    # Stored in Redis and compared between releases: a change of these values is a change of format.
    assert here.split() == FIXED


FIXED = ["d462a66d1c00a83863515c089a5ed13b", "4df3a862ab92728866e5b712f8c33731"]


def test_buffer_ids_tell_everything_apart() -> None:
    tokens = array.array("q", [1, 2])
    ids = {
        buffer_id("m", "s", "l", tokens),
        buffer_id("ms", "", "l", tokens),
        buffer_id("", "ms", "l", tokens),
        buffer_id("m", "s", "", tokens),
        buffer_id("m", "sl", "", tokens),
        buffer_id("m", "s", "l", tokens[:1]),
        buffer_id("m", "s", "l", array.array("q")),
        buffer_id("m", "s", "l", array.array("q", [2, 1])),
    }
    assert len(ids) == 8
    assert buffer_id("m", "s", b"l", tokens) == buffer_id("m", "s", "l", tokens.tobytes())
    assert buffer_id("m", "s", "l", memoryview(tokens)) in ids
    assert all(len(i) == 32 for i in ids)


def test_edits_cost_pieces_and_not_tokens() -> None:
    for length in (10**3, 10**6, 2**31 - 1):
        view = View.of_buffer("a", length)
        for k in range(32):
            view = view.apply([Edit(k * 30, k * 30 + 10, 12)])
        assert len(view.pieces) <= 2 * 32 + 1
        assert len(view.apply([Edit(k * 30 + 20, k * 30 + 25, 0) for k in range(33)]).pieces) <= 4 * 33 + 1
