"""The stacks that tests may ask for. Each becomes a fixture of its name; see conftest.py.

Neighbours share a model: tests are ordered by the position of the stacks they use, so that a server which is
no longer needed can go. The ``plain`` ones are the same without the plugin, the reference for exactness.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from leyline_lmcache.stack import StackSpec
from leyline_lmcache.stack.device import CPU_SHIM, detect

# A fixed number of threads: sums over different splits differ in the last bit.
_BASE = StackSpec(dtype="float32", max_total_tokens=32_768, threads=2)
_MLA = replace(_BASE, model="mla")
_GQA = replace(_BASE, model="gqa", lmcache=False)
# Some of the trained model's cases keep only six tokens behind an edit.
_TINY = replace(_BASE, model="tiny-mla", leyline={"min_reuse": 1})


def with_faults() -> dict[str, str]:
    """Environment of a server whose own code can be made to raise; see faults/leyline_faults.py."""
    plugins, path = ["leyline", "leyline_faults"], [str(Path(__file__).with_name("faults"))]
    if detect() == "cpu":
        plugins, path = [*plugins, "leyline_cpu"], [*path, str(CPU_SHIM)]
    path += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return {"SGLANG_PLUGINS": ",".join(plugins), "PYTHONPATH": os.pathsep.join(path)}


_SMALL = replace(
    _MLA,
    max_total_tokens=4096,
    context_length=3072,
    chunked_prefill_size=64,
    leyline={"inplace": "always", "drift_limit": 2},
)
# SGLang then checks every slot's owner after each step, and dies of a leak or of a slot freed twice.
_CHECKED = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}

STACKS: Mapping[str, StackSpec] = MappingProxyType(
    {
        "stack_tiny": _TINY,
        "stack_mla": _MLA,
        "stack_plain_mla": replace(_MLA, plugin=False),
        "stack_gqa": _GQA,
        "stack_plain_gqa": replace(_GQA, plugin=False),
        # Pages of several tokens, prefill in several steps, and no LMCache.
        "stack_mla_paged": replace(_MLA, page_size=16, chunked_prefill_size=512, lmcache=False),
        "stack_plain_mla_paged": replace(
            _MLA, plugin=False, page_size=16, chunked_prefill_size=512, lmcache=False
        ),
        "stack_tiny_bf16": replace(_TINY, dtype="bfloat16", page_size=16),
        # A pool that is soon full, slots taken over rather than copied, prefill in many steps.
        # Every third step throws a running request out, if there are two.
        "stack_small": replace(
            _SMALL, lmcache=False, env=_CHECKED | with_faults() | {"SGLANG_TEST_RETRACT": "1"}
        ),
        # The same without all that, but with stores on their way to LMCache, which SGLang's check overlooks.
        "stack_small_lmcache": _SMALL,
        # A model whose keys cannot be moved.
        "stack_ntk": replace(_BASE, model="gqa-ntk", lmcache=False),
    }
)
