"""Named reasons for not applying an edit.

Every edit that is not applied carries exactly one of these names; metrics, logs, the journal and the CLI use
the same strings. A refused edit is never a failed request: the engine prefills and answers as if no edit had
been asked.
"""

from __future__ import annotations

from enum import StrEnum


class FallbackReason(StrEnum):
    """Why the engine prefills instead of splicing."""

    INVALID_DIRECTIVE = "invalid_directive"
    """The directive or its envelope is malformed; the detail names the field."""
    OVERLAPPING_EDITS = "overlapping_edits"
    """Two directives of one turn claim the same tokens or the same insertion point."""
    UNKNOWN_BASE = "unknown_base"
    """The base's record is not known here (never seen, or dropped by a bound)."""
    TOKEN_MISMATCH = "token_mismatch"
    """The prompt is not what the directives make of the base."""
    INCOMPATIBLE_MODEL = "incompatible_model"
    """The base was computed by another model, or under another tenant's salt."""
    UNSUPPORTED_ROPE = "unsupported_rope"
    """The model's rotary embedding is not linear in position, so keys cannot be moved."""
    UNSUPPORTED_RUNTIME = "unsupported_runtime"
    """Something in the engine's configuration rules splicing out."""
    SOURCE_MISSING = "source_missing"
    """KV that the view needs is in no reachable tier."""
    NO_MEMORY = "no_memory"
    """There is no room for the edited KV, even after eviction."""
    BELOW_MIN_REUSE = "below_min_reuse"
    """Less KV would be kept than the configured minimum; prefilling is cheaper."""
    TIER_TIMEOUT = "tier_timeout"
    """A tier did not answer in time."""
    TIER_ERROR = "tier_error"
    """A tier answered with an error."""
    FORGOTTEN = "forgotten"
    """The KV was erased by a FORGET, or is being erased."""
    DRIFT_LIMIT = "drift_limit"
    """In-place rotations reached their limit and no stored copy is left to start from again."""
    INTERNAL_ERROR = "internal_error"
    """A fault of our own; the exact path was taken."""


class Fallback(Exception):
    """An edit is refused; the request is served by prefilling.

    Attributes:
        reason: the name used in every metric and log.
        detail: what exactly, naming the field, and what would be accepted. Never prompt text or token ids.
    """

    reason: FallbackReason
    detail: str

    def __init__(self, reason: FallbackReason, detail: str) -> None:
        # Both go to Exception so that the error survives pickling between processes.
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.detail}"
