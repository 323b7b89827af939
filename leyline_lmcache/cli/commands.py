"""The sub-commands. To add one: a module with a function ``run``, and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Entry:
    """One sub-command.

    Attributes:
        module: where it is; its function ``run`` takes the options, its docstring is the help text. Or it has
            an ``app`` with sub-commands of its own.
        summary: the line that ``leyline --help`` shows.
    """

    module: str
    summary: str


COMMANDS: Mapping[str, Entry] = MappingProxyType(
    {
        "up": Entry("leyline_lmcache.cli.up", "Start Redis, lmcache server and SGLang on this machine."),
        "down": Entry("leyline_lmcache.cli.down", "Stop what `up` started."),
        "status": Entry("leyline_lmcache.cli.status", "Show the stacks that `up` started."),
        "plan": Entry("leyline_lmcache.cli.plan", "Show what an edit makes each tier do."),
        "ops": Entry("leyline_lmcache.cli.ops", "List or follow the ops that were executed."),
        "view": Entry("leyline_lmcache.cli.view", "Show a response's pieces and the tiers they lie in."),
        "doctor": Entry("leyline_lmcache.cli.doctor", "Check the installation and the servers around it."),
        "policy": Entry(
            "leyline_lmcache.cli.policy", "Try policies on recorded conversations, or list them."
        ),
        "gateway": Entry("leyline_lmcache.cli.gateway", "Serve the OpenAI API in front of SGLang servers."),
        "bench": Entry(
            "leyline_lmcache.cli.bench", "Replay recorded conversations in arms, and compare them."
        ),
        "demo": Entry("leyline_lmcache.cli.demo", "Watch an agent edit its history, in three arms."),
    }
)
