"""Held-out evaluation cases: one edit (or several), one question at the end."""

import random

from data import (
    END,
    NOISE_IDS,
    ROLE,
    STEPS,
    SYSTEM,
    VARS,
    VOCAB,
    Edit,
    Msg,
    Stmt,
    W,
    msg_tokens,
    noise_tokens,
    render,
    stub_head,
    value_id,
)

TEST_SEED = 77_000_000


def _lit(r, v):
    return Stmt(v, "lit", r.randrange(100))


def _ref(r, y, x, alias=None):
    k = 0 if (alias if alias is not None else r.random() < 0.5) else r.choice(STEPS)
    return Stmt(y, "ref", src=x, k=k)


def filler(r, n, names, noise):
    """n messages that have nothing to do with the question"""
    out = []
    for _ in range(n):
        u = r.random()
        if u < 0.35 and names:
            ss = [_lit(r, names.pop())]
            if r.random() < 0.4 and names:
                ss.append(_ref(r, names.pop(), ss[0].var))
            out.append(Msg(r.choice(["tool", "tool", "assistant"]), "stmts", [], ss))
        elif u < 0.5:
            out.append(Msg("assistant", "call", [W("call"), r.choice(NOISE_IDS)]))
        else:
            out.append(Msg("tool", "noise", noise_tokens(r, r.randint(*noise))))
    return out


def make_case(r, size="short", sign=None, n_edits=1, hops=None, stub_fact=False):
    """-> dict(conv, edits, ask).  The asked variable is derived, after the span, from a
    variable that only the span defines; its value is never spelled out."""
    names = r.sample(VARS, len(VARS))
    n = {"short": (1, 4), "medium": (6, 14), "long": (30, 60), "xlong": (150, 230)}[size]
    noise = {"short": (2, 8), "medium": (3, 12), "long": (8, 40), "xlong": (8, 40)}[size]
    budget = names[:40] if size in ("long", "xlong") else names[:14]
    keep = names[40:]
    conv = [Msg("system", "sys", list(SYSTEM))]
    conv += filler(r, r.randint(*n) // 2, budget, noise)
    edits, asks = [], []
    for _ in range(n_edits):
        x, y = keep.pop(), keep.pop()
        conv += filler(r, r.randint(0, 2), budget, noise)
        m0 = len(conv)
        conv.append(Msg("assistant", "call", [W("call"), r.choice(NOISE_IDS)]))
        ss = [_lit(r, x)] + [_lit(r, keep.pop()) for _ in range(r.choice([0, 0, 1]))]
        r.shuffle(ss)
        conv.append(Msg("tool", "stmts", noise_tokens(r, r.randint(1, 3)) if r.random() < 0.3 else [], ss))
        if r.random() < 0.5:
            conv.append(Msg("tool", "noise", noise_tokens(r, r.randint(*noise))))
        m1 = len(conv)
        if r.random() < 0.3:
            m0 += 1
        conv += filler(r, r.randint(0, max(1, n[0] // 2)), budget, noise)
        conv.append(Msg(r.choice(["assistant", "tool"]), "stmts", [], [_ref(r, y, x)]))
        depth = hops if hops is not None else r.choice([1, 1, 2])
        if depth == 2:
            z = keep.pop()
            conv += filler(r, r.randint(0, 1), budget, noise)
            conv.append(Msg(r.choice(["assistant", "tool"]), "stmts", [], [_ref(r, z, y)]))
            y = z
        edits.append([m0, m1])
        asks.append(y)
    conv += filler(r, r.randint(*n) // 2, budget, noise)
    es = []
    for m0, m1 in edits:
        want_pos = (r.random() < 0.3) if sign is None else sign > 0
        span_len = sum(len(msg_tokens(m, {})[0]) for m in conv[m0:m1])
        fact = [_lit(r, keep.pop())] if stub_fact else []
        for _ in range(200):
            stub = Msg("tool", "stub", stub_head(r, m1 - m0, long=want_pos))
            if want_pos:
                stub.toks = (
                    stub.toks[:-1]
                    + r.choices(NOISE_IDS, k=max(0, span_len - len(stub.toks) + r.randint(0, 12)))
                    + stub.toks[-1:]
                )
            stub.stmts = fact
            d = len(msg_tokens(stub, {})[0]) - span_len
            if (d > 0) == want_pos and d != 0:
                break
        es.append(Edit(m0, m1, len(conv), stub))
    ask = r.choice(asks) if not stub_fact else es[0].stub.stmts[0].var
    return {"conv": conv, "edits": es, "ask": ask, "asks": asks}


def tokens(case):
    """flat token view of a case: prompt, spans (token indices), stubs, question"""
    conv = case["conv"]
    full = render(conv, [], "full")
    st, en = full.marks["starts"], full.marks["ends"]
    env = full.marks["env"]
    spans = [(st[e.m0][0], en[e.m1 - 1]) for e in case["edits"]]
    stubs = [msg_tokens(e.stub, {})[0] for e in case["edits"]]
    forget = render(conv, case["edits"], "forget")
    fenv = forget.marks["env"]
    for e in case["edits"]:
        for s in e.stub.stmts:
            env = dict(env)
            env[s.var] = s.val
    q = [ROLE["user"], W(case["ask"]), VOCAB["Ġ?"], END, ROLE["assistant"]]
    return {
        "prompt": full.ids,
        "spans": spans,
        "stubs": stubs,
        "question": q,
        "edited": forget.ids,
        "expect_full": value_id(env.get(case["ask"])),
        "expect_forget": value_id(fenv.get(case["ask"])),
    }


def build_cases(n=240, seed=TEST_SEED):
    r = random.Random(seed)
    out = []
    for i in range(n):
        size = ["short", "medium", "medium", "long"][i % 4]
        sign = -1 if i % 3 else 1
        ne = 1 if i % 5 else r.choice([2, 3])
        c = make_case(r, size, sign, ne, hops=1 + (i // 2) % 2)
        c.update(size=size, sign=sign, hops=1 + (i // 2) % 2, n_edits=ne)
        out.append(c)
    return out
