"""The wire form of directives: actions inside SGLang's KV-hint envelope (DESIGN §5).

An envelope is `{protocol_version, message_id, actions: [{action_id, action_type, action_version, payload}]}`.
Actions of types that are not ours belong to other components and are only counted. Inside ours everything is
strict: what is not understood is refused by name rather than half applied (I3). Fields around them that
    SGLang would drop before we
see them (its struct ignores unknown ones) are ignored here as well, so both ways in behave alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leyline_lmcache.directive import MAX_REPLACEMENT, Directive, Mode, check_name, first_bad_token, shown
from leyline_lmcache.reasons import Fallback, FallbackReason

ENVELOPE_VERSION = "1"
"""`protocol_version` of the envelope, and `action_version` of our actions."""
SPLICE = "kv.splice"
FORGET = "kv.forget"

MAX_ACTIONS = 1024
"""Most actions in one envelope, ours and others'."""
MAX_ENVELOPE_BYTES = 16 << 20
"""Longest envelope accepted as text."""

_FIELDS = ("base", "start", "end", "replacement_ids", "mode")
_REQUIRED = ("base", "start", "end")


@dataclass(frozen=True, slots=True)
class Envelope:
    """What one request asks for.

    Attributes:
        message_id: the sender's name for the envelope.
        directives: the AMORTIZE directives, in the order sent.
        forgets: the FORGET directives, in the order sent.
        foreign: how many actions of other types were there, and were left alone.
    """

    message_id: str
    directives: tuple[Directive, ...]
    forgets: tuple[Directive, ...]
    foreign: int


def parse_envelope(
    raw: Mapping[str, Any] | str | bytes,
    *,
    max_actions: int = MAX_ACTIONS,
    max_replacement: int = MAX_REPLACEMENT,
) -> Envelope:
    """Read an envelope: decoded, or as JSON text.

    `kv.forget` and `kv.splice` with mode `forget` mean the same. Order, overlap and the base's length are not
    checked here but by `directive.normalize`, once the base is known.

    Raises:
        Fallback: `invalid_directive`, with the path of the field, as in
            `actions[0].payload.start: expected a non-negative integer, got 'x'`.
    """
    envelope = _decode(raw)
    version = _text(envelope, "protocol_version", "protocol_version")
    if version != ENVELOPE_VERSION:
        raise _invalid("protocol_version", f"expected {ENVELOPE_VERSION!r}", version)
    message_id = _text(envelope, "message_id", "message_id", empty=True)
    actions = envelope.get("actions", [])
    if not _is_list(actions):
        raise _invalid("actions", "expected a list", actions)
    if len(actions) > max_actions:
        raise _invalid("actions", f"expected at most {max_actions}", len(actions))
    directives: list[Directive] = []
    forgets: list[Directive] = []
    foreign = 0
    for index, action in enumerate(actions):
        directive = _parse_action(action, f"actions[{index}]", max_replacement)
        if directive is None:
            foreign += 1
        elif directive.mode is Mode.FORGET:
            forgets.append(directive)
        else:
            directives.append(directive)
    return Envelope(message_id, tuple(directives), tuple(forgets), foreign)


def _parse_action(action: object, path: str, max_replacement: int) -> Directive | None:
    if not isinstance(action, Mapping):
        raise _invalid(path, "expected an object", action)
    kind = _text(action, "action_type", f"{path}.action_type")
    if kind not in (SPLICE, FORGET):
        return None
    version = _text(action, "action_version", f"{path}.action_version")
    if version != ENVELOPE_VERSION:
        raise _invalid(f"{path}.action_version", f"expected {ENVELOPE_VERSION!r} for {kind}", version)
    action_id = _text(action, "action_id", f"{path}.action_id", empty=True)
    payload = action.get("payload")
    if not isinstance(payload, Mapping):
        raise _invalid(f"{path}.payload", "expected an object", payload)
    return _parse_payload(payload, f"{path}.payload", kind, action_id, max_replacement)


def _parse_payload(
    payload: Mapping[Any, Any], path: str, kind: str, action_id: str, max_replacement: int
) -> Directive:
    for name in payload:
        if name not in _FIELDS:
            raise Fallback(
                FallbackReason.INVALID_DIRECTIVE,
                f"{path}: unknown field {shown(name)}; expected {', '.join(_FIELDS)}",
            )
    for name in _REQUIRED:
        if name not in payload:
            raise Fallback(FallbackReason.INVALID_DIRECTIVE, f"{path}.{name}: missing")
    ids = payload.get("replacement_ids", [])
    where = f"{path}.replacement_ids"
    if not _is_list(ids):
        # Only the type: text here may well be the replacement itself.
        raise _invalid(where, "expected a list of token ids", type(ids))
    if len(ids) > max_replacement:
        raise _invalid(where, f"expected at most {max_replacement} token ids", len(ids))
    bad = first_bad_token(ids)
    if bad is not None:
        got = "one out of range" if type(ids[bad]) is int else type(ids[bad]).__name__
        raise Fallback(FallbackReason.INVALID_DIRECTIVE, f"{where}[{bad}]: expected a token id, got {got}")
    mode = _mode(payload, f"{path}.mode", kind)
    try:
        return Directive(payload["base"], payload["start"], payload["end"], tuple(ids), mode, action_id)
    except Fallback as refused:
        raise Fallback(refused.reason, f"{path}.{refused.detail}") from None


def _mode(payload: Mapping[Any, Any], path: str, kind: str) -> Mode:
    default = Mode.FORGET if kind == FORGET else Mode.AMORTIZE
    value = payload.get("mode", default.value)
    if not isinstance(value, str) or value not in tuple(Mode):
        raise _invalid(path, "expected 'amortize' or 'forget'", value)
    mode = Mode(value)
    if kind == FORGET and mode is not Mode.FORGET:
        raise _invalid(path, f"expected 'forget' or nothing for {FORGET}", value)
    return mode


def _decode(raw: object) -> Mapping[Any, Any]:
    value = raw
    if isinstance(raw, str | bytes | bytearray):
        if len(raw) > MAX_ENVELOPE_BYTES:
            raise _invalid("envelope", f"expected at most {MAX_ENVELOPE_BYTES} bytes", len(raw))
        try:
            value = json.loads(raw, object_pairs_hook=_no_repeats, parse_constant=_no_constants)
        except Fallback:
            raise
        except (ValueError, RecursionError) as error:
            # json's own message quotes nothing of the document; UnicodeDecodeError's would, so only its name.
            what = (
                f"{error.msg} at {error.pos}"
                if isinstance(error, json.JSONDecodeError)
                else type(error).__name__
            )
            raise Fallback(FallbackReason.INVALID_DIRECTIVE, f"envelope: not JSON ({what})") from None
    if not isinstance(value, Mapping):
        raise _invalid("envelope", "expected an object", type(value))
    return value


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise Fallback(
                    FallbackReason.INVALID_DIRECTIVE, f"envelope: field {shown(name)} appears twice"
                )
            seen.add(name)
    return out


def _no_constants(name: str) -> float:
    raise Fallback(FallbackReason.INVALID_DIRECTIVE, f"envelope: {name} is not JSON")


def _text(source: Mapping[Any, Any], name: str, path: str, *, empty: bool = False) -> str:
    if name not in source:
        raise Fallback(FallbackReason.INVALID_DIRECTIVE, f"{path}: missing")
    value = source[name]
    check_name(path, value)
    assert isinstance(value, str)
    if not value and not empty:
        raise _invalid(path, "expected text", value)
    return value


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _invalid(path: str, expected: str, got: object) -> Fallback:
    return Fallback(FallbackReason.INVALID_DIRECTIVE, f"{path}: {expected}, got {shown(got)}")
