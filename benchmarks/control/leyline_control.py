"""An SGLang plugin that spoils Leyline's rotation, to see whether a benchmark would notice.

``LEYLINE_CONTROL=unrotated``: kept tokens move without their keys being turned.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

VARIABLE = "LEYLINE_CONTROL"
UNROTATED = "unrotated"


def register() -> None:
    """Called by SGLang in each of its processes, before the cache is built."""
    if os.environ.get(VARIABLE) != UNROTATED:
        raise ValueError(f"{VARIABLE}: must be {UNROTATED}, is {os.environ.get(VARIABLE)}")
    from leyline_lmcache.kernels import splice

    real = splice.splice_rows

    @functools.wraps(real)
    def unrotated(layout: Any, src: Any, dst: Any, shift: Any, **options: Any) -> Any:
        return real(layout, src, dst, 0, **options)

    for module in list(sys.modules.values()):
        if getattr(module, "splice_rows", None) is real and module.__name__.startswith("leyline_lmcache"):
            module.splice_rows = unrotated  # type: ignore[attr-defined]
