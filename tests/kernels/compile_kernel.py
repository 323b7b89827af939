"""Compile the Triton kernel for a Hopper GPU, without one, and say what came out (JSON on standard output).

A program of its own, because the other tests run Triton's interpreter, which is chosen when the kernel is
imported. Triton brings its own assembler; no driver is needed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from leyline_lmcache.kernels import KVLayout, Pairing, RopeSpec
from leyline_lmcache.kernels.triton_rotate import plan_launches, splice_kernel

POINTERS = {"planes": "*i64", "src": "*i64", "dst": "*i64", "row": "*i32", "cos": "*fp32", "sin": "*fp32"}


def spec(dim: int, pairing: Pairing) -> RopeSpec:
    return RopeSpec(dim, pairing, (1.0,) * (dim // 2))


def mla(dtype: torch.dtype, width: int = 576, rope: int = 64) -> KVLayout:
    stored = torch.uint8 if dtype.itemsize == 1 else dtype
    rows = torch.empty(4, 1, width, dtype=stored)
    return KVLayout.mla([rows], spec(rope, Pairing.INTERLEAVED), rope, logical_dtype=dtype)


def gqa(dtype: torch.dtype, heads: int = 8) -> KVLayout:
    stored = torch.uint8 if dtype.itemsize == 1 else dtype
    k, v = (torch.empty(4, heads, 128, dtype=stored) for _ in range(2))
    return KVLayout.mha([k], [v], spec(128, Pairing.HALVES), logical_dtype=dtype)


CASES: dict[str, tuple[Callable[[], KVLayout], bool]] = {
    "mla_bf16_moves": (lambda: mla(torch.bfloat16), True),
    "mla_bf16_stays": (lambda: mla(torch.bfloat16), False),
    "mla_fp8_moves": (lambda: mla(torch.float8_e4m3fn), True),
    "gqa_bf16_moves": (lambda: gqa(torch.bfloat16), True),
    "gqa_fp8_stays": (lambda: gqa(torch.float8_e5m2), False),
    "mla_odd_moves": (lambda: mla(torch.float16, 43, 10), True),
}


def compiled(layout: KVLayout, *, moves: bool) -> CompiledKernel:
    (launch,) = plan_launches(layout)
    constants = launch.constants(moves=moves)
    names = list(splice_kernel.arg_names)
    signature = {n: POINTERS.get(n, "constexpr" if n in constants else "i32") for n in names}
    source = ASTSource(
        fn=splice_kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    options = {"num_warps": launch.warps, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def spilled(cubin: bytes) -> int:
    """Bytes of local memory per thread, by the tool that Triton ships."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(n) for n in re.findall(r"STACK:(\d+)", said))


def main() -> None:
    found = {}
    for name, (layout, moves) in CASES.items():
        kernel = compiled(layout(), moves=moves)
        ptx = kernel.asm["ptx"]
        found[name] = {
            "spilled_bytes": spilled(kernel.asm["cubin"]),
            "wide_loads": len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)),
            "wide_stores": len(re.findall(r"st\.global\S*\.v4\.b32", ptx)),
            "stores": len(re.findall(r"st\.global", ptx)),
        }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
