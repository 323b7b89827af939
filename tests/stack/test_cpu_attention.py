"""The attention that stands in for upstream's on CPU: the same numbers, for every shape SGLang asks for."""

from __future__ import annotations

import importlib

import pytest

torch = pytest.importorskip("torch")

SHAPES = [
    pytest.param(4, 1, 96, 64, id="mla"),
    pytest.param(8, 2, 32, 32, id="gqa"),
    pytest.param(3, 3, 16, 16, id="mha"),
]


@pytest.mark.parametrize(("heads", "kv_heads", "width", "value_width"), SHAPES)
@pytest.mark.parametrize(("new", "length"), [(1, 1), (1, 77), (7, 7), (5, 300), (150, 400)])
@pytest.mark.parametrize("scores", [1, 5000, 1 << 19])
def test_equals_exact_attention(
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    kv_heads: int,
    width: int,
    value_width: int,
    new: int,
    length: int,
    scores: int,
) -> None:
    module = importlib.import_module("leyline_cpu_attention")
    monkeypatch.setattr(module, "_SCORES", scores)
    torch.manual_seed(new + length)
    query = torch.randn(new, heads, width)
    key = torch.randn(length, kv_heads, width)
    value = torch.randn(length, kv_heads, value_width)
    output = torch.empty(new, heads, value_width)
    module.attend(query, key, value, 0.3, output)

    visible = torch.arange(length)[None] <= torch.arange(length - new, length)[:, None]
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(each.double().transpose(0, 1)[None] for each in (query, key, value)),
        attn_mask=visible,
        scale=0.3,
        enable_gqa=True,
    )[0].transpose(0, 1)
    torch.testing.assert_close(output.double(), exact, rtol=1e-5, atol=1e-5)
