"""The directive envelope as SGLang carries it.

Native requests have ``kv_hints`` (``managers/kv_hints.py``); the OpenAI endpoints have
``custom_params.kv_hints`` in the sampling parameters, as JSON text or as an object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from leyline_lmcache.envelope import Envelope, parse_envelope
from leyline_lmcache.ranges import Range
from leyline_lmcache.reasons import Fallback, FallbackReason

FILL_ACTION = "leyline.fill"
"""Marks an internal request; clients may not send it."""

VIEW_ACTION = "leyline.view"
"""Asks what a base's view looks like and where its KV lies; the request itself is served as any other."""


def raw_envelope(kv_hints: Any, sampling_params: Any) -> Any:
    """The envelope of one request, undecoded, or None. ``sampling_params``: SGLang's object or mapping."""
    if kv_hints is not None:
        return kv_hints
    return custom_params(sampling_params).get("kv_hints")


def custom_params(sampling_params: Any) -> Mapping[str, Any]:
    """``custom_params`` of SGLang's object or mapping; empty where there are none."""
    custom = _field(sampling_params, "custom_params")
    return custom if isinstance(custom, Mapping) else {}


def decode(raw: Any) -> Envelope:
    """Raises ``Fallback`` (``invalid_directive``) naming the field."""
    if isinstance(raw, msgspec.Struct):
        raw = msgspec.to_builtins(raw)
    return parse_envelope(raw)


def fill_envelope(raw: Any, span: Range) -> dict[str, Any]:
    """The envelope of the internal request that fills ``span`` for the request that carries ``raw``."""
    if isinstance(raw, msgspec.Struct):
        raw = msgspec.to_builtins(raw)
    if isinstance(raw, str | bytes):
        raw = msgspec.json.decode(raw)
    marker = {
        "action_id": "fill",
        "action_type": FILL_ACTION,
        "action_version": "1",
        "payload": {"start": span[0], "end": span[1]},
    }
    return {**raw, "actions": [marker, *raw["actions"]]}


def fill_span(raw: Any) -> Range | None:
    """The span of an internal request's envelope; None for a client's."""
    for action in _field(raw, "actions") or ():
        if _field(action, "action_type") == FILL_ACTION:
            payload = _field(action, "payload")
            return int(payload["start"]), int(payload["end"])
    return None


def viewed_base(raw: Any) -> str | None:
    """The base whose view a request asks for. Raises ``Fallback`` (``invalid_directive``)."""
    if isinstance(raw, str | bytes):
        return None
    for action in _field(raw, "actions") or ():
        if _field(action, "action_type") == VIEW_ACTION:
            payload = _field(action, "payload")
            base = payload.get("base") if isinstance(payload, Mapping) else None
            if not isinstance(base, str) or not base:
                raise Fallback(
                    FallbackReason.INVALID_DIRECTIVE, f"{VIEW_ACTION}: payload.base: expected text"
                )
            return base
    return None


def view_of_session(raw: Any, find: Callable[[], str]) -> Any:
    """An envelope that asks for a view but names no base, with the base that ``find`` names; else itself."""
    if isinstance(raw, str | bytes) or raw is None:
        return raw
    for action in _field(raw, "actions") or ():
        payload = _field(action, "payload")
        if _field(action, "action_type") == VIEW_ACTION and isinstance(payload, Mapping) and not payload:
            plain = msgspec.to_builtins(raw) if isinstance(raw, msgspec.Struct) else dict(raw)
            actions = [
                {**each, "payload": {"base": find()}} if each["action_type"] == VIEW_ACTION else each
                for each in plain["actions"]
            ]
            return {**plain, "actions": actions}
    return raw


def _field(value: Any, name: str) -> Any:
    """A field of SGLang's struct or of a decoded object; None where it is neither or lacks the field."""
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def refuse_internal(raw: Any) -> None:
    """Raise ValueError (an HTTP 400 in SGLang) when a client sends the internal action."""
    try:
        internal = fill_span(raw) is not None
    except (KeyError, TypeError, ValueError, AttributeError):
        return
    if internal:
        raise ValueError(f"kv_hints: action_type {FILL_ACTION} is internal to Leyline and cannot be sent")
