"""``internal_error``: a fault of our own costs the edit, never the request, and never the server (I3, I6)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from reference.rules import Edit

from leyline_lmcache.stack import Stack
from leyline_lmcache.stack.client import Client

from .driver import Twin, agree, edited, envelope, refused, report, tokens, whole_pool

EDIT: Edit = (100, 200, (7, 8, 9))


@pytest.fixture
def stack(stack_small: Stack) -> Stack:
    return stack_small


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    """Here the log may show tracebacks: each fault is logged with one."""
    with stack.client(timeout_s=120.0) as client:
        yield client


@contextmanager
def fault(stack: Stack, name: str) -> Iterator[None]:
    """Let the server's own code raise at a named point; see support/faults."""
    armed = stack.directory / "faults" / name
    armed.parent.mkdir(exist_ok=True)
    armed.touch()
    try:
        yield
    finally:
        armed.unlink()


@pytest.mark.parametrize("name", ["plan", "sources", "allocate", "move", "reach", "keys"])
def test_internal_error_of_the_splice(stack: Stack, client: Client, twin: Twin, name: str) -> None:
    base = twin.base(tokens(400, ("fault", name)))
    shared = twin.base(base.tokens + tokens(9, "shared"))  # so that slots are copied and not taken over
    prompt = edited(base.tokens, EDIT) + tokens(9, "t")
    with fault(stack, name):
        answer = twin.ask(prompt, max_new_tokens=5, kv_hints=envelope(base.id, EDIT))
    assert "InjectedFault" in refused(answer, "internal_error")
    agree(answer, twin.reference.reprefill(prompt, 5))
    assert client.wait_idle().used == 0
    twin.edit(shared, [EDIT], tokens(9, "t"))
    whole_pool(client)


@pytest.mark.parametrize("name", ["move", "sources"])
def test_internal_error_in_place(stack: Stack, client: Client, twin: Twin, name: str) -> None:
    """Slots that were being taken over are given back."""
    base = twin.base(tokens(400, ("fault in place", name)))
    prompt = edited(base.tokens, EDIT) + tokens(9, "t")
    with fault(stack, name):
        answer = twin.ask(prompt, max_new_tokens=5, kv_hints=envelope(base.id, EDIT))
    refused(answer, "internal_error")
    agree(answer, twin.reference.reprefill(prompt, 5))
    whole_pool(client)


@pytest.mark.parametrize("name", ["fills", "fill"])
def test_a_fault_while_filling(stack: Stack, client: Client, twin: Twin, name: str) -> None:
    """The replacement is then missing, and the request prefills."""
    base = twin.base(tokens(400, ("fault", name)))
    prompt = edited(base.tokens, EDIT) + tokens(9, "t")
    with fault(stack, name):
        answer = twin.ask(prompt, max_new_tokens=5, kv_hints=envelope(base.id, EDIT))
    refused(answer, "source_missing")
    agree(answer, twin.reference.reprefill(prompt, 5))
    whole_pool(client)


@pytest.mark.parametrize("name", ["record", "edited record"])
def test_a_fault_while_remembering(stack: Stack, client: Client, twin: Twin, name: str) -> None:
    """The answer is out already; later edits of it find no base."""
    base = twin.base(tokens(400, ("fault", name)))
    with fault(stack, name):
        exact = twin.base(tokens(300, ("fault", name, "x")))
        turn = twin.edit(base, [EDIT], tokens(9, "t"))
    lost = exact if name == "record" else turn
    prompt = edited(lost.tokens, (50, 60, [])) + tokens(9, "t")
    answer = twin.ask(prompt, max_new_tokens=5, kv_hints=envelope(lost.id, (50, 60, [])))
    refused(answer, "unknown_base")
    agree(answer, twin.reference.reprefill(prompt, 5))
    assert report(twin.ask(prompt)) is None
    whole_pool(client)
