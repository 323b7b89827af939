"""``clear_tool_uses``: nothing until the context is large, then all tool uses but the last at once.

The options are those of Anthropic's ``clear_tool_uses_20250919``. A harness sends its conversation whole, so
what was cleared in earlier turns is found by going through these again: what was cleared once stays cleared,
the context counts as what it then was, and the next clearing comes when it has grown again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar

from leyline_lmcache.policies.base import CountTokens, Messages, OptionError, estimate_tokens
from leyline_lmcache.policies.messages import Result, arguments_of, results, size, tool_calls
from leyline_lmcache.policies.stubs import (
    MIN_CHARS,
    NO_ARGUMENTS,
    check_stub,
    has_arguments,
    stub_results,
    stubbed,
    worth_stubbing,
)


class Unit(StrEnum):
    """What a threshold counts."""

    INPUT_TOKENS = "input_tokens"
    TOOL_USES = "tool_uses"


@dataclass(frozen=True, slots=True)
class Threshold:
    """So many tokens of the prompt, or tool uses in it.

    Attributes:
        type: ``input_tokens`` or ``tool_uses``.
        value: how many.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    type: Unit
    value: int


@dataclass(frozen=True, slots=True)
class ClearToolUses:
    """Clear tool uses, the last ones excepted, whenever the context has become too large.

    What the model has not read yet stays in any case.

    Attributes:
        trigger: clear when there is more than this.
        keep: tool uses that stay.
        clear_at_least: tokens that a clearing must save; one that would save less is put off.
        exclude_tools: tools whose uses stay and do not count.
        clear_tool_inputs: also take the arguments out of the calls: of all, or of these tools.
        stub: what replaces a result; may contain {chars} and {lines} of what was there.
        min_chars: results no longer than this stay.
        count: tells the tokens of a text; not an option of the configuration.
    """

    trigger: Threshold = Threshold(Unit.INPUT_TOKENS, 100_000)
    keep: Threshold = Threshold(Unit.TOOL_USES, 3)
    clear_at_least: Threshold | None = None
    exclude_tools: tuple[str, ...] | None = None
    clear_tool_inputs: bool | tuple[str, ...] | None = False
    stub: str = "[tool output cleared]"
    min_chars: int = MIN_CHARS
    count: CountTokens = estimate_tokens

    def __post_init__(self) -> None:
        for name, units in (
            ("trigger", tuple(Unit)),
            ("keep", (Unit.TOOL_USES,)),
            ("clear_at_least", (Unit.INPUT_TOKENS,)),
        ):
            threshold: Threshold | None = getattr(self, name)
            if threshold is None:
                continue
            if threshold.type not in units:
                raise OptionError(name, f"expected {' or '.join(units)}, got {threshold.type}", "type")
            if threshold.value < 0:
                raise OptionError(name, f"expected 0 or more, got {threshold.value}", "value")
        check_stub(self.stub, self.min_chars)

    def counting(self, count: CountTokens) -> ClearToolUses:
        """The same policy with another way to count tokens."""
        return replace(self, count=count)

    def transform(self, messages: Messages, turn_idx: int) -> Messages:
        """See :class:`leyline_lmcache.policies.Policy`."""
        uses = [result for result in results(messages) if result.tool not in (self.exclude_tools or ())]
        cleared = self._cleared(messages, uses)
        whole = [use for use in cleared if self._clears_inputs(use)]
        outputs = [use for use in cleared if not self._clears_inputs(use)]
        made = stub_results(messages, outputs, self.stub, self.min_chars)
        return stub_results(made, whole, self.stub, self.min_chars, clear_inputs=True)

    def _cleared(self, messages: Messages, uses: list[Result]) -> list[Result]:
        """What the turns up to this one cleared."""
        cleared = 0
        total = 0
        arrived = 0
        counted = -1
        answered = -1
        by_tokens = self.trigger.type is Unit.INPUT_TOKENS
        least = self.clear_at_least.value if self.clear_at_least else 0
        # Of the uses up to each: a clearing that is put off turn by turn counts none of them twice.
        saved = [0]
        # Each answer of the model was a turn on everything before it; the last turn is this one.
        turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        for turn in [*turns, len(messages)]:
            if by_tokens:
                total += sum(size(message, self.count) for message in messages[counted + 1 : turn])
                counted = turn - 1
            while arrived < len(uses) and uses[arrived].index < turn:
                arrived += 1
            if (total if by_tokens else arrived - cleared) > self.trigger.value:
                end = max(cleared, arrived - self.keep.value)
                while end > cleared and uses[end - 1].index > answered:
                    end -= 1
                for use in uses[len(saved) - 1 : end]:
                    saved.append(saved[-1] + self._saving(messages, use))
                saving = saved[end] - saved[cleared]
                if saving >= least or not saving:
                    total -= saving
                    cleared = end
            answered = turn
        return uses[:cleared]

    def _saving(self, messages: Messages, use: Result) -> int:
        message = messages[use.index]
        saved = 0
        if worth_stubbing(message, self.min_chars):
            saved += size(message, self.count) - size(stubbed(message, self.stub), self.count)
        if self._clears_inputs(use) and use.call is not None:
            index, number = use.call
            if has_arguments(messages[index], number):
                arguments = arguments_of(tool_calls(messages[index])[number])
                saved += self.count(arguments) - self.count(NO_ARGUMENTS)
        return max(0, saved)

    def _clears_inputs(self, use: Result) -> bool:
        wanted = self.clear_tool_inputs
        return wanted if isinstance(wanted, bool) else use.tool in (wanted or ())
