"""Store and load throughput and latency of Leyline's L2 adapter against LMCache's own `resp` adapter.

Both are made by LMCache's factory, are driven through LMCache's L2 interface in this process as its
controllers drive them, and use the same Redis. Arms take turns within each round, in random order, and a
ratio compares two arms of one round, so that whatever else the machine does hits both. `resp` runs with
its default of 8 workers and with as many as ours has connections; the ratio is against whichever was
faster for that size and direction.

`resp` writes the bare KV bytes; ours adds a header and a checksum over the whole value, checked on load.
"""

from __future__ import annotations

import argparse
import math
import random
import select
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import redis
import torch
from _common import finish, print_table  # also puts the CPU shim in place; must come first
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from leyline_lmcache.stack import redis as redis_role
from leyline_lmcache.stack.ports import PortLease
from leyline_lmcache.stack.process import ServerProcess

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 8 * MIB)
TASK_BYTES = 32 * MIB
MOST_KEYS = 128
OPERATIONS = ("store", "load")
OURS = "leyline"


class Arm:
    """One adapter, driven as LMCache's controllers do: submit, wait for the event fd, take the result."""

    def __init__(self, name: str, spec: dict[str, Any]) -> None:
        self.name = name
        self.adapter = create_l2_adapter(get_l2_adapter_config_class(spec["type"]).from_dict(spec))

    def _wait(self, fd: int) -> None:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(60_000):
            raise TimeoutError(f"{self.name}: no answer in 60 s")
        consume_fd(fd)

    def store(self, keys: Sequence[Any], objects: Sequence[Any]) -> None:
        """One store task, to its end."""
        task = self.adapter.submit_store_task(list(keys), list(objects))
        done: dict[int, Any] = {}
        while task not in done:
            self._wait(self.adapter.get_store_event_fd())
            done |= self.adapter.pop_completed_store_tasks()
        if not done[task].is_successful():
            raise RuntimeError(f"{self.name}: a store failed")

    def load(self, keys: Sequence[Any], objects: Sequence[Any]) -> None:
        """One load task, to its end."""
        task = self.adapter.submit_load_task(list(keys), list(objects))
        bitmap = None
        while bitmap is None:
            self._wait(self.adapter.get_load_event_fd())
            bitmap = self.adapter.query_load_result(task)
        if bitmap.popcount() != len(keys):
            raise RuntimeError(f"{self.name}: a load missed {len(keys) - bitmap.popcount()} keys")


def memory_objects(size: int, count: int, fill: bool) -> list[Any]:
    """Blocks in one arena, as LMCache's L1 has them."""
    arena = torch.zeros(size * count, dtype=torch.uint8)
    if fill:
        arena.random_(0, 256)
    made = []
    for index in range(count):
        raw = arena[index * size : (index + 1) * size]
        metadata = MemoryObjMetadata(
            shape=torch.Size([size]),
            dtype=torch.uint8,
            address=raw.data_ptr(),
            phy_size=size,
            fmt=MemoryFormat.KV_2LTD,
            ref_count=1,
        )
        made.append(TensorMemoryObj(raw, metadata, parent_allocator=None))
    return made


def keys_for(arm: Arm, size: int, count: int) -> list[Any]:
    """Keys of one arm."""
    return [
        ObjectKey(chunk_hash=f"{arm.name}-{size}-{index}".encode(), model_name="bench/model", kv_rank=0)
        for index in range(count)
    ]


def measure(arms: Sequence[Arm], size: int, count: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each arm in each round, by operation; the first round is not counted."""
    sources = memory_objects(size, count, fill=True)
    targets = memory_objects(size, count, fill=False)
    seconds: dict[str, dict[str, list[float]]] = {op: {arm.name: [] for arm in arms} for op in OPERATIONS}
    for number in range(rounds + 1):
        for op, objects in (("store", sources), ("load", targets)):
            for arm in random.sample(list(arms), len(arms)):
                keys = keys_for(arm, size, count)
                start = time.perf_counter()
                getattr(arm, op)(keys, objects)
                taken = time.perf_counter() - start
                if number:
                    seconds[op][arm.name].append(taken)
                elif op == "load" and not all(
                    torch.equal(a.tensor, b.tensor) for a, b in zip(sources, targets, strict=True)
                ):
                    raise RuntimeError(f"{arm.name}: other bytes came back")
                if op == "load" and not number:
                    for target in targets:
                        target.tensor.zero_()
    return seconds


def ratio_to_best_other(seconds: dict[str, list[float]]) -> float:
    """Median over the rounds of (other's time / our time), against the other arm that was faster."""
    ours = seconds[OURS]
    others = [times for name, times in seconds.items() if name != OURS]
    best = min(others, key=statistics.median)
    return statistics.median(other / mine for other, mine in zip(best, ours, strict=True))


def run(port: int, rounds: int) -> tuple[dict[str, float], dict[str, Any]]:
    """All sizes; the summary and the details."""
    resp = {"type": "resp", "host": "127.0.0.1", "port": port}
    arms = [
        Arm(
            OURS,
            {
                "type": "plugin",
                "module_path": "leyline_lmcache.connector.l2",
                "class_name": "LeylineL2Adapter",
                "adapter_params": {
                    "url": f"redis://127.0.0.1:{port}",
                    "socket_timeout": 30.0,
                    "task_timeout": 60.0,
                },
            },
        ),
        Arm("resp-8", resp),
    ]
    connections = arms[0].adapter.options.load_connections
    arms.append(Arm(f"resp-{connections}", {**resp, "num_workers": connections}))
    names = [arm.name for arm in arms]
    flush = redis.Redis(port=port)
    summary: dict[str, float] = {}
    details: dict[str, Any] = {"rounds": rounds, "task_bytes": TASK_BYTES, "throughput": [], "latency": []}
    rows, latency_rows = [], []
    try:
        for size in SIZES:
            count = max(2, min(MOST_KEYS, TASK_BYTES // size))
            whole = measure(arms, size, count, rounds)
            flush.flushall()
            single = measure(arms, size, 1, rounds)
            flush.flushall()
            label = f"{size // KIB} KiB" if size < MIB else f"{size // MIB} MiB"
            key = label.replace(" ", "").lower()
            for op in OPERATIONS:
                rate = {name: size * count / statistics.median(whole[op][name]) / 1e9 for name in names}
                times = {name: 1e3 * statistics.median(single[op][name]) for name in names}
                over = ratio_to_best_other(whole[op])
                slower = 1 / ratio_to_best_other(single[op])
                summary[f"{op}_over_resp_{key}"] = round(over, 3)
                summary[f"{op}_latency_over_resp_{key}"] = round(slower, 3)
                rows.append([label, op, *(rate[name] for name in names), over])
                latency_rows.append([label, op, *(times[name] for name in names), slower])
                details["throughput"].append(
                    {"size": size, "keys": count, "operation": op, "gb_per_s": rate, "seconds": whole[op]}
                )
                details["latency"].append({"size": size, "operation": op, "ms": times, "seconds": single[op]})
    finally:
        for arm in arms:
            arm.adapter.close()
        flush.close()
    print_table(
        f"Throughput in GB/s, tasks of up to {TASK_BYTES // MIB} MiB (medians of {rounds} rounds)",
        ("chunk", "task", *names, "over resp"),
        rows,
    )
    print_table("Latency of a task of one chunk in ms", ("chunk", "task", *names, "over resp"), latency_rows)
    return summary, details


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def main() -> None:
    """Start a Redis, measure, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, PortLease() as lease:
        port = lease.take("redis")
        server = ServerProcess(redis_role.command(port, Path(folder)), Path(folder))
        server.start()
        try:
            server.wait_ready(lambda: redis_role.is_ready(port), 20.0)
            figures, details = run(port, options.rounds)
        finally:
            server.stop()
    throughput = {name: value for name, value in figures.items() if "latency" not in name}
    latency = {name: value for name, value in figures.items() if "latency" in name}
    summary = {
        "throughput_over_resp": round(geometric_mean(list(throughput.values())), 3),
        "latency_over_resp": round(geometric_mean(list(latency.values())), 3),
        **figures,
    }
    finish("l2_redis", summary, details)


if __name__ == "__main__":
    main()
