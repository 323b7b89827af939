"""Splice pools on a CUDA device with the compiled Triton kernel, and on the CPU with the torch version.

The torch version is held to the fp64 oracle by the other tests. Bytes outside the bands must be the same;
a turned element may differ by one unit in its last place, where fp32 arithmetic falls on a rounding edge.
"""

from __future__ import annotations

import itertools

import torch

from leyline_lmcache.kernels import KVLayout, Pairing, Plane, RopeSpec, prepare, splice_rows

SLOTS, TOKENS = 4096, 700
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def spec(dim: int, pairing: Pairing, base: float) -> RopeSpec:
    return RopeSpec(dim, pairing, tuple(base ** (-2 * i / dim) for i in range(dim // 2)))


def rows(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    made = torch.randn(SLOTS, *shape).to(dtype)
    return made.view(torch.uint8) if dtype.itemsize == 1 else made


def pools(pairing: Pairing, dtype: torch.dtype) -> dict[str, KVLayout]:
    def mla(width: int, rope: int) -> KVLayout:
        planes = [rows(dtype, 1, width) for _ in range(5)]
        return KVLayout.mla(planes, spec(rope, pairing, 1e4), rope, logical_dtype=dtype)

    def gqa(heads: int, dim: int, rope: int, v_dim: int) -> KVLayout:
        k = [rows(dtype, heads, dim) for _ in range(3)]
        v = [rows(dtype, heads, v_dim) for _ in range(3)]
        specs = [spec(rope, pairing, base) for base in (1e4, 5e5, 1e6)]
        return KVLayout.mha(k, v, specs, logical_dtype=dtype)

    return {
        "mla": mla(576, 64),
        "mla_odd": mla(47, 10),
        "gqa": gqa(8, 128, 128, 128),
        "gqa_partial": gqa(4, 96, 48, 64),
        "gqa_odd": gqa(3, 23, 6, 9),
        "mha_wide": gqa(40, 128, 128, 128),
    }


def on(layout: KVLayout, device: str) -> KVLayout:
    return KVLayout(tuple(Plane(p.name, p.rows.to(device).clone(), p.dtype, p.band) for p in layout))


def compare(host: KVLayout, card: KVLayout, label: str) -> None:
    for a, b in zip(host, card, strict=True):
        mine, theirs = a.rows, b.rows.cpu()
        if a.band is not None:
            end = a.band.offset + a.band.rope.rotary_dim
            x = mine[..., a.band.offset : end].view(a.dtype).double()
            y = theirs[..., a.band.offset : end].view(a.dtype).double()
            info = torch.finfo(a.dtype)
            size = torch.maximum(x.abs(), y.abs())
            bound = size * info.eps + info.smallest_normal * info.eps + size.max() * 2**-21
            assert bool(((x - y).abs() <= bound).all()), f"{label} {a.name}: bands differ"
            theirs[..., a.band.offset : end] = mine[..., a.band.offset : end]
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), (
            f"{label} {a.name}: bytes differ"
        )


def main() -> None:
    torch.manual_seed(0)
    count = 0
    for pairing, dtype in itertools.product(Pairing, DTYPES):
        for name, host in pools(pairing, dtype).items():
            card = on(host, "cuda")
            assert prepare(card) == "triton"
            slots = torch.randperm(SLOTS)
            src, dst = slots[:TOKENS], slots[TOKENS : 2 * TOKENS].clone()
            dst[: TOKENS // 3] = src[: TOKENS // 3]
            shifts = torch.tensor([0, 1, -1, 129, -1024, 131072, -(2**21)])[torch.arange(TOKENS) % 7]
            splice_rows(host, src, dst, shifts, backend="torch")
            splice_rows(card, src, dst, shifts, backend="triton")
            compare(host, card, f"{name} {pairing} {dtype} mixed")
            # In place and unchecked, slots on the card.
            where = src.cuda()
            splice_rows(host, src, src, -77, backend="torch")
            splice_rows(card, where, where, -77, backend="triton", validate=False)
            compare(host, card, f"{name} {pairing} {dtype} in place")
            # A move over itself is staged, on the card too.
            up, down = torch.arange(100, 400), torch.arange(90, 390)
            splice_rows(host, up, down, 5, backend="torch")
            splice_rows(card, up.cuda(), down.cuda(), 5)
            compare(host, card, f"{name} {pairing} {dtype} staged")
            count += 3
    print(f"compared {count} splices on {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    main()
