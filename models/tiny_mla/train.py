"""Train the tiny DeepSeek-V2 (MLA) model; retrain.sh has the stages.

The loss: the answers to questions (and spelled-out results), an auxiliary classifier of the value at
the end of every statement read from the hidden state entering the last layer, optionally (`sup`) an
attention target for head 0 of the last three layers, and a small next-token loss.  The auxiliary
head is not exported.
"""

import argparse
import json
import math
import random
import time
from types import SimpleNamespace as NS

import torch
import torch.nn as nn
import torch.nn.functional as F
from data import INF, NUM_ID, UNK_ID, VOCAB, random_conv, render
from export import widen
from fastmla import FastMLA

PAD = VOCAB["<|pad|>"]


def make_batch(r, n, length, ph):
    out = []
    while len(out) < n:
        L = int(length * r.uniform(0.6, 1.0))
        u = r.random()
        n_ed = (
            0 if u < ph["p_full"] else (1 if r.random() < ph["p_single"] else r.randint(2, ph["max_edits"]))
        )
        conv, edits, skip = random_conv(
            r,
            L,
            n_ed,
            noise=ph["noise"],
            ask_p=ph["ask_p"],
            max_vars=ph["max_vars"],
            noise_p=ph.get("noise_p", 0.19),
            ask_once=ph.get("ask_once", True),
            p_ref=ph.get("p_ref", 0.5),
            p_alias=ph.get("p_alias", 0.5),
            p_undef=ph.get("p_undef", 0.12),
        )
        mode = "full" if not edits else ("forget" if r.random() < ph["p_forget"] else "amort")
        gm = r.choice([0, 0, 8, 64, 512, 2048]) if ph["gaps"] else 0
        o = render(
            conv,
            edits if mode != "full" else [],
            mode,
            r,
            0.3 if gm <= 64 else 0.06,
            gm,
            skip if mode == "amort" else None,
        )
        if len(o.ids) <= length * 1.15 and o.ans:
            out.append(o)
    return out


def collate(items, r, max_pos):
    T = max(len(o.ids) for o in items)
    T = (T + 15) // 16 * 16
    B = len(items)
    ids = torch.full((B, T), PAD)
    pos = torch.zeros(B, T, dtype=torch.long)
    dead = torch.full((B, T), INF)
    loc = torch.zeros(B, T, dtype=torch.float64)
    ans, aux = [], []
    for b, o in enumerate(items):
        n = len(o.ids)
        ids[b, :n] = torch.tensor(o.ids)
        p = torch.tensor(o.pos)
        room = max_pos - int(p[-1]) - 1
        pos[b, :n] = p + (r.randint(0, room) if room > 0 and r.random() < 0.5 else 0)
        dead[b, :n] = torch.tensor(o.dead)
        loc[b, :n] = torch.tensor(o.loc, dtype=torch.float64)
        loc[b, n:] = 1e9
        ans += [(b, i, t) for i, t in o.ans]
        aux += [(b, i, t) for i, t in o.aux]
    t = torch.arange(T)
    mask = (
        (t[None, :] <= t[:, None])[None]
        & (dead[:, None, :] > t[None, :, None])
        & (loc[:, None, :] <= loc[:, :, None])
    )
    # layer L-3 reads literals, layer L-2 anything, for "y = x"; the last layer reads for questions
    sup = {"first": [], "second": [], "last": []}
    for b, o in enumerate(items):
        for q, k, kind, depth in o.links:
            if o.dead[k] > q:
                if kind == "ref":
                    if depth == 0:
                        sup["first"].append((b, q, k))
                    sup["second"].append((b, q, k))
                else:
                    sup["last"].append((b, q, k))
    sup = {n: torch.tensor(v).view(-1, 3) for n, v in sup.items()}
    return ids, pos, mask[:, None], torch.tensor(ans), torch.tensor(aux), sup


def tune_threads(m, ids, pos, mask):
    """the cores are shared: use 2 threads or 1, whichever is faster right now"""
    best = None
    for n in (2, 1):
        torch.set_num_threads(n)
        t = time.time()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            m(ids, pos, mask)
            m(ids, pos, mask)
        dt = time.time() - t
        if best is None or dt < best[0]:
            best = (dt, n)
    torch.set_num_threads(best[1])


def evaluate(m, head, seed, n, length, ph, tap):
    r = random.Random(seed)
    res = {}
    m.eval()
    with torch.no_grad():
        for mode in ("full", "amort", "forget"):
            p = dict(ph, p_full=1.0 if mode == "full" else 0.0, p_forget=1.0 if mode == "forget" else 0.0)
            ok = tot = 0
            for _ in range(max(1, n // 16)):
                b = make_batch(r, 16, length, p)
                ids, pos, mask, ans, _aux, _ = collate(b, r, 8000)
                h, _, _ = m(ids, pos, mask)
                pr = m.lm_head(h[ans[:, 0], ans[:, 1]]).argmax(-1)
                known = ans[:, 2] != UNK_ID if mode != "forget" else torch.ones(len(ans), dtype=torch.bool)
                ok += (pr == ans[:, 2])[known].sum().item()
                tot += known.sum().item()
            res[mode] = ok / max(tot, 1)
    m.train()
    return res


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--hidden", type=int, default=192)
    ap.add_argument("--inter", type=int, default=384)
    ap.add_argument("--layers", type=int, default=4)
    ap.add_argument("--heads", type=int, default=4)
    ap.add_argument("--lora", type=int, default=512)
    ap.add_argument("--nope", type=int, default=128)
    ap.add_argument("--v", type=int, default=128)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--wd", type=float, default=0.05)
    ap.add_argument("--aux", type=float, default=0.5)
    ap.add_argument("--lm", type=float, default=0.05)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--out", default="ckpt.pt")
    ap.add_argument("--init", default="")
    ap.add_argument("--phases", default="phases.json")
    ap.add_argument("--fp32", action="store_true")
    ap.add_argument("--log", type=int, default=50)
    a = ap.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(a.seed)
    c = NS(
        vocab_size=len(VOCAB),
        hidden_size=a.hidden,
        intermediate_size=a.inter,
        num_hidden_layers=a.layers,
        num_attention_heads=a.heads,
        kv_lora_rank=a.lora,
        qk_nope_head_dim=a.nope,
        qk_rope_head_dim=64,
        v_head_dim=a.v,
    )
    m = FastMLA(c)
    m.number_init(torch.tensor(NUM_ID))
    head = nn.Linear(a.hidden, len(NUM_ID) + 1, bias=False)
    if a.init:
        ck = torch.load(a.init)
        sd, _ = widen(ck["model"], ck["cfg"], a.lora, a.nope, a.v)  # no-op where the dims are the same
        m.load_state_dict(sd)
        head.load_state_dict(ck["head"])
    cls = torch.full((len(VOCAB),), -1)
    for i, t in enumerate([*NUM_ID, UNK_ID]):
        cls[t] = i
    with open(a.phases) as f:
        phases = json.load(f)
    total = sum(p["steps"] for p in phases)
    dec = [p for n, p in m.named_parameters() if p.dim() == 2 and "embed" not in n] + list(head.parameters())
    nod = [p for n, p in m.named_parameters() if not (p.dim() == 2 and "embed" not in n)]
    opts = []
    opts.append(
        torch.optim.AdamW(
            [{"params": dec, "weight_decay": a.wd}, {"params": nod, "weight_decay": 0.0, "lr": a.lr * 2}],
            lr=a.lr,
            betas=(0.9, 0.98),
            eps=1e-8,
        )
    )
    base = [[g["lr"] for g in o.param_groups] for o in opts]
    print(
        f"params {sum(p.numel() for p in m.parameters()) / 1e6:.2f}M, vocab {len(VOCAB)}, steps {total}",
        flush=True,
    )
    r = random.Random(a.seed + 1)
    tap = a.layers - 1
    step, t0, toks = 0, time.time(), 0
    run = {}
    ids = pos = mask = None
    for pi, ph in enumerate(phases):
        for _ in range(ph["steps"]):
            if step % 100 == 20:
                tune_threads(m, ids, pos, mask)
            w = min(1.0, (step + 1) / 100)
            lr_s = w * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, step / total)))))
            for o, bs in zip(opts, base, strict=True):
                for g, b_ in zip(o.param_groups, bs, strict=True):
                    g["lr"] = b_ * lr_s
            items = make_batch(r, ph["batch"], ph["len"], ph)
            ids, pos, mask, ans, aux, sup = collate(items, r, 8000)
            sup = (
                {a.layers - 3: sup["first"], a.layers - 2: sup["second"], a.layers - 1: sup["last"]}
                if ph.get("sup")
                else None
            )
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not a.fp32):
                h, t, loss_s = m(ids, pos, mask, tap, sup)
                la = m.lm_head(h[ans[:, 0], ans[:, 1]]).float()
                lx = head(F.rms_norm(t[aux[:, 0], aux[:, 1]].float(), (a.hidden,))).float()
            loss_a = F.cross_entropy(la, ans[:, 2])
            loss_x = F.cross_entropy(lx, cls[aux[:, 2]])
            loss = loss_a + a.aux * loss_x + ph.get("sup", 0.0) * loss_s
            run.setdefault("s", []).append(float(loss_s.detach() if torch.is_tensor(loss_s) else loss_s))
            if a.lm and step % 4 == 0:  # plain next-token loss, every 4th step
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not a.fp32):
                    lg = m.lm_head(h[:, :-1]).float()
                tgt = ids[:, 1:].masked_fill(ids[:, 1:] == PAD, -100)
                loss_l = F.cross_entropy(lg.reshape(-1, lg.shape[-1]), tgt.reshape(-1), ignore_index=-100)
                loss = loss + 4 * a.lm * loss_l
                run.setdefault("lm", []).append(loss_l.item())
            for o in opts:
                o.zero_grad(set_to_none=True)
            loss.backward()
            gn = nn.utils.clip_grad_norm_([p for o in opts for g in o.param_groups for p in g["params"]], 1.0)
            for o in opts:
                o.step()
            step += 1
            toks += sum(len(o.ids) for o in items)
            run.setdefault("a", []).append(loss_a.item())
            run.setdefault("x", []).append(loss_x.item())
            kn = ans[:, 2] != UNK_ID
            run.setdefault("kn", []).append((la.argmax(-1) == ans[:, 2])[kn].float().mean().item())
            run.setdefault("acc", []).append((la.argmax(-1) == ans[:, 2]).float().mean().item())
            if step % a.log == 0:
                el = time.time() - t0
                mean = {k: sum(v) / len(v) for k, v in run.items()}
                print(
                    f"ph{pi} step {step} ans {mean['a']:.3f} acc {mean['acc']:.3f} known {mean['kn']:.3f} "
                    f"aux {mean['x']:.3f} sup {mean['s']:.3f} lm {mean.get('lm', 0.0):.3f} "
                    f"gn {gn:.2f} lr {lr_s:.3f} | {toks / 1e6:.2f}M tok {el:.0f}s {toks / el:.0f} tok/s",
                    flush=True,
                )
                run = {}
        print(
            "  eval",
            pi,
            {k: round(v, 4) for k, v in evaluate(m, head, 999, 64, ph["len"], ph, tap).items()},
            flush=True,
        )
        torch.save({"model": m.state_dict(), "head": head.state_dict(), "cfg": vars(c)}, a.out)
    print(f"done: {toks / 1e6:.2f}M tokens, {time.time() - t0:.0f}s", flush=True)


if __name__ == "__main__":
    main()
