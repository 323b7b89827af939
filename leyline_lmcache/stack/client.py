"""A small client of an SGLang server: what tests, demo and benchmarks ask for, no more."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

Prompt = str | Sequence[int]


class RequestError(RuntimeError):
    """The server refused a request.

    Attributes:
        status: the HTTP status.
        body: what it answered.
    """

    def __init__(self, url: str, status: int, body: str) -> None:
        super().__init__(f"{url}: HTTP {status}: {body[:500]}")
        self.status = status
        self.body = body


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer of ``/generate``.

    Attributes:
        text: the generated text.
        output_ids: the generated tokens.
        meta: SGLang's ``meta_info``.
    """

    text: str
    output_ids: tuple[int, ...]
    meta: Mapping[str, Any]

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Generation:
        """From the JSON object SGLang answers with."""
        return cls(answer.get("text", ""), tuple(answer.get("output_ids") or ()), answer["meta_info"])

    @property
    def id(self) -> str:
        """The response id; the base of a later directive."""
        return str(self.meta["id"])

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.meta["prompt_tokens"])

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed for this request."""
        return int(self.meta.get("cached_tokens") or 0)

    @property
    def cached_details(self) -> Mapping[str, Any]:
        """Where the cached tokens came from (``device``, ``storage``); empty if SGLang does not say."""
        return self.meta.get("cached_tokens_details") or {}

    @property
    def finish_type(self) -> str:
        """``stop``, ``length`` or ``abort``."""
        return str((self.meta.get("finish_reason") or {}).get("type", ""))

    @property
    def output_logprobs(self) -> tuple[float, ...]:
        """Log-probability of each generated token; needs ``logprobs=True``."""
        return tuple(row[0] for row in self.meta.get("output_token_logprobs") or ())

    @property
    def input_logprobs(self) -> tuple[float | None, ...]:
        """Log-probability of each prompt token from ``logprob_start`` on; None for the first."""
        return tuple(row[0] for row in self.meta.get("input_token_logprobs") or ())


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """SGLang's KV pool as its scheduler sees it.

    Attributes:
        capacity: tokens it can hold.
        used: tokens held by something that runs or locks them; neither available nor evictable. 0 when idle.
        running, waiting: requests.
    """

    capacity: int
    used: int
    running: int
    waiting: int

    @property
    def is_idle(self) -> bool:
        """True if no request runs or waits."""
        return self.running == 0 and self.waiting == 0


class Client:
    """Talks to one SGLang server. Safe to use from several threads."""

    def __init__(self, url: str, *, model: str = "default", timeout_s: float = 300.0) -> None:
        """
        Args:
            url: base URL of the server.
            model: name sent with OpenAI requests.
            timeout_s: for a whole answer, or between two events of a stream.
        """
        self.model = model
        # Never through a proxy: the servers this is for run beside us.
        self.http = httpx.Client(base_url=url, timeout=timeout_s, trust_env=False)

    def close(self) -> None:
        """Close the connections."""
        self.http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- generation ----------------------------------------------------------------------------------------

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """One answer; the options are those of `request`."""
        answer = self._post("/generate", self.request(prompt, **options)).json()
        return Generation.of(answer[0] if isinstance(answer, list) else answer)

    def generate_all(self, prompt: Prompt | Sequence[Prompt], **options: Any) -> list[Generation]:
        """All answers of a request with ``n > 1`` or several prompts."""
        answer = self._post("/generate", self.request(prompt, **options)).json()
        return [Generation.of(one) for one in (answer if isinstance(answer, list) else [answer])]

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Generation]:
        """The answer as it grows: each item holds everything up to it."""
        body = self.request(prompt, **options) | {"stream": True}
        for event in self._events("/generate", body):
            yield Generation.of(event)

    @staticmethod
    def request(
        prompt: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = 8,
        temperature: float = 0.0,
        sampling: Mapping[str, Any] | None = None,
        kv_hints: Mapping[str, Any] | None = None,
        logprobs: bool = False,
        logprob_start: int | None = None,
        top_logprobs: int = 0,
        rid: str | None = None,
        **extra: Any,
    ) -> dict[str, Any]:
        """The body of a ``/generate`` request.

        Args:
            prompt: text, token ids, or a list of either.
            max_new_tokens, temperature: sampling; greedy by default.
            sampling: further ``sampling_params``.
            kv_hints: the envelope with directives.
            logprobs: ask for log-probabilities of the output, and of the prompt from `logprob_start` on.
            top_logprobs: alternatives per token.
            rid: the request's id, which is then the response's.
            extra: further fields, such as ``session_id`` or ``extra_key``.
        """
        is_text = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], str))
        body: dict[str, Any] = {
            "text" if is_text else "input_ids": prompt if isinstance(prompt, str) else list(prompt),
            "sampling_params": {
                "max_new_tokens": max_new_tokens,
                "temperature": temperature,
                **(sampling or {}),
            },
            **extra,
        }
        if kv_hints is not None:
            body["kv_hints"] = kv_hints
        if rid is not None:
            body["rid"] = rid
        if logprobs or logprob_start is not None or top_logprobs:
            body["return_logprob"] = True
            body["top_logprobs_num"] = top_logprobs
            if logprob_start is not None:
                body["logprob_start_len"] = logprob_start
        return body

    def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        """``/v1/chat/completions``, as the JSON object it answers with."""
        body = {"model": self.model, "messages": list(messages), "temperature": 0, **fields}
        return dict(self._post("/v1/chat/completions", body).json())

    def chat_stream(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Iterator[dict[str, Any]]:
        """``/v1/chat/completions`` with ``stream``: its chunks."""
        body = {"model": self.model, "messages": list(messages), "temperature": 0, **fields, "stream": True}
        yield from self._events("/v1/chat/completions", body)

    def complete(self, prompt: Prompt, **fields: Any) -> dict[str, Any]:
        """``/v1/completions``, as the JSON object it answers with."""
        body = {"model": self.model, "prompt": prompt, "temperature": 0, **fields}
        return dict(self._post("/v1/completions", body).json())

    def abort(self, rid: str = "", *, everything: bool = False) -> None:
        """Abort the request `rid`, or all of them."""
        self._post("/abort_request", {"rid": rid, "abort_all": everything})

    # -- the server ----------------------------------------------------------------------------------------

    def flush_cache(self, timeout_s: float = 10.0) -> bool:
        """Empty the KV pool; False if requests still ran after the time-out."""
        return self.http.post("/flush_cache", params={"timeout": timeout_s}).status_code == 200

    def server_info(self) -> dict[str, Any]:
        """Arguments and internal state of the server."""
        return dict(self._get("/server_info").json())

    def metrics(self) -> str:
        """Prometheus metrics as text; needs a server with metrics."""
        return self._get("/metrics", follow_redirects=True).text

    def pool(self) -> PoolUsage:
        """The KV pool now. The scheduler publishes it whenever it becomes idle, and while it works."""
        (load,) = self._get("/v1/loads").json()["loads"]
        return PoolUsage(
            load["max_total_num_tokens"],
            load["num_used_tokens"],
            load["num_running_reqs"],
            load["num_waiting_reqs"],
        )

    def wait_idle(self, timeout_s: float = 30.0) -> PoolUsage:
        """The KV pool once no request runs or waits.

        Raises:
            TimeoutError: one still does.
        """
        deadline = time.monotonic() + timeout_s
        while not (usage := self.pool()).is_idle:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"after {timeout_s:g} s {usage.running} requests run, {usage.waiting} wait"
                )
            time.sleep(0.05)
        return usage

    # -- HTTP ----------------------------------------------------------------------------------------------

    def _get(self, path: str, **options: Any) -> httpx.Response:
        return _checked(self.http.get(path, **options))

    def _post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        return _checked(self.http.post(path, json=body))

    def _events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        with self.http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                response.read()
            _checked(response)
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if line.startswith("data:") and data != "[DONE]":
                    yield json.loads(data)


def _checked(response: httpx.Response) -> httpx.Response:
    if response.status_code != 200:
        raise RequestError(str(response.url), response.status_code, response.text)
    return response
