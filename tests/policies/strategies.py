"""Random conversations."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from leyline_lmcache.policies import (
    ClearToolUses,
    KeepToolResults,
    Pipeline,
    Policy,
    Redact,
    StripReasoning,
    StubFailedCalls,
    Threshold,
    Unit,
)

Conversation = list[dict[str, Any]]

WORDS = st.sampled_from(
    ["ok", "Error: no such thing", "sk-12345678", "x" * 79, "x" * 80, "x" * 81, "é\n" * 60, "y" * 400, ""]
)
_THOUGHTS = st.sampled_from(["hm", "sk-12345678 it is", "z" * 200])
_TOOLS = st.sampled_from(["bash", "edit", "search"])


@st.composite
def contents(draw: st.DrawFn) -> Any:
    text = draw(WORDS)
    shape = draw(st.integers(0, 3))
    if shape < 2:
        return text
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if shape == 3:
        parts.append({"type": "image_url", "image_url": {"url": "data:sk-12345678"}})
    return parts


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    """Valid ones, with parallel calls, reasoning in every place, and calls that still wait at the end."""
    made: Conversation = [{"role": "system", "content": draw(WORDS)}] if draw(st.booleans()) else []
    made.append({"role": "user", "content": draw(contents())})
    for turn in range(draw(st.integers(0, 8))):
        answer: dict[str, Any] = {"role": "assistant", "content": draw(WORDS)}
        thinks = draw(st.integers(0, 4))
        thought = draw(_THOUGHTS)
        if thinks == 1:
            answer["reasoning_content"] = thought
        elif thinks == 2:
            answer["content"] = f"<think>{thought}</think>{answer['content']}"
        elif thinks == 3:
            answer["content"] = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": "so"}]
        calls = draw(st.lists(_TOOLS, max_size=3))
        if calls:
            answer["tool_calls"] = [
                {
                    "id": f"{turn}-{number}",
                    "type": "function",
                    "function": {"name": tool, "arguments": json.dumps({"a": draw(WORDS)})},
                }
                for number, tool in enumerate(calls)
            ]
            if draw(st.booleans()):
                answer["content"] = None
        made.append(answer)
        made += [
            {"role": "tool", "tool_call_id": f"{turn}-{number}", "content": draw(contents())}
            for number in range(len(calls))
        ]
        if not calls or draw(st.integers(0, 3)) == 0:
            made.append({"role": "user", "content": draw(contents())})
    return made


_TOOL_LISTS = st.lists(_TOOLS, max_size=1).map(tuple)

KEEP = st.builds(
    KeepToolResults,
    keep=st.integers(0, 4),
    batch=st.integers(1, 3),
    observations=st.booleans(),
    exclude_tools=_TOOL_LISTS,
    stub=st.sampled_from(["[old tool output removed]", "[{chars} characters, {lines} lines]"]),
)
FAILED = st.builds(
    StubFailedCalls, keep=st.integers(0, 3), clear_inputs=st.booleans(), observations=st.booleans()
)
STRIP = st.builds(StripReasoning, keep=st.integers(0, 2), keep_since_user=st.booleans())
CLEAR = st.builds(
    ClearToolUses,
    trigger=st.builds(Threshold, st.just(Unit.INPUT_TOKENS), st.integers(0, 400))
    | st.builds(Threshold, st.just(Unit.TOOL_USES), st.integers(0, 5)),
    keep=st.builds(Threshold, st.just(Unit.TOOL_USES), st.integers(0, 3)),
    clear_at_least=st.none() | st.builds(Threshold, st.just(Unit.INPUT_TOKENS), st.integers(0, 150)),
    exclude_tools=_TOOL_LISTS,
    clear_tool_inputs=st.booleans() | _TOOL_LISTS,
)
REDACT = st.builds(
    Redact,
    patterns=st.just((r"sk-\d{8}", "é")),
    roles=st.sampled_from([(), ("tool",), ("assistant", "tool")]),
)

OTHERS = KEEP | FAILED | STRIP | REDACT
POLICIES: st.SearchStrategy[Policy] = OTHERS | CLEAR
PIPELINES = st.builds(
    lambda first, rest: Pipeline((*first, *rest)),
    st.lists(CLEAR, max_size=1),
    st.lists(OTHERS, max_size=3),
)
