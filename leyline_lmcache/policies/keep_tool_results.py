"""``keep_tool_results``: the last results stay, older ones become stubs."""

from __future__ import annotations

from dataclasses import dataclass

from leyline_lmcache.policies.base import Messages, OptionError
from leyline_lmcache.policies.messages import results, seen_until
from leyline_lmcache.policies.stubs import MIN_CHARS, check_stub, stub_results


@dataclass(frozen=True, slots=True)
class KeepToolResults:
    """Keep the last tool results and stub those before them.

    What the model has not read yet stays in any case.

    Attributes:
        keep: results that stay.
        batch: stub so many at a time: fewer turns have an edit, and some results stay longer.
        observations: also ``user`` messages that follow the model's directly, for harnesses whose model calls
            tools in plain text.
        exclude_tools: tools whose results stay and do not count.
        stub: what replaces a result; may contain {chars} and {lines} of what was there.
        min_chars: results no longer than this stay.
    """

    keep: int = 2
    batch: int = 1
    observations: bool = False
    exclude_tools: tuple[str, ...] = ()
    stub: str = "[old tool output removed]"
    min_chars: int = MIN_CHARS

    def __post_init__(self) -> None:
        if self.keep < 0:
            raise OptionError("keep", f"expected 0 or more, got {self.keep}")
        if self.batch < 1:
            raise OptionError("batch", f"expected 1 or more, got {self.batch}")
        check_stub(self.stub, self.min_chars)

    def transform(self, messages: Messages, turn_idx: int) -> Messages:
        """See :class:`leyline_lmcache.policies.Policy`."""
        found = [
            result
            for result in results(messages, observations=self.observations)
            if result.tool not in self.exclude_tools
        ]
        old = max(0, len(found) - self.keep) // self.batch * self.batch
        last = seen_until(messages)
        chosen = [result for result in found[:old] if result.index < last]
        return stub_results(messages, chosen, self.stub, self.min_chars)
