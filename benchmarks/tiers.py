"""Edited sessions over three tiers: what is reused from each, what a load costs, what is stored.

One base of 2,000 tokens, [300, 500) replaced by five others and a new turn behind; asked again and again,
each time with its KV in another place: on the GPU, in LMCache's L1 (``/flush_cache``), in Redis (L1 cleared
too), and from a second engine with an ``lmcache server`` of its own (``other_node``). Then a session of 20
turns, each of which drops an old tool output for a stub and adds a new one, with the GPU emptied between
turns; vanilla LMCache (SGLang without the plugin, LMCache's own adapter) is given the same edited prompts.

    python benchmarks/tiers.py [--model mla] [--repeat 15] [--turns 20] [--no-recovery]

``reused_fraction_…`` is the part of the prompt whose KV came from just that tier, as the report says.
``rotated_over_plain_load`` is the time a load of the same chunks takes in the scheduler when their keys are
turned, over the time when they are not: an edit that shifts what follows by one, and one that shifts by
nothing; both fill one or two tokens, all of the base comes from L1, rounds alternate. Of the fastest third of
the rounds, which other work on the machine disturbs least; ``…_median`` is of all of them.
``bytes_stored_over_vanilla`` and ``keys`` count KV in Redis after the session; ``metadata_bytes`` are the
records that let any node go on with it. ``drift_…`` is how far keys are from those a model computes at the
new position, in fp32, after the session's 20 shifts: turned once from the first copy, as a load does, and one
shift after another. ``recovery_s_…`` is the time from a server's return to the first edit served from it.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import Figure, finish, print_table
from _nodes import empty_gpu, empty_l1, free_port, keys_of, shared, wait_stored

from leyline_lmcache.journal import JournalReader
from leyline_lmcache.kernels.layout import KVLayout
from leyline_lmcache.kernels.rope import Pairing, RopeSpec
from leyline_lmcache.kernels.splice import splice_rows
from leyline_lmcache.ops import OpKind, Tier
from leyline_lmcache.stack import Stack, StackSpec
from leyline_lmcache.stack.client import Client, Generation

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "tiers.png"
CONTEXT, SPAN, REPLACEMENT, TURN = 2000, (300, 500), 5, 24
LOADED = 4096
"""Tokens of context in the comparison of loads."""
OUTPUT, STUB, NOTE = 160, 8, 40
"""Of the session: tokens of a tool output, of the stub in its place, of what the agent says."""
KEPT_OUTPUTS = 8
PLACES = ("gpu", "l1", "redis", "other_node")
_TIER = {"gpu": Tier.GPU, "l1": Tier.CPU, "redis": Tier.REDIS, "other_node": Tier.REDIS}
_LEAST = 3
"""Ids below are special to some models."""


def spec_of(options: argparse.Namespace, **changes: Any) -> StackSpec:
    """One node."""
    common: dict[str, Any] = {
        "model": options.model,
        "chunk_size": options.chunk_size,
        "context_length": 2 * LOADED,
        "max_total_tokens": 6 * LOADED,
        "threads": options.threads,
        "server_module": True,
        "l2": "leyline",
    }
    return StackSpec(**(common | changes))


@contextlib.contextmanager
def one_node(options: argparse.Namespace) -> Iterator[Stack]:
    """With a Redis of its own."""
    port = free_port()
    with Stack(
        spec_of(options, redis_port=port, server_options=shared(f"redis://127.0.0.1:{port}"))
    ) as stack:
        yield stack


def envelope(base: str, *edits: tuple[int, int, Sequence[int]]) -> dict[str, Any]:
    """Directives (DESIGN §5)."""
    actions = [
        {
            "action_id": f"a{i}",
            "action_type": "kv.splice",
            "action_version": "1",
            "payload": {"base": base, "start": start, "end": end, "replacement_ids": list(replacement)},
        }
        for i, (start, end, replacement) in enumerate(edits)
    ]
    return {"protocol_version": "1", "message_id": "tiers", "actions": actions}


# ------------------------------------------------------------------------------------------ reuse by place


@dataclass(frozen=True, slots=True)
class Reuse:
    """One edited request whose KV lay in one place. ``tiers``: kept tokens by tier, as reported."""

    place: str
    prompt: int
    cached: int
    tiers: Mapping[str, int]
    seconds: float

    @property
    def fraction(self) -> float:
        """Of the prompt."""
        return self.tiers[_TIER[self.place].value] / self.prompt


def measure_reuse(here: Stack, options: argparse.Namespace) -> list[Reuse]:
    """The same edit from every place; the second node is started beside the first."""
    dice = random.Random(1)
    ids = dice.choices(range(_LEAST, 256), k=CONTEXT)
    replacement = dice.choices(range(_LEAST, 256), k=REPLACEMENT)
    replacement[0] = (ids[SPAN[0]] + 1) % 256
    found: list[Reuse] = []

    def ask(client: Client, place: str) -> None:
        prompt = ids[: SPAN[0]] + replacement + ids[SPAN[1] :] + dice.choices(range(_LEAST, 256), k=TURN)
        hints = envelope(base, (*SPAN, replacement))
        began = time.perf_counter()
        answer = client.generate(prompt, max_new_tokens=4, sampling={"ignore_eos": True}, kv_hints=hints)
        seconds = time.perf_counter() - began
        said = answer.meta["leyline"]
        if said["outcome"] != "spliced":
            raise RuntimeError(f"{place}: the edit was not spliced: {said}")
        found.append(Reuse(place, len(prompt), answer.cached_tokens, said["tiers"], seconds))

    with here.client() as client:
        base = client.generate(ids, max_new_tokens=4, sampling={"ignore_eos": True}).id
        wait_stored(here)
        ask(client, "gpu")
        empty_gpu(client)
        ask(client, "l1")
        empty_gpu(client)
        empty_l1(here)
        ask(client, "redis")
        assert here.redis_url is not None
        there = Stack(spec_of(options, redis_url=here.redis_url, server_options=shared(here.redis_url)))
        with there, there.client() as other:
            ask(other, "other_node")
    return found


# -------------------------------------------------------------------------------------------------- loads


def fastest(times: Sequence[float]) -> float:
    """Mean of the fastest third."""
    return statistics.mean(sorted(times)[: max(1, len(times) // 3)])


@dataclass(frozen=True, slots=True)
class Loads:
    """Seconds in the scheduler for loading one base, per round: keys turned, and not; and at the client."""

    rotated: Sequence[float]
    plain: Sequence[float]
    rotated_request: Sequence[float]
    plain_request: Sequence[float]

    @property
    def ratio(self) -> float:
        """Of the fastest third of the rounds: whatever else the machine does only ever adds to a time."""
        return fastest(self.rotated) / fastest(self.plain)


def measure_loads(stack: Stack, options: argparse.Namespace) -> Loads:
    """Rounds of both kinds in random order, each on a base that is in L1 only."""
    dice = random.Random(2)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    lineages: dict[str, bool] = {}
    rounds: dict[bool, list[str]] = {True: [], False: []}
    with stack.client() as client:
        for turn in range(-1, options.repeat):
            for rotated in dice.sample([True, False], k=2):
                ids = dice.choices(range(_LEAST, 256), k=LOADED)
                base = client.generate(ids, max_new_tokens=1).id
                wait_stored(stack, 0.3)
                empty_gpu(client)
                new = [(ids[9] + 1) % 256, *([7] if rotated else [])]
                prompt = ids[:9] + new + ids[10:] + dice.choices(range(_LEAST, 256), k=TURN)
                began = time.perf_counter()
                answer = client.generate(prompt, max_new_tokens=1, kv_hints=envelope(base, (9, 10, new)))
                taken = time.perf_counter() - began
                said = answer.meta["leyline"]
                if said["outcome"] != "spliced" or said["tiers"]["cpu"] < LOADED - 2 * options.chunk_size:
                    raise RuntimeError(f"a load was not what it should be: {said}")
                if turn >= 0:
                    seconds[rotated].append(taken)
                    lineages[said["lineage"]] = rotated
                    rounds[rotated].append(said["lineage"])
    time.sleep(0.5)  # the journal is written beside the requests
    spent: dict[str, float] = {}
    for op in JournalReader(stack.journal_dir).records():
        name = op.lineage[:12]
        if op.tier is Tier.CPU and name in lineages and op.op in (OpKind.COPY, OpKind.COPY_ROTATE):
            # The few tokens before the edit are loaded by the fill, unturned in both.
            if op.tokens > 64 and (op.op is OpKind.COPY_ROTATE) != lineages[name]:
                raise RuntimeError(f"{op.op} of {op.tokens} tokens in the other kind of round")
            spent[name] = spent.get(name, 0.0) + op.micros / 1e6
    return Loads(
        [spent[name] for name in rounds[True]],
        [spent[name] for name in rounds[False]],
        seconds[True],
        seconds[False],
    )


# ------------------------------------------------------------------------------------------------ session


@dataclass(slots=True)
class Session:
    """What a session of 20 turns left in Redis.

    Attributes:
        keys, kv_bytes: of KV, after each turn.
        metadata_bytes: of everything else at the end.
        reused: part of each edited prompt that came from the cache.
        shifts: of each edit.
    """

    keys: list[int] = field(default_factory=list)
    kv_bytes: list[int] = field(default_factory=list)
    metadata_bytes: int = 0
    reused: list[float] = field(default_factory=list)
    shifts: list[int] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)


def hold_session(stack: Stack, options: argparse.Namespace, *, directives: bool) -> Session:
    """Every turn drops the oldest tool output that is left for a stub, then adds one; the GPU is empty.

    The answers are fixed beforehand as part of the next turn's text, so that both arms see the same tokens.
    """
    dice = random.Random(3)

    def words(count: int) -> list[int]:
        return dice.choices(range(_LEAST, 256), k=count)

    parts = [(True, words(OUTPUT)) if i % 2 else (False, words(NOTE)) for i in range(2 * KEPT_OUTPUTS)]
    session = Session()
    with stack.client() as client:
        base = send(client, flat(parts))
        for _ in range(options.turns):
            wait_stored(stack)
            empty_gpu(client)
            stale = next(i for i, (is_output, _) in enumerate(parts) if is_output)
            start = sum(len(text) for _, text in parts[:stale])
            stub = words(STUB + dice.randrange(STUB))
            stub[0] = (parts[stale][1][0] + 1) % 256
            hints = envelope(base.id, (start, start + OUTPUT, stub)) if directives else None
            session.shifts.append(len(stub) - OUTPUT)
            parts[stale] = (False, stub)
            parts += [(False, words(NOTE)), (True, words(OUTPUT))]
            base = send(client, flat(parts), hints)
            session.reused.append(base.cached_tokens / base.prompt_tokens)
            said = base.meta.get("leyline") or {}
            session.outcomes.append(str(said.get("reason") or said.get("outcome") or ""))
            count(stack, session)
        wait_stored(stack)
        count(stack, session)
    return session


def flat(parts: Sequence[tuple[bool, Sequence[int]]]) -> list[int]:
    """The whole text."""
    return [token for _, text in parts for token in text]


def send(client: Client, ids: Sequence[int], hints: Mapping[str, Any] | None = None) -> Generation:
    """One request for one token."""
    return client.generate(ids, max_new_tokens=1, sampling={"ignore_eos": True}, kv_hints=hints)


def count(stack: Stack, session: Session) -> None:
    """Look into Redis."""
    found = keys_of(stack)
    # Our keys say what they are; LMCache's own adapter stores nothing but KV.
    ours = stack.spec.l2 == "leyline"
    kv = {name: size for name, size in found.items() if not ours or b":kv:" in name}
    session.keys.append(len(kv))
    session.kv_bytes.append(sum(kv.values()))
    session.metadata_bytes = sum(found.values()) - session.kv_bytes[-1]


# -------------------------------------------------------------------------------------------------- drift


def drift(shifts: Sequence[int]) -> tuple[float, float]:
    """Largest error of keys after many shifts: turned once by their sum, and one after another."""
    dim, count = 64, 256
    spec = RopeSpec(dim, Pairing.INTERLEAVED, tuple(10000.0 ** (-2 * i / dim) for i in range(dim // 2)))
    raw = np.random.default_rng(0).standard_normal((count, dim // 2, 2))
    pairs = raw[..., 0] + 1j * raw[..., 1]
    positions = 4096 + np.arange(count)

    def keys(offset: int) -> np.ndarray:
        turned = pairs * np.exp(1j * np.outer(positions + offset, np.array(spec.inv_freq)))
        return np.stack([turned.real, turned.imag], -1).reshape(count, dim)

    def error(steps: Sequence[int]) -> float:
        pool = torch.from_numpy(keys(0).astype(np.float32)).reshape(count, 1, dim)
        layout = KVLayout.mla([pool], spec, dim, kv_lora_rank=0)
        slots = torch.arange(count)
        for step in steps:
            splice_rows(layout, slots, slots, step, backend="torch")
        return float(np.abs(pool[:, 0].double().numpy() - keys(sum(shifts))).max())

    return error([sum(shifts)]), error(shifts)


# ------------------------------------------------------------------------------------------------ recovery


def measure_recovery(options: argparse.Namespace) -> dict[str, Figure]:
    """Seconds until a server that came back is used again; nothing where that is not measured."""
    try:
        recovery = import_module("_recovery")
    except ModuleNotFoundError as error:
        if error.name != "_recovery":
            raise
        print("recovery is not measured: there is no _recovery.py", file=sys.stderr)
        return {}
    return dict(recovery.measure(spec_of(options)))


# ------------------------------------------------------------------------------------------------- figures


def summary(
    reuse: Sequence[Reuse], loads: Loads, ours: Session, vanilla: Session, recovery: Mapping[str, Figure]
) -> dict[str, Figure]:
    """Flat figures; see the module's text."""
    once, chained = drift(ours.shifts)
    return {
        **{f"reused_fraction_{each.place}": round(each.fraction, 4) for each in reuse},
        "rotated_over_plain_load": round(loads.ratio, 3),
        "rotated_over_plain_load_median": round(
            statistics.median(loads.rotated) / statistics.median(loads.plain), 3
        ),
        "rotated_load_ms": round(fastest(loads.rotated) * 1e3, 2),
        "plain_load_ms": round(fastest(loads.plain) * 1e3, 2),
        "rotated_over_plain_request": round(fastest(loads.rotated_request) / fastest(loads.plain_request), 3),
        "loaded_tokens": LOADED,
        "bytes_stored_over_vanilla": round(ours.kv_bytes[-1] / vanilla.kv_bytes[-1], 4),
        "keys": ours.keys[-1],
        "keys_vanilla": vanilla.keys[-1],
        "kv_bytes": ours.kv_bytes[-1],
        "kv_bytes_vanilla": vanilla.kv_bytes[-1],
        "metadata_bytes": ours.metadata_bytes,
        "session_turns": len(ours.reused),
        "session_turns_spliced": ours.outcomes.count("spliced"),
        "session_reused_fraction": round(statistics.mean(ours.reused), 4),
        "session_reused_fraction_least": round(min(ours.reused), 4),
        "session_reused_fraction_vanilla": round(statistics.mean(vanilla.reused), 4),
        "drift_one_rotation": float(f"{once:.3g}"),
        "drift_chained": float(f"{chained:.3g}"),
        **recovery,
    }


def show(reuse: Sequence[Reuse], ours: Session, vanilla: Session) -> None:
    """Tables."""
    rows = [
        (
            each.place,
            each.prompt,
            each.cached,
            *each.tiers.values(),
            f"{each.fraction:.1%}",
            each.seconds * 1e3,
        )
        for each in reuse
    ]
    columns = ("source", "prompt", "cached", "from gpu", "from l1", "from redis", "reused", "ms")
    print_table("one edit, its source in each tier", columns, rows)
    print_table(
        "session: after each turn",
        ("turn", "outcome", "reused", "vanilla", "keys", "vanilla", "KiB", "vanilla"),
        [
            (i + 1, outcome, f"{mine:.1%}", f"{theirs:.1%}", a, b, c // 1024, d // 1024)
            for i, (outcome, mine, theirs, a, b, c, d) in enumerate(
                zip(
                    ours.outcomes,
                    ours.reused,
                    vanilla.reused,
                    ours.keys,
                    vanilla.keys,
                    ours.kv_bytes,
                    vanilla.kv_bytes,
                    strict=False,
                )
            )
        ],
    )


def draw(reuse: Sequence[Reuse], loads: Loads, ours: Session, vanilla: Session, path: Path) -> None:
    """Reuse by tier, what a rotation adds to a load, and what the session stores."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    blue, grey, green, red = "#1f6fb2", "#95a5a6", "#27ae60", "#c0392b"
    figure, (left, middle, right) = pyplot.subplots(
        1, 3, figsize=(12.5, 3.9), gridspec_kw={"width_ratios": [1.25, 0.8, 1.4]}
    )
    names = {"gpu": "GPU", "l1": "CPU (L1)", "redis": "Redis", "other_node": "Redis,\nother node"}
    bottom = np.zeros(len(reuse))
    for label, color, heights in (
        ("from this tier", blue, [each.fraction for each in reuse]),
        ("prefilled", grey, [1 - each.fraction for each in reuse]),
    ):
        left.bar([names[each.place] for each in reuse], heights, bottom=bottom, color=color, label=label)
        bottom += np.array(heights)
    for i, each in enumerate(reuse):
        left.text(i, each.fraction / 2, f"{each.fraction:.0%}", ha="center", color="white", weight="bold")
    left.set_title(f"{CONTEXT:,} tokens, 200 replaced by {REPLACEMENT}")
    left.set_ylabel("part of the edited prompt")
    left.legend(loc="lower center", fontsize=8, framealpha=0.95)

    for at, (values, color) in enumerate(((loads.plain, grey), (loads.rotated, green))):
        ms = [value * 1e3 for value in values]
        middle.bar(at, fastest(ms), color=color, width=0.6)
        middle.plot([at] * len(ms), ms, ".", color="black", markersize=4, alpha=0.6)
    middle.set_xticks([0, 1], ["load", "load and\nrotate"])
    middle.set_title(f"{LOADED:,} tokens from L1: {loads.ratio:.2f}×")
    middle.set_ylabel("milliseconds in the scheduler")

    for session, color, label in ((vanilla, red, "vanilla LMCache"), (ours, blue, "Leyline")):
        sizes = [size / 2**20 for size in session.kv_bytes[: len(session.reused)]]
        right.plot(range(1, len(sizes) + 1), sizes, "o-", color=color, label=label, markersize=4)
    right.set_title("KV in Redis, a session with an edit each turn")
    right.set_xlabel("turn")
    right.set_ylabel("MiB")
    right.set_ylim(bottom=0)
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.legend(fontsize=8)
    right.grid(alpha=0.25)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    """Measure, print, write and draw."""
    options = arguments()
    with one_node(options) as stack:
        loads = measure_loads(stack, options)
        reuse = measure_reuse(stack, options)
    with one_node(options) as stack:
        ours = hold_session(stack, options, directives=True)
    plain = spec_of(options, plugin=False, server_module=False, l2="resp")
    with Stack(plain) as stack:
        vanilla = hold_session(stack, options, directives=False)
    recovery = {} if options.no_recovery else measure_recovery(options)
    show(reuse, ours, vanilla)
    if not options.no_picture:
        draw(reuse, loads, ours, vanilla, PICTURE)
    finish(
        "tiers",
        summary(reuse, loads, ours, vanilla, recovery),
        {
            "model": options.model,
            "device": "cpu",
            "chunk_size": options.chunk_size,
            "threads": options.threads,
            "reuse": [
                {"place": each.place, "prompt": each.prompt, "cached": each.cached, "tiers": dict(each.tiers)}
                for each in reuse
            ],
            "loads_ms": {
                "rotated": [round(value * 1e3, 2) for value in loads.rotated],
                "plain": [round(value * 1e3, 2) for value in loads.plain],
            },
            "session": {
                name: {
                    "keys": session.keys,
                    "kv_bytes": session.kv_bytes,
                    "reused": [round(value, 4) for value in session.reused],
                    "outcomes": session.outcomes,
                }
                for name, session in (("leyline", ours), ("vanilla", vanilla))
            },
        },
    )


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="mla", help="of the stacks (mla)")
    parser.add_argument("--repeat", type=int, default=15, help="rounds of the comparison of loads (15)")
    parser.add_argument("--turns", type=int, default=20, help="of the session (20)")
    parser.add_argument("--chunk-size", type=int, default=64, help="tokens per chunk of LMCache (64)")
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of SGLang (1)")
    parser.add_argument("--no-recovery", action="store_true", help="do not kill servers")
    parser.add_argument("--no-picture", action="store_true", help="leave docs/images alone")
    return parser.parse_args()


if __name__ == "__main__":
    main()
