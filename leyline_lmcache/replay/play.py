"""Replays sessions against one server, several at a time.

The recorded answers are part of the prompts that follow, so the server is asked for one token: what it would
say itself is never used, and the time of a request is the time to its first token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from leyline_lmcache.replay.arms import Arm
from leyline_lmcache.replay.ceiling import Ceiling
from leyline_lmcache.replay.tokens import head
from leyline_lmcache.replay.workload import Prompt, Session
from leyline_lmcache.stack.client import Client, Generation

_AMORTIZE = {"leyline": {"mode": "amortize"}}
_TIERS = ("gpu", "cpu", "redis")
_DETAILS = {"gpu": "device", "cpu": "host", "redis": "storage"}


@dataclass(frozen=True, slots=True)
class Served:
    """One request. All counts are tokens of its prompt.

    Attributes:
        prompt: all of them.
        hit: whose KV was there. Not those that Leyline had prefilled for replacements just before, which
            SGLang counts as cached.
        filled: the latter.
        tiers: of `hit`, how many lay in which tier.
        seconds: until the first token.
        outcome: as Leyline reports it; None for a request without edits.
        reason: of a fallback.
        edits: applied.
        found: what the comparison with the session found to keep; None if nothing was derived.
    """

    prompt: int
    hit: int
    filled: int
    tiers: Mapping[str, int]
    seconds: float
    outcome: str | None = None
    reason: str | None = None
    edits: int = 0
    found: int | None = None

    @property
    def prefilled(self) -> int:
        """Computed for this request, its fills included."""
        return self.prompt - self.hit

    @classmethod
    def of(cls, answer: Generation, seconds: float) -> Served:
        """From SGLang's answer."""
        report: Mapping[str, Any] = answer.meta.get("leyline") or {}
        spliced = report.get("outcome") == "spliced"
        filled = min(int(report.get("filled") or 0), answer.cached_tokens) if spliced else 0
        hit = answer.cached_tokens - filled
        told = (report.get("tiers") or {}) if spliced else {}
        names = {tier: tier for tier in _TIERS} if spliced else _DETAILS
        counts = told if spliced else answer.cached_details
        below = {tier: int(counts.get(names[tier]) or 0) for tier in _TIERS[1:]}
        session: Mapping[str, Any] = report.get("session") or {}
        return cls(
            prompt=answer.prompt_tokens,
            hit=hit,
            filled=filled,
            tiers={"gpu": max(0, hit - sum(below.values())), **below},
            seconds=seconds,
            outcome=report.get("outcome"),
            reason=report.get("reason"),
            edits=int(report.get("edits") or 0) if spliced else 0,
            found=session.get("kept"),
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """A request, where it belongs, and what could have been reused."""

    session: str
    number: int
    served: Served
    ceiling: Ceiling


@dataclass(frozen=True, slots=True)
class Play:
    """A set of sessions, replayed once.

    Attributes:
        workload: name of the set.
        turns: of all sessions.
        seconds: for all of them.
    """

    workload: str
    arm: Arm
    concurrency: int
    turns: Sequence[Turn] = field(repr=False)
    seconds: float


def play(
    client: Client,
    arm: Arm,
    name: str,
    sessions: Sequence[Session],
    bounds: Callable[[Session, Arm], Sequence[Ceiling]],
    concurrency: int,
    run: object,
) -> Play:
    """Hold all sessions, so many at a time, each turn after turn.

    Args:
        client: of the arm's server, whose cache is emptied first.
        bounds: the ceilings of a session's prompts.
        run: what tells this replay from others of the same server; sessions of two find nothing of each
            other's.

    Raises:
        RequestError: the server refused a request.
    """
    client.wait_idle()
    client.flush_cache()

    def hold(session: Session) -> list[Turn]:
        prompts = session.sent if arm.has_policy else session.full
        start = head(run, name, concurrency, session.name)
        title = f"{run}-{name}-{concurrency}-{session.name}"
        return [
            Turn(session.name, number, _ask(client, arm, title, [*start, *prompt]), ceiling)
            for number, (prompt, ceiling) in enumerate(zip(prompts, bounds(session, arm), strict=True))
        ]

    began = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        turns = [turn for held in pool.map(hold, sessions) for turn in held]
    return Play(name, arm, concurrency, turns, time.perf_counter() - began)


def _ask(client: Client, arm: Arm, session: str, prompt: Prompt) -> Served:
    extra: dict[str, Any] = {}
    sampling: dict[str, Any] = {"ignore_eos": True}
    if arm is Arm.LEYLINE:
        extra["session_id"] = session
        sampling["custom_params"] = _AMORTIZE
    began = time.perf_counter()
    answer = client.generate(prompt, max_new_tokens=1, sampling=sampling, **extra)
    return Served.of(answer, time.perf_counter() - began)
