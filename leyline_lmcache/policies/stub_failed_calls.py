"""``stub_failed_calls``: results that report a failure become stubs, once something came after them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from leyline_lmcache.policies.base import Message, Messages, OptionError
from leyline_lmcache.policies.messages import results, seen_until, text_of
from leyline_lmcache.policies.stubs import MIN_CHARS, check_stub, stub_results

FAILURES = (
    r"^Traceback \(most recent call last\):",
    r"\A\s*(?:(?:fatal|internal|syntax|runtime)\s+)?(?:error|exception|failure)\b",
    r"^(?:\w+\.)*\w*(?:Error|Exception): ",
    r"<(?:returncode|exit_code)>\s*-?[1-9]",
    r"\b(?:exit(?:ed with)?|return) ?(?:code|status)\b\W{0,3}-?[1-9]",
    r": (?:command not found|No such file or directory|Permission denied)\s*$",
    r"""["'](?:is_error|isError)["']\s*:\s*true\b""",
)
"""How common harnesses and shells report a failure. Searched for line by line, without regard to case."""


@dataclass(frozen=True, slots=True)
class StubFailedCalls:
    """Stub the results of calls that failed.

    A result failed if its message says so (``is_error: true``) or its text matches a pattern.

    Attributes:
        keep: the last results, failed or not, that stay, so that the model can still learn from them.
        patterns: regular expressions that a failure matches (any of them).
        clear_inputs: also take the arguments out of the failed calls.
        observations: as in ``keep_tool_results``.
        exclude_tools: tools whose results stay.
        stub: what replaces a result; may contain {chars} and {lines} of what was there.
        min_chars: results no longer than this stay.
    """

    keep: int = 1
    patterns: tuple[str, ...] = FAILURES
    clear_inputs: bool = False
    observations: bool = False
    exclude_tools: tuple[str, ...] = ()
    stub: str = "[output of a failed call removed]"
    min_chars: int = MIN_CHARS

    def __post_init__(self) -> None:
        if self.keep < 0:
            raise OptionError("keep", f"expected 0 or more, got {self.keep}")
        if not self.patterns:
            raise OptionError("patterns", "expected one at least")
        for number, pattern in enumerate(self.patterns):
            try:
                re.compile(pattern)
            except re.error as error:
                raise OptionError("patterns", f"not a regular expression: {error}", number) from None
        check_stub(self.stub, self.min_chars)

    def transform(self, messages: Messages, turn_idx: int) -> Messages:
        """See :class:`leyline_lmcache.policies.Policy`."""
        found = results(messages, observations=self.observations)
        last = seen_until(messages)
        chosen = [
            result
            for result in found[: max(0, len(found) - self.keep)]
            if result.index < last
            and result.tool not in self.exclude_tools
            and self._failed(messages[result.index])
        ]
        return stub_results(messages, chosen, self.stub, self.min_chars, clear_inputs=self.clear_inputs)

    def _failed(self, message: Message) -> bool:
        if message.get("is_error") is True:
            return True
        text = text_of(message)
        return any(pattern.search(text) for pattern in _compiled(self.patterns))


@lru_cache(maxsize=64)
def _compiled(patterns: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern, re.MULTILINE | re.IGNORECASE) for pattern in patterns)
