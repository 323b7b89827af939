"""A server that cannot splice says so once at start, serves as ever, and names the reason of each refusal."""

from __future__ import annotations

import pytest

from leyline_lmcache.stack import Stack
from leyline_lmcache.stack.client import Client

from .driver import edited, envelope, refused, report, tokens


@pytest.fixture
def stack(stack_ntk: Stack) -> Stack:
    return stack_ntk


def test_unsupported_rope(client: Client) -> None:
    """R5: dynamic NTK. There is no plain server of this model: its own unedited answers stand in for one."""
    prompt = tokens(400, "ntk")
    base = client.generate(prompt, max_new_tokens=1)
    edit = (100, 150, tokens(5, "ntk r"))
    changed = edited(prompt, edit) + tokens(9, "ntk t")
    mine = client.generate(changed, logprobs=True, kv_hints=envelope(base.id, edit))
    detail = refused(mine, "unsupported_rope")
    assert "DynamicNTK" in detail
    assert mine.cached_tokens >= 100
    assert client.flush_cache()
    client.generate(prompt, max_new_tokens=1)
    fresh = client.generate(changed, logprobs=True)
    assert report(fresh) is None
    assert fresh.cached_tokens == 100
    assert mine.output_ids == fresh.output_ids
    assert mine.output_logprobs == pytest.approx(fresh.output_logprobs, abs=1e-4)


def test_said_once_at_start(stack: Stack) -> None:
    log = stack.logs["sglang"].read_text(errors="replace")
    assert log.count("serves without splicing: unsupported_rope") == 1


def test_malformed_directives_are_named_all_the_same(client: Client) -> None:
    hints = envelope("some", (5, 3, []))
    assert "end" in refused(client.generate(tokens(50, "bad"), kv_hints=hints), "invalid_directive")
