"""Main process: edits of a session whose client names none are derived from its prompts (DESIGN §5).

A request that opts in (``custom_params.leyline = {"mode": "amortize"}``, or the setting ``session_mode``) and
names a ``session_id`` is compared with what the session's answers left behind; the differences become
directives, as if the client had sent them. Never in the scheduler's process, nor on this one's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from sglang.srt.managers.io_struct import GenerateReqInput

from leyline_lmcache.sessions import Derived, SessionStore, SessionView, derive

from . import hints
from .settings import SessionMode, Settings

log = logging.getLogger(__name__)

_OPTION = "leyline"
_KEYS = ("mode",)


@dataclass(slots=True)
class Turn:
    """One request of a session, until it is answered.

    Attributes:
        session: what names it: the client's id, and whoever may read it (I7).
        derived: its directives came from this; None when the request has its own, or needs none.
        diff_ms: milliseconds the comparison took.
    """

    session: Hashable
    prompt: list[int]
    derived: Derived | None = None
    diff_ms: float = 0.0


class SessionEdits:
    """Sessions of one process."""

    def __init__(self, settings: Settings) -> None:
        self._mode = settings.session_mode
        self._min_reuse = settings.min_reuse
        self._store = SessionStore(
            settings.max_sessions, settings.max_session_views, settings.max_session_tokens
        )

    def wanted(self, obj: GenerateReqInput) -> bool:
        """Whether this request is one of a session whose edits are to be derived.

        Raises:
            ValueError: ``custom_params.leyline`` is malformed; names the field.
        """
        mode = _mode_of(obj.sampling_params, self._mode)
        single = (isinstance(obj.rid, str) or obj.rid is None) and _count(obj.sampling_params) == 1
        return mode is SessionMode.AMORTIZE and obj.session_id is not None and single

    def latest(self, obj: GenerateReqInput) -> str:
        """The last answer of the session a request names; the session's own id if there is none."""
        views = self._store.candidates((obj.session_id, obj.cache_salt, obj.extra_key, obj.lora_path))
        return views[0].response if views else str(obj.session_id)

    async def begin(self, obj: GenerateReqInput, prompt: list[int], *, has_directives: bool) -> Turn:
        """Compare a request with its session, and give it directives, unless it has its own."""
        session = (obj.session_id, obj.cache_salt, obj.extra_key, obj.lora_path)
        turn = Turn(session, prompt)
        if has_directives:
            return turn
        candidates = self._store.candidates(session)
        if not candidates:
            return turn
        begun = time.perf_counter()
        derived = await asyncio.to_thread(derive, candidates, prompt, min_reuse=self._min_reuse)
        turn.diff_ms = (time.perf_counter() - begun) * 1e3
        if derived is not None and derived.needs_directives:
            turn.derived = derived
            obj.kv_hints = envelope(derived)
        return turn

    def answered(self, turn: Turn, answer: Any, output_ids: list[int]) -> None:
        """A request of a session has its answer: the next turn's base."""
        meta = answer.get("meta_info") if isinstance(answer, dict) else None
        reason = (meta or {}).get("finish_reason") or {}
        if meta is None or not output_ids or reason.get("type") == "abort":
            return
        report = meta.get(_OPTION) or {}
        # The last token sampled has no KV.
        tokens = np.array([*turn.prompt, *output_ids[:-1]], dtype=np.int32)
        edited = report.get("outcome") == "spliced"
        self._store.add(turn.session, SessionView(str(meta["id"]), tokens, edited))


def envelope(derived: Derived) -> dict[str, Any]:
    """The directives a client would have sent."""
    changes = [(change.start, change.end, change.replacement) for change in derived.diff.changes]
    return {
        "protocol_version": "1",
        "message_id": "session",
        "actions": [
            {
                "action_id": f"change-{number}",
                "action_type": "kv.splice",
                "action_version": "1",
                "payload": {
                    "base": derived.base.response,
                    "start": start,
                    "end": end,
                    "replacement_ids": list(replacement),
                },
            }
            # An edited view that goes on as it is needs a directive that changes nothing.
            for number, (start, end, replacement) in enumerate(changes or [(0, 0, ())])
        ],
    }


def _count(sampling_params: Any) -> Any:
    """Answers asked for."""
    return sampling_params.get("n", 1) if isinstance(sampling_params, Mapping) else 1


def _mode_of(sampling_params: Any, default: SessionMode) -> SessionMode:
    custom = hints.custom_params(sampling_params)
    if _OPTION not in custom:
        return default
    options = custom[_OPTION]
    where = f"custom_params.{_OPTION}"
    if not isinstance(options, Mapping):
        raise ValueError(f"{where}: expected an object, got {type(options).__name__}")
    for key in options:
        if key not in _KEYS:
            raise ValueError(f"{where}.{key}: unknown key; known keys are {', '.join(_KEYS)}")
    if "mode" not in options:
        return default
    try:
        return SessionMode(str(options["mode"]))
    except ValueError:
        raise ValueError(
            f"{where}.mode: expected one of {', '.join(SessionMode)}, got {options['mode']!r}"
        ) from None
