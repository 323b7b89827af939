"""The stacks that tests may ask for. Each becomes a fixture of its name; see conftest.py.

Neighbours share a model: tests are ordered by the position of the stacks they use, so that a server which is
no longer needed can go. The ``plain`` ones are the same without the plugin, the reference for exactness.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from leyline_lmcache.stack import StackSpec

# A fixed number of threads: sums over different splits differ in the last bit.
_BASE = StackSpec(dtype="float32", max_total_tokens=32_768, threads=2)
_MLA = replace(_BASE, model="mla")
_GQA = replace(_BASE, model="gqa")
_TINY = replace(_BASE, model="tiny-mla")

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
        "stack_small": replace(
            _MLA,
            max_total_tokens=4096,
            context_length=3072,
            chunked_prefill_size=64,
            leyline={"inplace": "always", "drift_limit": 2},
            env=_CHECKED,
        ),
        # Running requests are thrown out again and again, in the middle of their prefill too.
        "stack_gqa_retract": replace(
            _GQA,
            lmcache=False,
            max_total_tokens=8192,
            chunked_prefill_size=64,
            env=_CHECKED | {"SGLANG_TEST_RETRACT": "1"},
        ),
    }
)
