"""The one public operation: copy KV rows between slots and turn their rotary band on the way."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import torch

from .job import Job
from .layout import KVLayout
from .rope import MAX_SHIFT
from .torch_rotate import splice_torch

Backend = Literal["auto", "torch", "triton"]

_INDEX_DTYPES = (torch.int64, torch.int32)


class SpliceError(ValueError):
    """Arguments that would touch memory outside the pool, or one slot twice; nothing was written."""


class SlotRangeError(SpliceError, IndexError):
    """A slot lies outside ``[0, slots)``."""


@dataclass(frozen=True, slots=True)
class SpliceStats:
    """``rows``: tokens whose KV changed. ``bytes_moved``: bytes read plus bytes written that the splice
    needs: whole rows for a copy, the band alone in place, nothing for shift 0 in place."""

    rows: int
    bytes_moved: int


def splice_rows(
    layout: KVLayout,
    src: torch.Tensor,
    dst: torch.Tensor,
    shift: torch.Tensor | int,
    *,
    backend: Backend = "auto",
    validate: bool = True,
) -> SpliceStats:
    """Copy row ``src[i]`` to ``dst[i]`` in every plane and turn its band by ``shift[i]`` positions.

    * ``src``, ``dst``: int64 or int32 ``[n]``, slots of ``layout``, on its device or on the CPU;
      ``shift``: an int for all, or an integer tensor ``[n]`` (best on the CPU: its values are needed there).
    * ``src[i] == dst[i]`` turns the band in place and writes nothing else; with shift 0 it is a no-op.
    * A copy with shift 0 is bit-exact. Everything outside a band always is.
    * All sources are read before any destination is written: ``dst`` may hold slots that other tokens
      read (a permutation, a move over itself). Such calls stage one plane at a time and are slower.
    * ``dst`` must not hold a slot twice; ``src`` may.

    On CUDA, slots given on the device are copied to the host to be checked, which waits for the stream;
    ``validate=False`` skips that with the Triton backend, and the caller then answers for range,
    uniqueness, and that no token reads a slot another one writes. The work is enqueued on the current stream.

    Raises ``SpliceError``/``SlotRangeError`` before anything is written.
    """
    shift = shift if isinstance(shift, torch.Tensor) else operator.index(shift)
    n = _check_arguments(src, dst, shift)
    triton = _triton(layout, backend)
    if n == 0:
        return SpliceStats(0, 0)
    if triton is not None and not validate:
        return _unchecked(triton, layout, src, dst, shift)
    host_src, host_dst = src.to("cpu", torch.int64), dst.to("cpu", torch.int64)
    shift = shift if isinstance(shift, int) else shift.to("cpu", torch.int64)
    if validate:
        _check_slots(layout.slots, host_src, host_dst, shift)
    job = Job.plan(layout.slots, host_src, host_dst, shift)
    rows = job.src.numel()
    if rows and (triton is None or job.crossed):
        splice_torch(layout, job)
    elif rows and triton is not None:
        device = layout.device
        row = torch.where(job.shifts[job.row] == 0, -1, job.row)
        triton.splice_triton(
            layout,
            job.src.to(device),
            job.dst.to(device),
            row.to(device, torch.int32),
            job.shifts,
            in_place=job.moved == 0,
        )
    return SpliceStats(rows, 2 * (job.moved * layout.row_bytes + (rows - job.moved) * layout.band_bytes))


def prepare(layout: KVLayout, *, backend: Backend = "auto") -> Literal["torch", "triton"]:
    """Compile what :func:`splice_rows` will run on ``layout``, so that the first splice does not wait for it
    (seconds, when Triton has nothing cached). Touches no row. Returns the backend that will serve.

    Raises whatever the compiler raises; a caller can then pass ``backend="torch"`` from there on.
    """
    triton = _triton(layout, backend)
    if triton is None:
        return "torch"
    none = torch.empty(0, dtype=torch.int64, device=layout.device)
    for in_place in (False, True):
        triton.splice_triton(layout, none, none, none.to(torch.int32), torch.tensor([1]), in_place=in_place)
    return "triton"


def _unchecked(
    triton: ModuleType, layout: KVLayout, src: torch.Tensor, dst: torch.Tensor, shift: torch.Tensor | int
) -> SpliceStats:
    """No look at the slots, so no wait for the device; the figures are what the call may move at most."""
    device, n = layout.device, src.numel()
    in_place = src is dst
    src = src.to(device, torch.int64)
    dst = src if in_place else dst.to(device, torch.int64)
    if isinstance(shift, int):
        shifts = torch.tensor([shift])
        row = torch.full((n,), 0 if shift else -1, dtype=torch.int32, device=device)
    else:
        shifts, row = torch.unique(shift.to("cpu", torch.int64), return_inverse=True)
        row = torch.where(shifts[row] == 0, -1, row).to(device, torch.int32)
    triton.splice_triton(layout, src, dst, row, shifts, in_place=in_place)
    return SpliceStats(n, 2 * n * (layout.band_bytes if in_place else layout.row_bytes))


def _triton(layout: KVLayout, backend: Backend) -> ModuleType | None:
    """The Triton backend, or None for the torch one."""
    if backend not in ("auto", "torch", "triton"):
        raise SpliceError(f"backend must be auto, torch or triton, got {backend!r}")
    if backend == "torch" or (backend == "auto" and layout.device.type != "cuda"):
        return None
    try:
        from . import triton_rotate
    except ImportError as error:
        if backend == "triton":
            raise SpliceError(f"backend triton: {error}; install triton or use backend torch") from error
        return None
    if triton_rotate.supports(layout.device):
        return triton_rotate
    if backend == "triton":
        raise SpliceError(f"backend triton does not run on {layout.device}; use backend torch or auto")
    return None


def _check_arguments(src: torch.Tensor, dst: torch.Tensor, shift: torch.Tensor | int) -> int:
    for name, slots in (("src", src), ("dst", dst)):
        if slots.dim() != 1:
            raise SpliceError(f"{name} must be one-dimensional, got shape {tuple(slots.shape)}")
        if slots.dtype not in _INDEX_DTYPES:
            raise SpliceError(f"{name} must be int64 or int32, got {slots.dtype}")
    if src.numel() != dst.numel():
        raise SpliceError(f"src holds {src.numel()} slots but dst holds {dst.numel()}")
    if isinstance(shift, int):
        if abs(shift) > MAX_SHIFT:
            raise SpliceError(f"shift must lie within ±{MAX_SHIFT}, got {shift}")
        return src.numel()
    if shift.dtype not in _INDEX_DTYPES:
        raise SpliceError(f"shift must be int64 or int32, got {shift.dtype}")
    if shift.dim() != 1 or shift.numel() != src.numel():
        raise SpliceError(f"shift must have shape ({src.numel()},), got {tuple(shift.shape)}")
    return src.numel()


def _check_slots(slots: int, src: torch.Tensor, dst: torch.Tensor, shift: torch.Tensor | int) -> None:
    for name, index in (("src", src), ("dst", dst)):
        low, high = (int(v) for v in index.aminmax())
        if low < 0 or high >= slots:
            raise SlotRangeError(
                f"{name} holds slot {low if low < 0 else high}, the pool has slots [0, {slots})"
            )
    seen = torch.zeros(slots, dtype=torch.bool)
    seen[dst] = True
    if int(seen.sum()) != dst.numel():
        twice = int(torch.bincount(dst).argmax())
        raise SpliceError(f"dst holds slot {twice} more than once")
    if isinstance(shift, torch.Tensor) and int(shift.abs().max()) > MAX_SHIFT:
        raise SpliceError(f"shift must lie within ±{MAX_SHIFT}")
