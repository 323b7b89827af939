"""Check the KV splice on the trained model, in plain transformers.

  python eval.py --model model [--n 240] [--json results.json]

Needs a transformers whose DeepseekV2 caches the compressed latent (5.24 does: layer.keys =
normed c_kv [B,1,T,512], layer.values = rotated k_pe [B,1,T,64]); older ones (5.4) cache the
expanded per-head K/V, which can be told by the shape and is refused here.
"""

import argparse
import inspect
import json
import random
import time

import cases as C
import torch
from data import (
    BOS,
    END,
    NOISE_IDS,
    ROLE,
    SYSTEM,
    VARS,
    VOCAB,
    Msg,
    Stmt,
    W,
    msg_tokens,
    noise_tokens,
    render,
    stub_head,
    value_id,
)
from transformers import DeepseekV2ForCausalLM, DynamicCache

torch.set_grad_enabled(False)


# ------------------------------------------------------------------ the splice itself
def inv_freq(cfg):
    d = cfg.qk_rope_head_dim
    return 1.0 / (cfg.rope_parameters["rope_theta"] ** (torch.arange(0, d, 2, dtype=torch.float64) / d))


def rotate(k_pe, delta, inv, arith=torch.float32, pairing="interleaved"):
    """R(delta) k_pe, DeepSeek checkpoints' interleaved pairs (x0,x1),(x2,x3).. ; stored dtype kept"""
    ang = delta * inv
    c, s = ang.cos().to(arith), ang.sin().to(arith)
    x = k_pe.to(arith)
    if pairing == "interleaved":
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2).to(k_pe.dtype)
    a, b = x.chunk(2, -1)  # neox halves: wrong here, a control
    return torch.cat((a * c - b * s, a * s + b * c), -1).to(k_pe.dtype)


class Lab:
    def __init__(self, model):
        self.m, self.cfg = model, model.config
        self.inv = inv_freq(self.cfg)
        self.kw = (
            "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
        )

    def run(self, ids, cache=None):
        """append ids to the cache (positions follow the cache length); -> last logits, cache"""
        if cache is None:
            cache = DynamicCache(config=self.cfg)
        o = self.m(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1, **{self.kw: cache})
        k, v = cache.layers[0].keys, cache.layers[0].values
        assert (
            k.shape[1] == 1
            and k.shape[-1] == self.cfg.kv_lora_rank
            and v.shape[-1] == self.cfg.qk_rope_head_dim
        ), "this transformers caches expanded K/V, not the MLA latent"
        return o.logits[0, -1].float(), cache

    def copy(self, cache, upto=None):
        new = DynamicCache(config=self.cfg)
        for i, layer in enumerate(cache.layers):
            new.update(layer.keys[..., :upto, :].clone(), layer.values[..., :upto, :].clone(), i)
        return new

    def splice(self, cache, s, e, stub, delta=None, rot=True, pairing="interleaved", shift_prefix=False):
        """replace [s,e) by stub, in place of a re-prefill.  shift_prefix: the mirror form (move the
        prefix and stub by -delta, leave the rest), used only as a cross-check."""
        new = self.copy(cache, s)
        if stub:
            self.run(stub, new)
        d = (len(stub) - (e - s)) if delta is None else delta
        for n, o in zip(new.layers, cache.layers, strict=True):
            tail = o.values[..., e:, :]
            head = n.values
            if shift_prefix:
                head = rotate(head, -d, self.inv)
            elif rot:
                tail = rotate(tail, d, self.inv, pairing=pairing)
            n.keys = torch.cat((n.keys, o.keys[..., e:, :]), -2)
            n.values = torch.cat((head, tail), -2)
        return new

    def run_at(self, ids, cache, pos0):
        o = self.m(
            input_ids=torch.tensor([ids]),
            use_cache=True,
            logits_to_keep=1,
            position_ids=torch.arange(pos0, pos0 + len(ids))[None],
            **{self.kw: cache},
        )
        return o.logits[0, -1].float()


def edits_right_to_left(t):
    return sorted(zip(t["spans"], t["stubs"], strict=True), key=lambda x: -x[0][0])


def apply_edits(lab, cache, t, **kw):
    for (s, e), stub in edits_right_to_left(t):
        cache = lab.splice(cache, s, e, stub, **kw)
    return cache


def apply_edits_left_to_right(lab, cache, t, **kw):
    off = 0
    for (s, e), stub in sorted(zip(t["spans"], t["stubs"], strict=True)):
        cache = lab.splice(cache, s + off, e + off, stub, **kw)
        off += len(stub) - (e - s)
    return cache


def am(logits):
    return None if logits is None else int(logits.argmax())


# ------------------------------------------------------------------ 1. three arms
def arms(lab, cases, inside):
    """inside: the question is already cached when the edit is made (only <|assistant|> is new)"""
    rows = []
    for c in cases:
        t = C.tokens(c)
        q = t["question"]
        pre, new = (t["prompt"] + q[:-1], q[-1:]) if inside else (t["prompt"], q)
        edited = t["edited"] + (q[:-1] if inside else [])
        _la, full = lab.run(pre)
        a, _ = lab.run(new, lab.copy(full))
        sp = apply_edits(lab, full, t)
        assert sp.get_seq_length() == len(edited)
        b, _ = lab.run(new, lab.copy(sp))
        b2, _ = lab.run(new, apply_edits_left_to_right(lab, full, t))
        nr, _ = lab.run(new, apply_edits(lab, full, t, rot=False))
        nx, _ = lab.run(new, apply_edits(lab, full, t, pairing="neox"))
        f, _ = lab.run(edited + new)
        wr = None
        if len(t["spans"]) == 1:
            d = len(t["stubs"][0]) - (t["spans"][0][1] - t["spans"][0][0])
            wr, _ = lab.run(new, apply_edits(lab, full, t, delta=-d))
        top = a.topk(2).values
        rows.append(
            {
                "size": c["size"],
                "sign": c["sign"],
                "hops": c["hops"],
                "n_edits": c["n_edits"],
                "want": t["expect_full"],
                "wantf": t["expect_forget"],
                "a": am(a),
                "b": am(b),
                "b2": am(b2),
                "norot": am(nr),
                "neox": am(nx),
                "wrong": am(wr),
                "c": am(f),
                "margin": float(top[0] - top[1]),
                "p": [float(x.softmax(-1)[t["expect_full"]]) for x in (a, b, f)],
            }
        )
    return rows


def summarize(rows, tag):
    n = len(rows)

    def pc(k):
        return sum(bool(k(r)) for r in rows)

    s = {
        "n": n,
        "full_correct": pc(lambda r: r["a"] == r["want"]),
        "amortize_correct": pc(lambda r: r["b"] == r["want"]),
        "forget_gives_full_answer": pc(lambda r: r["c"] == r["want"]),
        "forget_says_unknown": pc(lambda r: r["c"] == r["wantf"]),
        "amortize_eq_full": pc(lambda r: r["a"] == r["b"]),
        "forget_eq_full": pc(lambda r: r["a"] == r["c"]),
        "amortize_edit_order_agrees": pc(lambda r: r["b"] == r["b2"]),
        "control_no_rotation_eq_full": pc(lambda r: r["a"] == r["norot"]),
        "control_neox_pairing_eq_full": pc(lambda r: r["a"] == r["neox"]),
        "control_wrong_sign_eq_full": [
            pc(lambda r: r["wrong"] is not None and r["a"] == r["wrong"]),
            pc(lambda r: r["wrong"] is not None),
        ],
        "mean_p_of_full_answer(full,amortize,forget)": [
            round(sum(r["p"][i] for r in rows) / n, 4) for i in range(3)
        ],
        "mismatch_margins": [round(r["margin"], 3) for r in rows if r["a"] != r["b"]],
    }
    for key in ("size", "sign", "hops", "n_edits"):
        for val in sorted({r[key] for r in rows}, key=str):
            sub = [r for r in rows if r[key] == val]
            s[f"{key}={val}"] = {
                "n": len(sub),
                "full_correct": sum(r["a"] == r["want"] for r in sub),
                "amortize_eq_full": sum(r["a"] == r["b"] for r in sub),
                "amortize_correct": sum(r["b"] == r["want"] for r in sub),
                "forget_eq_full": sum(r["a"] == r["c"] for r in sub),
            }
    print(f"== {tag}")
    for k, v in s.items():
        print("  ", k, v)
    return s


# ------------------------------------------------------------------ 2. stub facts, visible facts, decode
def controls(lab, n, seed):
    """what the splice must not break: facts in the stub, in the prefix, downstream; greedy text"""
    r = random.Random(seed)
    ok = {"stub_fact": 0, "visible_fact": 0, "visible_fact_full": 0, "two_tokens": 0}
    for i in range(n):
        c = C.make_case(r, ["short", "medium", "medium"][i % 3], sign=-1 if i % 2 else 1, stub_fact=True)
        t = C.tokens(c)
        _, full = lab.run(t["prompt"])
        sp = apply_edits(lab, full, t)
        x, cc = lab.run(t["question"], lab.copy(sp))
        ok["stub_fact"] += int(x.argmax()) == t["expect_full"]
        y, _ = lab.run([int(x.argmax())], cc)
        ok["two_tokens"] += int(y.argmax()) == END
        evicted = {s.var for e in c["edits"] for m in c["conv"][e.m0 : e.m1] for s in m.stmts}
        env = render(c["conv"], [], "full").marks["env"]
        vis = [v for v in env if v not in evicted and env[v] is not None and v not in c["asks"]]
        if not vis:
            ok["visible_fact"] += 1
            ok["visible_fact_full"] += 1
            continue
        v = r.choice(vis)
        q = [ROLE["user"], W(v), VOCAB["Ġ?"], END, ROLE["assistant"]]
        ok["visible_fact"] += int(lab.run(q, lab.copy(sp))[0].argmax()) == value_id(env[v])
        ok["visible_fact_full"] += int(lab.run(q, lab.copy(full))[0].argmax()) == value_id(env[v])
    ok["n"] = n
    print("== controls", ok)
    return ok


# ------------------------------------------------------------------ 3. mirror form
def mirror(lab, cases):
    """rotating the tail by delta == rotating prefix+stub by -delta and decoding at the old position"""
    worst = 0.0
    for c in cases:
        t = C.tokens(c)
        if len(t["spans"]) != 1:
            continue
        _, full = lab.run(t["prompt"])
        (s, e), stub = t["spans"][0], t["stubs"][0]
        x, _ = lab.run(t["question"], lab.splice(full, s, e, stub))
        y = lab.run_at(t["question"], lab.splice(full, s, e, stub, shift_prefix=True), len(t["prompt"]))
        worst = max(worst, float((x - y).abs().max()))
    print("== mirror form: max |logit difference|", worst)
    return worst


# ------------------------------------------------------------------ 4. rotation error
def rotation_error(lab, cases, seed=5):
    """stored K_pe rotated by delta, against K_pe computed afresh at the new position"""
    raw = {}
    hooks = [
        layer.self_attn.kv_a_proj_with_mqa.register_forward_hook(
            lambda m, i, o, li=li: raw.setdefault(li, []).append(o[0, :, lab.cfg.kv_lora_rank :].clone())
        )
        for li, layer in enumerate(lab.m.model.layers)
    ]
    for c in cases:
        lab.run(C.tokens(c)["prompt"])
    for h in hooks:
        h.remove()
    dt = next(lab.m.parameters()).dtype
    inv32 = lab.inv.float()

    def fresh(k, pos):  # as the model does it: fp32 inside, stored in dt
        ang = pos[:, None].float() * inv32
        c, s = ang.cos(), ang.sin()
        a, b = k.float()[:, 0::2], k.float()[:, 1::2]
        return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2).to(dt)

    def exact(k, pos):
        ang = pos[:, None].double() * lab.inv
        c, s = ang.cos(), ang.sin()
        a, b = k.double()[:, 0::2], k.double()[:, 1::2]
        return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)

    def rel(x, y):
        return float((x.double() - y.double()).norm() / y.double().norm())

    r = random.Random(seed)
    out = {}
    L = len(raw)
    for name, nrot in (("1 rotation", 1), ("50 rotations", 50)):
        acc = {
            k: [0.0] * L
            for k in (
                "successive_vs_fresh",
                "composed_vs_fresh",
                "successive_vs_exact",
                "composed_vs_exact",
                "fresh_vs_exact",
                "successive_vs_composed",
                "lowprec_arith_vs_fresh",
            )
        }
        reps = 5
        for _rep in range(reps):
            ds = [r.choice([-1, 1]) * r.randint(1, 40) for _ in range(nrot)]
            tot = sum(ds)
            for li in range(L):
                k = torch.cat(raw[li])
                pos = torch.arange(len(k)) % 2000 + 2100  # room for any walk of the position
                st = fresh(k, pos)
                x, z = st, st
                for d in ds:
                    x = rotate(x, d, lab.inv)
                    z = rotate(z, d, lab.inv, arith=dt)
                one = rotate(st, tot, lab.inv)
                fr, ex = fresh(k, pos + tot), exact(k, pos + tot)
                for key, (u, v) in {
                    "successive_vs_fresh": (x, fr),
                    "composed_vs_fresh": (one, fr),
                    "successive_vs_exact": (x, ex),
                    "composed_vs_exact": (one, ex),
                    "fresh_vs_exact": (fr, ex),
                    "successive_vs_composed": (x, one),
                    "lowprec_arith_vs_fresh": (z, fr),
                }.items():
                    acc[key][li] += rel(u, v) / reps
        out[name] = {k: {"mean": sum(v) / L, "per_layer": v} for k, v in acc.items()}
    out["tokens"] = int(sum(len(x) for x in raw[0]))
    print("== K_pe relative L2 error,", dt, "storage,", out["tokens"], "tokens x", L, "layers")
    for name in ("1 rotation", "50 rotations"):
        for k, v in out[name].items():
            print(f"   {name}: {k} {v['mean']:.3e}")
    return out


def layer0_check(lab, cases):
    """layer 0's K_pe depends on the token only: the spliced one must equal a re-prefill's;
    deeper layers and c_kv must not"""
    num = [0.0] * lab.cfg.num_hidden_layers
    den = list(num)
    numc = list(num)
    denc = list(num)
    for c in cases:
        t = C.tokens(c)
        _, full = lab.run(t["prompt"])
        sp = apply_edits(lab, full, t)
        _, re = lab.run(t["edited"])
        for i, (x, y) in enumerate(zip(sp.layers, re.layers, strict=True)):
            num[i] += float((x.values.double() - y.values.double()).pow(2).sum())
            den[i] += float(y.values.double().pow(2).sum())
            numc[i] += float((x.keys.double() - y.keys.double()).pow(2).sum())
            denc[i] += float(y.keys.double().pow(2).sum())
    o = {
        "k_pe": [(a / b) ** 0.5 for a, b in zip(num, den, strict=True)],
        "c_kv": [(a / b) ** 0.5 for a, b in zip(numc, denc, strict=True)],
    }
    print(
        "== spliced cache vs re-prefilled cache, relative L2 by layer:",
        {k: [f"{x:.2e}" for x in v] for k, v in o.items()},
    )
    return o


# ------------------------------------------------------------------ 5. trajectories
def trajectories(lab, n_traj, steps=50, seed=9):
    """every step: a tool result, a derived statement, the tool result of two steps ago is evicted,
    a question.  Caches: full (append only), amort (spliced each step, K_pe rotated again and again),
    composed (spliced, every K_pe re-rotated from its pristine copy); forget = re-prefill each step."""
    tot = {
        "steps": 0,
        "asked_lost": 0,
        "full_ok": 0,
        "amort_ok": 0,
        "composed_ok": 0,
        "forget_ok": 0,
        "amort_eq_full": 0,
        "composed_eq_full": 0,
        "forget_eq_full": 0,
        "edits": 0,
        "max_len": 0,
        "fresh": 0,
        "fresh_full_ok": 0,
        "fresh_amort_ok": 0,
        "fresh_forget_ok": 0,
    }
    for tr in range(n_traj):
        r = random.Random(seed * 1000 + tr)
        names = r.sample(VARS, len(VARS))
        full = am = co = None
        text = []  # edited token list (amort/forget view)
        pristine = []  # per layer: (values as first written, position written at) for `co`
        where = []  # (start in edited text, length, step) of evictable tool results
        env, lost_ready, asked = {}, [], []

        def push(ids, text=text, pristine=pristine):
            nonlocal full, am, co
            lf, full = lab.run(ids, full)
            la, am = lab.run(ids, am)
            n0 = 0 if co is None else co.get_seq_length()
            lc, co = lab.run(ids, co)
            for i, layer in enumerate(co.layers):
                v = layer.values[..., n0:, :].clone()
                p = torch.arange(n0, n0 + len(ids))
                if len(pristine) <= i:
                    pristine.append([v, p])
                else:
                    pristine[i] = [torch.cat((pristine[i][0], v), -2), torch.cat((pristine[i][1], p))]
            text.extend(ids)
            return lf, la, lc

        push([BOS, ROLE["system"], *SYSTEM, END])
        for step in range(steps):
            define = len(names) >= 2 and (step % 3 != 2)
            push([ROLE["assistant"], W("call"), r.choice(NOISE_IDS), END])
            if define:
                x, y = names.pop(), names.pop()
                ids, _, _, _ = msg_tokens(
                    Msg(
                        "tool", "stmts", noise_tokens(r, r.randint(1, 8)), [Stmt(x, "lit", r.randrange(100))]
                    ),
                    env,
                )
            else:
                ids, _, _, _ = msg_tokens(Msg("tool", "noise", noise_tokens(r, r.randint(4, 20))), env)
            where.append([len(text), len(ids), y if define else None])
            push(ids)
            if define:
                push(msg_tokens(Msg("assistant", "stmts", [], [C._ref(r, y, x)]), env)[0])
            if len(where) >= 3:  # evict the tool result of two steps ago
                s, n, yy = where[len(where) - 3]
                stub = [ROLE["tool"], *stub_head(r, 1, long=r.random() < 0.15), END]
                d = len(stub) - n
                am = lab.splice(am, s, s + n, stub)
                co = lab.splice(co, s, s + n, stub, rot=False)
                for i, layer in enumerate(co.layers):
                    pv, pp = pristine[i]
                    new_v = layer.values[..., s : s + len(stub), :].clone()
                    pv = torch.cat((pv[..., :s, :], new_v, pv[..., s + n :, :]), -2)
                    pp = torch.cat((pp[:s], torch.arange(s, s + len(stub)), pp[s + n :]))
                    shift = (torch.arange(len(pp)) - pp).double()
                    layer.values = rotate(pv, shift[:, None], lab.inv)
                    pristine[i] = [pv, pp]
                text[s : s + n] = stub
                for w in where:
                    if w[0] > s:
                        w[0] += d
                tot["edits"] += 1
                if yy:
                    lost_ready.append(yy)
            fresh = [v for v in lost_ready if v not in asked]
            pool = fresh or lost_ready or list(env)
            if pool:
                v = r.choice(pool)
                q = [ROLE["user"], W(v), VOCAB["Ġ?"], END, ROLE["assistant"]]
                lf, la, lc = push(q)
                fg, _ = lab.run(list(text))
                A, B, Cc, F = (int(z.argmax()) for z in (lf, la, lc, fg))
                want = value_id(env[v])
                tot["steps"] += 1
                tot["full_ok"] += want == A
                tot["amort_ok"] += want == B
                tot["composed_ok"] += Cc == want
                tot["forget_ok"] += want == F
                tot["amort_eq_full"] += A == B
                tot["composed_eq_full"] += Cc == A
                tot["forget_eq_full"] += A == F
                if v in lost_ready:
                    tot["asked_lost"] += 1
                if fresh:
                    tot["fresh"] += 1
                    tot["fresh_full_ok"] += want == A
                    tot["fresh_amort_ok"] += want == B
                    tot["fresh_forget_ok"] += want == F
                asked.append(v)
                push([want, END])
        tot["max_len"] = max(tot["max_len"], full.get_seq_length())
    print(f"== {n_traj} trajectories of {steps} steps:", tot)
    return tot


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="model")
    ap.add_argument("--n", type=int, default=240)
    ap.add_argument("--traj", type=int, default=3)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--dtypes", default="bfloat16,float32")
    ap.add_argument("--json", default="")
    ap.add_argument("--quick", action="store_true")
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    cs = C.build_cases(a.n)
    res = {}
    for dt in a.dtypes.split(","):
        t0 = time.time()
        lab = Lab(DeepseekV2ForCausalLM.from_pretrained(a.model, dtype=getattr(torch, dt)).eval())
        print("########", dt)
        R = res[dt] = {}
        R["edit_before_question"] = summarize(arms(lab, cs, False), f"{dt}: edit, then the question")
        if a.quick:
            continue
        R["question_before_edit"] = summarize(
            arms(lab, cs, True), f"{dt}: question cached, then the edit, then <|assistant|>"
        )
        r = random.Random(4242)
        xl = [
            dict(
                C.make_case(r, "xlong", -1 if i % 3 else 1, 1, hops=1 + i % 2),
                size="xlong",
                sign=-1 if i % 3 else 1,
                hops=1 + i % 2,
                n_edits=1,
            )
            for i in range(24)
        ]
        ln = [len(C.tokens(c)["prompt"]) for c in xl]
        R["xlong"] = summarize(
            arms(lab, xl, True),
            f"{dt}: prompts of {min(ln)}-{max(ln)} tokens, question cached before the edit",
        )
        R["xlong"]["tokens"] = [min(ln), max(ln)]
        R["controls"] = controls(lab, 120, 31)
        R["mirror_max_logit_diff"] = mirror(lab, cs[:60])
        R["rotation_error"] = rotation_error(lab, cs[:60])
        R["cache_vs_reprefill"] = layer0_check(lab, cs[:60])
        R["trajectories"] = trajectories(lab, a.traj)
        print(f"({dt}: {time.time() - t0:.0f} s)")
        if a.json:
            with open(a.json, "w") as f:
                json.dump(res, f, indent=1)


if __name__ == "__main__":
    main()
