"""Build the HF tokenizer: byte-level, one token per known word, bytes for anything else."""

import json
import os
import sys

from data import SPECIALS, VOCAB
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{% if m['content'] %}{{ ' ' + (m['content'] | trim) }}{% endif %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build(out):
    t = Tokenizer(models.BPE(vocab=VOCAB, merges=[], ignore_merges=True))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens(
        [AddedToken(s, special=True, normalized=False) for s in SPECIALS]
        + [AddedToken(s, special=True, normalized=False) for s in VOCAB if s.startswith("<|reserved_")]
    )
    from transformers import PreTrainedTokenizerFast

    f = PreTrainedTokenizerFast(
        tokenizer_object=t,
        bos_token="<|bos|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )
    f.chat_template = CHAT_TEMPLATE
    f.save_pretrained(out)
    # plain names that transformers 4.x, 5.x and SGLang all know; the template in both places
    p = os.path.join(out, "tokenizer_config.json")
    with open(p) as f_in:
        c = json.load(f_in)
    c["tokenizer_class"] = "PreTrainedTokenizerFast"
    c["chat_template"] = CHAT_TEMPLATE
    c.pop("backend", None)
    with open(p, "w") as f_out:
        json.dump(c, f_out, indent=2)
    return f


if __name__ == "__main__":
    build(sys.argv[1])
