"""Attention for SGLang's ``torch_native`` backend whose cost is that of the new tokens.

Upstream pads the queries of a request to its whole length, so a prompt found in the cache costs as much
as one that was not: half a second for 16 new tokens behind 2,000 cached ones, several behind 8,000. On such
a stack no cache is worth anything, and nothing about one can be measured. Here ``n`` queries meet ``kv``
keys in ``n * kv`` steps, as in every GPU backend. Cross attention and sliding windows stay with upstream.

``LEYLINE_CPU_ATTENTION=upstream`` leaves everything to upstream.
"""

from __future__ import annotations

import os
from typing import Any

import torch

VARIABLE = "LEYLINE_CPU_ATTENTION"
_SCORES = 1 << 19
"""Attention scores held at once, in elements: what stays in a core's cache."""


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, output: torch.Tensor
) -> None:
    """Causal attention of the last ``n`` of ``kv`` positions, in fp32.

    Args:
        query: ``[n, heads, d]``.
        key: ``[kv, kv_heads, d]``; ``heads`` is a multiple of ``kv_heads``.
        value: ``[kv, kv_heads, e]``.
        scale: of the scores.
        output: ``[n, heads, e]``, written.
    """
    n, heads, width = query.shape
    kv, kv_heads, _ = key.shape
    group = heads // kv_heads
    # One matrix product per key head, with the heads that share it as further rows.
    keys = key.float().permute(1, 2, 0)
    values = value.float().transpose(0, 1)
    step = max(1, _SCORES // (heads * kv))
    for start in range(0, n, step):
        stop = min(n, start + step)
        reach = kv - n + stop
        rows = query[start:stop].float().view(stop - start, kv_heads, group, width)
        rows = rows.permute(1, 2, 0, 3).reshape(kv_heads, -1, width)
        scores = (rows @ keys[..., :reach]).mul_(scale).view(kv_heads, group, stop - start, reach)
        if stop - start > 1:
            # Row i of this block may not see its last (rows - 1 - i) keys.
            block = scores[..., reach - (stop - start) :]
            hidden = torch.ones(stop - start, stop - start, dtype=torch.bool).triu_(1)
            block.masked_fill_(hidden, float("-inf"))
        weights = scores.softmax(-1).view(kv_heads, -1, reach)
        mixed = (weights @ values[:, :reach]).view(kv_heads, group, stop - start, -1)
        output[start:stop] = mixed.permute(2, 0, 1, 3).reshape(stop - start, heads, -1).to(output.dtype)


def install() -> None:
    """Replace the two loops of ``TorchNativeAttnBackend``."""
    if os.environ.get(VARIABLE) == "upstream":
        return
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend

    upstream_extend, upstream_decode = Backend._run_sdpa_forward_extend, Backend._run_sdpa_forward_decode

    def run(
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        new_lens: list[int],
        scaling: float | None,
    ) -> torch.Tensor:
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        # The value of MLA is the first part of its key.
        shared = v_cache.data_ptr() == k_cache.data_ptr()
        start = 0
        for row, length, n in zip(req_pool_indices.tolist(), seq_lens.tolist(), new_lens, strict=True):
            slots = req_to_token[row, :length]
            key = k_cache[slots]
            value = key[..., : v_cache.shape[-1]] if shared else v_cache[slots]
            attend(query[start : start + n], key, value, scale, output[start : start + n])
            start += n
        return output

    def extend(
        self: Any,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        windowed = sliding_window_size is not None and sliding_window_size > -1
        if not causal or is_cross_attn or encoder_lens is not None or windowed:
            return upstream_extend(
                self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
                extend_prefix_lens, extend_seq_lens, encoder_lens, scaling, enable_gqa, causal, is_cross_attn,
                sliding_window_size,
            )  # fmt: skip
        new = extend_seq_lens.tolist()
        return run(query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, new, scaling)

    def decode(
        self: Any,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        windowed = sliding_window_size is not None and sliding_window_size > -1
        if is_cross_attn or encoder_lens is not None or windowed:
            return upstream_decode(
                self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens,
                scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
            )  # fmt: skip
        new = [1] * len(seq_lens)
        return run(query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, new, scaling)

    Backend._run_sdpa_forward_extend = extend
    Backend._run_sdpa_forward_decode = decode
