"""Fixtures for tests that start processes of their own."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator

import pytest
from support.processes import processes


@pytest.fixture
def mark() -> Iterator[str]:
    """A value for MARK; whatever of it is left after the test is killed."""
    made = uuid.uuid4().hex
    yield made
    for pid in processes(made):
        os.kill(pid, signal.SIGKILL)
