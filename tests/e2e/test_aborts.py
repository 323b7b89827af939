"""A request that ends early, while its replacement is being prefilled: it ends under its own name, and leaks
nothing.

Prefill goes in steps of 64 tokens, so that a fill of 1200 takes a while.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from reference.rules import Edit

from leyline_lmcache.stack import Stack
from leyline_lmcache.stack.client import Client, Generation

from .driver import Twin, edited, envelope, eventually, post_and_hold, tokens, whole_pool, written_since

REPLACEMENT = tokens(1200, "long replacement")
EDIT: Edit = (100, 150, REPLACEMENT)
FOREVER = 1500
"""Tokens asked for by requests that must not live to generate them."""


@pytest.fixture
def stack(stack_small: Stack) -> Stack:
    return stack_small


@pytest.fixture(autouse=True)
def whole_afterwards(client: Client) -> Iterator[None]:
    client.wait_idle()
    assert client.flush_cache()
    yield
    whole_pool(client)


class Scene:
    """A base and the body of a request that edits it and would then generate for a long time."""

    def __init__(self, stack: Stack, client: Client, twin: Twin, seed: object) -> None:
        self.client, self.twin = client, twin
        self._log = stack.logs["sglang"]
        self.base = twin.base(tokens(300, seed), 1)
        self.prompt = edited(self.base.tokens, EDIT) + tokens(9, "tail")
        self.body: dict[str, Any] = Client.request(
            self.prompt,
            max_new_tokens=FOREVER,
            sampling={"ignore_eos": True},
            kv_hints=envelope(self.base.id, EDIT),
        )
        self.generated_before = generated(client)
        self._written = self._log.stat().st_size

    def filling(self) -> None:
        """Wait until the first of the fill's 19 steps was made: SGLang logs each."""
        eventually(lambda: "Prefill batch" in written_since(self._log, self._written), "the fill runs")

    def cut_short(self) -> None:
        """Nothing runs any more, and not because it had come to its end."""
        self.client.wait_idle(60)
        assert generated(self.client) - self.generated_before < FOREVER

    def still_works(self) -> None:
        """The same edit, left alone this time, answers like the reference."""
        self.twin.edit(self.base, [EDIT], tokens(9, "tail"), 3, again=True)


def generated(client: Client) -> int:
    """Tokens the server has generated so far."""
    lines = re.findall(r"^sglang:generation_tokens_total\{[^}]*\} (\S+)$", client.metrics(), re.MULTILINE)
    return int(sum(float(value) for value in lines))


@pytest.fixture
def scene(stack: Stack, client: Client, twin: Twin, request: pytest.FixtureRequest) -> Scene:
    return Scene(stack, client, twin, request.node.name)


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def _generate(scene: Scene, rid: str) -> Any:
    return Generation.of(scene.client._post("/generate", scene.body | {"rid": rid}).json())


def _stream(scene: Scene, rid: str) -> Any:
    events = list(scene.client._events("/generate", scene.body | {"rid": rid, "stream": True}))
    return Generation.of(events[-1])


@pytest.mark.parametrize("ask", [_generate, _stream], ids=["answer", "stream"])
def test_abort_by_id(
    scene: Scene, background: ThreadPoolExecutor, ask: Callable[[Scene, str], Generation]
) -> None:
    """The answer is an abort under the client's own id."""
    answer: Future[Generation] = background.submit(ask, scene, "my-request")
    scene.filling()
    scene.client.abort("my-request")
    assert answer.result(60).finish_type == "abort"
    assert answer.result().id == "my-request"
    assert answer.result().output_ids == ()
    scene.cut_short()
    scene.still_works()


def test_abort_everything(scene: Scene, background: ThreadPoolExecutor) -> None:
    answer = background.submit(_generate, scene, "one-of-many")
    scene.filling()
    scene.client.abort(everything=True)
    assert answer.result(60).finish_type == "abort"
    assert answer.result().id == "one-of-many"
    scene.cut_short()
    scene.still_works()


def test_abort_of_somebody_else_changes_nothing(scene: Scene, background: ThreadPoolExecutor) -> None:
    body = scene.body | {"sampling_params": {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}}
    answer = background.submit(lambda: scene.client._post("/generate", body | {"rid": "mine"}).json())
    scene.filling()
    scene.client.abort("not-mine")
    scene.client.abort("min")
    assert len(answer.result(60)["output_ids"]) == 3
    assert answer.result()["meta_info"]["leyline"]["outcome"] == "spliced"


def test_abort_of_one_prompt_of_a_batch(scene: Scene, background: ThreadPoolExecutor) -> None:
    """The others go on."""
    other = [*scene.prompt[:-1], 3]
    body = scene.body | {
        "input_ids": [scene.prompt, other],
        "rid": ["first", "second"],
        "sampling_params": {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True},
    }
    answers = background.submit(lambda: scene.client._post("/generate", body).json())
    scene.filling()
    scene.client.abort("first")
    first, second = (Generation.of(one) for one in answers.result(60))
    assert (first.id, first.finish_type) == ("first", "abort")
    assert (second.id, second.finish_type, len(second.output_ids)) == ("second", "length", 3)
    scene.still_works()


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "answer"])
def test_client_gone(scene: Scene, path: str, stream: bool) -> None:
    """SGLang notices a lost client of a plain answer after some seconds, of a stream at once."""
    body: dict[str, Any] = scene.body | {"stream": stream}
    if path != "/generate":
        body = {
            "model": scene.client.model,
            "prompt": scene.prompt,
            "max_tokens": FOREVER,
            "ignore_eos": True,
            "custom_params": {"kv_hints": json.dumps(scene.body["kv_hints"])},
            "stream": stream,
        }
    connection = post_and_hold(scene.client, path, body)
    scene.filling()
    connection.close()
    scene.cut_short()
    scene.still_works()


def test_client_gone_after_the_first_token(scene: Scene) -> None:
    events = scene.client.stream(
        scene.prompt,
        max_new_tokens=FOREVER,
        sampling={"ignore_eos": True},
        kv_hints=envelope(scene.base.id, EDIT),
    )
    assert next(events).meta["leyline"]["outcome"] == "spliced"
    events.close()  # type: ignore[attr-defined]
    scene.cut_short()
    scene.still_works()
