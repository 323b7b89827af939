"""C6: pages of several tokens; C3: prefill in several steps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from reference.rules import Edit

from leyline_lmcache.stack import Stack
from leyline_lmcache.stack.client import Client

from .driver import IDENTITY, Twin, agree, edited, envelope, spliced, tokens, whole_pool

ON_AND_OFF: dict[str, list[Edit]] = {
    "all on pages": [(304, 496, tokens(16, "p0"))],
    "removed, on pages": [(320, 336, [])],
    "inserted, on pages": [(320, 320, tokens(16, "p1"))],
    "start off": [(309, 496, tokens(11, "p2"))],
    "end off": [(304, 501, tokens(16, "p3"))],
    "nothing on pages": [(301, 497, tokens(5, "p4"))],
    "removed, off pages": [(301, 330, [])],
    "one token": [(333, 334, [9])],
    "inserted, off pages": [(333, 333, [9, 8, 7])],
    "page border inside": [(335, 337, tokens(2, "p5"))],
    "first tokens": [(0, 3, [9])],
    "two in one page": [(323, 324, [5]), (328, 330, [6])],
    "two in neighbouring pages": [(319, 320, [5]), (336, 339, [])],
    "kept run shorter than a page": [(303, 305, [5]), (325, 340, tokens(3, "p6"))],
    "far apart, both off": [(101, 107, [5]), (411, 413, tokens(40, "p7"))],
    "three, of every kind": [(50, 61, []), (200, 200, tokens(19, "p8")), (433, 450, tokens(3, "p9"))],
}
"""With pages of 16. The reference computes the slack again, as the documented rule says."""


class TestPagesOf16:
    @pytest.fixture
    def stack(self, stack_mla_paged: Stack) -> Stack:
        return stack_mla_paged

    @pytest.mark.parametrize("kind", ON_AND_OFF)
    @pytest.mark.parametrize("length", [542, 569])  # with the answer, whole pages and not
    def test_edits_on_and_off_the_borders_C6(self, twin: Twin, kind: str, length: int) -> None:
        base = twin.base(tokens(length, ("pages", kind, length)), 3)
        twin.edit(base, ON_AND_OFF[kind], tokens(9, "pages t"), 3)

    def test_turn_after_turn(self, twin: Twin) -> None:
        turn = twin.base(tokens(600, "turns"))
        for number, edits in enumerate(
            [
                [(301, 330, tokens(5, "t0"))],
                [IDENTITY],
                [(100, 110, tokens(23, "t1")), (430, 431, [])],
                [IDENTITY],
                [(296, 330, [])],
            ]
        ):
            turn = twin.edit(turn, edits, tokens(21, ("turns", number)), 4)

    def test_replacements_longer_than_a_prefill_step_C3(self, twin: Twin, client: Client) -> None:
        base = twin.base(tokens(1300, "steps"))
        turn = twin.edit(base, [(700, 705, tokens(700, "steps r"))], tokens(600, "steps t"))
        assert spliced(turn.answer)["filled"] >= 700
        twin.differs_from_reprefill(turn, base)
        whole_pool(client)

    def test_twice_at_once_C2(self, twin: Twin, client: Client) -> None:
        base = twin.base(tokens(500, "twice"))
        edits: list[Edit] = [(101, 150, tokens(7, "twice r"))]
        prompt = edited(base.tokens, *edits) + tokens(9, "twice t")
        want, _ = twin.reference.serve(base.context, edits, prompt, page_size=twin.page_size)
        with ThreadPoolExecutor(4) as pool:
            hints = envelope(base.id, *edits)
            answers = list(pool.map(lambda _: twin.ask(prompt, kv_hints=hints), range(4)))
        for answer in answers:
            spliced(answer)
            agree(answer, want)
        whole_pool(client)
