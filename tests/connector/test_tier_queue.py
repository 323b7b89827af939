"""Work for the stored tiers: what waits for it goes first, and nothing grows without bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_lmcache.connector.tier_queue import Priority, TierQueue
from leyline_lmcache.reasons import Fallback, FallbackReason


class Job:
    def __init__(self, polls: int = 1, late: bool = False, fault: str | None = None) -> None:
        self.polls, self.late, self.fault = polls, late, fault
        self.started = self.cancelled = False

    def start(self) -> None:
        assert not self.started
        self.started = True
        if self.fault == "start":
            raise Fallback(FallbackReason.TIER_ERROR, "start")

    def advance(self) -> bool:
        assert self.started and not self.cancelled
        if self.fault == "advance":
            raise Fallback(FallbackReason.TIER_ERROR, "advance")
        self.polls -= 1
        return self.polls <= 0

    def is_late(self) -> bool:
        return self.late

    def cancel(self) -> None:
        assert not self.cancelled
        self.cancelled = True


def test_a_load_goes_before_prefetches_that_waited_longer() -> None:
    queue = TierQueue(running=2, waiting=8)
    jobs = {name: Job() for name in ("load1", "ahead1", "ahead2", "load2", "load3")}
    for name, job in jobs.items():
        queue.submit(name, job, Priority.PREFETCH if "ahead" in name else Priority.LOAD)
    # Prefetches take half of the room at most, and load1 has it.
    assert [name for name, job in jobs.items() if job.started] == ["load1", "load2"]
    assert queue.poll("load3") is False and not jobs["load3"].started
    assert queue.poll("load2") is True
    assert queue.poll("load3") is False and jobs["load3"].started
    assert queue.poll("load1") is True and queue.poll("load3") is True
    assert queue.background() == ["ahead1"]
    for _ in range(2):
        queue.poll("ahead1")
    assert queue.background() == ["ahead2"]


def test_a_full_queue_sends_a_request_to_prefill() -> None:
    queue = TierQueue(running=1, waiting=2)
    for name in "abc":
        queue.submit(name, Job(), Priority.LOAD)
    with pytest.raises(Fallback, match="tier_waiting") as refused:
        queue.submit("d", Job(), Priority.LOAD)
    assert refused.value.reason is FallbackReason.TIER_TIMEOUT
    assert queue.refused[Priority.LOAD] == 1 and len(queue) == 3
    # Other priorities have room of their own.
    queue.submit("e", Job(), Priority.INVALIDATE)


def test_a_deadline_passes_while_a_job_waits() -> None:
    queue = TierQueue(running=1, waiting=2)
    queue.submit("a", Job(polls=9), Priority.LOAD)
    late = Job(late=True)
    queue.submit("b", late, Priority.LOAD)
    with pytest.raises(Fallback, match="tier_running"):
        queue.poll("b")
    assert not late.started and queue.poll("b") is None and len(queue) == 1


@pytest.mark.parametrize("fault", ["start", "advance"])
def test_a_job_that_fails_makes_room(fault: str) -> None:
    queue = TierQueue(running=1, waiting=2)
    bad, good = Job(fault=fault), Job()
    if fault == "start":
        with pytest.raises(Fallback, match="start"):
            queue.submit("bad", bad, Priority.LOAD)
    else:
        queue.submit("bad", bad, Priority.LOAD)
    queue.submit("good", good, Priority.LOAD)
    if fault == "advance":
        with pytest.raises(Fallback, match="advance"):
            queue.poll("bad")
    while queue.poll("good") is False:
        pass
    assert good.started and len(queue) == 0


def test_cancelled_jobs_give_back_and_make_room() -> None:
    queue = TierQueue(running=1, waiting=2)
    first, second, third = Job(), Job(), Job()
    for name, job in (("first", first), ("second", second), ("third", third)):
        queue.submit(name, job, Priority.LOAD)
    assert queue.cancel("second") and second.cancelled and not second.started
    assert queue.cancel("first") and first.cancelled
    assert not queue.cancel("first")
    assert queue.poll("third") is False and third.started


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "poll", "cancel"]), st.integers(0, 9), st.sampled_from(list(Priority))
    ),
    max_size=60,
)


@given(STEPS, st.integers(1, 4), st.integers(1, 4))
def test_any_order_of_calls_stays_within_bounds_and_loses_nothing(
    steps: list[tuple[str, int, Priority]], running: int, waiting: int
) -> None:
    queue = TierQueue(running, waiting)
    jobs: dict[str, Job] = {}
    ended: set[str] = set()
    for number, (step, which, priority) in enumerate(steps):
        known = sorted(set(jobs) - ended)
        if step == "submit":
            name = f"job{number}"
            try:
                queue.submit(name, job := Job(polls=which % 3), priority)
                jobs[name] = job
            except Fallback:
                assert queue.depth(priority) == waiting
        elif known:
            name = known[which % len(known)]
            if (step == "poll" and queue.poll(name)) or (step == "cancel" and queue.cancel(name)):
                ended.add(name)
        assert len(queue._running) <= running
        assert all(queue.depth(each) <= waiting for each in Priority)
        assert sorted(queue.names()) == sorted(set(jobs) - ended)
    for _ in range(300):
        for name in queue.names():
            queue.poll(name)
    assert len(queue) == 0
