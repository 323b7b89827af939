"""C3: requests that are thrown out while they run, and come back.

Prefill goes in steps of 64 tokens, and every third step throws a running request out if there are two. SGLang
checks the owners of every slot after each step.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from reference.rules import Edit

from leyline_lmcache.stack import Stack
from leyline_lmcache.stack.client import Client, Generation

from .driver import Turn, Twin, agree, edited, envelope, spliced, tokens, whole_pool


@pytest.fixture
def stack(stack_small: Stack) -> Stack:
    return stack_small


def test_edited_requests_are_thrown_out_and_finish_C3(twin: Twin, client: Client) -> None:
    """They come back onto the same edited path, and answer like the reference."""
    bases = [twin.base(tokens(400, ("retract", number))) for number in range(4)]
    edits: list[Edit] = [(50, 80, tokens(100, "retract r")), (200, 210, [])]
    tail = tokens(70, "retract t")
    answers = at_once(twin, [(base, edits, tail) for base in bases], 24)
    assert sum(int(answer.meta["num_retractions"]) for answer in answers) > 0
    whole_pool(client)


def test_what_was_thrown_out_can_be_edited_again_C3(twin: Twin, client: Client) -> None:
    """Its record is of the view it finished with."""
    bases = [twin.base(tokens(300, ("again", number))) for number in range(2)]
    edits: list[Edit] = [(50, 80, tokens(5, "again r"))]
    tail = tokens(20, "again t")
    answers = at_once(twin, [(base, edits, tail) for base in bases], 16)
    assert sum(int(answer.meta["num_retractions"]) for answer in answers) > 0
    for base, answer in zip(bases, answers, strict=True):
        want, served = twin.reference.serve(base.context, edits, edited(base.tokens, *edits) + tail, 16)
        twin.edit(Turn(answer, want, served), [(100, 120, tokens(30, "again s"))], tokens(20, "again u"))
    whole_pool(client)


def at_once(twin: Twin, asked: list[tuple[Turn, list[Edit], list[int]]], count: int) -> list[Generation]:
    """Edited requests side by side: a lone one is never thrown out."""
    prompts = [edited(base.tokens, *edits) + tail for base, edits, tail in asked]

    def ask(number: int) -> Generation:
        base, edits, _ = asked[number]
        hints = envelope(base.id, *edits)
        return twin.ask(prompts[number], max_new_tokens=count, kv_hints=hints)

    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(ask, range(len(asked))))
    for (base, edits, _), prompt, answer in zip(asked, prompts, answers, strict=True):
        spliced(answer)
        agree(answer, twin.reference.serve(base.context, edits, prompt, count)[0])
    return answers
