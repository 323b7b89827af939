"""Replays sets of sessions in arms, one stack after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from leyline_lmcache.replay.arms import Arm, Servers, served_model
from leyline_lmcache.replay.ceiling import Ceiling, ceilings
from leyline_lmcache.replay.play import Play, play
from leyline_lmcache.replay.tally import Tally, tally
from leyline_lmcache.replay.tokens import HEAD
from leyline_lmcache.replay.workload import Session, Workload
from leyline_lmcache.stack import Stack
from leyline_lmcache.stack.client import Client

CONCURRENCY = (1, 8)
Report = Callable[[str], None]


@dataclass(slots=True)
class Bounds:
    """Ceilings of sessions, each computed once."""

    least: int
    _known: dict[tuple[int, bool], list[Ceiling]] = field(default_factory=dict)

    def __call__(self, session: Session, arm: Arm) -> Sequence[Ceiling]:
        """Of the prompts that an arm sends."""
        prompts = session.sent if arm.has_policy else session.full
        key = (id(session), prompts is session.full)
        if key not in self._known:
            # The head of a session is the same in all its turns, whatever it is.
            self._known[key] = ceilings([[0] * HEAD + list(prompt) for prompt in prompts], self.least)
        return self._known[key]


def compare(
    workloads: Sequence[Workload],
    servers: Servers,
    *,
    arms: Sequence[Arm] = tuple(Arm),
    concurrency: Sequence[int] = CONCURRENCY,
    on_progress: Report = lambda line: None,
) -> list[Tally]:
    """Replay everything in every arm; the arm without policy only where there is one.

    Raises:
        StackError: a server did not start.
        RequestError: one refused a request.
    """
    bounds = Bounds(servers.min_reuse)
    for workload in workloads:
        on_progress(f"{workload.name}: computing ceilings")
        for session in workload.sessions:
            for arm in arms:
                if workload.has_policy or arm.has_policy:
                    bounds(session, arm)
    made: list[Tally] = []
    with served_model(servers) as model:
        for arm in arms:
            wanted = [each for each in workloads if each.has_policy or arm.has_policy]
            if not wanted:
                continue
            on_progress(f"{arm}: starting the servers")
            with Stack(servers.spec(arm, model)) as stack, stack.client() as client:
                warm_up(client)
                for workload in wanted:
                    for level in concurrency:
                        where = f"{arm}: {workload.name}, {level} at a time"
                        on_progress(where)
                        made.append(tally(replay(client, arm, workload, bounds, level)))
                        on_progress(f"{where}: {made[-1].hit_rate:.1%} in {made[-1].seconds:.0f} s")
    return made


def replay(
    client: Client, arm: Arm, workload: Workload, bounds: Bounds, level: int, run: object = ""
) -> Play:
    """Replay one set once."""
    return play(client, arm, workload.name, workload.sessions, bounds, level, run)


def warm_up(client: Client) -> None:
    """Nobody pays for a server's first requests."""
    for length in (16, 512, 2048):
        client.generate([number % 199 for number in range(length)], max_new_tokens=1)
