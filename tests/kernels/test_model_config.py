"""RoPE from a configuration: computed here and built by SGLang, both must say the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leyline_lmcache.kernels import Pairing, UnsupportedRope, probe_config

from .rotary_modules import HEAD, REFUSED, SUPPORTED

LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": HEAD,
    "max_position_embeddings": 2048,
    "rope_theta": 10000,
}


@pytest.mark.parametrize("base", [LLAMA, DEEPSEEK], ids=["llama", "deepseek"])
@pytest.mark.parametrize("kind", SUPPORTED)
def test_computed_and_built_agree(kind: str, base: dict[str, Any]) -> None:
    if base is DEEPSEEK and kind in ("linear", "llama3"):
        pytest.skip("SGLang's MLA attention knows no such scaling")
    config = {**base, "rope_scaling": SUPPORTED[kind]}
    built, computed = probe_config(config), probe_config(config, engine=False)
    assert computed.inv_freq == pytest.approx(built.inv_freq, rel=2e-7, abs=0)
    assert computed.amplitude == pytest.approx(built.amplitude, rel=2e-7)
    assert (computed.rotary_dim, computed.pairing) == (built.rotary_dim, built.pairing)
    assert built.pairing is (Pairing.HALVES if base is LLAMA else Pairing.INTERLEAVED)


def test_both_spellings_and_a_nested_text_model() -> None:
    old = {**LLAMA, "rope_scaling": SUPPORTED["llama3"]}
    new = {**LLAMA, "rope_theta": None, "rope_parameters": {**SUPPORTED["llama3"], "rope_theta": 500000.0}}  # type: ignore[dict-item]
    wrapped = {"model_type": "wrapper", "text_config": new}
    assert probe_config(old) == probe_config(new) == probe_config(wrapped)


def test_partial_rotary_and_interleaved_families() -> None:
    spec = probe_config({**LLAMA, "model_type": "glm4", "partial_rotary_factor": 0.5})
    assert (spec.rotary_dim, spec.pairing) == (HEAD // 2, Pairing.INTERLEAVED)
    spec = probe_config({**DEEPSEEK, "rope_interleave": False})
    assert spec.pairing is Pairing.HALVES


@pytest.mark.parametrize("kind", REFUSED)
def test_kinds_of_scaling_refused_by_name(kind: str) -> None:
    scaling, reason = REFUSED[kind]
    for engine in (True, False):
        assert refusal({**LLAMA, "rope_scaling": scaling}, engine=engine) == reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "llama4_text"}, "llama4"),
        ({"model_type": "hunyuan_v1_dense", "use_qk_norm": True}, "norm_after_rope"),
        ({"alibi": True}, "no_rotary"),
        ({"rope_theta": None}, "no_rotary"),
        ({"no_rope_layers": [3, 7]}, "mixed_layers"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk"),
        ({"rope_parameters": {"use_fope": True, "rope_type": "default"}}, "fourier"),
        ({"rope_parameters": {"full": {"rope_type": "default"}, "sliding": {}}}, "mixed_layers"),
        ({"rope_scaling": {"rope_type": "twisted"}}, "unknown_scaling"),
        ({"rope_scaling": "none"}, "unknown_scaling"),
    ],
)
def test_models_refused_by_name(change: dict[str, Any], reason: str) -> None:
    for engine in (True, False):
        assert refusal({**LLAMA, **change}, engine=engine) == reason


def refusal(config: dict[str, Any], *, engine: bool) -> str:
    with pytest.raises(UnsupportedRope) as caught:
        probe_config(config, engine=engine)
    return str(caught.value.reason)


def test_a_model_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert probe_config(tmp_path) == probe_config(str(tmp_path / "config.json")) == probe_config(LLAMA)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="does not hold a JSON object"):
        probe_config(tmp_path)
    with pytest.raises(OSError, match=r"config\.json"):
        probe_config(tmp_path / "missing" / "config.json")
