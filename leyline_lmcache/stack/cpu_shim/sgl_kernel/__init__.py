"""Satisfies imports of SGLang's CPU kernels, which no published wheel carries.

With its CPU engine selected, SGLang imports some of them by name at start and calls none on the
``torch_native`` path. A name resolves to a function that says so, should it be called after all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def unavailable(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name}: this machine has no such kernel; use a CUDA build of SGLang"
        )

    unavailable.__name__ = name
    return unavailable
