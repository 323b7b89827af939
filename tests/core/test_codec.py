"""The plan codec: round trips, and errors that name the field."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_lmcache.codec import MAX_PLAN_BYTES, SCHEMA_VERSION, CodecError, decode_plan, encode_plan
from leyline_lmcache.ops import Plan, Tier
from leyline_lmcache.pieces import Edit, View
from leyline_lmcache.planner import compile_plan

from .strategies import SOME

BASE = View.of_buffer("a", 2000)
# In order: fill, copy_rotate, copy, rotate..., so that each kind of op is there.
NEW = BASE.apply([Edit(300, 500, 5), Edit(600, 610, 10), Edit(700, 720, 0)]).extend(20)
GPU = compile_plan(BASE, NEW, 16, Tier.GPU, fuse=False)
CPU = compile_plan(BASE, NEW, 16, Tier.CPU)


def raw(plan: Plan) -> dict[str, Any]:
    out = msgpack.unpackb(encode_plan(plan))
    assert isinstance(out, dict)
    return out


def refusal(data: Any) -> str:
    with pytest.raises(CodecError) as refused:
        decode_plan(data if isinstance(data, bytes) else msgpack.packb(data))
    assert len(str(refused.value)) < 300
    return str(refused.value)


@pytest.mark.parametrize("plan", [GPU, CPU, compile_plan(View(), View(), 1, Tier.REDIS)])
def test_round_trip(plan: Plan) -> None:
    again = decode_plan(encode_plan(plan))
    assert again == plan
    assert [type(op) for op in again.ops] == [type(op) for op in plan.ops]
    assert encode_plan(again) == encode_plan(plan)


def test_every_kind_of_op_is_covered_here() -> None:
    kinds = {op["op"] for plan in (GPU, CPU) for op in raw(plan)["ops"]}
    assert kinds == {"fill", "copy", "rotate", "copy_rotate", "invalidate"}


def test_a_missing_or_unknown_field_is_named() -> None:
    for plan in (GPU, CPU):
        for name in raw(plan):
            cut = raw(plan)
            del cut[name]
            assert refusal(cut).startswith("v:" if name == "v" else f"plan.{name}: missing")
        assert refusal({**raw(plan), "extra": 1}).startswith("plan: unknown field 'extra'")
        for index, op in enumerate(plan.ops):
            for name in raw(plan)["ops"][index]:
                cut = raw(plan)
                del cut["ops"][index][name]
                message = refusal(cut)
                assert message.startswith((f"ops[{index}].{name}: missing", f"ops[{index}].op: expected"))
            more = raw(plan)
            more["ops"][index]["extra"] = 1
            assert refusal(more).startswith(f"ops[{index}]: unknown field 'extra'"), op


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1, "1", 1.0, None, True])
def test_another_version_is_said_so_before_anything_else(version: Any) -> None:
    assert refusal({"v": version, "new": 1}).startswith(f"v: expected schema version {SCHEMA_VERSION}, got")


def test_wrong_types_everywhere_are_named() -> None:
    for plan in (GPU, CPU):
        for wrong in (None, "x", 1.5, [], {}, -1, 2**63, b"y", True):
            for name in ("tier", "block_size", "old_length", "new_length", "shared_blocks", "ops"):
                if name == "ops" and wrong == []:
                    continue
                assert refusal({**raw(plan), name: wrong}).startswith(name)
            for index, op in enumerate(raw(plan)["ops"]):
                for name, value in op.items():
                    if value == wrong and type(value) is type(wrong):
                        continue
                    if (name, wrong) in (("deps", []), ("buffer", "x")) or (name == "shift" and wrong == -1):
                        continue
                    changed = raw(plan)
                    changed["ops"][index][name] = wrong
                    assert refusal(changed).startswith(f"ops[{index}].{name}"), (op, name, wrong)


@pytest.mark.parametrize(
    ("index", "name", "value", "message"),
    [
        (0, "op", "explode", "ops[0].op: expected one of"),
        (0, "id", 1, "ops[0].id: expected 0"),
        (2, "deps", [2], "ops[2].deps: expected ids of earlier ops"),
        (0, "deps", [0], "ops[0].deps: expected ids of earlier ops"),
        (0, "end", 288, "ops[0].end: expected more than start"),
        (0, "end", 10**6, "ops[0].end: past the new view"),
        (1, "length", 0, "ops[1].length: expected from 1"),
        (1, "length", 10**6, "ops[1].length: runs past the new view"),
        (1, "src_offset", 16, "ops[1].src_offset: expected less than the block size 16"),
        (1, "dst_offset", 16, "ops[1].dst_offset: expected less than the block size 16"),
        (1, "deferred", True, "ops[1].deferred: expected False on gpu"),
        (1, "buffer", "", "ops[1].buffer: expected a buffer id"),
        (1, "buffer", "x" * 600, "ops[1].buffer: expected a buffer id"),
        (2, "shift", 0, "ops[2].shift: expected a shift other than 0"),
        (-1, "count", 10**6, "past the old view"),
        (-1, "buffer", "a", "expected none, for the old view's own blocks on gpu"),
    ],
)
def test_values_that_make_no_sense_are_named(index: int, name: str, value: Any, message: str) -> None:
    changed = raw(GPU)
    changed["ops"][index][name] = value
    assert message in refusal(changed)


def test_on_cpu_an_invalidation_needs_its_buffer() -> None:
    changed = raw(CPU)
    changed["ops"][-1]["buffer"] = None
    assert "expected a buffer on cpu" in refusal(changed)


def test_what_is_no_plan_at_all() -> None:
    for data in (b"", b"\xc1", b"\x81", b"\xa5ab", b"\x80\x80", b"\xdf\xff\xff\xff\xff", b"\x91" * 5000):
        assert refusal(data).startswith(("plan", "v"))
    for value in (None, 1, "x", [], [1], {1: 2}, msgpack.Timestamp(1), msgpack.ExtType(5, b"x")):
        assert refusal(value).startswith(("plan", "v"))
    assert refusal(b"\x82\xa1v\x01\xa1v\x01") == "plan: a field appears twice"
    assert refusal(b"\xc0" * (MAX_PLAN_BYTES + 1)).startswith("plan: expected at most")


@pytest.mark.parametrize("name", ["\ud800", "", "x" * 600, "a\nb"])
def test_a_buffer_name_that_cannot_travel_is_refused_when_it_is_written(name: str) -> None:
    plan = compile_plan(View(), View.of_buffer(name, 3), 1, Tier.GPU)
    with pytest.raises(CodecError, match=r"ops\[0\].buffer: expected a buffer id"):
        encode_plan(plan)


def test_a_plan_too_long_to_be_read_is_not_written() -> None:
    base = View.of_buffer("a", 400_000)
    plan = compile_plan(base, base.apply([Edit(k * 8, k * 8 + 3, 1) for k in range(50_000)]), 1, Tier.GPU)
    with pytest.raises(CodecError, match="plan: expected at most"):
        encode_plan(plan)


@SOME
@given(st.binary(max_size=200))
def test_any_bytes_are_a_plan_or_refused(data: bytes) -> None:
    try:
        plan = decode_plan(data)
    except CodecError:
        return
    assert decode_plan(encode_plan(plan)) == plan


@SOME
@given(st.randoms(use_true_random=False), st.sampled_from((GPU, CPU)), st.integers(1, 4))
def test_damaged_plans_are_refused_or_valid(rng: random.Random, plan: Plan, times: int) -> None:
    data = bytearray(encode_plan(plan))
    for _ in range(times):
        at = rng.randrange(len(data))
        match rng.randrange(3):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at]
            case 2:
                data.insert(at, rng.randrange(256))
    try:
        again = decode_plan(bytes(data))
    except CodecError:
        return
    # What is accepted is whole: its parts expand, its deps have no cycle.
    assert decode_plan(encode_plan(again)) == again
    assert all(dep < op.id for op in again.ops for dep in op.deps)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=6)
    | st.binary(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


@SOME
@given(st.data())
def test_any_value_in_any_field_is_valid_or_refused(data: st.DataObject) -> None:
    changed = raw(data.draw(st.sampled_from((GPU, CPU))))
    at = data.draw(st.sampled_from([changed, *changed["ops"]]))
    at[data.draw(st.sampled_from([*at, "other"]))] = data.draw(values)
    packed = msgpack.packb(changed)
    try:
        plan = decode_plan(packed)
    except CodecError as refused:
        assert ":" in str(refused)
    else:
        assert decode_plan(encode_plan(plan)) == plan
