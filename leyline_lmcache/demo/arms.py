"""Sends the conversation in three arms to one server.

All arms use one server, so that they are measured under the same conditions, but each has a `cache_salt` of
its own: the cache then keeps their KV apart as it does for tenants. Without that, the re-prefill arm would
find prefixes that the splice arm has just computed, and the figures would depend on the order of the arms.

A turn is two requests. The *draft* has the new messages and the question. Then the agent drops what is stale
and asks again (*final*). So when the edit comes, the question is in the cache already and is moved with
everything else after the edit: a missing or wrong rotation cannot hide behind a question that is prefilled
afterwards. Between the two, in two turns of three, the KV of all arms is driven off the GPU, to LMCache's L1
or on to Redis, as it happens to a session that waits long for its next turn.

The contract is to follow full context. Where full context itself wavers between two answers, a rounding
decides and nothing is learnt. So the conversation is rehearsed first with full context alone, and a version
is taken in which it is right and sure every time; what the other arms make of it plays no part in the choice.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from leyline_lmcache.demo.dialect import Dialect
from leyline_lmcache.demo.results import Arm, ArmTurn, Served, TurnResult
from leyline_lmcache.demo.scenario import Message, Place, Scenario, Turn, write_scenario
from leyline_lmcache.demo.transcript import Replacement, Transcript
from leyline_lmcache.envelope import ENVELOPE_VERSION, SPLICE
from leyline_lmcache.stack import Client

Displace = Callable[[Place], None]

_MOST_VERSIONS = 8
_SURE = 0.95


class Agent:
    """One arm: its history, and the requests it sends."""

    def __init__(self, client: Client, dialect: Dialect, salt: str, *, directives: bool) -> None:
        self._client = client
        self._dialect = dialect
        self._salt = salt
        self._directives = directives
        self._base: str | None = None
        self._transcript = Transcript([("opening", dialect.opening())])
        self._output: Sequence[int] = ()

    def read(self, name: str, *messages: Message) -> None:
        """Add messages to the history, under a name by which they can be replaced."""
        self._transcript.append(name, *(self._dialect.message(message) for message in messages))

    def edit(self, changes: dict[str, tuple[Message, ...]]) -> tuple[Replacement, ...]:
        """Replace messages of the history by name."""
        texts = {
            name: tuple(token for message in messages for token in self._dialect.message(message))
            for name, messages in changes.items()
        }
        return self._transcript.edit(texts)

    def ask(self, edits: Sequence[Replacement] = (), *, logprobs: bool = False) -> Served:
        """Let the model answer the history, of which `edits` were made since the last request."""
        prompt = [*self._transcript.tokens, *self._dialect.prompt_end()]
        hints = None
        if self._directives and self._base is not None:
            hints = envelope(self._base, edits)
        started = time.perf_counter()
        answer = self._client.generate(
            prompt,
            max_new_tokens=self._dialect.answer_tokens,
            kv_hints=hints,
            cache_salt=self._salt,
            logprobs=logprobs,
        )
        milliseconds = (time.perf_counter() - started) * 1e3
        self._base, self._output = answer.id, answer.output_ids
        report = answer.meta.get("leyline") or {}
        # What was loaded with the prefix is part of `moved`, and of the prefix.
        moved = min(int(report.get("moved", 0)), int(report.get("spliced", 0)))
        filled, tiers = int(report.get("filled", 0)), report.get("tiers") or {}
        return Served(
            prompt=answer.prompt_tokens,
            prefix=answer.cached_tokens - moved - filled,
            spliced=moved,
            filled=filled,
            prefilled=answer.prompt_tokens - answer.cached_tokens,
            milliseconds=milliseconds,
            answer=self._dialect.read(answer.output_ids),
            amortized=int(report.get("spliced", 0)),
            outcome=str(report.get("outcome", "")),
            reason=str(report.get("reason", "")),
            lineage=str(report.get("lineage", "")),
            **{place.value: int(tiers.get(place, 0)) for place in Place},
            sure=math.exp(answer.output_logprobs[0]) if logprobs and answer.output_logprobs else None,
        )

    def keep_answer(self, name: str) -> None:
        """Add the last answer to the history."""
        self._transcript.append(name, self._dialect.prompt_end(), self._dialect.answered(self._output))


def envelope(base: str, edits: Sequence[Replacement]) -> dict[str, Any]:
    """Directives as SGLang's `kv_hints`. Without edits: go on with the base's view as it is."""
    spans = [(edit.start, edit.end, list(edit.tokens)) for edit in edits] or [(0, 0, [])]
    return {
        "protocol_version": ENVELOPE_VERSION,
        "message_id": "demo",
        "actions": [
            {
                "action_id": f"edit-{index}",
                "action_type": SPLICE,
                "action_version": ENVELOPE_VERSION,
                "payload": {"base": base, "start": start, "end": end, "replacement_ids": ids},
            }
            for index, (start, end, ids) in enumerate(spans)
        ],
    }


def choose_version(client: Client, dialect: Dialect, turns: int, seed: int) -> tuple[int, Scenario]:
    """The first version of a seed's conversation in which full context is right and sure in every turn.

    When there is none among the first few, the one with the fewest turns in which it is not. Random weights
    are never right: then the first.
    """
    if not dialect.trained:
        return 0, write_scenario(turns, seed)
    best = (turns + 1, 0, write_scenario(turns, seed))
    for version in range(_MOST_VERSIONS):
        scenario = write_scenario(turns, seed, version)
        doubts = _rehearse(client, dialect, scenario)
        best = min(best, (doubts, version, scenario), key=lambda each: each[:2])
        if not doubts:
            break
    return best[1:]


def _rehearse(client: Client, dialect: Dialect, scenario: Scenario) -> int:
    """Turns in which full context is wrong or not sure."""
    agent = Agent(client, dialect, f"{uuid.uuid4().hex[:8]}-rehearsal", directives=False)
    _read_history(agent, scenario)
    doubts = 0
    for turn in scenario.turns:
        _read_turn(agent, scenario, turn)
        done = agent.ask(logprobs=True)
        agent.keep_answer(f"answer {turn.number}")
        doubts += done.answer != turn.expected or (done.sure or 0.0) < _SURE
    return doubts


def converse(
    client: Client, dialect: Dialect, scenario: Scenario, displace: Displace | None = None
) -> Iterator[TurnResult]:
    """Hold the conversation, and give each turn when all arms have answered it.

    `displace` drives everybody's KV to a turn's place, between the drafts and the edit; None leaves it all
    on the GPU.
    """
    run = uuid.uuid4().hex[:8]
    _warm_up(client, dialect, scenario, f"{run}-warm-up")
    agents = {arm: Agent(client, dialect, f"{run}-{arm.value}", directives=arm is Arm.SPLICE) for arm in Arm}
    for agent in agents.values():
        _read_history(agent, scenario)
        agent.ask()
    order = list(Arm)
    for turn in scenario.turns:
        done: dict[Arm, ArmTurn] = {}
        edits: tuple[Replacement, ...] = ()
        drafts = {arm: _draft(agents[arm], scenario, turn) for arm in order}
        place = turn.place if displace is not None else Place.GPU
        if displace is not None:
            displace(place)
        for arm in order:
            final, made = _finish(agents[arm], arm, turn)
            done[arm] = ArmTurn(drafts[arm], final)
            edits = made or edits
        yield TurnResult(
            turn.number,
            tuple(one.edit for one in edits),
            turn.question.content,
            turn.expected,
            {arm: done[arm] for arm in Arm},
            place,
        )
        # Nobody is always first.
        order = [*order[1:], order[0]]


def _draft(agent: Agent, scenario: Scenario, turn: Turn) -> Served:
    _read_turn(agent, scenario, turn)
    return agent.ask()


def _finish(agent: Agent, arm: Arm, turn: Turn) -> tuple[Served, tuple[Replacement, ...]]:
    edits: tuple[Replacement, ...] = ()
    if arm is not Arm.FULL:
        changes: dict[str, tuple[Message, ...]] = {f"output {turn.stale}": (turn.stub,)}
        if turn.deleted is not None:
            changes[f"aside {turn.deleted}"] = ()
        edits = agent.edit(changes)
    final = agent.ask(edits)
    agent.keep_answer(f"answer {turn.number}")
    return final, edits


def _warm_up(client: Client, dialect: Dialect, scenario: Scenario, salt: str) -> None:
    """Send one of each kind of request, so that nobody pays for the first time."""
    agent = Agent(client, dialect, salt, directives=True)
    _read_history(agent, scenario)
    agent.ask()
    agent.ask(agent.edit({"output 0": (scenario.turns[0].stub,)}))


def _read_history(agent: Agent, scenario: Scenario) -> None:
    agent.read("system", scenario.system)
    for index in range(scenario.before):
        _read_round(agent, scenario, index)


def _read_turn(agent: Agent, scenario: Scenario, turn: Turn) -> None:
    _read_round(agent, scenario, turn.round)
    agent.read(f"question {turn.number}", turn.question)


def _read_round(agent: Agent, scenario: Scenario, index: int) -> None:
    one = scenario.rounds[index]
    agent.read(f"call {index}", one.call)
    agent.read(f"output {index}", one.output)
    agent.read(f"note {index}", one.note)
    agent.read(f"aside {index}", one.aside)
