"""Tiny models with random weights and a tokenizer of bytes, for tests and for trying things.

    python -m leyline_lmcache.stack.recipes NAME FOLDER

Needs transformers; everything else in this package only names the recipes. Token ids 0 to 255 are bytes, so
any text has as many tokens as it has UTF-8 bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_BOS, _EOS, _PAD = 256, 257, 258
_POSITIONS = 32_768

_COMMON: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "max_position_embeddings": _POSITIONS,
    "bos_token_id": _BOS,
    "eos_token_id": _EOS,
    "pad_token_id": _PAD,
    "tie_word_embeddings": False,
    # Large enough that attention is far from uniform: an edit must be able to change the answer.
    "initializer_range": 0.08,
}
# DeepSeek-V2's architecture. SGLang's CPU engine takes no RoPE but yarn for it; here one with an amplitude
# other than 1 and a stretched table, as in the published models.
_MLA: Mapping[str, Any] = {
    **_COMMON,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    # As many dense layers as layers: no expert is ever built, but the counts must be there.
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
_GQA: Mapping[str, Any] = {
    **_COMMON,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
RECIPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "mla": {**_MLA, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32},
        # A cache row of the published models: 512 latent values and 64 rotary ones.
        "mla-512": {
            **_MLA,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
        },
        "gqa": _GQA,
        # Its angles are not the product of a frequency and a position, so keys of it cannot be moved.
        "gqa-ntk": {
            **_GQA,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        },
    }
)

_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make(name: str, folder: str) -> None:
    """Write the model `name` and its tokenizer to `folder`, always with the same weights."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    torch.manual_seed(0)
    recipe = dict(RECIPES[name])
    if "kv_lora_rank" in recipe:
        model = DeepseekV2ForCausalLM(DeepseekV2Config(**recipe))
    else:
        model = LlamaForCausalLM(LlamaConfig(**recipe))
    model.to(torch.float32).save_pretrained(folder)

    vocabulary = {letter: token for token, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"<s>": _BOS, "</s>": _EOS, "<pad>": _PAD}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT_TEMPLATE,
    ).save_pretrained(folder)


if __name__ == "__main__":
    make(sys.argv[1], sys.argv[2])
