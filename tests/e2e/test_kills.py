"""Redis, ``lmcache server`` and SGLang are killed or stopped while idle, while a view is looked up, while its
KV is loaded, and while KV is stored: no wrong token, no slot or lock lost, and all is used again afterwards.

What an edited request has to answer comes from the fp32 reference: with its view's KV if the report says that
it was spliced, by prefilling else.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from reference.model import Context, Reference
from reference.rules import Edit
from support.specs import STACKS, with_faults

from leyline_lmcache.stack import Stack
from leyline_lmcache.stack.client import Client, Generation
from leyline_lmcache.stack.ports import PortLease

from .driver import agree, edited, envelope, eventually, report, tokens, written_since

pytestmark = [pytest.mark.stack, pytest.mark.slow]

CHUNK, OUTPUT = 16, 5
LENGTH = 19 * CHUNK
"""Of a base: whole chunks, so that all of it is stored."""
EDIT: Edit = (100, 150, (7, 8, 9))
PHASES = ("idle", "plan", "load", "store")
POINTS = {"plan": "leyline.fetch", "load": "prepare_retrieve", "store": "commit_store"}
"""The call before which the engine waits while somebody dies."""
AWAY_REASONS = {"source_missing", "tier_error", "tier_timeout", "unknown_base"}
BACK_S = 60.0
"""Generous: a loaded machine takes long to start a server."""
ANSWER_S = 20.0
"""Far below LMCache's own time-out, with which the stack is configured."""

_TROUBLE = re.compile(r"CRITICAL|panicked|leak detected|Scheduler hit an exception|AssertionError")


@dataclass(frozen=True)
class Base:
    id: str
    context: Context


@dataclass
class Rig:
    """The servers, and the reference beside them. Every answer is checked."""

    stack: Stack
    reference: Reference
    client: Client
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2))
    _count: Iterator[int] = field(default_factory=itertools.count)

    def base(self, prompt: list[int] | None = None) -> Base:
        """A request without edits."""
        prompt = prompt or self.prompt()
        answer = self._ask(prompt)
        want = self.reference.reprefill(prompt, OUTPUT)
        agree(answer, want)
        return Base(answer.id, want.context)

    def prompt(self) -> list[int]:
        return tokens(LENGTH - OUTPUT + 1, ("kills", next(self._count)))

    def edit(self, base: Base) -> dict[str, Any]:
        """An edited request with a new turn; its report."""
        prompt = edited(base.context.tokens, EDIT) + tokens(9, ("turn", next(self._count)))
        answer = self._ask(prompt, kv_hints=envelope(base.id, EDIT))
        said = report(answer)
        assert said is not None
        if said["outcome"] == "spliced":
            agree(answer, self.reference.serve(base.context, [EDIT], prompt, OUTPUT)[0])
        else:
            assert said["outcome"] == "fallback" and said["reason"] in AWAY_REASONS, said
            agree(answer, self.reference.reprefill(prompt, OUTPUT))
        return said

    def _ask(self, prompt: list[int], **options: Any) -> Generation:
        sampling = {"ignore_eos": True}
        return self.client.generate(
            prompt, max_new_tokens=OUTPUT, logprobs=True, sampling=sampling, **options
        )

    def start(self, work: Callable[[], Any]) -> Future[Any]:
        return self._threads.submit(work)

    def flush(self) -> None:
        """Empty the GPU."""
        self.client.wait_idle()
        assert self.client.flush_cache()

    def forget_l1(self) -> None:
        """Leave what there is in Redis alone."""
        self.flush()
        eventually(lambda: not any(self.locks().values()), "what is stored has reached Redis")
        httpx.post(f"{self.stack.lmcache_url}/cache/clear", timeout=30).raise_for_status()

    @contextmanager
    def waiting_at(self, point: str, work: Callable[[], Any]) -> Iterator[Future[Any]]:
        """Within it, the engine waits in the middle of ``work``."""
        armed = self.stack.directory / "pauses" / point
        armed.parent.mkdir(exist_ok=True)
        reached = armed.with_name(f"{point}.reached")
        reached.unlink(missing_ok=True)
        armed.touch()
        try:
            job = self.start(work)
            eventually(lambda: reached.exists() or job.done(), f"the engine is at {point}")
            assert reached.exists(), f"it was never at {point}: {job.result()}"
            yield job
        finally:
            armed.unlink()

    def down(self, role: str, how: str) -> None:
        number = signal.SIGKILL if how == "kill" else signal.SIGSTOP
        os.kill(self.stack.server(role).pid, number)

    def up(self, role: str, how: str) -> None:
        if how == "kill":
            self.stack.restart(role)
        else:
            os.kill(self.stack.server(role).pid, signal.SIGCONT)

    def locks(self) -> dict[str, int]:
        status = httpx.get(f"{self.stack.lmcache_url}/status", timeout=30).json()
        l1 = status.get("storage_manager", status)["l1_manager"]
        return {
            name: l1[name] for name in ("read_locked_count", "write_locked_count", "staging_object_count")
        }

    def whole(self) -> None:
        """I6: every slot is free or evictable, no chunk is locked."""
        self.flush()
        assert self.client.pool().used == 0
        eventually(lambda: not any(self.locks().values()), f"no lock is left: {self.locks()}")

    def recovered(self, who: str, tier: str, forget: Callable[[], None]) -> None:
        """A new base is stored, forgotten and loaded from ``tier`` again."""
        begin = time.monotonic()

        def served() -> bool:
            base = self.base()
            self.client.wait_idle()
            forget()
            said = self.edit(base)
            return said["outcome"] == "spliced" and said["tiers"][tier] > 0

        eventually(served, f"edits are served from {tier} again", BACK_S)
        print(f"{who}: served from {tier} again after {time.monotonic() - begin:.2f} s")

    def at_once(self, work: Callable[[], Any], what: str) -> Any:
        begin = time.monotonic()
        result = work()
        took = time.monotonic() - begin
        assert took < ANSWER_S, f"{what} took {took:.1f} s"
        return result


@pytest.fixture(scope="module")
def rig(reference_of: Callable[[str], Reference]) -> Iterator[Rig]:
    lease = PortLease()
    port = lease.take("redis")
    lease.release()
    pool = f"leyline-kills-{port}"
    spec = replace(
        STACKS["stack_mla"],
        threads=1,
        chunk_size=CHUNK,
        server_module=True,
        server_options={"redis": {"url": f"redis://127.0.0.1:{port}"}},
        l2="leyline",
        l1_size_gb=0.2,
        redis_port=port,
        max_total_tokens=4096,
        context_length=2048,
        mq_timeout_s=120.0,
        # Shared memory is where a store can be interrupted; a dead engine is given up as soon as LMCache can.
        lmcache_args=("--shm-name", pool, "--worker-reap-timeout-seconds", "30"),
        env=with_faults() | {"LEYLINE_TEST_PAUSES": "1"},
    )
    try:
        with Stack(spec) as stack, stack.client(120.0) as client:
            yield Rig(stack, reference_of(spec.model), client)
            text = written_since(stack.logs["sglang"], 0)
            found = _TROUBLE.search(text)
            assert found is None, text[max(0, found.start() - 500) : found.start() + 3000]
    finally:
        with suppress(FileNotFoundError):
            Path(f"/dev/shm/lmcache_l1_pool_{pool}").unlink()


@pytest.mark.parametrize("how", ["kill", "hang"])
@pytest.mark.parametrize("phase", PHASES)
def test_t9_lmcache_server(rig: Rig, phase: str, how: str) -> None:
    far = rig.base()
    rig.flush()
    kept = rig.base()
    if phase == "idle":
        rig.down("lmcache", how)
    else:
        work = rig.base if phase == "store" else lambda: rig.edit(far)
        with rig.waiting_at(POINTS[phase], work) as job:
            rig.down("lmcache", how)
        rig.at_once(lambda: job.result(ANSWER_S), "a request in the middle")
    for _ in range(2):
        assert rig.at_once(lambda: rig.edit(kept), "an edit on the GPU")["outcome"] == "spliced"
    new = rig.at_once(rig.base, "a new request")
    assert rig.edit(new)["outcome"] == "spliced"
    rig.flush()
    said = rig.at_once(lambda: rig.edit(new), "an edit whose source is away")
    assert said["outcome"] == "fallback"
    rig.up("lmcache", how)
    rig.recovered(f"lmcache server, {phase}, {how}", "cpu", rig.flush)
    rig.whole()


@pytest.mark.parametrize("how", ["kill", "hang"])
@pytest.mark.parametrize("phase", PHASES)
def test_t8_redis(rig: Rig, phase: str, how: str) -> None:
    far = rig.base()
    rig.forget_l1()
    kept = rig.base()
    if phase == "idle":
        rig.down("redis", how)
    else:
        nobody = Base("nobody", far.context)
        work = {"plan": lambda: rig.edit(nobody), "load": lambda: rig.edit(far), "store": rig.base}[phase]
        with redis.Redis.from_url(rig.stack.redis_url) as slow:
            slow.client_pause(2000)
        job = rig.start(work)
        time.sleep(0.1)
        rig.down("redis", how)
        rig.at_once(lambda: job.result(ANSWER_S), "a request in the middle")
    assert rig.at_once(lambda: rig.edit(kept), "an edit on the GPU")["outcome"] == "spliced"
    # On one node, edits go on: L1 has what Redis would have.
    new = rig.at_once(rig.base, "a new request")
    rig.flush()
    said = rig.at_once(lambda: rig.edit(new), "an edit from L1")
    assert said["outcome"] == "spliced" and said["tiers"]["cpu"] > 0
    rig.at_once(lambda: rig.edit(far), "an edit whose source is away")
    rig.up("redis", how)
    rig.recovered(f"redis, {phase}, {how}", "redis", rig.forget_l1)
    rig.whole()


@contextmanager
def _slow(server: redis.Redis) -> Iterator[None]:
    # What is asked in this time is answered after it: each question costs up to two seconds.
    server.client_pause(2000)
    yield
    server.client_unpause()


@contextmanager
def _full(server: redis.Redis) -> Iterator[None]:
    server.config_set("maxmemory", 1)
    yield
    server.config_set("maxmemory", 0)


@contextmanager
def _read_only(server: redis.Redis) -> Iterator[None]:
    """As a primary is after a failover that nobody told us of."""
    server.replicaof("127.0.0.1", "1")
    yield
    server.replicaof("NO", "ONE")


@pytest.mark.parametrize("fault", [_slow, _full, _read_only])
def test_t8_redis_is_slow_or_refuses_writes(rig: Rig, fault: Callable[[redis.Redis], Any]) -> None:
    far = rig.base()
    rig.forget_l1()
    before = _failures(rig)
    with redis.Redis.from_url(rig.stack.redis_url) as server, fault(server):
        kept = rig.at_once(rig.base, "a new request")
        assert rig.at_once(lambda: rig.edit(kept), "an edit on the GPU")["outcome"] == "spliced"
        rig.flush()
        said = rig.at_once(lambda: rig.edit(kept), "an edit from L1")
        assert said["outcome"] == "spliced" and said["tiers"]["cpu"] > 0
        rig.at_once(lambda: rig.edit(far), "an edit whose source Redis has")
        if fault is not _slow:
            eventually(lambda: _failures(rig) > before, "what was refused is counted by name")
    rig.recovered(f"redis, {fault.__name__}", "redis", rig.forget_l1)
    rig.whole()


def _failures(rig: Rig) -> int:
    """Chunks that Redis did not take, as ``/status`` counts them."""
    status = httpx.get(f"{rig.stack.lmcache_url}/status", timeout=30).json()
    (adapter,) = status.get("storage_manager", status)["l2_adapters"]
    stores = adapter["redis"]["operations"].get("store", {"keys": {}})["keys"]
    return sum(count for name, count in stores.items() if name != "ok")


@pytest.mark.parametrize("phase", PHASES)
def test_sglang(rig: Rig, phase: str) -> None:
    far = rig.base()
    rig.flush()
    interrupted = rig.prompt()
    if phase == "idle":
        rig.down("sglang", "kill")
    else:
        work = (lambda: rig.base(interrupted)) if phase == "store" else (lambda: rig.edit(far))
        with rig.waiting_at(POINTS[phase], work) as job:
            rig.down("sglang", "kill")
        with pytest.raises(httpx.HTTPError):
            job.result(ANSWER_S)
    begin = time.monotonic()
    rig.stack.restart("sglang")
    print(f"sglang, {phase}: serves again after {time.monotonic() - begin:.1f} s")
    said = rig.edit(far)
    assert said["outcome"] == "spliced" and said["tiers"]["cpu"] + said["tiers"]["redis"] > 0
    for _ in range(2):
        # What a store left half-written is nobody's KV.
        rig.base(interrupted)
        rig.flush()
    assert rig.client.pool().used == 0


def test_nothing_of_a_dead_engine_is_left(rig: Rig) -> None:
    eventually(lambda: not any(rig.locks().values()), f"its locks go: {rig.locks()}", 90.0)
    rig.recovered("after all", "cpu", rig.flush)
    rig.whole()
