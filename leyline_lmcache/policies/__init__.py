"""Policies: what of a conversation its model still has to see (DESIGN §10).

A harness keeps its messages whole; a policy says, before each call, which of them are sent as stubs or
without some part. Leyline finds the edits by itself, so that they cost no prefill::

    policy = KeepToolResults(keep=2)               # or load("policies.yaml")
    messages = apply(policy, messages)
"""

from __future__ import annotations

from leyline_lmcache.policies.base import (
    Counting,
    CountTokens,
    Erasing,
    Message,
    Messages,
    OptionError,
    Pipeline,
    Policy,
    PolicyError,
    apply,
    erased,
    estimate_tokens,
    turn_of,
)
from leyline_lmcache.policies.clear_tool_uses import ClearToolUses, Threshold, Unit
from leyline_lmcache.policies.config import build, from_context_management, load
from leyline_lmcache.policies.document import ConfigError, Document
from leyline_lmcache.policies.keep_tool_results import KeepToolResults
from leyline_lmcache.policies.pairs import problems
from leyline_lmcache.policies.redact import Redact
from leyline_lmcache.policies.registry import available
from leyline_lmcache.policies.strip_reasoning import StripReasoning
from leyline_lmcache.policies.stub_failed_calls import StubFailedCalls

__all__ = [
    "ClearToolUses",
    "ConfigError",
    "CountTokens",
    "Counting",
    "Document",
    "Erasing",
    "KeepToolResults",
    "Message",
    "Messages",
    "OptionError",
    "Pipeline",
    "Policy",
    "PolicyError",
    "Redact",
    "StripReasoning",
    "StubFailedCalls",
    "Threshold",
    "Unit",
    "apply",
    "available",
    "build",
    "erased",
    "estimate_tokens",
    "from_context_management",
    "load",
    "problems",
    "turn_of",
]
