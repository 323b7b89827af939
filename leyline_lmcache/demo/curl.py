"""Commands with which somebody can talk to the servers that the demo left running."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from leyline_lmcache.demo.arms import envelope
from leyline_lmcache.demo.dialect import Dialect
from leyline_lmcache.demo.scenario import Message
from leyline_lmcache.demo.transcript import Transcript

_BASE = "try-1"
_STALE = "output"
_HISTORY = (
    ("system", (Message("system", "You track variables. Answer with the value or unknown."),)),
    (
        _STALE,
        (
            Message("tool", "kappa = 42;"),
            Message("tool", "status ok files found on disk check the log for warn and error result"),
        ),
    ),
    ("note", (Message("assistant", "port = kappa;"),)),
    ("log", (Message("tool", "build passed test run took 12 items done cache ready memory ok disk ok"),)),
    ("question", (Message("user", "port ?"),)),
)
_STUB = Message("tool", "[evicted: 2 older tool turns]")


def commands(url: str, dialect: Dialect) -> list[tuple[str, str]]:
    """Commands, each with what to say about it: a base, an edit of it, the edit without directives."""
    whole = _text(dialect, _HISTORY)
    edited = _text(dialect, [(name, (_STUB,) if name == _STALE else said) for name, said in _HISTORY])
    transcript = Transcript([("opening", dialect.opening())])
    for name, said in _HISTORY:
        transcript.append(name, *(dialect.message(message) for message in said))
    directives = envelope(_BASE, transcript.edit({_STALE: dialect.message(_STUB)}))
    return [
        (f"A base, whose id is {_BASE}:", _curl(url, {"rid": _BASE, "text": whole})),
        (
            "The same with the tool's output replaced by a stub, and a directive that says so "
            "(see meta_info.leyline in the answer):",
            _curl(url, {"text": edited, "kv_hints": directives}),
        ),
        ("The same text without the directive, which is prefilled:", _curl(url, {"text": edited})),
    ]


def _text(dialect: Dialect, history: Sequence[tuple[str, Sequence[Message]]]) -> str:
    said = "".join(dialect.text(message) for _, messages in history for message in messages)
    return f"{dialect.first}{said}{dialect.asking}"


def _curl(url: str, fields: dict[str, Any]) -> str:
    body = {**fields, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    text = json.dumps(body).replace("'", r"\u0027")
    return f"curl -s {url}/generate -H 'Content-Type: application/json' -d '{text}'"
