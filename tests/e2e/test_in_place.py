"""In place: the old view's slots are taken over when nothing else uses it, and copied when something does.

The server prefers taking over, has a small pool, and checks every slot's owner after each step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest
from reference.rules import Edit

from leyline_lmcache.stack import Stack
from leyline_lmcache.stack.client import Client

from .driver import (
    IDENTITY,
    Twin,
    agree,
    edited,
    envelope,
    refused,
    report,
    spliced,
    tokens,
    whole_pool,
)

EDIT: Edit = (100, 200, (7, 8, 9))


@pytest.fixture
def stack(stack_small: Stack) -> Stack:
    return stack_small


@pytest.fixture(autouse=True)
def empty_before_whole_after(client: Client) -> Iterator[None]:
    client.wait_idle()
    assert client.flush_cache()
    yield
    whole_pool(client)


@contextmanager
def running(client: Client, prompt: Sequence[int], count: int, into: list[tuple[int, ...]]) -> Iterator[None]:
    """A request that holds its KV and generates while the block runs; its answer ends up in ``into``."""
    started = threading.Event()

    def run() -> None:
        try:
            last: tuple[int, ...] = ()
            for answer in client.stream(prompt, max_new_tokens=count, sampling={"ignore_eos": True}):
                last = answer.output_ids
                started.set()
            into.append(last)
        finally:
            started.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert started.wait(120)
        yield
    finally:
        thread.join()


def test_slots_are_taken_over(twin: Twin) -> None:
    base = twin.base(tokens(700, "take"))
    turn = twin.edit(base, [EDIT], tokens(9, "take t"))
    assert spliced(turn.answer)["in_place"] is True
    twin.differs_from_reprefill(turn, base)
    # The base's own KV is no longer on the GPU: without directives it is served as if it had been evicted.
    again = twin.ask(base.tokens, max_new_tokens=5)
    assert report(again) is None
    assert again.cached_details["device"] <= 256
    agree(again, twin.reference.reprefill(base.tokens, 5))


def test_nothing_is_copied_when_nothing_moves(twin: Twin) -> None:
    """Shift 0, E5: the slots only change their key."""
    base = twin.base(tokens(500, "stay"))
    turn = twin.edit(base, [(100, 101, [9])], tokens(9, "stay t"))
    assert spliced(turn.answer)["in_place"] is True
    for _ in range(4):  # no rounding, so no drift, however often
        turn = twin.edit(turn, [(100, 101, tokens(1, turn.id))], tokens(5, turn.id))


def test_an_edit_in_place_of_an_edit_in_place(twin: Twin) -> None:
    base = twin.base(tokens(500, "chain"))
    first = twin.edit(base, [(300, 330, tokens(4, "c1"))], tokens(9, "c2"))
    second = twin.edit(first, [(100, 120, tokens(30, "c3"))], tokens(9, "c4"))
    assert spliced(second.answer)["in_place"] is True
    third = twin.edit(second, [IDENTITY], tokens(9, "c5"))
    assert third.answer.cached_tokens == len(second.tokens)


def test_several_edits_share_one_takeover_or_copy(twin: Twin) -> None:
    base = twin.base(tokens(600, "several"))
    turn = twin.edit(base, [EDIT, (400, 420, [])], tokens(9, "several t"))
    twin.edit(turn, [(10, 20, []), (300, 310, tokens(50, "s2"))], tokens(9, "several u"))


def test_drift_limit(twin: Twin) -> None:
    """I4: roundings in place are counted; at the limit the view is prefilled, and starts at none again."""
    turn = twin.base(tokens(400, "drift"))
    for number, start in enumerate((60, 50)):
        turn = twin.edit(turn, [(start, start + 5, [])], tokens(3, ("drift", number)))
        assert spliced(turn.answer)["in_place"] is True
    edit: Edit = (40, 45, [])
    prompt = edited(turn.tokens, edit) + tokens(3, "drift t")
    answer = twin.ask(prompt, max_new_tokens=5, kv_hints=envelope(turn.id, edit))
    assert "2" in refused(answer, "drift_limit")
    agree(answer, twin.reference.reprefill(prompt, 5))
    twin.edit(twin.base(prompt), [(30, 35, [])])


@pytest.mark.parametrize("where", ["end", "middle"])
def test_a_base_that_another_session_shares_is_copied_C5(twin: Twin, where: str) -> None:
    """The other session's KV stays where it is, and its answers stay what they were."""
    base = twin.base(tokens(500, ("shared", where)))
    keep = len(base.tokens) if where == "end" else 350
    other = twin.base(base.tokens[:keep] + tokens(30, "other", low=256, high=400))
    turn = twin.edit(base, [EDIT], tokens(9, "shared t"))
    assert spliced(turn.answer)["in_place"] is False
    again = twin.ask(other.tokens, max_new_tokens=5)
    assert again.cached_tokens == len(other.tokens) - 1
    assert again.cached_details["device"] == again.cached_tokens
    agree(again, twin.reference.reprefill(other.tokens, 5))
    agree(twin.ask(base.tokens, max_new_tokens=5), twin.reference.reprefill(base.tokens, 5))


def test_source_missing_after_eviction_C1(twin: Twin, client: Client) -> None:
    """The base fell out of a full pool before it was edited; it is prefilled, and can be edited again."""
    base = twin.base(tokens(400, "evicted"))
    for number in range(2):
        client.generate(tokens(2900, ("evict", number)), max_new_tokens=1)
    prompt = edited(base.tokens, EDIT) + tokens(9, "evicted t")
    answer = twin.ask(prompt, max_new_tokens=5, kv_hints=envelope(base.id, EDIT))
    refused(answer, "source_missing")
    agree(answer, twin.reference.reprefill(prompt, 5))
    twin.edit(twin.base(prompt), [(50, 60, [])])


class TestWithLmcache:
    """Whatever was just answered may be on its way to LMCache, which locks it. Nothing is thrown out here."""

    @pytest.fixture
    def stack(self, stack_small_lmcache: Stack) -> Stack:
        return stack_small_lmcache

    def test_right_after_the_answer(self, twin: Twin) -> None:
        """Taken over or copied: the answer is right, and so is what LMCache stored."""
        for number in range(4):
            base = twin.base(tokens(600, ("pending", number)), 1)
            twin.edit(base, [(100, 130, [])], tokens(5, "pending t"), 2)

    def test_what_was_stored_meanwhile_is_exact_E6(self, twin: Twin, client: Client) -> None:
        prompt = tokens(600, "meanwhile")
        base = twin.base(prompt, 1)
        twin.edit(base, [(100, 130, [])], tokens(300, "meanwhile t"), 2)
        client.wait_idle()
        assert client.flush_cache()
        again = twin.base(prompt)
        assert again.answer.cached_details["storage"] == 512
        changed = edited(prompt, (100, 130, [])) + tokens(300, "meanwhile t")
        twin.base(changed)

    def test_a_base_that_a_running_request_holds_is_copied_E2(self, twin: Twin, client: Client) -> None:
        base = twin.base(tokens(500, "held"))
        found: list[tuple[int, ...]] = []
        with running(client, base.tokens, 60, found):
            turn = twin.edit(base, [EDIT], tokens(9, "held t"))
            assert spliced(turn.answer)["in_place"] is False
        assert list(found[0]) == twin.reference.reprefill(base.tokens, 60).ids
        twin.edit(turn, [(150, 170, [])], tokens(9, "held u"))

    def test_no_memory(self, twin: Twin, client: Client) -> None:
        """A pool full of running requests: the copy finds no room, the prefill does."""
        base = twin.base(tokens(700, "room"))
        twin.ask(base.tokens + tokens(20, "room o"), max_new_tokens=1)  # shared, so it cannot be taken over
        prompt = edited(base.tokens, EDIT) + tokens(9, "room t")
        with ExitStack() as held:
            for number in range(2):
                held.enter_context(running(client, tokens(1480, ("hog", number)), 120, []))
            answer = twin.ask(prompt, max_new_tokens=5, kv_hints=envelope(base.id, EDIT))
        refused(answer, "no_memory")
        agree(answer, twin.reference.reprefill(prompt, 5))
