"""How long edits do without a stored tier after its server came back, and how soon they are answered then.

    python benchmarks/_recovery.py [--model mla]

``first_answer_s_…`` is the time to the answer of an edited request whose source is on the GPU, sent in the
moment in which the server was killed (``…_hung``: stopped). ``recovery_s_…`` is the time from the server
being ready again to the first edited request that is served from its tier: from L1 for ``lmcache server``,
from Redis for Redis; it includes a new base each time, since both come back empty.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import httpx
from _common import Figure, print_table

from leyline_lmcache.stack import Stack, StackSpec
from leyline_lmcache.stack.client import Client, Generation
from leyline_lmcache.stack.ports import PortLease

LENGTH, SPAN = 600, (100, 200)
LONGEST_S = 60.0


def measure(spec: StackSpec) -> dict[str, Figure]:
    """Start a stack like ``spec`` with a Redis of its own, and kill its servers one after the other.

    Raises:
        TimeoutError: a tier was not used again within a minute.
    """
    lease = PortLease()
    port = lease.take("redis")
    lease.release()
    shared = {**spec.server_options, "redis": {"url": f"redis://127.0.0.1:{port}"}}
    spec = replace(spec, server_module=True, l2="leyline", redis_port=port, server_options=shared)
    with Stack(spec) as stack, stack.client() as client:
        session = _Session(stack, client)
        session.edit(session.base())  # compiles and warms
        return {
            "first_answer_s_daemon": session.first_answer("lmcache", signal.SIGKILL),
            "recovery_s_daemon": session.recovery("lmcache", "cpu", session.flush),
            "first_answer_s_redis": session.first_answer("redis", signal.SIGKILL),
            "recovery_s_redis": session.recovery("redis", "redis", session.forget_l1),
            "first_answer_s_daemon_hung": session.hung("lmcache"),
            "first_answer_s_redis_hung": session.hung("redis"),
        }


@dataclass(slots=True)
class _Session:
    stack: Stack
    client: Client

    def base(self) -> tuple[Generation, list[int]]:
        prompt = [random.randrange(3, 256) for _ in range(LENGTH)]
        answer = self.client.generate(prompt, max_new_tokens=4)
        return answer, prompt + list(answer.output_ids[:-1])

    def edit(self, base: tuple[Generation, list[int]]) -> Generation:
        """The span replaced by one token, and a new turn."""
        answer, known = base
        payload = {"base": answer.id, "start": SPAN[0], "end": SPAN[1], "replacement_ids": [7]}
        action = {"action_id": "a", "action_type": "kv.splice", "action_version": "1", "payload": payload}
        hints = {"protocol_version": "1", "message_id": "m", "actions": [action]}
        turn = [random.randrange(3, 256) for _ in range(16)]
        prompt = [*known[: SPAN[0]], 7, *known[SPAN[1] :], *turn]
        return self.client.generate(prompt, max_new_tokens=1, kv_hints=hints)

    def first_answer(self, role: str, number: signal.Signals) -> float:
        base = self.base()
        os.kill(self.stack.server(role).pid, number)
        begin = time.perf_counter()
        answer = self.edit(base)
        taken = time.perf_counter() - begin
        if answer.meta["leyline"]["outcome"] != "spliced":
            raise RuntimeError(f"without {role}, an edit on the GPU was not served: {answer.meta['leyline']}")
        return taken

    def hung(self, role: str) -> float:
        with self._stopped(role):
            return self.first_answer(role, signal.SIGSTOP)

    @contextmanager
    def _stopped(self, role: str) -> Iterator[None]:
        pid = self.stack.server(role).pid
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def recovery(self, role: str, tier: str, forget: Callable[[], None]) -> float:
        self.stack.restart(role)
        begin = time.perf_counter()
        while (taken := time.perf_counter() - begin) < LONGEST_S:
            base = self.base()
            forget()
            said = self.edit(base).meta["leyline"]
            if said["outcome"] == "spliced" and said["tiers"][tier] > 0:
                return time.perf_counter() - begin
        raise TimeoutError(f"{role}: its tier was not used again within {taken:.0f} s")

    def flush(self) -> None:
        self.client.wait_idle()
        self.client.flush_cache()

    def forget_l1(self) -> None:
        self.flush()
        time.sleep(0.1)  # what is stored reaches Redis a few milliseconds later
        httpx.post(f"{self.stack.lmcache_url}/cache/clear", timeout=30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="mla")
    options = parser.parse_args()
    figures = measure(StackSpec(model=options.model, chunk_size=16, threads=1, dtype="float32"))
    print_table("recovery", ("figure", "seconds"), list(figures.items()))


if __name__ == "__main__":
    main()
