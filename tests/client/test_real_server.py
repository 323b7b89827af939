"""A harness with an ``openai`` client and a policy, on the real stack with the trained model."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from leyline_lmcache.client import AsyncSession, Session
from leyline_lmcache.policies import Messages
from leyline_lmcache.stack import Stack
from leyline_lmcache.stack.cases import Case, load_cases

SOME = 8
FIELDS: dict[str, Any] = {"model": "default", "temperature": 0, "max_tokens": 1}


class Evict:
    """A stranger's policy: once the question comes, old messages have made room for summaries."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def transform(self, messages: Messages, turn_idx: int) -> Messages:
        if messages[-1] != self._case.question_message:
            return messages
        made: list[Any] = []
        at = 0
        for edit in self._case.edits:
            made += [*messages[at : edit.message_span[0]], edit.stub_message]
            at = edit.message_span[1]
        return [*made, *messages[at:]]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    # SGLang writes a last message of the assistant's in a way of its own, unlike the same further up.
    found = [case for case in load_cases() if case.messages[-1]["role"] != "assistant"]
    return [case for case in found if case.size != "long"][:SOME]


def content(answer: Any) -> str:
    return str(answer.choices[0].message.content).strip()


def test_edits_are_spliced_and_answers_are_those_of_full_context(
    stack_tiny: Stack, cases: list[Case]
) -> None:
    """The derived value was never written. Full context knows it; the edited text alone does not tell."""
    with OpenAI(base_url=f"{stack_tiny.sglang_url}/v1", api_key="-") as openai:
        for case in cases:
            whole = [*case.messages, case.question_message]
            session, full = Session(openai, policy=Evict(case)), Session(openai)
            session.create(messages=case.messages, **FIELDS)
            wanted = content(full.create(messages=whole, **FIELDS))
            answer = session.chat.completions.create(messages=whole, **FIELDS)
            fresh = openai.chat.completions.create(messages=Evict(case).transform(whole, 0), **FIELDS)
            report = session.last
            assert report is not None and report.outcome == "spliced", (case.id, report)
            assert content(answer) == wanted != content(fresh), case.id
            assert report.prompt == len(case.edited_prompt) + len(case.question)
            assert report.spliced is not None and report.cached is not None
            assert 0 < report.spliced <= report.cached < report.prompt
            assert full.last is not None and full.last.outcome is None
            assert session.totals.cached >= report.cached and session.totals.calls == 2

        case = cases[0]
        session = Session(openai, policy=Evict(case))
        session.create(messages=case.messages, **FIELDS)
        with session.create(
            messages=[*case.messages, case.question_message], stream=True, **FIELDS
        ) as stream:
            said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        wanted = content(
            openai.chat.completions.create(messages=[*case.messages, case.question_message], **FIELDS)
        )
        assert said.strip() == wanted
        assert session.last is not None and session.last.cached


def test_the_same_with_an_asynchronous_client(stack_tiny: Stack, cases: list[Case]) -> None:
    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{stack_tiny.sglang_url}/v1", api_key="-") as openai:
            sessions = [AsyncSession(openai, policy=Evict(case)) for case in cases]
            await asyncio.gather(
                *(
                    one.create(messages=case.messages, **FIELDS)
                    for one, case in zip(sessions, cases, strict=True)
                )
            )
            await asyncio.gather(
                *(
                    one.create(messages=[*case.messages, case.question_message], **FIELDS)
                    for one, case in zip(sessions, cases, strict=True)
                )
            )
        reports = [session.last for session in sessions]
        assert [report.outcome for report in reports if report is not None] == ["spliced"] * len(cases)

    asyncio.run(run())


def test_the_example_runs(stack_tiny: Stack, tmp_path: Path) -> None:
    for folder in "abcde":
        (tmp_path / folder).mkdir()
        for number in range(12):
            (tmp_path / folder / f"file-{folder}-{number}").touch()
    loop = Path(__file__).parents[2] / "examples" / "loop.py"
    words = ["--url", stack_tiny.sglang_url, "--root", str(tmp_path), "--turns", "5"]
    run = subprocess.run([sys.executable, str(loop), *words], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    turns = [line.split() for line in run.stdout.splitlines()[1:6]]
    # The first output is older than the last two when there are three.
    assert [turn[4] for turn in turns] == ["none", "none", "none", "spliced", "spliced"], run.stdout
    assert all(int(turn[3]) > 0 for turn in turns[3:]), run.stdout
