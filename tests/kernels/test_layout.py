"""What a layout accepts, and how it says what it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from leyline_lmcache.kernels import Band, KVLayout, LayoutError, Pairing, Plane

from .oracle import spec_of

SPEC = spec_of(8, Pairing.HALVES)


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def test_an_mla_pool_turns_the_end_of_its_rows() -> None:
    layout = KVLayout.mla([rows(10, 1, 24), rows(10, 24)], SPEC, 8, kv_lora_rank=16)
    assert [p.band and p.band.offset for p in layout] == [16, 16]
    assert [tuple(p.rows.shape) for p in layout] == [(10, 1, 24)] * 2
    assert (layout.slots, layout.row_bytes, layout.band_bytes) == (10, 2 * 24 * 4, 2 * 8 * 4)


def test_an_mha_pool_turns_the_start_of_each_key_head() -> None:
    layout = KVLayout.mha([rows(10, 3, 12)], [rows(10, 3, 20)], SPEC)
    assert [p.band and p.band.offset for p in layout] == [0, None]
    assert (layout.row_bytes, layout.band_bytes) == (3 * 32 * 4, 3 * 8 * 4)


def test_layers_take_their_specs_in_order_of_their_ids() -> None:
    first, second = SPEC, spec_of(8, Pairing.INTERLEAVED)
    layout = KVLayout.mla([rows(4, 8), rows(4, 8)], {7: second, 3: first}, 8)
    assert [p.band and p.band.rope for p in layout] == [first, second]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: KVLayout.mla([rows(4, 1, 24)], SPEC, 8, kv_lora_rank=512), "packed quantized rows"),
        (lambda: KVLayout.mla([rows(4, 1, 24)], SPEC, 16), "the model turns 8"),
        (lambda: KVLayout.mla([rows(4, 1, 4)], SPEC, 8), "lies outside a head of 4"),
        (lambda: KVLayout.mla([rows(4, 1, 8)] * 2, [SPEC], 8), "1 entries for 2 buffers"),
        (lambda: KVLayout.mla([], SPEC, 8), "planes is empty"),
        (lambda: KVLayout.mla([rows(2, 4, 1, 8, 2)], SPEC, 8), "page-interleaved"),
        (lambda: KVLayout.mla([rows(4, 1, 8, dtype=torch.int32)], SPEC, 8), "cannot be rotated"),
        (lambda: KVLayout.mla([rows(4, 1, 8, dtype=torch.uint8)], SPEC, 8), "cannot be rotated"),
        (
            lambda: KVLayout.mla([rows(4, 1, 8)], SPEC, 8, logical_dtype=torch.bfloat16),
            "cannot hold torch.bfloat16",
        ),
        (lambda: KVLayout.mla([rows(4, 8, 2).transpose(1, 2)], SPEC, 8), "must be contiguous"),
        (lambda: KVLayout.mha([rows(4, 1, 8)], [], SPEC), "1 K buffers but 0 V buffers"),
        (lambda: KVLayout.mha([rows(4, 1, 8)], [rows(5, 1, 8)], SPEC), "v.0. has 5 slots"),
        (lambda: KVLayout((Plane("p", rows(4, 8), torch.float32, Band(1, SPEC)),)), "lies outside"),
        (
            lambda: KVLayout.mha([rows(4, 1, 8)], [rows(4, 1, 8).to("meta")], SPEC),
            "v.0. is on meta",
        ),
    ],
)
def test_other_layouts_are_refused_by_name(make: Callable[[], KVLayout], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        make()
