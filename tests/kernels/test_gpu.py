"""The compiled kernel on a CUDA device. A process of its own: the others run the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_compiled_kernel_equals_the_torch_version() -> None:
    script = Path(__file__).with_name("compare_on_gpu.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run(
        [sys.executable, "-P", str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert "compared" in run.stdout
