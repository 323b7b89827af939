"""What the demo measured: per request, per turn, and in all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from leyline_lmcache.demo.scenario import Place
from leyline_lmcache.journal import OpRecord
from leyline_lmcache.ops import OpKind, Tier
from leyline_lmcache.view import Edit


class Arm(StrEnum):
    """Three ways to serve the same conversation."""

    FULL = "full"
    """Nothing is ever dropped: what the model would answer if memory cost nothing."""
    REPREFILL = "re-prefill"
    """The history is edited and sent without directives: what a prefix cache makes of it."""
    SPLICE = "splice"
    """The history is edited and sent with directives."""


@dataclass(frozen=True, slots=True)
class Served:
    """One answered request.

    Attributes:
        prompt: its tokens; the sum of the next four.
        prefix: found as a prefix in the cache.
        spliced: moved to their new places by this request, with the KV they had before the edit.
        filled: prefilled in the middle, for the replacements.
        prefilled: prefilled at the end.
        milliseconds: from sending it to the whole answer, at the client.
        answer: what the model said.
        amortized: tokens, spliced now or in an earlier turn, whose KV is older than an edit before them.
        outcome: of the edit, as the plugin reports it; "" for a request without directives.
        reason: why the edit was refused; "" if it was not.
        lineage: short name of the edited view; "" for exact KV.
        sure: the answer's probability to the model, where it was asked for.
        gpu, cpu, redis: tokens whose KV was kept, by the tier they came from; 0 where that is not told.
    """

    prompt: int
    prefix: int
    spliced: int
    filled: int
    prefilled: int
    milliseconds: float
    answer: str
    amortized: int = 0
    outcome: str = ""
    reason: str = ""
    lineage: str = ""
    sure: float | None = None
    gpu: int = 0
    cpu: int = 0
    redis: int = 0

    @property
    def computed(self) -> int:
        """Tokens the engine had to compute."""
        return self.filled + self.prefilled


@dataclass(frozen=True, slots=True)
class ArmTurn:
    """What one arm did in one turn.

    Attributes:
        draft: the request with the new messages and the question, before the turn's edit.
        final: the request after it, whose answer stays in the history.
    """

    draft: Served
    final: Served


@dataclass(frozen=True, slots=True)
class TurnResult:
    """One turn in all arms.

    Attributes:
        number: from 1.
        edits: of the turn, in positions of the splice arm's draft.
        question: what was asked.
        expected: the right answer.
        arms: what each arm did.
        place: where the KV lay when the edit came.
    """

    number: int
    edits: tuple[Edit, ...]
    question: str
    expected: str
    arms: Mapping[Arm, ArmTurn]
    place: Place = Place.GPU

    def follows(self, arm: Arm) -> bool:
        """True when the arm answers like the one that sees everything."""
        return self.arms[arm].final.answer == self.arms[Arm.FULL].final.answer

    @property
    def is_spliced(self) -> bool:
        """True when the edited request was served from edited KV."""
        final = self.arms[Arm.SPLICE].final
        return final.outcome == "spliced" and final.amortized > 0


@dataclass(frozen=True, slots=True)
class Totals:
    """One arm over all turns; tokens of the edited requests, and what all its requests had to compute.

    Attributes:
        prompt, prefix, spliced, filled, prefilled: of the edited requests, see `Served`.
        milliseconds: of the edited requests.
        computed: tokens computed by all requests, drafts included.
        follows: turns answered like the full-context arm.
        right: turns answered right.
    """

    prompt: int
    prefix: int
    spliced: int
    filled: int
    prefilled: int
    milliseconds: float
    computed: int
    follows: int
    right: int


class Verdict(StrEnum):
    """What the demo has shown."""

    HELD = "held"
    """Every edit was spliced, and every answer follows the full-context arm."""
    NOT_SPLICED = "not_spliced"
    """At least one edited request was served by prefilling."""
    BROKEN = "broken"
    """At least one answer of the splice arm differs from the full-context arm's."""
    UNMEASURED = "unmeasured"
    """All was spliced, but with random weights answers mean nothing."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """All turns.

    Attributes:
        model: the model's name.
        trained: its answers mean something.
        seed, version: of the scenario.
        turns: in order.
        ops: what the last edit made the tiers do, from the journal.
    """

    model: str
    trained: bool
    seed: int
    version: int
    turns: Sequence[TurnResult]
    ops: Sequence[OpRecord] = ()

    def total(self, arm: Arm) -> Totals:
        """One arm over all turns."""
        finals = [turn.arms[arm].final for turn in self.turns]
        drafts = [turn.arms[arm].draft for turn in self.turns]
        return Totals(
            prompt=sum(one.prompt for one in finals),
            prefix=sum(one.prefix for one in finals),
            spliced=sum(one.spliced for one in finals),
            filled=sum(one.filled for one in finals),
            prefilled=sum(one.prefilled for one in finals),
            milliseconds=sum(one.milliseconds for one in finals),
            computed=sum(one.computed for one in finals + drafts),
            follows=sum(turn.follows(arm) for turn in self.turns),
            right=sum(turn.arms[arm].final.answer == turn.expected for turn in self.turns),
        )

    def tokens_from(self, place: Place) -> int:
        """Tokens of the splice arm's edited requests whose KV came from there."""
        return sum(int(getattr(turn.arms[Arm.SPLICE].final, place)) for turn in self.turns)

    @property
    def verdict(self) -> Verdict:
        """What was shown; no turns show nothing."""
        if not self.turns or not all(turn.is_spliced for turn in self.turns):
            return Verdict.NOT_SPLICED
        if not self.trained:
            return Verdict.UNMEASURED
        return Verdict.HELD if all(turn.follows(Arm.SPLICE) for turn in self.turns) else Verdict.BROKEN

    def to_json(self) -> dict[str, Any]:
        """All figures as plain data."""
        totals = {arm.value: asdict(self.total(arm)) for arm in Arm}
        return {
            "model": self.model,
            "trained": self.trained,
            "seed": self.seed,
            "version": self.version,
            "verdict": self.verdict.value,
            "turns": [_turn_json(turn) for turn in self.turns],
            "totals": totals,
            "last_plan": [asdict(op) for op in self.ops],
            "summary": self._summary(),
        }

    def _summary(self) -> dict[str, Any]:
        """The figures in one flat object."""
        full, again, splice = (self.total(arm) for arm in Arm)
        return {
            "turns": len(self.turns),
            "edits": sum(len(turn.edits) for turn in self.turns),
            "turns_spliced": sum(turn.is_spliced for turn in self.turns),
            **{f"turns_from_{place}": sum(turn.place is place for turn in self.turns) for place in Place},
            **{f"tokens_from_{place}": self.tokens_from(place) for place in Place},
            "splice_equals_full": splice.follows,
            "reprefill_equals_full": again.follows,
            "full_right": full.right,
            "spliced_tokens": splice.spliced,
            "spliced_fraction": _ratio(splice.spliced, splice.prompt),
            "computed_tokens_splice": splice.filled + splice.prefilled,
            "computed_tokens_reprefill": again.filled + again.prefilled,
            "edited_over_hit": _ratio(splice.milliseconds, full.milliseconds),
            "edited_over_reprefill": _ratio(splice.milliseconds, again.milliseconds),
        }


def _turn_json(turn: TurnResult) -> dict[str, Any]:
    return {
        "number": turn.number,
        "place": turn.place.value,
        "edits": [asdict(edit) for edit in turn.edits],
        "question": turn.question,
        "expected": turn.expected,
        "arms": {
            arm.value: {**asdict(done), "follows_full": turn.follows(arm)} for arm, done in turn.arms.items()
        },
    }


def last_ops(records: Iterable[OpRecord], lineage: str) -> list[OpRecord]:
    """The ops of one edit: those of its lineage."""
    return [record for record in records if lineage and record.lineage.startswith(lineage)]


def condensed(ops: Iterable[OpRecord]) -> list[OpRecord]:
    """Ops of one kind, tier and request as one, with the sums of their figures; a shift if all have the same.

    A view of many pieces has as many ops, which say nothing on a screen.
    """
    groups: dict[tuple[str, Tier, OpKind | None], list[OpRecord]] = {}
    for op in ops:
        groups.setdefault((op.request, op.tier, op.op), []).append(op)
    return [
        replace(
            group[-1],
            blocks=sum(op.blocks for op in group),
            tokens=sum(op.tokens for op in group),
            shift=group[0].shift if len({op.shift for op in group}) == 1 else 0,
            bytes=sum(op.bytes for op in group),
            micros=sum(op.micros for op in group),
        )
        for group in groups.values()
    ]


def _ratio(a: float, b: float) -> float | None:
    return round(a / b, 4) if b else None
