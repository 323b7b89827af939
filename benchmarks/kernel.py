"""How near the splice comes to the machine's copy bandwidth, on the CPU and on a GPU where there is one.

A fraction is the time of a plain copy of as many bytes over the time of the splice; both move the bytes that
must move and are timed in turns within one process.

* *copying*: whole rows of all planes; the plain copy is contiguous, the kindest there is.
* *in place*: rotary bands only; the plain copy is of the bands where they lie, from slots to other slots,
  since a band is a small part of a row and no copy of it is contiguous. Against a contiguous copy of as
  many bytes it is called *in place, packed*.
* *scattered*: copying between slots in random order. On a CPU a row then costs the latency of memory; the
  plain copy is torch's gather and scatter of the same rows.

CPU arms run on one thread, like the splice, and count its CPU time: other programs on the machine would else
be measured too. GPU arms are timed by events on the stream, slots on the device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from _common import finish, print_table

from leyline_lmcache.kernels import KVLayout, Pairing, RopeSpec, prepare, splice_rows

SHIFT = -195
Arms = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Setting:
    """A device and how much to move on it: enough that no cache holds it."""

    device: str
    layers: int
    tokens: int
    rounds: int
    dtypes: tuple[torch.dtype, ...]


CPU = Setting("cpu", 8, 4096, 15, (torch.bfloat16, torch.float32))
GPU = Setting("cuda", 32, 32768, 30, (torch.bfloat16, torch.float8_e4m3fn, torch.float32))


def spec(dim: int, pairing: Pairing) -> RopeSpec:
    return RopeSpec(dim, pairing, tuple(10000.0 ** (-2 * i / dim) for i in range(dim // 2)))


def pool(kind: str, setting: Setting, dtype: torch.dtype) -> KVLayout:
    """DeepSeek's rows (512 + 64) or Llama's heads (8 of 128), three times as many slots as tokens."""
    stored = torch.uint8 if dtype.itemsize == 1 else dtype

    def rows(*shape: int) -> list[torch.Tensor]:
        made = []
        for _ in range(setting.layers):
            values = torch.randn(3 * setting.tokens, *shape, device=setting.device).to(dtype)
            made.append(values.view(stored))
        return made

    if kind == "mla":
        return KVLayout.mla(rows(1, 576), spec(64, Pairing.INTERLEAVED), 64, logical_dtype=dtype)
    return KVLayout.mha(rows(8, 128), rows(8, 128), spec(128, Pairing.HALVES), logical_dtype=dtype)


def arms_of(layout: KVLayout, setting: Setting) -> Arms:
    n, device = setting.tokens, setting.device
    first, second = torch.arange(n, device=device), torch.arange(n, 2 * n, device=device)
    order = torch.randperm(3 * n, device=device)
    some, others = order[:n].contiguous(), order[n : 2 * n].contiguous()
    banded = [p.turning_units for p in layout if p.turning_units is not None]

    def packed(size: int, planes: int) -> Callable[[], object]:
        source = [torch.ones(size // planes, dtype=torch.uint8, device=device) for _ in range(planes)]
        target = [torch.empty_like(s) for s in source]
        return lambda: [t.copy_(s) for t, s in zip(target, source, strict=True)]

    def indexed() -> None:
        for plane in layout:
            plane.units.index_copy_(0, others, plane.units.index_select(0, some))

    def splice(src: torch.Tensor, dst: torch.Tensor) -> Callable[[], object]:
        # On a GPU the engine has checked the slots; the check would wait for the stream.
        return lambda: splice_rows(layout, src, dst, SHIFT, validate=device == "cpu")

    return {
        "copy": packed(n * layout.row_bytes, len(layout.planes)),
        "copy_scattered": indexed,
        "copy_bands": lambda: [b[n : 2 * n].copy_(b[2 * n :]) for b in banded],
        "copy_bands_packed": packed(n * layout.band_bytes, len(banded)),
        "splice": splice(first, second),
        "splice_scattered": splice(some, others),
        "splice_in_place": splice(first, first),
        "splice_in_place_scattered": splice(some, some),
    }


def measure(arms: Arms, setting: Setting) -> dict[str, float]:
    """Median milliseconds of each arm, timed in turns."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(setting.rounds + 2):
        for name, arm in arms.items():
            ms = timed_gpu(arm) if setting.device == "cuda" else timed_cpu(arm)
            if turn >= 2:  # the first rounds compile and touch the memory
                taken[name].append(ms)
    return {name: statistics.median(times) for name, times in taken.items()}


def timed_cpu(arm: Callable[[], object]) -> float:
    start = time.thread_time()
    arm()
    return (time.thread_time() - start) * 1e3


def timed_gpu(arm: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # Work enqueued before keeps the stream busy while the host prepares the arm's launches.
    torch.cuda._sleep(2_000_000)
    start.record()
    arm()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def fractions(ms: dict[str, float]) -> dict[str, float]:
    return {
        "copying": ms["copy"] / ms["splice"],
        "in_place": ms["copy_bands"] / ms["splice_in_place"],
        "in_place_packed": ms["copy_bands_packed"] / ms["splice_in_place"],
        "scattered": ms["copy_scattered"] / ms["splice_scattered"],
        "scattered_packed": ms["copy"] / ms["splice_scattered"],
        "in_place_scattered": ms["copy_bands_packed"] / ms["splice_in_place_scattered"],
    }


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    settings = [CPU, *([GPU] if torch.cuda.is_available() else [])]
    details, summary, table = [], {}, []
    for setting in settings:
        device = torch.cuda.get_device_name() if setting.device == "cuda" else "cpu"
        for kind in ("mla", "gqa"):
            for dtype in setting.dtypes:
                layout = pool(kind, setting, dtype)
                backend = prepare(layout)
                ms = measure(arms_of(layout, setting), setting)
                got = fractions(ms)
                name = str(dtype).removeprefix("torch.")
                moved = 2 * setting.tokens * layout.row_bytes
                details.append(
                    {
                        "device": device,
                        "backend": backend,
                        "pool": kind,
                        "dtype": name,
                        "layers": setting.layers,
                        "tokens": setting.tokens,
                        "bytes_moved": moved,
                        "ms": ms,
                        "fractions": got,
                    }
                )
                speeds = [moved / ms[arm] / 1e6 for arm in ("copy", "splice")]
                table.append([device, backend, kind, name, *speeds, *got.values()])
                # The figures of the issues are bf16; the last device, a GPU if there is one, gives its name.
                if dtype is torch.bfloat16:
                    tail = "" if kind == "mla" else "_gqa"
                    summary["device"] = device
                    summary[f"fraction_of_copy_bandwidth{tail}"] = round(got["copying"], 3)
                    summary[f"fraction_in_place{tail}"] = round(got["in_place"], 3)
                    summary[f"fraction_in_place_packed{tail}"] = round(got["in_place_packed"], 3)
                    summary[f"fraction_scattered{tail}"] = round(got["scattered"], 3)
                    if setting is CPU:
                        summary[f"cpu_fraction_of_copy_bandwidth{tail}"] = round(got["copying"], 3)
                        summary[f"cpu_fraction_in_place{tail}"] = round(got["in_place"], 3)
                elif setting is CPU:
                    tail = f"_{name}" if kind == "mla" else f"_gqa_{name}"
                    summary[f"cpu_fraction_of_copy_bandwidth{tail}"] = round(got["copying"], 3)
                    summary[f"cpu_fraction_in_place{tail}"] = round(got["in_place"], 3)
                del layout
    columns = ["device", "backend", "pool", "dtype", "copy GB/s", "splice GB/s"]
    print_table("splice against a plain copy (fractions)", [*columns, *got], table)
    finish("kernel", summary, details)


if __name__ == "__main__":
    main()
