"""Fetches of the server module over a stand-in for LMCache's storage, which loses races on demand."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from leyline_lmcache.connector import wire
from leyline_lmcache.connector.server import LeylineModule, ModuleConfig

KEYS = [f"k{i}" for i in range(6)]


class Cells:
    def __init__(self, cells: set[int]) -> None:
        self._cells = cells

    def get_indices_list(self) -> list[int]:
        return sorted(self._cells)


@dataclass(frozen=True)
class Group:
    keys: list[str]


class Storage:
    """``l1``, ``l2``: what is there. ``busy``: keys another prefetch is bringing, for so many more tasks."""

    def __init__(self) -> None:
        self.l1: set[str] = set()
        self.l2: set[str] = set()
        self.busy: Counter[str] = Counter()
        self.locks: Counter[str] = Counter()
        self.tasks: list[list[str]] = []

    def submit_prefetch_task(self, spec: Any, external_request_id: str) -> int:
        (group,) = spec.key_groups
        self.tasks.append(list(group.keys))
        return len(self.tasks) - 1

    def query_prefetch_status(self, handle: int) -> Any:
        keys = self.tasks[handle]
        found = {i for i, key in enumerate(keys) if key in self.l1 | self.l2}
        free = {i for i in found if not self.busy[keys[i]]}
        brought = {i for i in free if keys[i] not in self.l1}
        for i in found - free:
            self.busy[keys[i]] -= 1
        for i in free:
            self.locks[keys[i]] += 1
            self.l1.add(keys[i])
        return SimpleNamespace(
            hit_cells=[Cells(free)], l2_hit_cells=[Cells(brought)], found_cells=[Cells(found)]
        )

    def finish_read_prefetched(self, keys: list[str], read_locks: int) -> None:
        for key in keys:
            self.locks[key] -= read_locks


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    context = SimpleNamespace(storage_manager=Storage(), chunk_size=1)
    made = LeylineModule(SimpleNamespace(server_context=context, modules=()), ModuleConfig())

    def rows(message: Any, part: wire.Part) -> Any:
        chunks = [i for a, b in part.chunks for i in range(a, b)]
        return chunks, [Group([KEYS[i] for i in chunks])]

    monkeypatch.setattr(made, "_rows", rows)
    monkeypatch.setattr("leyline_lmcache.connector.server.PrefetchTaskSpec", SimpleNamespace)
    yield made
    made.close()


def fetch(module: Any, *chunks: tuple[int, int]) -> wire.Fetched:
    part = wire.Part(tokens=b"", salt="", chunks=chunks)
    message = wire.Fetch(job="j", model="m", world_size=1, readers=1, ttl_s=10, parts=(part,))
    module.fetch(wire.encode(message))
    for _ in range(20):
        answer = wire.decode(module.poll(wire.encode(wire.Job(job="j"))), wire.Fetched)
        if answer.done:
            return answer
    raise AssertionError("never done")


def held(module: Any) -> dict[str, int]:
    return {key: count for key, count in module._storage.locks.items() if count}


def test_hits_and_what_of_them_came_from_l2(module: Any) -> None:
    module._storage.l1, module._storage.l2 = {"k0", "k2"}, {"k2", "k3"}
    answer = fetch(module, (0, 1), (2, 6))
    assert (answer.hits, answer.brought) == (((0, 2, 3),), ((3,),))
    assert len(module._storage.tasks) == 1, "nothing that is missing is asked for again"
    module.release(wire.encode(wire.Job(job="j", keep=((0,),))))
    assert held(module) == {"k0": 1}


def test_what_another_prefetch_is_bringing_is_waited_for(module: Any) -> None:
    storage = module._storage
    storage.l2 = set(KEYS)
    storage.busy.update({"k1": 1, "k3": 2})
    answer = fetch(module, (0, 5))
    assert (answer.hits, answer.brought) == (((0, 1, 2, 3, 4),), ((0, 1, 2, 3, 4),))
    assert storage.tasks == [KEYS[:5], ["k1", "k3"], ["k3"]]
    assert held(module) == dict.fromkeys(KEYS[:5], 1)
    module.release(wire.encode(wire.Job(job="j")))
    assert held(module) == {}


def test_but_not_for_ever(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leyline_lmcache.connector.server._RETRY_S", -1.0)
    module._storage.l2 = set(KEYS)
    module._storage.busy["k1"] = 1000
    assert fetch(module, (0, 3)).hits == ((0, 2),)
    module.release(wire.encode(wire.Job(job="j")))
    assert held(module) == {}
