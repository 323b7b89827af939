"""The stacks that other tests rely on serve the models they name, alike with and without the plugin."""

from __future__ import annotations

import pytest

from leyline_lmcache.stack import Stack
from leyline_lmcache.stack.cases import load_cases

PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(2000)]


def test_a_prompt_is_served_from_gpu_then_from_lmcache(stack_plain_mla: Stack) -> None:
    with stack_plain_mla.client() as client:
        cold = client.generate(PROMPT, logprobs=True)
        warm = client.generate(PROMPT, logprobs=True)
        assert warm.cached_tokens == len(PROMPT) - 1
        assert client.flush_cache()
        loaded = client.generate(PROMPT, logprobs=True)
    assert loaded.cached_details["storage"] == len(PROMPT) // 256 * 256
    assert cold.output_ids == warm.output_ids == loaded.output_ids


def test_the_pool_is_whole_when_idle(stack_plain_mla: Stack) -> None:
    with stack_plain_mla.client() as client:
        client.generate(PROMPT[:500])
        usage = client.wait_idle()
    assert usage.capacity == stack_plain_mla.spec.max_total_tokens
    assert usage.used == 0


@pytest.mark.parametrize("start", [0, 1], ids=["whole", "cached prefix"])
def test_plain_and_plugin_agree(stack_gqa: Stack, stack_plain_gqa: Stack, start: int) -> None:
    prompt = PROMPT[start:1000]
    with stack_gqa.client() as ours, stack_plain_gqa.client() as plain:
        for client in (ours, plain):
            assert client.flush_cache()
        answers = [client.generate(prompt, logprobs=True) for client in (ours, plain)]
    assert answers[0].output_ids == answers[1].output_ids
    assert answers[0].output_logprobs == answers[1].output_logprobs
    assert answers[0].cached_tokens == answers[1].cached_tokens


def test_the_trained_model_answers_its_cases(stack_tiny: Stack) -> None:
    case = load_cases()[0]
    with stack_tiny.client() as client:
        full = client.generate(case.prompt + case.question, max_new_tokens=1)
        edited = client.generate(case.edited_prompt + case.question, max_new_tokens=1)
        chat = client.chat([*case.messages, case.question_message], max_tokens=1)
    assert full.output_ids == (case.expected,)
    assert edited.output_ids == (case.expected_forget,)
    assert chat["choices"][0]["message"]["content"].strip() == "92"
