"""Main process: prefill the replacements of an edit before the request itself (DESIGN §6, *Fill*).

A replacement in the middle has no KV, and the engine computes prompts from their end only. So a request whose
directives replace tokens first runs short internal requests, each the prompt up to one replacement's end
with no sampling, and then itself. The client sends one request and sees one answer.

Upstream: ``TokenizerManager.generate_request`` (an async generator) and ``.abort_request``.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.runtime_context import get_parallel, get_schedule

from leyline_lmcache.directive import normalize
from leyline_lmcache.ranges import Range
from leyline_lmcache.reasons import Fallback

from . import hints
from .plans import fill_ranges
from .session_edits import SessionEdits, Turn
from .settings import Settings

log = logging.getLogger(__name__)

_ANY_LENGTH = 2**31 - 1
"""The base's length is known to the scheduler only; bounds are checked there."""


@dataclass(slots=True)
class _Filling:
    """One prompt of a client's request while its fills run."""

    fills: set[str] = field(default_factory=set)
    aborted: bool = False


@dataclass(frozen=True, slots=True)
class _Element:
    """One prompt of a request, with what its fills have to copy."""

    index: int
    prompt: list[int]
    raw: Any
    spans: tuple[Range, ...]
    cache_salt: str | None
    extra_key: str | None
    lora_path: str | None


class FillRunner:
    """Runs fills around ``generate_request``. One per process; keeps only what is in flight."""

    def __init__(self, settings: Settings) -> None:
        self._min_reuse = settings.min_reuse
        self._sessions = SessionEdits(settings)
        self._filling: dict[str, _Filling] = {}

    async def generate(
        self, original: Callable[..., AsyncIterator[Any]], manager: Any, obj: Any, request: Any = None
    ) -> AsyncIterator[Any]:
        """In place of ``generate_request``: fills first, then the request; unpacks the reports."""
        turn = await self._turn(manager, obj) if isinstance(obj, GenerateReqInput) else None
        raws = _envelopes(obj) if isinstance(obj, GenerateReqInput) else []
        aborted: list[str] = []
        if any(raw is not None for raw in raws):
            rids = _rids(obj, len(raws))
            fillings = [_Filling() for _ in raws]
            self._filling.update(zip(rids, fillings, strict=False))
            try:
                elements = await self._elements_or_none(manager, obj, raws)
                last = await self._fill_all(original, manager, obj, elements, fillings, request)
            except BaseException:
                _settle(obj)
                raise
            finally:
                for rid in rids:
                    self._filling.pop(rid, None)
            if all(filling.aborted for filling in fillings):
                answer = _aborted(obj, rids, [len(prompt) for prompt in await _prompts(manager, obj)], last)
                _settle(obj)
                yield answer
                return
            aborted = [rid for rid, filling in zip(rids, fillings, strict=False) if filling.aborted]
        late = asyncio.ensure_future(_abort_when_sent(manager, aborted)) if aborted else None
        try:
            async with aclosing(original(manager, obj, request)) as answers:  # type: ignore[type-var]
                output: list[int] = []
                async for answer in answers:
                    unpacked = _unpacked(answer)
                    if turn is not None:
                        output = _collect(output, manager, obj, unpacked)
                        unpacked = self._tell(turn, unpacked, output)
                    yield unpacked
        finally:
            if late is not None:
                late.cancel()

    # ------------------------------------------------------------------ sessions

    async def _turn(self, manager: Any, obj: GenerateReqInput) -> Turn | None:
        """What a session makes of a request; a fault of ours costs the splice, never the request.

        Raises:
            ValueError: the client's options are malformed (an HTTP 400).
        """
        if isinstance(obj.session_id, str) and _is_single(obj):
            obj.kv_hints = hints.view_of_session(obj.kv_hints, lambda: self._sessions.latest(obj))
        if not self._sessions.wanted(obj) or not _is_single(obj):
            return None
        if obj.contains_mm_input() or obj.input_embeds is not None:
            return None
        try:
            has_directives = any(raw is not None for raw in _envelopes(obj))
            prompt = await _prompt(manager, obj, 0)
            return await self._sessions.begin(obj, prompt, has_directives=has_directives)
        except Exception:
            log.exception("the edits of request %s could not be derived", obj.rid)
            return None

    def _tell(self, turn: Turn, answer: Any, output: list[int]) -> Any:
        """Remember a finished answer, and let the report say what the session did."""
        meta = answer.get("meta_info") if isinstance(answer, dict) else None
        if meta is None or meta.get("finish_reason") is None:
            return answer
        self._sessions.answered(turn, answer, output)
        if turn.derived is not None and isinstance(meta.get("leyline"), dict):
            derived = turn.derived
            meta["leyline"]["session"] = {
                "base": derived.base.response,
                "changes": len(derived.diff.changes),
                "kept": derived.diff.kept,
                "diff_ms": round(turn.diff_ms, 3),
            }
        return answer

    def abort(
        self, original: Callable[..., Any], manager: Any, rid: str = "", abort_all: bool = False
    ) -> Any:
        """In place of ``abort_request``: while a request is filled, the manager does not know its id."""
        if abort_all:
            for running in self._filling.values():
                running.aborted = True
            return original(manager, rid, abort_all)
        filling = self._filling.get(rid)
        if filling is None:
            return original(manager, rid, abort_all)
        filling.aborted = True
        for fill in list(filling.fills):
            original(manager, fill, False)
        return None

    # ------------------------------------------------------------------ what to fill

    async def _elements_or_none(self, manager: Any, obj: GenerateReqInput, raws: list[Any]) -> list[_Element]:
        """As :meth:`_elements`; a fault of ours costs the splice, never the request."""
        for raw in raws:
            hints.refuse_internal(raw)
        try:
            return await self._elements(manager, obj, raws)
        except Exception:
            log.exception("the fills of request %s could not be worked out", obj.rid)
            return []

    async def _elements(self, manager: Any, obj: GenerateReqInput, raws: list[Any]) -> list[_Element]:
        """The prompts of a request that need fills. Malformed directives need none: the scheduler names the
        fault."""
        if obj.contains_mm_input() or obj.input_embeds is not None:
            return []
        if get_parallel().dp_size > 1 and obj.routed_dp_rank is None:
            return []  # the fill and the request could reach different engines
        page_size = get_schedule().page_size
        elements: list[_Element] = []
        for i, raw in enumerate(raws):
            if raw is None:
                continue
            try:
                envelope = hints.decode(raw)
                directives = normalize(envelope.directives, _ANY_LENGTH)
            except Fallback:
                continue
            if envelope.forgets:
                continue
            spans = fill_ranges([d for d in directives if not d.is_identity], page_size, self._min_reuse)
            if not spans:
                continue
            prompt = await _prompt(manager, obj, i)
            # What ends near the prompt's end is prefilled by the request itself.
            spans = tuple(span for span in spans if span[1] + self._min_reuse <= len(prompt))
            if spans:
                elements.append(
                    _Element(
                        i,
                        prompt,
                        raw,
                        spans,
                        _at(obj.cache_salt, i),
                        _at(obj.extra_key, i),
                        _at(obj.lora_path, i),
                    )
                )
        return elements

    # ------------------------------------------------------------------ running them

    async def _fill_all(
        self,
        original: Callable[..., AsyncIterator[Any]],
        manager: Any,
        obj: GenerateReqInput,
        elements: list[_Element],
        fillings: list[_Filling],
        request: Any,
    ) -> dict[str, Any] | None:
        """Fill every prompt, prompts side by side; returns the last answer of a fill, if any.

        A fill that fails is not the request's failure: the scheduler then finds the replacement missing
        and prefills. Only the client's departure is passed on.
        """
        jobs = [
            asyncio.ensure_future(self._fill_one(original, manager, obj, element, fillings, request))
            for element in elements
        ]
        try:
            answers = await asyncio.gather(*jobs)
        except BaseException:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            raise
        return next((answer for answer in reversed(answers) if answer is not None), None)

    async def _fill_one(
        self,
        original: Callable[..., AsyncIterator[Any]],
        manager: Any,
        obj: GenerateReqInput,
        element: _Element,
        fillings: list[_Filling],
        request: Any,
    ) -> dict[str, Any] | None:
        filling = fillings[element.index]
        last: dict[str, Any] | None = None
        for span in element.spans:
            if filling.aborted:
                break
            rid = f"leyline-fill-{uuid.uuid4().hex}"
            filling.fills.add(rid)
            try:
                fill = GenerateReqInput(
                    rid=rid,
                    input_ids=element.prompt[: span[1]],
                    sampling_params={"max_new_tokens": 0, "temperature": 0},
                    kv_hints=hints.fill_envelope(element.raw, span),
                    cache_salt=element.cache_salt,
                    extra_key=element.extra_key,
                    lora_path=element.lora_path,
                    priority=obj.priority,
                    routed_dp_rank=obj.routed_dp_rank,
                )
                async with aclosing(original(manager, fill, request)) as answers:  # type: ignore[type-var]
                    async for answer in answers:
                        last = answer
            except Exception as error:
                if request is not None and not filling.aborted and await request.is_disconnected():
                    raise
                log.warning("fill of request %s failed: %s", obj.rid, type(error).__name__)
                break
            finally:
                filling.fills.discard(rid)
        return last


async def _abort_when_sent(manager: Any, rids: list[str]) -> None:
    """Abort these prompts of a request as soon as the scheduler has them: before, it would not know them."""
    for rid in rids:
        while not getattr(manager.rid_to_state.get(rid), "dispatched", False):
            await asyncio.sleep(0.005)
        manager.abort_request(rid)


def _settle(obj: GenerateReqInput) -> None:
    """Leave a request that never reached SGLang as it would have: the code after its answer looks at it."""
    if not hasattr(obj, "is_single"):
        with suppress(Exception):
            obj.normalize_batch_and_arguments()


def _rids(obj: GenerateReqInput, count: int) -> list[str]:
    """The ids of a request's prompts. Given here if the client gave none: an abort must find them."""
    if obj.rid is None:
        obj.rid = uuid.uuid4().hex if _is_single(obj) else [uuid.uuid4().hex for _ in range(count)]
    if isinstance(obj.rid, list):
        return obj.rid
    return [obj.rid] if _is_single(obj) else [f"{obj.rid}_{i}" for i in range(count)]


async def _prompts(manager: Any, obj: GenerateReqInput) -> list[list[int]]:
    """Token ids of every prompt."""
    if _is_single(obj):
        return [await _prompt(manager, obj, 0)]
    count = len(obj.input_ids if obj.input_ids is not None else obj.text or ())
    return [await _prompt(manager, obj, i) for i in range(count)]


async def _prompt(manager: Any, obj: GenerateReqInput, i: int) -> list[int]:
    """Token ids of one prompt, exactly as SGLang will tokenize it."""
    if obj.input_ids is not None:
        ids = obj.input_ids if _is_single(obj) else obj.input_ids[i]
        return list(ids)
    text = obj.text if _is_single(obj) else obj.text[i]
    ids, _ = await manager._tokenize_texts(text)
    return list(ids)


def _envelopes(obj: GenerateReqInput) -> list[Any]:
    """One undecoded envelope, or None, per prompt."""
    count = 1 if _is_single(obj) else len(obj.input_ids if obj.input_ids is not None else obj.text or ())
    return [hints.raw_envelope(_at(obj.kv_hints, i), _at(obj.sampling_params, i)) for i in range(count)]


def _is_single(obj: GenerateReqInput) -> bool:
    if obj.input_ids is not None:
        return not obj.input_ids or not isinstance(obj.input_ids[0], list)
    return not isinstance(obj.text, list)


def _at(value: Any, i: int) -> Any:
    """One prompt's value of a field that may be given once for all prompts."""
    return (value[i] if i < len(value) else None) if isinstance(value, list) else value


def _aborted(obj: GenerateReqInput, rids: list[str], lengths: list[int], last: dict[str, Any] | None) -> Any:
    """The answer to a request that was aborted while it was being filled, in the shape of SGLang's own."""
    shared = dict(last["meta_info"]) if last else {"cached_tokens": 0}
    shared.pop("leyline", None)
    shared |= {
        "finish_reason": {"type": "abort", "message": "Aborted while its replacements were prefilled"},
        "completion_tokens": 0,
    }
    single = _is_single(obj)
    answers = []
    for index, (rid, length) in enumerate(zip(rids, lengths, strict=False)):
        meta = {**shared, "prompt_tokens": length, "id": rid}
        answer: dict[str, Any] = {"text": "", "output_ids": [], "meta_info": meta}
        answers.append(answer if single else answer | {"index": index})
    return answers[0] if single else answers


def _collect(output: list[int], manager: Any, obj: GenerateReqInput, answer: Any) -> list[int]:
    """Token ids so far: SGLang repeats all of them in each part of a stream, or sends what is new."""
    ids: list[int] | None = answer.get("output_ids") if isinstance(answer, dict) else None
    if not ids:
        return output
    if obj.stream and manager.incremental_streaming_output:
        output.extend(ids)
        return output
    return ids


def _unpacked(answer: Any) -> Any:
    """``meta_info["leyline"]`` as one object: SGLang sends per-token lists, to neighbours in a batch too."""
    for each in answer if isinstance(answer, list) else [answer]:
        meta = each.get("meta_info") if isinstance(each, dict) else None
        if meta is None or not isinstance(meta.get("leyline"), list):
            continue
        report = next((value for value in meta["leyline"] if value is not None), None)
        if report is None:
            del meta["leyline"]
        else:
            meta["leyline"] = report
    return answer
