"""Directives: what a policy asks the stack to change (DESIGN §2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from leyline_lmcache.reasons import Fallback, FallbackReason
from leyline_lmcache.view import Edit, View, order_edits

TOKEN_LIMIT = 2**31
"""Token ids and positions stay below this: they travel as int32 through tags, keys and kernels."""
MAX_NAME_LENGTH = 512
"""Longest `base` and `action_id`, in characters."""
MAX_REPLACEMENT = 1 << 20
"""Longest replacement, in tokens."""


class Mode(StrEnum):
    """What happens to the KV of the tokens after the edit."""

    AMORTIZE = "amortize"
    """It stays as it was computed and only its position changes."""
    FORGET = "forget"
    """It is destroyed in every tier and computed again from the edited text."""


@dataclass(frozen=True, slots=True)
class Directive:
    """Replace the tokens `[start, end)` of a base by `replacement`.

    Attributes:
        base: id of the response whose prompt and completion the span indexes.
        start: first token replaced.
        end: just past the last token replaced; equal to `start` for an insertion.
        replacement: token ids; may be empty. With `start == end` as well, the directive edits nothing and
            asks only to continue the base's view.
        mode: AMORTIZE or FORGET.
        action_id: the sender's name for this directive, for logs and receipts.

    Raises:
        Fallback: `invalid_directive`, naming the field.
    """

    base: str
    start: int
    end: int
    replacement: tuple[int, ...] = ()
    mode: Mode = Mode.AMORTIZE
    action_id: str = ""

    def __post_init__(self) -> None:
        check_name("base", self.base)
        if not self.base:
            raise _invalid("base", "expected the id of a response", self.base)
        _check_position("start", self.start)
        _check_position("end", self.end)
        if self.end < self.start:
            raise Fallback(
                FallbackReason.INVALID_DIRECTIVE,
                f"end: expected at least start ({self.start}), got {self.end}",
            )
        if not isinstance(self.replacement, tuple):
            raise _invalid("replacement", "expected a tuple of token ids", type(self.replacement))
        if len(self.replacement) > MAX_REPLACEMENT:
            raise _invalid("replacement", f"expected at most {MAX_REPLACEMENT} tokens", len(self.replacement))
        bad = first_bad_token(self.replacement)
        if bad is not None:
            raise _invalid(
                f"replacement[{bad}]",
                f"expected a token id from 0 to {TOKEN_LIMIT - 1}",
                type(self.replacement[bad]),
            )
        if not isinstance(self.mode, Mode):
            raise _invalid("mode", "expected amortize or forget", self.mode)
        check_name("action_id", self.action_id)

    @property
    def shift(self) -> int:
        """How far the tokens after the span move: `len(replacement) - (end - start)`."""
        return len(self.replacement) - (self.end - self.start)

    @property
    def edit(self) -> Edit:
        """The same change as an edit of a view."""
        return Edit(self.start, self.end, len(self.replacement))

    @property
    def is_identity(self) -> bool:
        """True for "continue this view with no edit"."""
        return self.edit.is_identity


def normalize(directives: Iterable[Directive], base_length: int) -> tuple[Directive, ...]:
    """Check the directives of one turn against their base and put them in order.

    All use the base's positions. Overlap is defined by `view.order_edits`: an insertion that touches a span
    comes before it at its start and after it at its end; two insertions at one point overlap; a directive
    that edits nothing overlaps nothing, and is kept.

    Returns:
        The directives sorted by position; empty for none.

    Raises:
        Fallback: `invalid_directive` (several bases, or a span outside the base), `overlapping_edits`.
    """
    ordered = sorted(directives, key=lambda d: (d.start, d.end))
    if any(d.base != ordered[0].base for d in ordered):
        raise Fallback(
            FallbackReason.INVALID_DIRECTIVE, "base: expected the same base in every directive of one request"
        )
    order_edits((d.edit for d in ordered), base_length)
    return tuple(ordered)


def apply_directives(view: View, directives: Iterable[Directive]) -> View:
    """The view after one turn's directives, honouring their modes.

    AMORTIZE leaves holes only for the replacements. After the first FORGET everything is a hole: the engine
    prefills it again from the edited text. Raises as `normalize`.
    """
    ordered = normalize(directives, view.length)
    new = view.apply([d.edit for d in ordered])
    moved = 0
    for directive in ordered:
        if directive.mode is Mode.FORGET:
            return new.punch(directive.start + moved, new.length)
        moved += directive.shift
    return new


def first_bad_token(ids: Sequence[object]) -> int | None:
    """Index of the first item that is not a token id (an int, not a bool, in range), or None."""
    # Almost always all are good, and a summary can be long: look at them without a Python loop first.
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < TOKEN_LIMIT):  # type: ignore[type-var,operator]
        return None
    for index, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < TOKEN_LIMIT:
            return index
    return None


def check_name(field: str, value: object) -> None:
    """Refuse what cannot be an id: names go into logs, metrics and records, so they are short and printable.

    Raises:
        Fallback: `invalid_directive`, naming the field.
    """
    if not isinstance(value, str):
        raise _invalid(field, "expected text", value)
    if len(value) > MAX_NAME_LENGTH:
        raise _invalid(field, f"expected at most {MAX_NAME_LENGTH} characters", len(value))
    # No line breaks, control characters or lone surrogates.
    if not value.isprintable():
        raise Fallback(FallbackReason.INVALID_DIRECTIVE, f"{field}: expected printable characters only")


def shown(value: object) -> str:
    """A value for an error message: numbers and short names as they are, of anything else only its type.

    Longer text could be a prompt, which no message may carry (I10).
    """
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if abs(value) < 2**64 else "an integer of more than 64 bits"
    if isinstance(value, str) and len(value) <= 16:
        return repr(value)
    if isinstance(value, type):
        return value.__name__
    return type(value).__name__


def _check_position(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _invalid(name, "expected a non-negative integer", value)
    if value >= TOKEN_LIMIT:
        raise _invalid(name, f"expected less than {TOKEN_LIMIT}", value)


def _invalid(field: str, expected: str, got: object) -> Fallback:
    return Fallback(FallbackReason.INVALID_DIRECTIVE, f"{field}: {expected}, got {shown(got)}")
