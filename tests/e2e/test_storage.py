"""With LMCache: exact prefixes come from storage as ever; edited KV is in no tier under an exact key."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from reference.rules import Edit

from leyline_lmcache.stack import Stack
from leyline_lmcache.stack.client import Client

from .driver import IDENTITY, edited, envelope, quiet_log, report, same_answer, spliced, tokens

EDIT: Edit = (600, 700, (7, 8, 9))
OPTIONS = {"max_new_tokens": 5, "logprobs": True, "sampling": {"ignore_eos": True}}


@pytest.fixture
def ours(stack_mla: Stack) -> Iterator[Client]:
    with quiet_log(stack_mla), stack_mla.client(120.0) as client:
        yield client


def _flush(client: Client) -> None:
    client.wait_idle()
    assert client.flush_cache()


def test_exact_prefixes_still_come_from_storage(ours: Client) -> None:
    prompt = tokens(1100, "prefix")
    base = ours.generate(prompt, **OPTIONS)
    known = prompt + list(base.output_ids[:-1])
    spliced(ours.generate(edited(known, EDIT), kv_hints=envelope(base.id, EDIT), **OPTIONS))
    _flush(ours)
    again = ours.generate(prompt, **OPTIONS)
    assert again.cached_details["storage"] == 1024
    assert again.output_ids == base.output_ids
    _flush(ours)
    # The edited text shares 600 tokens with the base: two chunks, and not one more.
    exact = ours.generate(edited(prompt, EDIT), **OPTIONS)
    assert exact.cached_details["storage"] == exact.cached_tokens == 512


def test_a_prefix_in_storage_serves_the_edit_that_follows_it(ours: Client) -> None:
    """The base is loaded from storage; then it is edited like any other."""
    prompt = tokens(1100, "loaded")
    ours.generate(prompt, max_new_tokens=1)
    _flush(ours)
    base = ours.generate(prompt, max_new_tokens=1)
    assert base.cached_details["storage"] == 1024
    answer = ours.generate(edited(prompt, EDIT), kv_hints=envelope(base.id, EDIT), **OPTIONS)
    assert spliced(answer)["moved"] == 400 - 1


def test_edited_kv_in_no_tier_after_a_restart_E6(stack_mla: Stack, stack_plain_mla: Stack) -> None:
    """I1 across tiers: SGLang forgets all, LMCache and Redis hold what was stored; all of it is exact."""
    prompt = tokens(1100, "restart")
    with stack_mla.client(120.0) as ours, stack_plain_mla.client(120.0) as plain:
        base = ours.generate(prompt, max_new_tokens=1)
        plain.generate(prompt, max_new_tokens=1)
        changed = edited(prompt, EDIT) + tokens(300, "restart t")
        answer = ours.generate(changed, kv_hints=envelope(base.id, EDIT), **OPTIONS)
        longer = changed + list(answer.output_ids) + tokens(300, "restart u")
        spliced(ours.generate(longer, kv_hints=envelope(answer.id, IDENTITY), **OPTIONS))
        ours.wait_idle()
        stack_mla.restart("sglang")
        plain.wait_idle()
        assert plain.flush_cache()
        for request in (longer, changed, prompt):
            mine, theirs = (client.generate(request, **OPTIONS) for client in (ours, plain))
            assert report(mine) is None
            same_answer(mine, theirs)
            assert mine.cached_details == theirs.cached_details
            assert mine.cached_tokens == theirs.cached_tokens >= 512
        # Records are in memory until the tiers take part: after a restart the base is unknown, by name.
        edit = ours.generate(changed, kv_hints=envelope(base.id, EDIT), **OPTIONS)
        assert (report(edit) or {}).get("reason") == "unknown_base"
