"""What SGLang's and LMCache's wheels miss on a machine without CUDA. No installed file is changed.

* torchvision's wheels are linked against CUDA. With a CPU-only torch their extension does not load, and the
  import fails where a Python implementation is registered for an operator that the extension would have
  declared. The operators are declared here, just before torchvision is imported.
* SGLang's ``torch_native`` attention has no entry in the table of MLA strategies and inherits one that reads
  un-absorbed keys and values; but it always reads from the latent pool. It gets the absorbed strategy.
* The same backend does a cached prompt's attention all over again; see leyline_cpu_attention.py.

``sgl_kernel`` beside this file stands in for CPU kernels that no wheel carries.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# The operators for which torchvision registers a Python implementation at import.
_OPERATORS = ("nms", "qnms")

_library: Any = None  # a torch.library.Library takes its operators back when it is collected


def _declare_operators() -> None:
    global _library
    import torch

    if _library is not None or torch.cuda.is_available():
        return
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        # A torchvision built for CPU has declared them by itself.
        if not hasattr(torch.ops.torchvision, name):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class _BeforeTorchvision(MetaPathFinder):
    """Finds torchvision where it is, and declares its operators before it runs."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchvision":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _DeclaringLoader(spec.loader.name, spec.loader.path)
        return spec


class _DeclaringLoader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        _declare_operators()
        super().exec_module(module)


def install() -> None:
    """Prepare this process; does nothing the second time."""
    if not any(isinstance(finder, _BeforeTorchvision) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTorchvision())


def register() -> None:
    """SGLang plugin: the absorbed MLA strategy for ``torch_native``, and its attention."""
    import leyline_cpu_attention
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    handlers.AttentionBackendRegistry.register("torch_native", handlers._dispatch_mla_subtype)
    leyline_cpu_attention.install()
