"""The contract of AMORTIZE on a real server, against the independent fp32 reference (DESIGN §2).

Every edited request is compared token by token and log-probability by log-probability, and in how many tokens
it got from the cache. Names say which case of the issue or which invariant a test holds.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from reference.rules import Edit

from leyline_lmcache.stack import Stack
from leyline_lmcache.stack.client import Client, RequestError

from .driver import IDENTITY, Twin, agree, edited, envelope, refused, report, spliced, tokens, whole_pool

SHIFTS = (0, 1, -1, 127, -127, 128, -128, 129, -129, 1024, -1024)


class Contract:
    """What must hold for every model; a subclass names the stack."""

    def test_span_of_200_replaced_by_5_in_2000_tokens(self, twin: Twin) -> None:
        """§7.1, E1: prefix and tail are reused; the answer follows full context, not a re-prefill."""
        base = twin.base(tokens(2000, "span"))
        turn = twin.edit(base, [(300, 500, tokens(5, "span r"))], tokens(20, "span t"))
        said = spliced(turn.answer)
        assert turn.answer.cached_tokens >= 1800
        assert (said["prefix"], said["filled"], said["moved"]) == (300, 5, len(base.tokens) - 500)
        twin.differs_from_reprefill(turn, base)

    def test_empty_replacement_in_2000_tokens(self, twin: Twin) -> None:
        """§7.1: nothing is filled; one rotation serves the rest."""
        base = twin.base(tokens(2000, "empty"))
        turn = twin.edit(base, [(300, 500, [])], tokens(20, "empty t"))
        assert turn.answer.cached_tokens >= 1800
        assert spliced(turn.answer)["filled"] == 0
        twin.differs_from_reprefill(turn, base)

    def test_three_edits_in_one_request(self, twin: Twin) -> None:
        """§7.1: shrinking, removing and growing at once; each replacement sees the KV kept before it."""
        base = twin.base(tokens(2000, "three"))
        edits = [(100, 200, tokens(5, "r1")), (700, 900, []), (1500, 1510, tokens(200, "r3"))]
        turn = twin.edit(base, edits, tokens(20, "three t"))
        assert spliced(turn.answer)["edits"] == 3
        twin.differs_from_reprefill(turn, base)

    def test_second_edit_a_turn_later(self, twin: Twin) -> None:
        """§7.1, E8: the second view is made of buffers that were computed in different contexts."""
        base = twin.base(tokens(1200, "later"))
        first = twin.edit(base, [(300, 500, tokens(5, "l1"))], tokens(40, "l2"))
        # Behind the first edit, over the first turn's end, so that kept KV comes from both requests.
        second = twin.edit(first, [(800, 830, tokens(9, "l3"))], tokens(15, "l4"))
        assert spliced(second.answer)["prefix"] == 300
        third = twin.edit(second, [(960, 1000, [])], tokens(15, "l5"))
        twin.differs_from_reprefill(third, second)

    def test_edit_inside_an_earlier_replacement_E8(self, twin: Twin) -> None:
        base = twin.base(tokens(700, "inside"))
        first = twin.edit(base, [(200, 230, tokens(90, "i1"))], tokens(10, "i2"))
        second = twin.edit(first, [(220, 250, tokens(4, "i3"))], tokens(10, "i4"))
        twin.edit(second, [(221, 223, [])], tokens(10, "i5"))

    def test_edit_before_an_earlier_edit_E8(self, twin: Twin) -> None:
        """The later tokens' shift adds up, from the positions they were first computed at."""
        base = twin.base(tokens(700, "before"))
        first = twin.edit(base, [(400, 450, tokens(6, "b1"))], tokens(10, "b2"))
        second = twin.edit(first, [(100, 160, tokens(70, "b3"))], tokens(10, "b4"))
        assert spliced(second.answer)["prefix"] == 100
        twin.edit(second, [(20, 30, [])], tokens(10, "b5"))

    def test_edit_over_an_earlier_edits_borders_E8(self, twin: Twin) -> None:
        base = twin.base(tokens(700, "borders"))
        first = twin.edit(base, [(300, 400, tokens(50, "o1"))], tokens(10, "o2"))
        twin.edit(first, [(280, 320, tokens(8, "o3")), (340, 360, [])], tokens(10, "o4"))

    def test_same_span_again_each_turn_E8(self, twin: Twin) -> None:
        turn = twin.base(tokens(500, "again"))
        length = 40
        for count in (10, 25, 3):
            turn = twin.edit(turn, [(100, 100 + length, tokens(count, ("again", count)))], tokens(6, count))
            length = count

    def test_an_earlier_view_can_be_edited_again(self, twin: Twin) -> None:
        """Undo: the base's response is still there after its KV was moved into an edited path."""
        base = twin.base(tokens(600, "undo"))
        twin.edit(base, [(100, 150, tokens(3, "u1"))], tokens(8, "u2"))
        twin.edit(base, [(200, 210, tokens(30, "u3"))], tokens(8, "u2"))
        again = twin.ask(base.tokens + tokens(8, "u2"))
        assert report(again) is None
        agree(again, twin.reference.reprefill(base.tokens + tokens(8, "u2")))

    def test_continuing_an_edited_view_without_an_edit(self, twin: Twin) -> None:
        """§7.1: the identity directive; all of the edited KV is reused, turn after turn."""
        base = twin.base(tokens(700, "go on"))
        first = twin.edit(base, [(100, 300, tokens(5, "g1"))], tokens(10, "g2"))
        second = twin.edit(first, [IDENTITY], [first.answer.output_ids[-1], *tokens(30, "g3")])
        assert second.answer.cached_tokens == len(first.tokens)
        assert spliced(second.answer)["moved"] == 0
        third = twin.edit(second, [IDENTITY], tokens(30, "g4"))
        twin.edit(third, [(550, 570, [])], tokens(10, "g5"))

    def test_continuing_an_edited_view_from_its_middle(self, twin: Twin) -> None:
        """The harness dropped the end: the view is kept as far as the prompt follows it."""
        base = twin.base(tokens(700, "part"))
        first = twin.edit(base, [(100, 300, tokens(5, "p1"))], tokens(10, "p2"))
        prompt = first.tokens[:400] + tokens(30, "p3", low=256, high=400)
        turn = twin.edit_prompt(first, [IDENTITY], prompt)
        assert turn.answer.cached_tokens == 400

    def test_what_was_asked_before_does_not_change_the_answer(self, twin: Twin) -> None:
        """A shorter prompt of the same view computes its last token itself, or what follows its replacements.

        That KV must not stand in for the kept KV of a longer prompt.
        """
        base = twin.base(tokens(700, "asked"))
        edits: list[Edit] = [(100, 150, tokens(5, "asked r"))]
        whole = edited(base.tokens, *edits)
        for length in (200, 201, 202):
            twin.edit_prompt(base, edits, whole[:length], again=True)
        twin.edit(base, edits, tokens(9, "asked t"), again=True)
        more: list[Edit] = [*edits, (300, 305, tokens(7, "asked s"))]
        whole = edited(base.tokens, *more)
        departs = whole[: 300 - 45 + 7 + 14] + tokens(30, "asked u", low=256, high=400)
        twin.edit_prompt(base, more, departs, again=True)
        twin.edit(base, more, tokens(9, "asked t"), again=True)

    def test_identity_on_an_unedited_base_is_exact(self, twin: Twin) -> None:
        """E9: empty span with empty replacement asks for nothing, and gets what everybody gets."""
        base = twin.base(tokens(300, "ident"))
        prompt = base.tokens + tokens(10, "ident t")
        for where in (0, 150, len(base.tokens)):
            answer = twin.ask(prompt, kv_hints=envelope(base.id, (where, where, [])))
            assert (report(answer) or {})["outcome"] == "exact"
            agree(answer, twin.reference.reprefill(prompt))

    def test_one_token_flips_E5(self, twin: Twin) -> None:
        """Shift 0: everything after the token is reused, and nothing turns."""
        base = twin.base(tokens(1500, "flip"))
        flipped = [(base.tokens[700] + 1) % 256]
        turn = twin.edit(base, [(700, 701, flipped)], tokens(12, "flip t"))
        assert turn.answer.cached_tokens == len(base.tokens)
        assert (spliced(turn.answer)["filled"], spliced(turn.answer)["moved"]) == (1, len(base.tokens) - 701)
        # So little was changed that only the reference's distance can say that the old KV was kept.
        twin.edit(turn, [(300, 301, [9])], tokens(12, "flip u"))

    def test_summary_longer_than_its_span_E7(self, twin: Twin) -> None:
        base = twin.base(tokens(800, "longer"))
        turn = twin.edit(base, [(200, 210, tokens(300, "longer r"))], tokens(12, "longer t"))
        assert spliced(turn.answer)["filled"] == 300
        twin.differs_from_reprefill(turn, base)

    def test_past_the_context_length_is_refused_by_the_engine_E7(self, stack: Stack, twin: Twin) -> None:
        base = twin.base(tokens(300, "past"))
        edits = [(100, 110, tokens(stack.spec.context_length, "past r"))]
        with pytest.raises(RequestError) as refusal:
            twin.ask(edited(base.tokens, *edits), kv_hints=envelope(base.id, *edits))
        assert refusal.value.status == 400
        assert "context length" in refusal.value.body
        twin.edit(base, [(100, 110, [4])], tokens(5, "past t"))

    @pytest.mark.parametrize(
        "edit",
        [
            (0, 10, (7, 8, 9)),
            (0, 10, ()),
            (0, 1, ()),
            (0, 0, (5,)),
            (299, 300, ()),
            (150, 150, (5, 6)),
            (150, 151, (6,)),
            (150, 151, ()),
        ],
        ids=str,
    )
    def test_edges_that_are_spliced_E9(self, twin: Twin, edit: Edit) -> None:
        base = twin.base(tokens(330, "edges"), 4)
        twin.edit(base, [edit], tokens(9, "edges t"))

    @pytest.mark.parametrize("which", ["last token", "everything", "everything, nothing instead", "append"])
    def test_edges_that_keep_nothing_E9(self, twin: Twin, which: str) -> None:
        """Refused by name, and answered by prefilling."""
        base = twin.base(tokens(330, "nothing"), 4)
        end = len(base.tokens)
        edit: Edit = {
            "last token": (end - 1, end, [9]),
            "everything": (0, end, tokens(40, "all")),
            "everything, nothing instead": (0, end, []),
            "append": (end, end, [5, 6, 7]),
        }[which]
        prompt = edited(base.tokens, edit) + tokens(9, "nothing t")
        answer = twin.ask(prompt, kv_hints=envelope(base.id, edit))
        refused(answer, "below_min_reuse")
        agree(answer, twin.reference.reprefill(prompt))

    def test_shifts_R8(self, twin: Twin) -> None:
        """Angles of one and of a thousand positions, to both sides."""
        base = twin.base(tokens(1500, "shifts"), 4)
        for shift in SHIFTS:
            width = max(3, 3 - shift)
            edit = (120, 120 + width, tokens(width + shift, ("shift", shift)))
            twin.edit(base, [edit], tokens(6, "shift t"), 3)

    def test_keep_the_last_three_results_E3(self, twin: Twin) -> None:
        """Each turn stubs one more old result; every turn hits all but the stub and the new turn."""
        stub = tokens(4, "stub")
        turn = twin.base(tokens(120, "results"))
        spans: list[tuple[int, int]] = []
        for number in range(6):
            edits: list[Edit] = []
            if len(spans) >= 3:
                start, end = spans.pop(0)
                edits = [(start, end, stub)]
                gone = end - start - len(stub)
                spans = [(a - gone, b - gone) for a, b in spans]
            result = tokens(60, ("result", number))
            begin = len(edited(turn.tokens, *edits)) + 1
            tail = [turn.answer.output_ids[-1], *result, *tokens(8, ("ask", number))]
            spans.append((begin, begin + len(result)))
            if edits:
                turn = twin.edit(turn, edits, tail, 6)
                assert turn.served is not None
                assert turn.answer.cached_tokens == turn.answer.prompt_tokens - len(tail)
            else:
                turn = twin.base(turn.tokens + tail, 6)

    def test_two_identical_edited_requests_at_once_C2(self, twin: Twin, client: Client) -> None:
        """Whoever splices second finds the path there; no slot is lost or freed twice."""
        base = twin.base(tokens(600, "twice"))
        edits = [(100, 200, tokens(7, "twice r")), (400, 420, [])]
        prompt = edited(base.tokens, *edits) + tokens(9, "twice t")
        want, _ = twin.reference.serve(base.context, edits, prompt)
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda _: twin.ask(prompt, kv_hints=envelope(base.id, *edits)), range(6)))
        for answer in answers:
            spliced(answer)
            agree(answer, want)
        whole_pool(client)

    def test_editing_while_the_base_is_being_continued_E2(self, twin: Twin, client: Client) -> None:
        """The running request is unaffected; what it held is free once it ends."""
        base = twin.base(tokens(600, "running"))
        tail = tokens(10, "running t")
        started = threading.Event()
        running: list[Sequence[int]] = []

        def go_on() -> None:
            for answer in client.stream(
                base.tokens + tail, max_new_tokens=120, sampling={"ignore_eos": True}
            ):
                running[:] = [answer.output_ids]
                started.set()

        thread = threading.Thread(target=go_on)
        thread.start()
        try:
            assert started.wait(60)
            turn = twin.edit(base, [(100, 300, tokens(4, "running r"))], tail)
            twin.edit(turn, [(50, 60, [])], tail)
        finally:
            thread.join()
        assert list(running[0]) == twin.reference.reprefill(base.tokens + tail, 120).ids
        whole_pool(client)


class TestMla(Contract):
    @pytest.fixture
    def stack(self, stack_mla: Stack) -> Stack:
        return stack_mla


class TestGqa(Contract):
    @pytest.fixture
    def stack(self, stack_gqa: Stack) -> Stack:
        return stack_gqa
