"""I1: whoever sends no directives gets, bit for bit, what a server without the plugin answers, in any order.

Both servers see the same requests, except that the edited ones go to ours alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from reference.rules import Edit

from leyline_lmcache.stack import Stack
from leyline_lmcache.stack.client import Client, Generation

from .driver import IDENTITY, edited, envelope, quiet_log, report, same_answer, spliced, tokens


@dataclass
class Pair:
    """Our server and a plain one, whose caches have the same history of exact requests."""

    ours: Client
    plain: Client

    def exact(self, prompt: Sequence[int], count: int = 6, **options: Any) -> Generation:
        """Ask both; the answers must be identical."""
        mine, theirs = (
            client.generate(
                prompt, max_new_tokens=count, logprobs=True, sampling={"ignore_eos": True}, **options
            )
            for client in (self.ours, self.plain)
        )
        assert report(mine) is None
        same_answer(mine, theirs)
        assert mine.cached_tokens == theirs.cached_tokens
        assert mine.cached_details == theirs.cached_details
        return mine

    def edit(self, base: str, prompt: Sequence[int], *edits: Edit, count: int = 6) -> Generation:
        """Ask ours only."""
        answer = self.ours.generate(
            prompt, max_new_tokens=count, sampling={"ignore_eos": True}, kv_hints=envelope(base, *edits)
        )
        spliced(answer)
        return answer

    def flush(self) -> None:
        for client in (self.ours, self.plain):
            client.wait_idle()
            assert client.flush_cache()


class Exactness:
    """What must hold for every pair of stacks."""

    @pytest.fixture
    def pair(self, stack: Stack, plain: Stack) -> Iterator[Pair]:
        with quiet_log(stack), stack.client(120.0) as ours, plain.client(120.0) as theirs:
            both = Pair(ours, theirs)
            both.flush()
            yield both

    def test_the_edited_prompt_without_directives_after_the_edit(self, pair: Pair) -> None:
        prompt = tokens(900, "after")
        base = pair.exact(prompt)
        known = prompt + list(base.output_ids[:-1])
        edit: Edit = (300, 500, tokens(5, "after r"))
        changed = edited(known, edit) + tokens(20, "after t")
        answer = pair.edit(base.id, changed, edit)
        exact = pair.exact(changed)
        assert exact.cached_tokens <= 300
        assert exact.output_logprobs != answer.output_logprobs
        assert pair.exact(changed).cached_tokens >= len(changed) - 16
        # And the edited answer's own continuation, asked for without directives.
        pair.exact(changed + list(answer.output_ids) + tokens(9, "after u"))
        pair.exact(known + tokens(9, "after v"))

    def test_the_edited_prompt_without_directives_before_the_edit(self, pair: Pair) -> None:
        prompt = tokens(900, "first")
        edit: Edit = (300, 500, [])
        base = pair.exact(prompt, 1)
        changed = edited(prompt, edit) + tokens(20, "first t")
        pair.exact(changed)
        answer = pair.edit(base.id, changed, edit)
        second = pair.edit(answer.id, changed + list(answer.output_ids) + tokens(5, "first u"), IDENTITY)
        pair.exact(changed + list(answer.output_ids) + tokens(5, "first u"))
        assert second.cached_tokens > 0
        pair.exact(changed)
        pair.exact(prompt)

    def test_edited_kv_is_not_behind_an_emptied_cache(self, pair: Pair) -> None:
        """E6: with LMCache, an exact prefix comes back from storage; edited KV is not there under any key."""
        prompt = tokens(1100, "stored")
        base = pair.exact(prompt, 1)
        edits: list[Edit] = [(300, 400, tokens(40, "stored r")), (800, 801, [])]
        changed = edited(prompt, *edits) + tokens(300, "stored t")
        answer = pair.edit(base.id, changed, *edits)
        longer = changed + list(answer.output_ids) + tokens(300, "stored u")
        pair.edit(answer.id, longer, IDENTITY)
        pair.flush()
        pair.exact(longer)
        pair.flush()
        pair.exact(prompt)
        pair.flush()
        pair.exact(longer)
        pair.exact(changed)

    @pytest.mark.parametrize("seed", range(3))
    def test_any_order(self, pair: Pair, seed: int) -> None:
        """A random conversation with branches: continue, edit, repeat without directives, empty the cache."""
        rng = random.Random(seed)
        first = tokens(rng.randrange(200, 500), ("order", seed))
        bases = [(pair.exact(first, 1).id, first)]  # with one token generated, the record is the prompt
        asked = [first]
        for step in range(14):
            base, known = bases[rng.randrange(len(bases))]
            tail = tokens(rng.randrange(1, 40), ("tail", seed, step))
            what = rng.choice(["exact", "exact", "again", "edit", "edit", "edit", "flush"])
            if what == "flush":
                pair.flush()
                bases, asked = [(pair.exact(first, 1).id, first)], asked
            elif what == "again":
                pair.exact(rng.choice(asked), 3)
            elif what == "exact":
                bases.append((pair.exact(known + tail, 1).id, known + tail))
                asked.append(known + tail)
            else:
                start = rng.randrange(0, len(known) - 120)
                end = start + rng.randrange(0, 60)
                edit: Edit = (start, end, tokens(rng.randrange(1, 30), ("new", seed, step)))
                changed = edited(known, edit) + tail
                bases.append((pair.edit(base, changed, edit, count=1).id, changed))
                asked.append(changed)
        for prompt in asked[-4:]:
            pair.exact(prompt, 3)


class TestWithLmcacheMla(Exactness):
    @pytest.fixture
    def stack(self, stack_mla: Stack) -> Stack:
        return stack_mla

    @pytest.fixture
    def plain(self, stack_plain_mla: Stack) -> Stack:
        return stack_plain_mla


class TestWithoutLmcacheGqa(Exactness):
    @pytest.fixture
    def stack(self, stack_gqa: Stack) -> Stack:
        return stack_gqa

    @pytest.fixture
    def plain(self, stack_plain_gqa: Stack) -> Stack:
        return stack_plain_gqa
