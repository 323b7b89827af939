"""The workloads that were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from leyline_lmcache.policies.base import Policy
from leyline_lmcache.policies.conversations import ConversationError
from leyline_lmcache.replay.tokens import Tokenizer
from leyline_lmcache.replay.workload import Workload, read

SAMPLE = ("swe_agent", "miniswe", "magagent")
POLICY = "keep_tool_results: {keep: 2, observations: true}"
"""Stubs tool outputs older than the two latest (the paper's), also those given as messages of the user."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What is left out.

    Attributes:
        tokens: of a prompt without policy, and its head.
        sessions: of each file; None for all.
    """

    tokens: int
    sessions: int | None = None


def sample() -> list[Path]:
    """The recorded conversations of the source tree.

    Raises:
        ConversationError: they are not there, as in an installation from a wheel.
    """
    folder = Path(__file__).resolve().parents[2] / "tests" / "data" / "conversations"
    files = [folder / f"{name}.jsonl.gz" for name in SAMPLE]
    if not all(file.is_file() for file in files):
        raise ConversationError("no conversations given, and the sample comes only with the source tree")
    return files


def load(files: Sequence[Path], tokenizer: Tokenizer, policy: Policy, limits: Limits) -> list[Workload]:
    """Read them.

    Raises:
        ConversationError: a file holds none, none is short enough, or two have one name.
        PolicyError: the policy tears a call from its result.
    """
    made = [
        read(file, tokenizer, policy, most_tokens=limits.tokens, most_sessions=limits.sessions)
        for file in files
    ]
    names = [each.name for each in made]
    for file, workload in zip(files, made, strict=True):
        if not workload.sessions:
            raise ConversationError(f"{file}: no prompt has at most {limits.tokens:,} tokens")
        if names.count(workload.name) > 1:
            raise ConversationError(f"{file}: another file has the name {workload.name} too")
        if len({session.name for session in workload.sessions}) < len(workload.sessions):
            raise ConversationError(f"{file}: session: two conversations have the same name")
    return made
