"""Plans as msgpack, between processes and nodes.

A plan is a map with its schema version under `v` and its ops as maps under `ops`. Nothing is skipped or
guessed: another version, an unknown op or field, a missing field, a wrong type or a value out of range is a
    `CodecError`
that names the field. What decodes is a plan in which every dep names an earlier op, so it has no cycles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import msgpack

from leyline_lmcache.directive import TOKEN_LIMIT
from leyline_lmcache.ops import KINDS, Copy, CopyRotate, Fill, Invalidate, Op, OpKind, Plan, Rotate, Tier

SCHEMA_VERSION = 1
"""Version of the encoding written, and the only one read."""
MAX_PLAN_BYTES = 4 << 20
"""Longest encoded plan; a thousand edits make a few percent of it."""
MAX_BUFFER_NAME = 512
"""Longest buffer id accepted, in characters."""

_TYPES: dict[str, type[Op]] = {kind.value: op for op, kind in KINDS.items()}
_PLAN_FIELDS = ("v", "tier", "block_size", "old_length", "new_length", "shared_blocks", "ops")


class CodecError(ValueError):
    """The bytes are not a plan; the message names the field and what was expected there."""


def encode_plan(plan: Plan) -> bytes:
    """The plan as msgpack; `decode_plan` gives back an equal one.

    Raises:
        CodecError: for a plan that `decode_plan` would refuse for its size or a buffer's name.
    """
    for index, op in enumerate(plan.ops):
        name = getattr(op, "buffer", None)
        if name is not None:
            _buffer(name, f"ops[{index}].buffer")
    data: bytes = msgpack.packb(
        {
            "v": SCHEMA_VERSION,
            "tier": plan.tier.value,
            "block_size": plan.block_size,
            "old_length": plan.old_length,
            "new_length": plan.new_length,
            "shared_blocks": plan.shared_blocks,
            "ops": [op_to_map(op) for op in plan.ops],
        }
    )
    if len(data) > MAX_PLAN_BYTES:
        raise CodecError(f"plan: expected at most {MAX_PLAN_BYTES} bytes, got {len(data)}")
    return data


def decode_plan(data: bytes) -> Plan:
    """Read a plan.

    Raises:
        CodecError: for anything that `encode_plan` would not have written.
    """
    if len(data) > MAX_PLAN_BYTES:
        raise CodecError(f"plan: expected at most {MAX_PLAN_BYTES} bytes, got {len(data)}")
    try:
        raw = msgpack.unpackb(data, raw=False, strict_map_key=True, object_pairs_hook=_no_repeats)
    except CodecError:
        raise
    except Exception as error:
        # msgpack raises a dozen unrelated types here, RecursionError and UnicodeDecodeError among them.
        raise CodecError(f"plan: not msgpack ({type(error).__name__})") from None
    if not isinstance(raw, dict):
        raise CodecError(f"plan: expected a map, got {type(raw).__name__}")
    # First, so that a newer writer is told apart from a broken one.
    version = raw.get("v")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise CodecError(f"v: expected schema version {SCHEMA_VERSION}, got {_shown(version)}")
    _check_names(raw, "plan", _PLAN_FIELDS)
    tier = raw["tier"]
    if not isinstance(tier, str) or tier not in tuple(Tier):
        raise CodecError(f"tier: expected one of {', '.join(Tier)}, got {_shown(tier)}")
    block_size = _integer(raw["block_size"], "block_size", 1, TOKEN_LIMIT)
    old_length = _integer(raw["old_length"], "old_length", 0, TOKEN_LIMIT)
    new_length = _integer(raw["new_length"], "new_length", 0, TOKEN_LIMIT)
    shared = _integer(raw["shared_blocks"], "shared_blocks", 0, -(-new_length // block_size))
    if not isinstance(raw["ops"], list):
        raise CodecError(f"ops: expected a list, got {type(raw['ops']).__name__}")
    plan = Plan(Tier(tier), block_size, old_length, new_length, shared, ())
    ops: list[Op] = []
    for index, item in enumerate(raw["ops"]):
        op = op_from_map(item, f"ops[{index}]")
        if op.id != index:
            raise CodecError(f"ops[{index}].id: expected {index}, its place, got {op.id}")
        _check_fits(op, plan, f"ops[{index}]")
        ops.append(op)
    return Plan(plan.tier, block_size, old_length, new_length, shared, tuple(ops))


def op_to_map(op: Op) -> dict[str, Any]:
    """One op as a map of msgpack (and JSON) types, its kind under `op`."""
    out: dict[str, Any] = {"op": KINDS[type(op)].value}
    for field in fields(op):
        value = getattr(op, field.name)
        out[field.name] = list(value) if field.name == "deps" else value
    return out


def op_from_map(raw: object, path: str = "op") -> Op:
    """The reverse of `op_to_map`. Raises CodecError, naming the field below `path`."""
    if not isinstance(raw, dict):
        raise CodecError(f"{path}: expected a map, got {type(raw).__name__}")
    kind = raw.get("op")
    cls = _TYPES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise CodecError(f"{path}.op: expected one of {', '.join(OpKind)}, got {_shown(kind)}")
    names = [field.name for field in fields(cls)]
    _check_names(raw, path, ("op", *names))
    values = {name: _READERS[name](raw[name], f"{path}.{name}") for name in names if name != "buffer"}
    if "buffer" in names:
        # Only an invalidation may leave its buffer open: the old view's own blocks.
        old_view = cls is Invalidate and raw["buffer"] is None
        values["buffer"] = None if old_view else _buffer(raw["buffer"], f"{path}.buffer")
    op = cls(**values)
    if isinstance(op, Fill) and op.end <= op.start:
        raise CodecError(f"{path}.end: expected more than start ({op.start}), got {op.end}")
    if any(dep >= op.id for dep in op.deps):
        raise CodecError(f"{path}.deps: expected ids of earlier ops, below {op.id}")
    return op


def _check_fits(op: Op, plan: Plan, path: str) -> None:
    """Check what an op's values mean in its plan."""
    size = plan.block_size
    match op:
        case Copy() | CopyRotate() | Rotate():
            if op.deferred is not plan.tier.deferred:
                raise CodecError(f"{path}.deferred: expected {plan.tier.deferred} on {plan.tier.value}")
            if op.dst_offset >= size:
                raise CodecError(f"{path}.dst_offset: expected less than the block size {size}")
            if op.dst_block * size + op.dst_offset + op.length > plan.new_length:
                raise CodecError(f"{path}.length: runs past the new view, which has {plan.new_length} tokens")
            if not isinstance(op, Rotate) and op.src_offset >= size:
                raise CodecError(f"{path}.src_offset: expected less than the block size {size}")
        case Fill():
            if op.end > plan.new_length:
                raise CodecError(f"{path}.end: past the new view, which has {plan.new_length} tokens")
        case Invalidate():
            if (op.buffer is not None) is not plan.tier.deferred:
                expected = "a buffer" if plan.tier.deferred else "none, for the old view's own blocks"
                raise CodecError(f"{path}.buffer: expected {expected} on {plan.tier.value}")
            if op.buffer is None and (op.block + op.count - 1) * size >= plan.old_length:
                raise CodecError(f"{path}.count: past the old view, which has {plan.old_length} tokens")


def _check_names(raw: dict[Any, Any], path: str, names: tuple[str, ...]) -> None:
    for name in names:
        if name not in raw:
            raise CodecError(f"{path}.{name}: missing")
    for name in raw:
        if name not in names:
            raise CodecError(f"{path}: unknown field {_shown(name)}; expected {', '.join(names)}")


def _integer(value: object, path: str, least: int, most: int) -> int:
    if type(value) is not int:
        raise CodecError(f"{path}: expected an integer, got {_shown(value)}")
    if not least <= value <= most:
        raise CodecError(f"{path}: expected from {least} to {most}, got {value}")
    return value


def _count(value: object, path: str) -> int:
    return _integer(value, path, 0, TOKEN_LIMIT)


def _positive(value: object, path: str) -> int:
    return _integer(value, path, 1, TOKEN_LIMIT)


def _shift(value: object, path: str) -> int:
    shift = _integer(value, path, -TOKEN_LIMIT, TOKEN_LIMIT)
    if not shift:
        raise CodecError(f"{path}: expected a shift other than 0")
    return shift


def _flag(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise CodecError(f"{path}: expected true or false, got {_shown(value)}")
    return value


def _deps(value: object, path: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise CodecError(f"{path}: expected a list of op ids, got {_shown(value)}")
    return tuple(_count(dep, f"{path}[{i}]") for i, dep in enumerate(value))


def _buffer(value: object, path: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_BUFFER_NAME or not value.isprintable():
        raise CodecError(f"{path}: expected a buffer id of 1 to {MAX_BUFFER_NAME} printable characters")
    return value


_READERS: dict[str, Callable[[object, str], Any]] = {
    "id": _count,
    "deps": _deps,
    "src_block": _count,
    "src_offset": _count,
    "dst_block": _count,
    "dst_offset": _count,
    "length": _positive,
    "shift": _shift,
    "deferred": _flag,
    "start": _count,
    "end": _count,
    "block": _count,
    "count": _positive,
}


def _no_repeats(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise CodecError("plan: a field appears twice")
    return out


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str):
        return repr(value[:32])
    return type(value).__name__
