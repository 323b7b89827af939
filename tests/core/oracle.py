"""A naive model of views and plans, to check the real ones against.

A document is a list with one entry for each token: where its KV came from, `(buffer, position it was computed
at)`, or None when there is none yet. Edits are slice assignments. Plans are executed, op by op and in any
order their deps allow, on blocks of cells that know for which position their key is rotated. Everything here
is O(tokens) and does without the code under test.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from leyline_lmcache.codec import decode_plan, encode_plan
from leyline_lmcache.ops import Copy, CopyRotate, Fill, Invalidate, Op, Plan, Rotate, Tier, expand
from leyline_lmcache.pieces import Edit, PieceTable, View
from leyline_lmcache.planner import compile_plan

Origin = tuple[str, int]
Doc = list[Origin | None]
Cell = tuple[object, int] | None


# ---------------------------------------------------------------- scripts


@dataclass(frozen=True)
class Turn:
    """One turn: edits as (gap, span, replacement) each after the one before, then `tail` new tokens."""

    edits: tuple[tuple[int, int, int], ...] = ()
    tail: int = 0


@dataclass(frozen=True)
class Back:
    """Return to a view already seen; counted modulo how many there are."""

    version: int


@dataclass(frozen=True)
class Cut:
    """Drop tokens from the end (a client that leaves out the base's answer)."""

    drop: int


Step = Turn | Back | Cut


@dataclass(frozen=True)
class Script:
    """A session: the length of its first prompt, and what happens to it."""

    base: int
    block_size: int
    steps: tuple[Step, ...]
    seed: int = 0


def random_script(rng: random.Random) -> Script:
    """A script from a seeded generator; the soak run uses this, Hypothesis has strategies of its own."""
    scale = rng.choice((3, 3, 12, 12, 12, 60, 60, 300))

    def edit() -> tuple[int, int, int]:
        return (
            rng.choice((0, rng.randrange(scale))),
            rng.choice((0, 1, rng.randrange(scale))),
            rng.choice((0, 1, rng.randrange(scale))),
        )

    def step() -> Step:
        pick = rng.random()
        if pick < 0.12:
            return Back(rng.randrange(8))
        if pick < 0.2:
            return Cut(rng.randrange(scale))
        return Turn(tuple(edit() for _ in range(rng.randrange(6))), rng.choice((0, 0, rng.randrange(scale))))

    return Script(
        rng.randrange(2 * scale),
        rng.choice((1, 2, 3, 7, 16, 64, 256, rng.randrange(1, 257))),
        tuple(step() for _ in range(rng.randrange(1, 7))),
        rng.randrange(2**32),
    )


def edits_of(turn: Turn, length: int) -> list[Edit]:
    """The turn's edits on a view of `length` tokens: in order, apart, never two insertions at one point."""
    edits: list[Edit] = []
    position = 0
    last_insert = -1
    for gap, span, replacement in turn.edits:
        start = min(position + gap, length)
        end = min(start + span, length)
        if start == end:
            if replacement and start == last_insert:
                continue
            if replacement:
                last_insert = start
        edits.append(Edit(start, end, replacement))
        position = end
    return edits


# ---------------------------------------------------------------- documents


def apply_edits(doc: Doc, edits: list[Edit]) -> Doc:
    """The edited document; from the back, so that positions stay those of the base."""
    out = list(doc)
    for edit in sorted(edits, key=lambda e: (e.start, e.end), reverse=True):
        out[edit.start : edit.end] = [None] * edit.length
    return out


def align_holes(doc: Doc, block_size: int) -> Doc:
    """Every block with a hole in it is a hole altogether."""
    out = list(doc)
    for start in range(0, len(doc), block_size):
        if None in doc[start : start + block_size]:
            out[start : start + block_size] = [None] * len(doc[start : start + block_size])
    return out


def fill_holes(doc: Doc, buffer: str) -> Doc:
    """What the engine computed in place."""
    return [(buffer, i) if origin is None else origin for i, origin in enumerate(doc)]


def doc_of(view: View) -> Doc:
    """The view, token by token."""
    out: Doc = []
    for start, piece in view.spans():
        assert start == len(out)
        for i in range(piece.length):
            out.append(None if piece.buffer is None else (piece.buffer, piece.src_start + i))
    return out


def check_view(view: View, doc: Doc) -> None:
    """The view says what the document says, in canonical form."""
    assert doc_of(view) == doc
    assert view.length == len(view) == len(doc)
    for a, b in zip(view.pieces, view.pieces[1:], strict=False):
        assert not (a.buffer == b.buffer and (a.buffer is None or a.src_end == b.src_start)), "not canonical"
    holes = {i for start, end in view.holes() for i in range(start, end)}
    assert holes == {i for i, origin in enumerate(doc) if origin is None}
    assert View(view.pieces) == view


# ---------------------------------------------------------------- plans


class Unsound(AssertionError):
    """A plan did something that would have corrupted KV."""


class Store:
    """Blocks of one tier while a plan runs.

    A cell of the new view holds `(origin, position its key is rotated for)`; a filled cell `("fill",
    position)`; one not yet written None.
    """

    def __init__(self, plan: Plan, old: Doc, target: Doc) -> None:
        self.plan, self.old, self.target = plan, old, target
        size = plan.block_size
        self.wanted: list[Cell] = [("fill" if o is None else o, i) for i, o in enumerate(target)]
        self.cells: list[Cell] = [None] * len(target)
        self.freed: set[tuple[str | None, int]] = set()
        self.pending = set(plan.fills)
        self.at: dict[Origin, list[int]] = {}
        for i, origin in enumerate(old):
            if origin is not None:
                self.at.setdefault(origin, []).append(i)
        # A shared block is the old view's own; where it is to be filled it is not used.
        self.shared_cells = {
            i for i in range(min(plan.shared_blocks * size, len(target))) if target[i] is not None
        }
        for i in self.shared_cells:
            self.cells[i] = (old[i], i)

    def begin(self, extent: Op) -> None:
        """Before the extent's first block."""
        match extent:
            case Copy() | CopyRotate() | Rotate():
                first = extent.dst_block * self.plan.block_size + extent.dst_offset
                if any(start <= first + extent.length - 1 for start, _ in self.pending):
                    raise Unsound(f"{extent} does not wait for a fill before it")
                if not isinstance(extent, Rotate) and extent.deferred is (self.plan.tier is Tier.GPU):
                    raise Unsound("deferred on the GPU, or not deferred elsewhere")
            case Fill(start=start, end=end):
                # The engine attends to everything before.
                if self.cells[:start] != self.wanted[:start]:
                    raise Unsound(f"{extent} before what precedes it is right")
                self.pending.remove((start, end))

    def run(self, op: Op) -> None:
        """One op on one block."""
        size = self.plan.block_size
        match op:
            case Copy() | CopyRotate():
                if not (0 < op.length <= size - op.dst_offset and op.length <= size - op.src_offset):
                    raise Unsound(f"{op} crosses a block")
                src = op.src_block * size + op.src_offset
                dst = op.dst_block * size + op.dst_offset
                turned = op.shift if isinstance(op, CopyRotate) else 0
                for k in range(op.length):
                    origin = (op.buffer, src + k)
                    self._check_readable(origin)
                    if self.cells[dst + k] is not None:
                        raise Unsound(f"{op} overwrites {dst + k}")
                    self.cells[dst + k] = (origin, src + k + turned)
            case Rotate():
                if not 0 < op.length <= size - op.dst_offset:
                    raise Unsound(f"{op} crosses a block")
                if op.shift == 0:
                    raise Unsound(f"{op} does nothing")
                dst = op.dst_block * size + op.dst_offset
                for i in range(dst, dst + op.length):
                    cell = self.cells[i]
                    if cell is None or i in self.shared_cells:
                        raise Unsound(f"{op} turns {i}, which was not copied")
                    self.cells[i] = (cell[0], cell[1] + op.shift)
            case Fill():
                if op.start // size != (op.end - 1) // size or op.start % size:
                    raise Unsound(f"{op} is not in one block from its boundary")
                if op.end % size and op.end != len(self.target):
                    raise Unsound(f"{op} ends inside a block and not with the view")
                for i in range(op.start, op.end):
                    if self.cells[i] is not None:
                        raise Unsound(f"{op} overwrites {i}")
                    self.cells[i] = ("fill", i)
            case Invalidate():
                if op.count != 1:
                    raise Unsound(f"{op} is more than one block")
                key = (op.buffer, op.block)
                if key in self.freed:
                    raise Unsound(f"{op} frees twice")
                self.freed.add(key)

    def check(self) -> None:
        """After all ops: every cell is right, and exactly what is no longer needed was given up."""
        assert self.cells == self.wanted
        assert self.freed == self._unneeded()

    def _unneeded(self) -> set[tuple[str | None, int]]:
        size = self.plan.block_size
        if self.plan.tier is Tier.GPU:
            held = {i // size for i, origin in enumerate(self.old) if origin is not None}
            kept = {i // size for i in self.shared_cells}
            return {(None, block) for block in held - kept}
        before = {(o[0], o[1] // size) for o in self.old if o is not None}
        after = {(o[0], o[1] // size) for o in self.target if o is not None}
        return set(before - after)

    def _check_readable(self, src: Origin) -> None:
        if not self.freed:
            return
        size = self.plan.block_size
        if self.plan.tier is Tier.GPU:
            # The token may be found at any place the old view has it; all must still be there.
            gone = any((None, i // size) in self.freed for i in self.at.get(src, ()))
        else:
            gone = (src[0], src[1] // size) in self.freed
        if gone:
            raise Unsound(f"{src} is read after its block was given up")


def execute(plan: Plan, old: Doc, target: Doc, rng: random.Random) -> None:
    """Run a plan's single-block ops in a random order that its deps allow, then check the outcome."""
    store = Store(plan, old, target)
    blocks: dict[int, list[Op]] = {op.id: [] for op in plan.ops}
    for op in expand(plan):
        blocks[op.id].append(op)
    extents = {op.id: op for op in plan.ops}
    assert len(extents) == len(plan.ops), "ids repeat"
    waiting = {op.id: set(op.deps) for op in plan.ops}
    while waiting:
        ready = [i for i, deps in waiting.items() if not deps]
        assert ready, "the deps have a cycle"
        now = rng.choice(ready)
        rng.shuffle(blocks[now])
        store.begin(extents[now])
        for op in blocks[now]:
            store.run(op)
        del waiting[now]
        for deps in waiting.values():
            deps.discard(now)
    store.check()


def check_plan(old: View, new: View, block_size: int, rng: random.Random, tiers: tuple[Tier, ...]) -> None:
    """Compile for each tier, and check everything a plan promises."""
    old_doc, new_doc = doc_of(old), doc_of(new)
    target = align_holes(new_doc, block_size)
    for tier in tiers:
        plan = compile_plan(old, new, block_size, tier, fuse=rng.random() < 0.7)
        assert (plan.old_length, plan.new_length) == (len(old_doc), len(new_doc))
        assert plan.shared_blocks == shared_blocks(old_doc, new_doc, block_size)
        assert plan.tokens_filled == target.count(None)
        assert len(plan.ops) <= 3 * (len(old.pieces) + len(new.pieces)) + 1
        assert sum(len(op.deps) for op in plan.ops) <= 3 * len(plan.ops)
        check_strict(plan)
        execute(plan, old_doc, target, rng)
        assert decode_plan(encode_plan(plan)) == plan


def check_strict(plan: Plan) -> None:
    """Of a piece, a destination block gets at most two copies, from at most two source blocks."""
    sources: dict[tuple[int, int], list[int]] = {}
    for op in expand(plan):
        if isinstance(op, Copy | CopyRotate):
            sources.setdefault((op.id, op.dst_block), []).append(op.src_block)
    assert all(len(blocks) <= 2 for blocks in sources.values())


def shared_blocks(old: Doc, new: Doc, block_size: int) -> int:
    """Leading blocks in which the new document says what the old one does."""
    count = 0
    for start in range(0, len(new), block_size):
        part = new[start : start + block_size]
        if old[start : start + len(part)] != part:
            break
        count += 1
    return count


# ---------------------------------------------------------------- provenance


class Influences:
    """Which tokens were in context when each token's KV was computed, kept as whole documents."""

    def __init__(self) -> None:
        self.events: list[tuple[Doc, frozenset[int]]] = []
        self.known: set[Origin] = set()

    def computed(self, before: Doc, after: Doc) -> None:
        """`after` is `before` with its holes computed."""
        fresh = frozenset(i for i, origin in enumerate(before) if origin is None)
        self.events.append((after, fresh))
        self.known.update(origin for i in fresh if (origin := after[i]) is not None)

    def of(self, asked: set[Origin]) -> set[Origin]:
        """These tokens, and those computed with one of them in context, directly or through others."""
        tainted = set(asked)
        size = -1
        while size != len(tainted):
            size = len(tainted)
            for doc, fresh in self.events:
                seen = False
                for i, origin in enumerate(doc):
                    seen = seen or origin in tainted
                    if seen and i in fresh and origin is not None:
                        tainted.add(origin)
        return tainted


# ---------------------------------------------------------------- a whole session


def run_script(script: Script, *, tiers: tuple[Tier, ...] = tuple(Tier), influence: bool = False) -> None:
    """Play a session on the real table and on the naive model, and compare them after every step."""
    rng = random.Random(script.seed)
    size = script.block_size
    table = PieceTable()
    view, doc = View.of_buffer("b0", script.base), fill_holes([None] * script.base, "b0")
    influences = Influences()
    influences.computed([None] * script.base, doc)
    if script.base:
        table.register("b0", view)
    versions: list[tuple[View, Doc]] = [(view, doc)]
    numbers = [table.push("s", view).number]
    prints: dict[bytes, Doc] = {}
    for step, what in enumerate(script.steps, 1):
        old_view, old_doc = view, doc
        match what:
            case Back(version):
                k = version % len(versions)
                view, doc = versions[k]
                assert table.goto("s", numbers[k]) == view
            case Cut(drop):
                view, doc = view.truncate(max(0, len(doc) - drop)), doc[: max(0, len(doc) - drop)]
            case Turn(_, tail):
                edits = edits_of(what, len(doc))
                rng.shuffle(edits)
                view = view.apply(edits).extend(tail)
                doc = apply_edits(doc, edits) + [None] * tail
        check_view(view, doc)
        assert view.first_change(old_view) == old_view.first_change(view) == first_change(doc, old_doc)
        check_plan(old_view, view, size, rng, tiers)
        if isinstance(what, Back):
            continue
        # The engine computes the holes and their slack, at this block size.
        buffer = f"b{step}"
        hollow, hollow_doc = view.aligned(size), align_holes(doc, size)
        check_view(hollow, hollow_doc)
        view, doc = hollow.filled(buffer), fill_holes(hollow_doc, buffer)
        check_view(view, doc)
        influences.computed(hollow_doc, doc)
        if hollow.holes():
            table.register(buffer, view)
        for i in {0, len(doc) - 1, rng.randrange(len(doc))} if doc else set():
            origin = doc[i]
            assert origin is not None
            assert view.shift_at(i) == i - origin[1]
        a, b = sorted((rng.randint(0, len(doc)), rng.randint(0, len(doc))))
        assert [
            (start + k, (piece.buffer, piece.src_start + k))
            for start, piece in view.between(a, b)
            for k in range(piece.length)
        ] == list(enumerate(doc[a:b], a))
        assert prints.setdefault(view.fingerprint(), doc) == doc
        versions.append((view, doc))
        numbers.append(table.push("s", view).number)
    for number, (kept, kept_doc) in zip(numbers, versions, strict=True):
        # Views are immutable: whatever came later, each is what it was.
        assert table.goto("s", number) == kept
        check_view(kept, kept_doc)
    if influence and influences.known:
        for origin in rng.sample(sorted(influences.known), min(3, len(influences.known))):
            # A run of tokens of one buffer that it computed itself.
            buffer, start = origin
            end = start + 1
            while end < start + 4 and (buffer, end) in influences.known:
                end += 1
            found = table.influenced_by(buffer, start, end)
            got = {(name, i) for name, a, b in found for i in range(a, b)}
            assert got == influences.of({(buffer, i) for i in range(start, end)})


def first_change(a: Doc, b: Doc) -> int:
    """The first place where two documents differ."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
