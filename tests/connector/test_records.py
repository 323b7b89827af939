"""Base records, roundings and lineages: bounds, tenants, and what is kept."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from leyline_lmcache.connector.lineage import (
    LineageTable,
    Roundings,
    Tokens,
    key_array,
    tag_at,
    tagged,
    untagged,
)
from leyline_lmcache.connector.packs import BufferInfo
from leyline_lmcache.connector.records import BaseRecord, Namespace, RecordStore
from leyline_lmcache.view import Piece, View

HERE = Namespace(None, None, None)


def record(name: str, length: int = 10, buffer: str | None = None, namespace: Namespace = HERE) -> BaseRecord:
    buffer = buffer or name
    keys = np.arange(length, dtype=np.int64)
    return BaseRecord(name, namespace, keys, View.of_buffer(buffer, length), buffer, Roundings())


def test_records_are_bounded_in_number_and_tokens_and_the_oldest_goes() -> None:
    store = RecordStore(3, 35)
    for name in "abc":
        store.add(record(name))
    assert store.get("a", HERE) is not None  # used: now the youngest
    store.add(record("d"))
    assert [store.get(name, HERE) is not None for name in "abcd"] == [True, False, True, True]
    store.add(record("e", 20))
    assert store.tokens <= 35 and store.get("e", HERE) is not None
    assert list(store.holders("b", HERE)) == []


def test_one_record_larger_than_the_bound_is_still_kept() -> None:
    store = RecordStore(3, 5)
    store.add(record("a", 100))
    assert store.get("a", HERE) is not None and len(store) == 1


def test_i7_a_record_of_another_namespace_is_unknown() -> None:
    store = RecordStore(9, 999)
    salted = Namespace("salt", None, None)
    store.add(record("a", namespace=salted))
    assert store.get("a", HERE) is None and store.get("a", salted) is not None
    assert list(store.holders("a", HERE)) == [] and len(list(store.holders("a", salted))) == 1


def test_i10_a_salt_is_never_shown() -> None:
    assert "secret" not in repr(Namespace("secret", "secret", None))
    assert "secret" not in repr(record("a", namespace=Namespace("secret", None, None)))


def test_the_record_that_computed_a_buffer_comes_first() -> None:
    store = RecordStore(99, 9999)
    store.add(record("origin", buffer="b"))
    for i in range(20):
        store.add(BaseRecord(f"v{i}", HERE, np.arange(10), View.of_buffer("b", 10), f"own{i}", Roundings()))
    found = [held.response for held in store.holders("b", HERE)]
    assert found[0] == "origin" and found[1] == "v19" and len(found) == 21


@given(st.integers(0, 10**6))
def test_roundings_equal_an_array(seed: int) -> None:
    rng = random.Random(seed)
    runs, naive = Roundings(), [0] * 40
    for _ in range(8):
        a, b = sorted(rng.choices(range(41), k=2))
        n = rng.randrange(4)
        runs.write(a, b, n)
        naive[a:b] = [n] * (b - a)
        c, d = sorted(rng.choices(range(41), k=2))
        assert runs.most(c, d) == max(naive[c:d], default=0)
        back = [0] * 40
        for x, y, count in runs.between(0, 40):
            back[x:y] = [count] * (y - x)
        assert back == naive


def test_tags_keep_tokens_and_lineages_apart() -> None:
    tokens = np.array([0, 1, 2**31 - 1], dtype=np.int64)
    keys = tagged(tokens, 2**31 - 1)
    assert (untagged(keys) == tokens).all() and tag_at(keys, 1) == 2**31 - 1
    assert (tagged(tokens, 0) == tokens).all()
    assert list(key_array(keys)) == keys.tolist() and min(keys) >= 0


def test_a_view_keeps_its_tag_and_a_tag_is_never_used_twice() -> None:
    table = LineageTable(2)
    first = table.of(b"a")
    assert table.of(b"a") is first
    table.of(b"b"), table.of(b"c")
    again = table.of(b"a")
    assert again.tag not in (first.tag, table.of(b"c").tag) and len(table) == 2


# -- what an edit leaves behind ----------------------------------------------------------------------------


def _with(name: str, length: int, view: View, tokens: Tokens, buffer: str) -> tuple[BaseRecord, BufferInfo]:
    found = BaseRecord(name, HERE, tokens, view, buffer, Roundings())
    assert view.length == length == len(tokens)
    return found, BufferInfo(buffer, tokens, b"")


def test_an_edited_base_gives_up_what_no_other_view_has() -> None:
    store = RecordStore(10, 10_000)
    tokens = np.arange(100)
    base, info = _with("base", 100, View.of_buffer("b", 100), tokens, "b")
    store.add(base, [info])
    view = View((Piece("b", 0, 20), Piece("b", 60, 40)))
    turn = BaseRecord("turn", HERE, tokens[:60], view, "t", Roundings())
    store.add(turn, [BufferInfo("t", tokens[:60], b"l")])
    assert store.supersede(base) == {"b": ([(20, 60)], [(20, 60)])}
    # A second edit, of the turn: only the newly dead part is news.
    later = BaseRecord(
        "later", HERE, tokens[:50], View((Piece("b", 0, 20), Piece("b", 70, 30))), "u", Roundings()
    )
    store.add(later, [])
    assert store.supersede(turn) == {"b": ([(20, 70)], [(60, 70)])}
    # Asked for again, the base refers to all of it.
    assert store.get("base", HERE) is base
    assert store.supersede(later) == {}


def test_sequences_that_begin_alike_share_their_chunks() -> None:
    store = RecordStore(10, 10_000)
    tokens = np.arange(100)
    base, info = _with("base", 100, View.of_buffer("b", 100), tokens, "b")
    store.add(base, [info])
    like = np.concatenate([tokens[:50], tokens[:30]])
    twin, other = _with("twin", 80, View.of_buffer("c", 80), like, "c")
    store.add(twin, [other])
    assert store.supersede(base) == {"b": ([(50, 100)], [(50, 100)])}
    # Another tenant's chunks are not these, whatever its tokens.
    stranger = BaseRecord(
        "stranger", Namespace("salt", None, None), tokens, View.of_buffer("d", 100), "d", Roundings()
    )
    store.add(stranger, [BufferInfo("d", tokens, b"")])
    assert store.get("base", HERE) is base
    assert store.supersede(base) == {"b": ([(50, 100)], [(50, 100)])}


def test_a_record_that_was_dropped_gives_up_nothing() -> None:
    store = RecordStore(1, 10_000)
    base = record("base")
    store.add(base)
    store.add(record("other", buffer="o"))
    assert store.supersede(base) == {}
