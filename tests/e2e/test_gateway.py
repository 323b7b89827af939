"""The openai client and curl, through the gateway, against a real server: edits in the middle are spliced."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from gateway.servers import Running, serving
from support.specs import STACKS

from leyline_lmcache.gateway.settings import GatewaySettings
from leyline_lmcache.stack import Stack
from leyline_lmcache.stack.client import Client

from .driver import whole_pool

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "parameters": {"type": "object", "properties": {"n": {"type": "string"}}},
        },
    }
]
OUTPUT_TOKENS = 240
"""Of what the tool prints, at least: 120 numbers and the spaces between them, a token each character."""
# What a tool printed is stubbed once there are two newer ones.
POLICY = "policies: {tidy: [keep_tool_results: {keep: 2}]}\npolicy: tidy\n"


@pytest.fixture
def stack(stack_mla: Stack) -> Stack:
    return stack_mla


@contextmanager
def through(*stacks: Stack, text: str = "", **environ: str) -> Iterator[tuple[Running, openai.OpenAI]]:
    urls = "".join(f"- {{name: s{n}, url: '{each.sglang_url}'}}\n" for n, each in enumerate(stacks))
    settings = GatewaySettings.parse(f"listen: {{port: 0}}\nbackends:\n{urls}{text}", "test", environ)
    with serving(settings) as running:
        url = f"{running.url}/v1"
        with openai.OpenAI(
            base_url=url, api_key="key", max_retries=0, http_client=httpx.Client(trust_env=False)
        ) as client:
            yield running, client


class Agent:
    """A harness that calls a tool in every turn, keeps its messages whole, and knows nothing of caches."""

    def __init__(self, client: openai.OpenAI, seed: str, **options: Any) -> None:
        self._client = client
        self._chance = random.Random(seed)
        self._options = options
        self.messages: list[Any] = [
            {"role": "system", "content": "You track variables."},
            {"role": "user", "content": f"{seed}: {self._words(30)}"},
        ]

    def _words(self, count: int) -> str:
        return " ".join(str(self._chance.randrange(100)) for _ in range(count))

    def ask(self) -> dict[str, Any]:
        """One turn, at once; the answer."""
        answer = self._client.chat.completions.create(**self._request())
        self._call_tool(answer.choices[0].message.content or "")
        return answer.model_dump()

    def stream(self) -> dict[str, Any]:
        """One turn, in a stream; the usage at its end."""
        usage = None
        text = ""
        request = self._request() | {"stream": True, "stream_options": {"include_usage": True}}
        for part in self._client.chat.completions.create(**request):
            usage = part.usage or usage
            text += part.choices[0].delta.content or "" if part.choices else ""
        assert usage is not None
        self._call_tool(text)
        return usage.model_dump()

    def _request(self) -> dict[str, Any]:
        return {
            "model": "mla",
            "messages": self.messages,
            "tools": TOOLS,
            "temperature": 0,
            "max_tokens": 4,
            **self._options,
        }

    def _call_tool(self, text: str) -> None:
        name = f"c{len(self.messages)}"
        call = {"id": name, "type": "function", "function": {"name": "read", "arguments": "{}"}}
        self.messages += [
            {"role": "assistant", "content": text, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": name, "content": self._words(120)},
        ]


def spliced_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["spliced_tokens"])


def cached_tokens(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_a_harness_that_knows_nothing_keeps_its_kv(stack: Stack, client: Client) -> None:
    """The gateway's policy stubs old outputs; the server derives the edits and splices what stays."""
    with through(stack, text=POLICY) as (running, api):
        agent = Agent(api, "policy")
        answers = [agent.ask() for _ in range(6)]
        # The first three prompts are only longer than the one before.
        assert [answer.get("leyline") for answer in answers[:3]] == [None] * 3
        for answer in answers[3:]:
            said = answer["leyline"]
            assert said["outcome"] == "spliced" and said["session"]["changes"] >= 1, said
            # Of the outputs that the last turn had, the newer one lies behind the stub.
            assert spliced_tokens(answer) == said["spliced"] > OUTPUT_TOKENS
            assert cached_tokens(answer["usage"]) >= said["prefix"] + said["spliced"]
        assert running.metric("policy_runs_total", policy="tidy", outcome="changed") == 3
        assert running.metric("tokens_total", tenant="default", kind="spliced") == sum(
            map(spliced_tokens, answers)
        )
    whole_pool(client)


def test_streams_with_tools_are_spliced_too(stack: Stack, client: Client) -> None:
    def run(mode: str) -> list[int]:
        with through(stack, text=f"mode: {mode}\n{POLICY}") as (_, api):
            agent = Agent(api, f"stream {mode}")
            return [cached_tokens(agent.stream()) for _ in range(6)]

    spliced, vanilla = run("amortize"), run("off")
    # Without the splice, what is behind the newest stub is computed again.
    for ours, theirs in zip(spliced[3:], vanilla[3:], strict=True):
        assert ours > theirs + OUTPUT_TOKENS
    whole_pool(client)


def test_a_request_edits_by_context_management(stack: Stack, client: Client) -> None:
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "tool_uses", "value": 2},
        "keep": {"type": "tool_uses", "value": 2},
    }
    with through(stack) as (_, api):
        agent = Agent(api, "context", extra_body={"context_management": {"edits": [edit]}})
        answers = [agent.ask() for _ in range(4)]
    assert spliced_tokens(answers[3]) > OUTPUT_TOKENS and spliced_tokens(answers[2]) == 0
    whole_pool(client)


def test_tenants_share_no_kv_i7(stack: Stack, client: Client) -> None:
    text = "auth: {mode: check, keys_env: KEYS}\nsalt_secret_env: SECRET\n" + POLICY
    with through(stack, text=text, KEYS="one key, two other", SECRET="s") as (_, api):
        first = Agent(api, "tenants")
        cached = [cached_tokens(first.ask()["usage"]) for _ in range(2)]
        assert cached[1] > 0
        again = Agent(api.with_options(api_key="other"), "tenants")
        assert cached_tokens(again.ask()["usage"]) == 0
        with pytest.raises(openai.AuthenticationError):
            Agent(api.with_options(api_key="nobody"), "tenants").ask()
    whole_pool(client)


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"max_tokens": 10**6}, {"messages": []}, {"messages": "x"}]
)
def test_errors_are_the_servers_own(stack: Stack, client: Client, wrong: dict[str, Any]) -> None:
    body = {"model": "mla", "messages": [{"role": "user", "content": "1 2 3"}], **wrong}
    with through(stack, text=POLICY) as (running, _):
        for stream in (False, True):
            asked = {**body, "stream": stream}
            ours = running.client.post("/v1/chat/completions", json=asked)
            direct = client.http.post("/v1/chat/completions", json=asked)
            assert ours.status_code == direct.status_code >= 400
            assert ours.json() == direct.json()


def test_completions_and_models(stack: Stack, client: Client) -> None:
    with through(stack) as (_, api):
        assert [model.id for model in api.models.list()] == ["mla"]
        said = "1 2 3 " * 50
        answer = api.completions.create(model="mla", prompt=said, max_tokens=3, temperature=0)
        direct = client.complete(said, max_tokens=3)
        assert answer.choices[0].text == direct["choices"][0]["text"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("stream", [False, True])
def test_curl(stack: Stack, client: Client, stream: bool) -> None:
    body = {
        "model": "mla",
        "messages": [{"role": "user", "content": "4 5 6"}],
        "tools": TOOLS,
        "max_tokens": 3,
        "stream": stream,
    }
    with through(stack) as (running, _):
        url = f"{running.url}/v1/chat/completions"
        header = "content-type: application/json"
        done = subprocess.run(
            ["curl", "-sSN", "--noproxy", "*", url, "-H", header, "-d", json.dumps(body)],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
    if stream:
        assert done.stdout.endswith("data: [DONE]\n\n")
    else:
        assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"


@pytest.fixture
def second(stacks: Any, tmp_path: Any) -> Iterator[Callable[[], Stack]]:
    """Starts another server, which a test may kill."""
    with ExitStack() as opened:

        def start() -> Stack:
            spec = replace(STACKS["stack_mla"], lmcache=False)
            return opened.enter_context(Stack(spec, directory=tmp_path / "second"))

        yield start


@pytest.mark.slow
def test_a_killed_servers_session_goes_on_at_the_other(
    stack: Stack, client: Client, second: Callable[[], Stack]
) -> None:
    doomed = second()
    with through(stack, doomed, text=POLICY) as (running, api):
        # A session whose server is the one that will be killed.
        at_doomed = (
            agent
            for number in range(64)
            if (agent := Agent(api, f"killed {number}")).ask() and _requests(doomed) > 0
        )
        agent = next(at_doomed)
        for _ in range(3):
            answer = agent.ask()
        assert answer["leyline"]["outcome"] == "spliced"
        doomed.kill("sglang")
        # The other one has never seen it: this turn is computed, the next ones are edited as before.
        assert agent.ask()["choices"][0]["finish_reason"]
        answers = [agent.ask() for _ in range(2)]
        assert all(spliced_tokens(answer) > OUTPUT_TOKENS for answer in answers)
        assert cached_tokens(agent.stream()) > OUTPUT_TOKENS
        assert running.client.get("/ready").json()["up"] == ["s0"]
    whole_pool(client)


def _requests(stack: Stack) -> float:
    """Requests that a server has finished."""
    with stack.client() as client:
        found = [
            line.rpartition(" ")[2]
            for line in client.metrics().splitlines()
            if line.startswith("sglang:num_requests_total")
        ]
    return sum(map(float, found))
