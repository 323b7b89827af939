"""The reference has to be right before anything is compared with it."""

from __future__ import annotations

import random

import pytest
import torch

from leyline_lmcache.stack import device, models

from .model import Context, Reference
from .rules import apply_edits, serve

NAMES = ("mla", "gqa", "tiny-mla")


@pytest.fixture(scope="module", params=NAMES)
def reference(request: pytest.FixtureRequest) -> Reference:
    device.activate_shim()
    return Reference(models.resolve(request.param))


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 256), k=count)


def close(a: Context, b: Context) -> float:
    return max(
        float((x - y).abs().max()) for x, y in zip([*a.keys, *a.values], [*b.keys, *b.values], strict=True)
    )


def test_answers_are_transformers_own_greedy_answers(reference: Reference) -> None:
    prompt = tokens(120, 1)
    whole = reference.reprefill(prompt, 6)
    parts = reference.answer(reference.prefill(prompt[:70]), prompt[70:], 6)
    with torch.no_grad():
        out = reference.model.generate(
            torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None, use_cache=False
        )
    assert whole.ids == parts.ids == out[0, len(prompt) :].tolist()
    assert whole.logprobs == pytest.approx(parts.logprobs, abs=1e-5)
    assert whole.context.tokens == prompt + whole.ids[:-1]


def test_turned_keys_are_the_ones_the_model_caches(reference: Reference) -> None:
    """R6: pairing and amplitude are the model's own, at positions other than the first."""
    from transformers import DynamicCache

    prompt = tokens(40, 2)
    cache = DynamicCache()
    with torch.no_grad():
        reference.model(
            torch.tensor([prompt]), past_key_values=cache, position_ids=torch.arange(40)[None], use_cache=True
        )
    context = reference.prefill(prompt)
    for layer, keys in zip(cache.layers, context.keys, strict=True):
        cached = layer.values if reference.mla else layer.keys
        assert cached.shape[-1] == keys.shape[-1]
        assert torch.equal(reference.turned(keys), cached)


def test_layer_zero_is_the_same_wherever_a_token_was_computed(reference: Reference) -> None:
    """Its input is the embedding alone, so a moved key must equal one computed at the new place."""
    base = reference.prefill(tokens(100, 3))
    moved = reference.edited(base, [(20, 50, [])], [])
    fresh = reference.prefill(moved.tokens)
    assert torch.allclose(reference.turned(moved.keys[0]), reference.turned(fresh.keys[0]), atol=1e-6)
    assert close(moved, fresh) > 1e-4  # the other layers remember the span: this is the contract


def test_an_edit_after_everything_is_a_re_prefill(reference: Reference) -> None:
    base = reference.prefill(tokens(60, 4))
    new = tokens(9, 5)
    edited = reference.edited(base, [(60, 60, new)], [(60, 69)])
    assert close(edited, reference.prefill(base.tokens + new)) < 1e-4


def test_the_contract_differs_from_re_prefill(reference: Reference) -> None:
    base = reference.prefill(tokens(400, 6))
    prompt, _ = apply_edits(base.tokens, [(60, 200, [7, 8])])
    prompt += tokens(10, 7)
    answer, served = reference.serve(base, [(60, 200, [7, 8])], prompt)
    assert served.target == 262
    assert float((answer.first - reference.reprefill(prompt).first).abs().max()) > 5e-3


def test_rules_page_1() -> None:
    base = list(range(1000, 3000))
    edits = [(300, 500, [1, 2, 3, 4, 5])]
    prompt = apply_edits(base, edits)[0] + [9] * 20
    served = serve(base, edits, prompt)
    assert (served.computed, served.target, served.prefix, served.kept) == (((300, 305),), 1805, 300, 1500)


def test_rules_round_to_pages_and_merge() -> None:
    base = list(range(1000, 1500))
    edits = [(100, 110, [1, 2]), (130, 140, [3]), (400, 400, [4] * 20)]
    prompt = apply_edits(base, edits)[0] + [9] * 40
    served = serve(base, edits, prompt, page_size=16, min_reuse=16)
    # [100, 102) -> [96, 112) and [122, 123) -> [112, 128) touch; [383, 403) -> [368, 416).
    assert served.computed == ((96, 128), (368, 416))
    # 503 edited tokens; the base's last 4 never were a whole page: 499, floored to 496.
    assert served.target == 496


def test_rules_leave_a_replacement_near_the_end_to_the_tail() -> None:
    base = list(range(1000, 1100))
    edits = [(20, 30, []), (90, 95, [1, 2])]
    prompt = apply_edits(base, edits)[0] + [9] * 5
    served = serve(base, edits, prompt)
    assert served.computed == () and served.target == served.cached == 80 and served.kept == 60
    # With a longer new turn it is prefilled ahead, and found in the cache.
    served = serve(base, edits, [*prompt, *[9] * 20])
    assert served.computed == () and (served.target, served.cached, served.kept) == (80, 82, 60)
