"""Breaker and write gate, on a clock of the test's own."""

from __future__ import annotations

from leyline_lmcache.connector.redis import Outcome
from leyline_lmcache.connector.redis.breaker import Breaker, WriteGate


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(3, 1.0, 8.0, Clock())
    assert not breaker.failed() and not breaker.failed()
    breaker.succeeded()
    assert not breaker.failed() and not breaker.failed() and not breaker.is_open
    assert breaker.failed() and breaker.is_open and breaker.opened == 1


def test_open_stays_open_until_a_probe_succeeds() -> None:
    breaker = Breaker(1, 1.0, 8.0, Clock())
    assert breaker.failed()
    assert not breaker.failed()  # told once
    breaker.succeeded()  # a straggler that was under way
    assert breaker.is_open
    assert breaker.close() and not breaker.is_open
    assert not breaker.close()


def test_probes_come_less_and_less_often() -> None:
    clock = Clock()
    breaker = Breaker(1, 1.0, 8.0, clock)
    breaker.failed()
    waits = []
    for _ in range(6):
        waits.append(breaker.probe_due - clock.now)
        clock.now = breaker.probe_due
        breaker.probe_failed()
    for wait, nominal in zip(waits, (1, 2, 4, 8, 8, 8), strict=True):
        assert 0.75 * nominal <= wait <= nominal


def test_a_relapse_goes_on_where_it_was_and_health_starts_anew() -> None:
    clock = Clock()
    breaker = Breaker(1, 1.0, 64.0, clock)
    breaker.failed()
    for _ in range(3):
        breaker.probe_failed()
    breaker.close()
    clock.now += 1
    breaker.failed()
    assert breaker.probe_due - clock.now > 8
    breaker.close()
    clock.now += 60
    breaker.failed()
    assert breaker.probe_due - clock.now <= 1


def test_the_gate_lets_one_try_at_a_time_after_a_refusal() -> None:
    clock = Clock()
    gate = WriteGate(1.0, 8.0, clock)
    assert gate.admits() and gate.admits()
    assert gate.refused(Outcome.OUT_OF_MEMORY)
    assert not gate.admits() and gate.reason is Outcome.OUT_OF_MEMORY
    clock.now += 1
    assert gate.admits() and not gate.admits()
    assert not gate.refused(Outcome.READ_ONLY)  # told once
    clock.now += 1.5
    assert not gate.admits()  # the wait doubled
    clock.now += 1
    assert gate.admits()
    assert gate.accepted() and gate.admits() and gate.admits()
    assert not gate.accepted()
