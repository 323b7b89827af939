"""Tokenizer vocabulary + synthetic agent-transcript generator (no torch needed).

A *conversation* is a list of symbolic messages.  `render()` turns it (plus a list
of edits) into token ids, answer labels and the per-token attributes from which the
attention mask is built.  Three modes share one conversation:

  full    : no edit at all
  amort   : the spans are hidden from every token processed after the edit point; the
            stub tokens are processed at the edit point, at the span's place (they see
            the prefix only), exactly what a KV splice leaves in the cache
  forget  : the edited prompt prefilled from scratch (stub inline, span never seen)
"""

from __future__ import annotations

from dataclasses import dataclass, field

SPECIALS = ["<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|unk|>"]
NUMS = [str(i) for i in range(100)]
LETTERS = list("abcdefghijklmnopqrstuvwxyz")
NAMES = """
alpha beta gamma delta omega sigma theta kappa count total limit index offset size depth width
height score level rate price port row col page step seed temp load rank slot node edge batch
epoch gain cost mass
""".split()
VARS = LETTERS + NAMES
WORDS = """
You track variables Answer with the value or unknown call read set get log status ok error files
found done list open test passed failed line build cache user file took ready info warn memory
disk id old new run check result what is report tell me older tool turns removed to save context
policy by summary in of on for from no all items kept dropped next last
""".split()
PUNCT_SP = ["=", "+", "-", "->", "?", "|", "#", "["]  # written with a leading space
PUNCT = [";", ".", ":", ",", "]", "/", "[", "?", "evicted"]  # written without
UNKNOWN = "unknown"
STEPS = [1, 1, -1, 2]  # "y = x + 1", "- 1", "+ 2" (mod 100)


def build_vocab():
    """token string (byte-level form) -> id"""
    from tokenizers.pre_tokenizers import ByteLevel

    toks = list(SPECIALS)
    toks += sorted(ByteLevel.alphabet())  # 256 bytes: lossless fallback
    seen = set(toks)
    for w in (
        ["Ġ" + n for n in NUMS]
        + ["Ġ" + v for v in VARS]
        + ["Ġ" + w for w in WORDS]
        + ["Ġ" + p for p in PUNCT_SP]
        + PUNCT
    ):
        if w not in seen:
            seen.add(w)
            toks.append(w)
    n = (len(toks) + 63) // 64 * 64  # pad to a multiple of 64
    i = 0
    while len(toks) < n:
        toks.append(f"<|reserved_{i}|>")
        i += 1
    return {t: i for i, t in enumerate(toks)}


VOCAB = build_vocab()
BOS, END = VOCAB["<|bos|>"], VOCAB["<|end|>"]
ROLE = {r: VOCAB[f"<|{r}|>"] for r in ("system", "user", "assistant", "tool")}


def W(w):
    return VOCAB["Ġ" + w]


def P(p):
    return VOCAB[p]


NUM_ID = [W(n) for n in NUMS]
UNK_ID = W(UNKNOWN)
SEMI = P(";")
SYSTEM = [
    W("You"),
    W("track"),
    W("variables"),
    P("."),
    W("Answer"),
    W("with"),
    W("the"),
    W("value"),
    W("or"),
    W("unknown"),
    P("."),
]
NOISE_WORDS = [
    w
    for w in dict.fromkeys(WORDS)
    if w not in ("You", "Answer", "unknown", "what", "is", "call", "older", "turns")
]
NOISE_IDS = [W(w) for w in NOISE_WORDS]
DIGIT_IDS = [VOCAB[c] for c in "0123456789"]
G = VOCAB["Ġ"]


def value_id(v):
    return UNK_ID if v is None else NUM_ID[v]


# ----------------------------------------------------------------- symbolic messages
@dataclass
class Stmt:
    var: str
    op: str  # "lit" | "ref"
    val: int = 0  # lit
    src: str = ""  # ref
    k: int = 0  # ref: +k / -k (mod 100), 0 = alias
    stated: bool = False  # ref: " -> value" is spelled out in the text


@dataclass
class Msg:
    role: str
    kind: str  # "sys" | "noise" | "call" | "stmts" | "ask" | "stub"
    toks: list = field(default_factory=list)  # literal tokens (noise / call / sys / stub head)
    stmts: list = field(default_factory=list)
    ask: str = ""
    edit_after: bool = False


@dataclass
class Edit:
    m0: int  # first message of the span
    m1: int  # one past the last message of the span
    at: int  # message index before which the edit happens (m1 <= at)
    stub: Msg | None = None


def noise_tokens(r, n):
    out = []
    while len(out) < n:
        u = r.random() if out else 0.0
        if u < 0.62:
            out.append(r.choice(NOISE_IDS))
        elif u < 0.80:
            out.append(r.choice(NUM_ID))
        elif u < 0.90:
            if out:
                out.append(P(r.choice([".", ",", ":"])))
        elif u < 0.94:
            out.append(W(r.choice(VARS)))  # a variable name mentioned without "="
        elif u < 0.97:  # a number outside the vocabulary, as bytes
            out.append(G)
            out += [DIGIT_IDS[r.randint(1, 9)], *r.choices(DIGIT_IDS, k=r.randint(2, 4))]
        else:  # an unknown word, as bytes
            w = "".join(r.choices(LETTERS, k=r.randint(3, 6)))
            if "Ġ" + w not in VOCAB:
                out.append(G)
                out += [VOCAB[c] for c in w]
    return out


def stub_head(r, n_turns, long=False):
    """a stub's words: "[evicted: 3 older tool turns]" and relatives"""
    t = [VOCAB["Ġ["], P("evicted")]
    u = r.random()
    if u < 0.7:
        t += [P(":"), NUM_ID[min(n_turns, 99)], W("older"), W("tool"), W("turns")]
    if long or u > 0.85:
        t += [
            W(w)
            for w in r.choice(
                ["removed by policy to save context", "dropped to save memory", "summary of older turns kept"]
            ).split()
        ]
        if long:
            t += r.choices(NOISE_IDS, k=r.randint(4, 24))
    t.append(P("]"))
    return t


# ----------------------------------------------------------------- rendering
class Rendered:
    __slots__ = ("ans", "asks", "aux", "dead", "ids", "links", "loc", "marks", "pos")

    def __init__(self):
        self.ids, self.pos, self.dead, self.loc = [], [], [], []
        self.ans, self.aux = [], []  # (position whose next token / state is supervised, target id)
        self.links = []  # (query position, key position, kind, depth): where the value is to be read
        self.asks = []  # (position predicting the answer, target, kind)
        self.marks = {}


INF = 1 << 30


def msg_tokens(m, env, full_env=None):
    """tokens of a message; env maps var -> value (None = unknown) and is updated.
    returns (ids, ans[(i,target)], aux[(i,target)]) with i relative to the message start.
    full_env (forget mode): values the original transcript spelled out; the text keeps them"""
    ids, ans, aux, links = [ROLE[m.role]], [], [], []
    ids += m.toks
    for s in m.stmts:
        ids += [W(s.var), VOCAB["Ġ="]]
        if s.op == "lit":
            v = s.val
            ids.append(NUM_ID[v])
        else:
            base = env.get(s.src)
            v = None if base is None else (base + s.k) % 100
            ids.append(W(s.src))
            if s.k:
                ids += [VOCAB["Ġ+"] if s.k > 0 else VOCAB["Ġ-"], NUM_ID[abs(s.k)]]
            if s.stated:
                ids.append(VOCAB["Ġ->"])
                links.append((len(ids) - 1, s.src, "ref"))
                if full_env is None or full_env.get(s.var) == v:
                    ans.append((len(ids) - 1, value_id(v)))
                else:
                    v = full_env[s.var]
                ids.append(value_id(v))
        env[s.var] = v
        ids.append(SEMI)
        aux.append((len(ids) - 1, value_id(v)))
        if s.op == "ref" and not s.stated:
            links.append((len(ids) - 1, s.src, "ref"))
        links.append((len(ids) - 1, s.var, "def"))
    if m.kind == "ask":
        ids += [W(m.ask), VOCAB["Ġ?"]]
    ids.append(END)
    if m.kind == "ask":
        ids.append(ROLE["assistant"])
        v = env.get(m.ask)
        ans.append((len(ids) - 1, value_id(v)))
        links.append((len(ids) - 1, m.ask, "ask"))
        ids += [value_id(v), END]
    return ids, ans, aux, links


def render(conv, edits, mode, r=None, gap_p=0.0, gap_max=0, relabel=None):
    """conv: [Msg]; edits sorted by .at.  -> Rendered"""
    o = Rendered()
    env = {}
    span_of = {}
    for e in edits:
        for i in range(e.m0, e.m1):
            span_of[i] = e
    o.ids.append(BOS)
    o.pos.append(0)
    o.dead.append(INF)
    o.loc.append(0.0)
    pos = 1
    starts = {}  # message -> (first token index, first loc, first pos)
    ends = {}
    by_at = {}
    for e in edits:
        by_at.setdefault(e.at, []).append(e)

    full_env = None
    last_at = 0
    semi = {}
    if mode == "forget":
        full_env, last_at = {}, max([e.at for e in edits], default=0)
        for m in conv + [e.stub for e in edits if e.stub is not None]:
            msg_tokens(m, full_env)

    def emit(m, env_, loc_fn, pos0, label=-1):
        ids, ans, aux, links = msg_tokens(m, env_, full_env)
        base, ref_depth = len(o.ids), 0
        for j, t in enumerate(ids):
            o.ids.append(t)
            o.pos.append(pos0 + j)
            o.dead.append(INF)
            o.loc.append(loc_fn(j))
        for i, t in ans:
            if m.kind == "ask":
                if label is not None:
                    t = t if label < 0 else label
                    o.asks.append((base + i, t, m.ask))
                    o.ans.append((base + i, t))
                    o.ids[base + i + 1] = t
            else:
                o.ans.append((base + i, t))
        for i, t in aux:
            o.aux.append((base + i, t))
        for i, v, kind in links:
            if kind == "def":
                semi[v] = (base + i, ref_depth)
                ref_depth = 0
            elif v in semi and not (kind == "ask" and label != -1):
                o.links.append((base + i, semi[v][0], kind, semi[v][1]))
                if kind == "ref":
                    ref_depth = semi[v][1] + 1
        return len(ids)

    for mi, m in enumerate(conv):
        if mode == "amort":
            for e in by_at.get(mi, ()):
                i0, l0, p0 = starts[e.m0]
                i1 = ends[e.m1 - 1]
                now = len(o.ids)
                for i in range(i0, i1):
                    o.dead[i] = now
                if e.stub is not None:
                    emit(e.stub, env, lambda j, l0=l0: l0 + j * 1e-4, p0)
        if mode == "forget" and mi in span_of:
            e = span_of[mi]
            if mi == e.m0 and e.stub is not None:
                b = len(o.ids)
                pos += emit(e.stub, env, lambda j, b=b: float(b + j), pos)
            continue
        if mode == "forget" and m.kind == "ask" and mi < last_at:
            continue  # its answer was given before the edit: out of the training text
        if r is not None and gap_max and r.random() < gap_p:
            pos += r.randint(1, gap_max)
        b = len(o.ids)
        starts[mi] = (b, float(b), pos)
        n = emit(m, env, lambda j, b=b: float(b + j), pos, relabel.get(mi, -1) if relabel else -1)
        ends[mi] = b + n
        pos += n
        e = span_of.get(mi)
        if mode == "amort" and e is not None and mi == e.m1 - 1 and e.stub is not None:
            # leave room for a stub longer than the span
            span_len = ends[mi] - starts[e.m0][0]
            need = len(msg_tokens(e.stub, dict(env))[0]) - span_len
            if need > 0:
                pos += need
    o.marks = {"starts": starts, "ends": ends, "env": env}
    return o


# ----------------------------------------------------------------- conversations
def random_conv(
    r,
    target_len,
    n_edits,
    p_undef=0.12,
    noise=(2, 10),
    ask_p=0.45,
    max_vars=60,
    noise_p=0.19,
    ask_once=True,
    p_ref=0.5,
    p_alias=0.5,
):
    """returns (conv, edits, relabel).  Questions are appended all along; `relabel` maps the index
    of a question about an evicted variable to its label in amort mode: "unknown", or None (not
    supervised) where something was derived from the variable, so that traces of it remain."""
    names = r.sample(VARS, len(VARS))
    conv = [Msg("system", "sys", list(SYSTEM))] if r.random() < 0.8 else []
    depth, defined_in, uses = {}, {}, {}
    order = []
    est = 12
    evicted_msgs = set()
    edits = []
    lost = set()  # variables whose defining statement was evicted
    skip, asked = {}, set()
    want_edits = sorted(r.uniform(0.3, 0.85) for _ in range(n_edits))

    def add(m):
        nonlocal est
        conv.append(m)
        est += 2 + len(m.toks) + 5 * len(m.stmts) + (5 if m.kind == "ask" else 0)

    def new_var():
        return names.pop() if names and len(order) < max_vars else None

    def live_vars():
        return [v for v in order if v not in lost]

    def ref_stmt():
        lv = [v for v in live_vars() if depth[v] < 2]
        y = new_var()
        if y is None:
            return None
        if not lv or r.random() < p_undef:
            src = new_var()
            if src is None:
                return None
            depth[y] = 1
        else:
            # prefer variables nobody refers to yet
            fresh = [v for v in lv if not uses.get(v)]
            src = r.choice(fresh if fresh and r.random() < 0.7 else lv)
            depth[y] = depth[src] + 1
        uses.setdefault(src, []).append(y)
        k = 0 if r.random() < p_alias else r.choice(STEPS)
        order.append(y)
        defined_in[y] = len(conv)
        return Stmt(y, "ref", src=src, k=k, stated=r.random() < 0.2)

    def lit_stmt():
        x = new_var()
        if x is None:
            return None
        depth[x] = 0
        order.append(x)
        defined_in[x] = len(conv)
        return Stmt(x, "lit", r.randrange(100))

    def noise_msg():
        u = r.random()
        if u < 0.35:
            return Msg(
                "assistant",
                "call",
                [W("call"), r.choice(NOISE_IDS)] + ([r.choice(NOISE_IDS)] if r.random() < 0.5 else []),
            )
        return Msg("tool", "noise", noise_tokens(r, r.randint(*noise)))

    def ask():
        # what can be asked: any variable ever named, mostly derived ones
        # each variable is asked once, so that no earlier answer gives a value away
        u = r.random()
        free = [v for v in order if v not in asked or not ask_once]
        pool_d = [v for v in free if depth[v] > 0]
        pool_lost_src = [
            y for x in lost for y in uses.get(x, []) if y in defined_in and y not in lost and y not in asked
        ]
        if pool_lost_src and u < 0.55:
            v = r.choice(pool_lost_src)
        elif pool_d and u < 0.80:
            v = r.choice(pool_d)
        elif free and u < 0.96:
            v = r.choice(free)
        else:
            v = new_var()
        if v is None:
            add(noise_msg())
            return
        asked.add(v)
        m = Msg(
            "user",
            "ask",
            r.choice([[], [], [W("what"), W("is")], [W("report")], [W("tell"), W("me")]]),
            ask=v,
        )
        if v in lost:  # evicted: gone, unless something was derived from it (then: no label)
            skip[len(conv)] = None if uses.get(v) else UNK_ID
        add(m)

    def do_edit():
        # a span of 1-3 messages (never the system message) that holds at least one statement
        cand = [i for i, m in enumerate(conv) if m.kind in ("stmts",) and i not in evicted_msgs and i > 0]
        useful = [
            i
            for i in cand
            if any(
                uses.get(s.var) and any(defined_in.get(y, -1) > i and y not in lost for y in uses[s.var])
                for s in conv[i].stmts
            )
        ]
        if useful and r.random() < 0.85:
            c = r.choice(useful)
        elif cand:
            c = r.choice(cand)
        else:
            return
        lo, hi = c, c + 1
        for _ in range(r.choice([0, 0, 1, 1, 2, 3])):
            if r.random() < 0.5:
                if (
                    lo - 1 > 0
                    and conv[lo - 1].kind in ("noise", "call", "stmts")
                    and lo - 1 not in evicted_msgs
                ):
                    lo -= 1
            elif hi < len(conv) and conv[hi].kind in ("noise", "call") and hi not in evicted_msgs:
                hi += 1
        for i in range(lo, hi):
            evicted_msgs.add(i)
            for s in conv[i].stmts:
                lost.add(s.var)
        u = r.random()
        stub = None
        if u > 0.05:
            stub = Msg("tool", "stub", stub_head(r, hi - lo, long=r.random() < 0.25))
            if r.random() < 0.25:
                s = lit_stmt()
                if s is not None:
                    stub.stmts.append(s)
                    defined_in[s.var] = lo
        edits.append(Edit(lo, hi, len(conv), stub))

    while est < target_len:
        frac = est / target_len
        while want_edits and frac > want_edits[0]:
            want_edits.pop(0)
            do_edit()
        u = r.random()
        n_free = len(order) - (len(asked & set(order)) if ask_once else 0)
        if n_free > 0 and u < ask_p:
            ask()
        elif u < 1.0 - noise_p:
            m = Msg(
                r.choice(["tool", "tool", "assistant"]),
                "stmts",
                noise_tokens(r, r.randint(1, 3)) if r.random() < noise_p else [],
            )
            for _ in range(r.choice([1, 1, 1, 2, 2, 3])):
                s = lit_stmt() if (not order or r.random() >= p_ref) else ref_stmt()
                if s is not None:
                    m.stmts.append(s)
            if m.stmts:
                add(m)
            elif not names:
                add(noise_msg())
        else:
            add(noise_msg())
    return conv, edits, skip
