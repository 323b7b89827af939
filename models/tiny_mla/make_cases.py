"""Write cases.jsonl.gz: held-out cases of eval.py, as token ids and as chat messages.

Of the 240 cases two thirds are kept, so that as many shifts are positive as negative.
"""

import argparse
import gzip
import json

import cases as C
from data import msg_tokens
from transformers import AutoTokenizer


def chat(tokenizer, m):
    """{"role","content"} of a message; the template gives back exactly its tokens"""
    ids = msg_tokens(m, {})[0]
    return {"role": m.role, "content": tokenizer.decode(ids[1:-1]).strip()}


def encode(tokenizer, messages, generation_prompt=False):
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=generation_prompt, tokenize=True, return_dict=True
    )["input_ids"]


def case_json(tk, i, c):
    """a case as plain data; refuses one whose chat form does not give back its tokens"""
    t = C.tokens(c)
    msgs = [chat(tk, m) for m in c["conv"]]
    ask = {"role": "user", "content": c["ask"] + " ?"}
    edits = sorted(zip(c["edits"], t["spans"], t["stubs"], strict=True), key=lambda x: x[1])
    em = list(msgs)
    for e, _, _ in reversed(edits):
        em[e.m0 : e.m1] = [chat(tk, e.stub)]
    assert encode(tk, msgs) == t["prompt"], i
    assert encode(tk, [*msgs, ask], True) == t["prompt"] + t["question"], i
    assert encode(tk, em) == t["edited"], i
    return {
        "id": i,
        "size": c["size"],
        "hops": c["hops"],
        "n_edits": c["n_edits"],
        "prompt": t["prompt"],
        "edits": [
            {
                "span": list(s),
                "stub": st,
                "delta": len(st) - (s[1] - s[0]),
                "message_span": [e.m0, e.m1],
                "stub_message": chat(tk, e.stub),
            }
            for e, s, st in edits
        ],
        "question": t["question"],
        "edited_prompt": t["edited"],
        "expected": t["expect_full"],
        "expected_text": tk.decode([t["expect_full"]]).strip(),
        "expected_forget": t["expect_forget"],
        "expected_forget_text": tk.decode([t["expect_forget"]]).strip(),
        "messages": msgs,
        "question_message": ask,
    }


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="model")
    ap.add_argument("--out", default="cases.jsonl.gz")
    ap.add_argument("--n", type=int, default=240)
    a = ap.parse_args()
    tk = AutoTokenizer.from_pretrained(a.model)
    # without a name and a date, the same cases give the same file
    with open(a.out, "wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as f:
        kept = [(i, c) for i, c in enumerate(C.build_cases(a.n)) if i % 3 != 2]
        for i, c in kept:
            f.write((json.dumps(case_json(tk, i, c)) + "\n").encode())
    print("wrote", len(kept), "cases")


if __name__ == "__main__":
    main()
