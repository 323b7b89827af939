"""The arms that are compared, and the stack of each."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from leyline_lmcache.stack import StackSpec
from leyline_lmcache.stack.models import resolve

MODEL, POOL = "mla", 262_144
_SPARE = 64
"""Context beyond the longest prompt."""
_WEIGHTS = (".safetensors", ".bin", ".index.json")


class Arm(StrEnum):
    """What is replayed on which servers."""

    FULL = "full"
    """No policy, SGLang alone."""
    RADIX = "radix"
    """The policy, SGLang alone."""
    LMCACHE = "lmcache"
    """The policy, SGLang with LMCache."""
    LEYLINE = "leyline"
    """The policy, SGLang with LMCache and Leyline; requests name their session and no edits."""

    @property
    def has_policy(self) -> bool:
        """Prompts are those the policy makes."""
        return self is not Arm.FULL


@dataclass(frozen=True, slots=True)
class Servers:
    """What all arms have in common.

    Attributes:
        model: as in `StackSpec`.
        pool: tokens of SGLang's KV pool.
        most_tokens: of a prompt.
        vocabulary: ids are below it; a random model that has fewer gets a wider embedding.
        min_reuse: the plugin's setting.
    """

    model: str = MODEL
    pool: int = POOL
    most_tokens: int = 24_000
    vocabulary: int = 256
    page_size: int = 1
    chunk_size: int = 256
    threads: int = 1
    min_reuse: int = 16
    device: str = "auto"

    def spec(self, arm: Arm, model: str) -> StackSpec:
        """The stack of an arm; `model`: from `served_model`."""
        with_lmcache = arm in (Arm.LMCACHE, Arm.LEYLINE)
        random = ("--load-format", "dummy") if model != self.model else ()
        return StackSpec(
            model=model,
            plugin=arm is Arm.LEYLINE,
            lmcache=with_lmcache,
            redis=False,
            l2="none",
            page_size=self.page_size,
            chunk_size=self.chunk_size,
            context_length=self.most_tokens + _SPARE,
            max_total_tokens=self.pool,
            threads=self.threads,
            device=self.device,
            leyline={"min_reuse": self.min_reuse} if arm is Arm.LEYLINE else {},
            sglang_args=random,
        )


@contextlib.contextmanager
def served_model(servers: Servers) -> Iterator[str]:
    """The model as it is, or a copy of its configuration for a larger vocabulary, with random weights.

    What a random model answers is of no interest here, so it need not be one that was ever saved.
    """
    source = resolve(servers.model)
    config = json.loads((source / "config.json").read_text())
    if config.get("vocab_size", servers.vocabulary) >= servers.vocabulary:
        yield servers.model
        return
    with tempfile.TemporaryDirectory(prefix="leyline-replay-") as folder:
        for file in source.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHTS):
                shutil.copy(file, folder)
        config["vocab_size"] = servers.vocabulary
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield folder
