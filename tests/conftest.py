"""Fixtures for all tests: above all the real stacks of support/specs.py, each a fixture of its name.

A test that takes ``stack_mla`` gets a running `leyline_lmcache.stack.Stack`, shared with all other tests of
the run: it may fill or flush the cache, but a test that stops or kills servers starts its own.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.pool import StackPool
from support.processes import processes
from support.specs import STACKS

from leyline_lmcache.stack import Stack
from leyline_lmcache.stack.device import activate_shim
from leyline_lmcache.stack.process import log_tail

# Before anything imports torch or sglang: two cores serve the tests and the servers.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")
activate_shim()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A run in the background of a shell: the programs under test would inherit the deafness.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_POOL = pytest.StashKey[StackPool]()


def _stacks_of(item: pytest.Item) -> list[str]:
    """Names of the stacks a test uses, in the order of STACKS."""
    used = set(getattr(item, "fixturenames", ()))
    return [name for name in STACKS if name in used]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests without servers first, then those of each stack together."""
    position = {name: index for index, name in enumerate(STACKS)}
    for item in items:
        if _stacks_of(item):
            item.add_marker(pytest.mark.stack)
    items.sort(key=lambda item: [position[name] for name in _stacks_of(item)])


@pytest.fixture(scope="session")
def stacks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackPool]:
    """All stacks of the run; mostly used through the fixtures named after them."""
    pool = StackPool(STACKS, tmp_path_factory.getbasetemp() / "stacks")
    pool.plan(_stacks_of(item) for item in request.session.items)
    request.config.stash[_POOL] = pool
    yield pool
    pool.stop_all()


def _stack_fixture(name: str) -> Callable[..., Any]:
    @pytest.fixture(name=name)
    def stack(stacks: StackPool) -> Stack:
        return stacks.get(name)

    return stack


for _name in STACKS:
    globals()[_name] = _stack_fixture(_name)


@pytest.fixture(autouse=True)
def _stacks_in_use(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tell the pool which stacks a test holds, so that it keeps these and may drop others."""
    names = _stacks_of(request.node)
    if not names:
        yield
        return
    pool: StackPool = request.getfixturevalue("stacks")
    pool.begin_test(names)
    yield
    pool.end_test(names)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Show the end of the servers' logs with a failed test."""
    report: pytest.TestReport = yield
    pool = item.config.stash.get(_POOL, None)
    if report.failed and pool is not None:
        for stack in pool.running(_stacks_of(item)):
            for role, log in stack.logs.items():
                report.sections.append((f"{stack.spec.model} {role} log", log_tail(log, 30)))
    return report


@pytest.fixture
def mark() -> Iterator[str]:
    """A value for MARK; whatever of it is left after the test is killed."""
    made = uuid.uuid4().hex
    yield made
    for pid in processes(made):
        os.kill(pid, signal.SIGKILL)
