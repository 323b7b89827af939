"""Policies from YAML, from a request's `context_management`, and from other packages."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leyline_lmcache.policies import (
    ClearToolUses,
    ConfigError,
    KeepToolResults,
    Pipeline,
    Redact,
    StripReasoning,
    Threshold,
    Unit,
    available,
    build,
    from_context_management,
    load,
)
from leyline_lmcache.policies.registry import options


def written(folder: Path, text: str) -> Path:
    file = folder / "policies.yaml"
    file.write_text(textwrap.dedent(text))
    return file


def test_every_option_of_every_policy_may_stand_in_a_file(tmp_path: Path) -> None:
    for name, offer in available().items():
        known = options(offer.factory())
        assert known is not None, name
        given = {option.name: ["secret"] if option.required else _plain(option.default) for option in known}
        file = tmp_path / f"{name}.yaml"
        file.write_text(json.dumps({"policies": [{name: given}]}))
        if name == "redact":
            assert load(file) == Pipeline((Redact(("secret",)),))
        else:
            assert load(file) == Pipeline((offer.factory()(),)), name


def _plain(value: Any) -> Any:
    if isinstance(value, Threshold):
        return {"type": value.type.value, "value": value.value}
    return list(value) if isinstance(value, tuple) else value


def test_a_file_with_all_kinds_of_values(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        """
        policies:
          - clear_tool_uses:
              trigger: {type: tool_uses, value: 9}
              clear_tool_inputs: [bash]
          - strip_reasoning
          - keep_tool_results: {keep: 4, exclude_tools: [a, b]}
          - redact:
              patterns:
                - 'sk-\\d+'
        """,
    )
    assert load(file) == Pipeline(
        (
            ClearToolUses(Threshold(Unit.TOOL_USES, 9), clear_tool_inputs=("bash",)),
            StripReasoning(),
            KeepToolResults(4, exclude_tools=("a", "b")),
            Redact((r"sk-\d+",)),
        )
    )
    assert load(written(tmp_path, "policies: []")) == Pipeline()
    assert load(written(tmp_path, "policies:")) == Pipeline()


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("", None, "expected a mapping with the key policies"),
        ("[]", 1, "expected a mapping with the key policies"),
        ("polices: []", 1, "polices: unknown key; the only one is policies"),
        ("policies: keep_tool_results", 1, "policies: expected a list of policies, got str"),
        ("policies:\n- keep_tool_result", 2, "policies[0]: unknown policy 'keep_tool_result'; there are"),
        ("policies:\n- redact\n", 2, "policies[0].patterns: is missing, and has no default"),
        ("policies:\n- 3\n", 2, "policies[0]: expected a policy's name, got int"),
        ("policies:\n- a: 1\n  b: 2\n", 2, "policies[0]: expected one name with its options below it"),
        ("policies:\n- strip_reasoning: 3", 2, "policies[0].strip_reasoning: expected options"),
        (
            "policies:\n- strip_reasoning:\n    kep: 3",
            3,
            "policies[0].strip_reasoning.kep: unknown option; there are keep, keep_since_user, tags, fields",
        ),
        (
            "policies:\n- strip_reasoning:\n    keep: 1\n    keep_since_user: 'yes'",
            4,
            "policies[0].strip_reasoning.keep_since_user: input should be a valid boolean",
        ),
        (
            "policies:\n- strip_reasoning:\n    tags:\n      - think\n      - 4",
            5,
            "policies[0].strip_reasoning.tags[1]: input should be a valid string",
        ),
        (
            "policies:\n- keep_tool_results:\n    batch: 1\n    keep: -2",
            4,
            "policies[0].keep_tool_results.keep: expected 0 or more, got -2",
        ),
        (
            "policies:\n- redact:\n    patterns:\n    - a\n    - '('",
            4,
            "policies[0].redact.patterns[0]: matches the replacement",
        ),
        (
            "policies:\n- clear_tool_uses:\n    trigger:\n      type: tool_uses\n      value: 1.5",
            5,
            "policies[0].clear_tool_uses.trigger.value: input should be a valid integer",
        ),
        (
            "policies:\n- clear_tool_uses:\n    trigger:\n      type: words\n      value: 1",
            4,
            "policies[0].clear_tool_uses.trigger.type: input should be 'input_tokens' or 'tool_uses'",
        ),
        (
            "policies:\n- clear_tool_uses:\n    keep:\n      type: tool_uses\n      valu: 1",
            5,
            "policies[0].clear_tool_uses.keep.valu: unknown option",
        ),
        (
            "policies:\n- clear_tool_uses:\n    keep:\n      value: 2\n      type: input_tokens",
            5,
            "policies[0].clear_tool_uses.keep.type: expected tool_uses, got input_tokens",
        ),
        (
            "policies:\n- clear_tool_uses: {count: len}",
            2,
            "policies[0].clear_tool_uses.count: unknown option",
        ),
        ("policies:\n- redact: {patterns: [a]}\n- clear_tool_uses", 2, "patterns[0]"),
        (
            "policies:\n- strip_reasoning\n- clear_tool_uses",
            3,
            "policies[1]: clear_tool_uses has to be the first",
        ),
        ("policies:\n- strip_reasoning:\n    keep: 1\n    keep: 2", 4, "keep: is there twice"),
        ("policies:\n  - [", 2, "not valid YAML"),
        ("policies: &a [*a]", 1, "expected a policy's name, got list"),
        ("policies:\n- strip_reasoning: {keep: 2001-01-01}", 2, "keep: input should be a valid integer"),
        ("policies: !!python/object:os.system x", 1, "not valid YAML"),
    ],
)
def test_a_mistake_names_file_line_and_field(tmp_path: Path, text: str, line: int | None, said: str) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(file)
    where = f"{file}:{line}: " if line else f"{file}: "
    assert str(caught.value).startswith(where)
    assert said in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read: No such file"):
        load(tmp_path / "nowhere.yaml")
    (tmp_path / "latin").write_bytes(b"policies: [\xff]")
    with pytest.raises(ConfigError, match="latin: not UTF-8"):
        load(tmp_path / "latin")


def test_without_a_file_the_field_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        build([{"keep_tool_results": {"keep": "2"}}], at=("tenants", "a", "policies"))
    assert str(caught.value) == (
        "tenants.a.policies[0].keep_tool_results.keep: input should be a valid integer"
    )


# -- a request's own ----------------------------------------------------------------------------------------


def test_anthropics_parameters_are_understood() -> None:
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "input_tokens", "value": 30000},
        "keep": {"type": "tool_uses", "value": 3},
        "clear_at_least": {"type": "input_tokens", "value": 5000},
        "exclude_tools": ["web_search"],
        "clear_tool_inputs": True,
    }
    assert from_context_management({"edits": [edit]}) == Pipeline(
        (
            ClearToolUses(
                Threshold(Unit.INPUT_TOKENS, 30000),
                Threshold(Unit.TOOL_USES, 3),
                Threshold(Unit.INPUT_TOKENS, 5000),
                ("web_search",),
                True,
            ),
        )
    )
    nothing = {"type": edit["type"], "exclude_tools": None, "clear_at_least": None, "clear_tool_inputs": None}
    assert from_context_management({"edits": [nothing]}) == Pipeline((ClearToolUses(clear_tool_inputs=None),))
    assert from_context_management({"edits": []}) == from_context_management({}) == Pipeline()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "context_management: expected an object, got list"),
        ({"edit": []}, "context_management.edit: unknown field; the only one is edits"),
        ({"edits": {}}, None),
        ({"edits": 3}, "context_management.edits: expected a list"),
        ({"edits": ["x"]}, "context_management.edits[0]: expected an object, got str"),
        ({"edits": [{"type": "x"}]}, "context_management.edits[0].type: expected clear_tool_uses_20250919"),
        (
            {"edits": [{"type": "clear_tool_uses_20250919", "stub": "x"}]},
            "context_management.edits[0].stub: unknown field",
        ),
        (
            {"edits": [{"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": "3"}}]},
            "context_management.edits[0].keep.value: input should be a valid integer",
        ),
        ({"edits": [{"type": "clear_tool_uses_20250919"}] * 2}, "expected one edit at most, got 2"),
    ],
)
def test_a_request_that_asks_for_something_else_is_told(value: Any, said: str | None) -> None:
    if said is None:
        assert from_context_management(value) == Pipeline()
        return
    with pytest.raises(ConfigError) as caught:
        from_context_management(value)
    assert said in str(caught.value)


# -- other packages -----------------------------------------------------------------------------------------

_PACKAGE = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Shout:
    "Make everything loud."
    mark: str = "!"
    times: int = 1

    def transform(self, messages, turn_idx):
        return [{**m, "content": m["content"] + self.mark * self.times} for m in messages]

def quiet(level=0):
    if level < 0:
        raise ValueError("level is negative")
    return Shout("", level)

def nothing():
    return None
"""
_ENTRIES = """
[leyline.policies]
shout = strange_policies:Shout
quiet = strange_policies:quiet
nothing = strange_policies:nothing
absent = strange_policies:Absent
redact = strange_policies:Shout
"""


@pytest.fixture
def strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package that brings policies."""
    (tmp_path / "strange_policies.py").write_text(_PACKAGE)
    info = tmp_path / "strange-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strange\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(_ENTRIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("strange_policies", None)


def test_packages_bring_policies(strangers: None) -> None:
    made = build([{"shout": {"times": 2}}, {"quiet": {"level": 3}}, "strip_reasoning"])
    assert made.transform([{"role": "user", "content": "hi"}], 0) == [{"role": "user", "content": "hi!!"}]
    assert {name: offer.source for name, offer in available().items()} | {"shout": "strange"} == {
        name: offer.source for name, offer in available().items()
    }
    # A built-in one goes first: a configuration means the same wherever it is read.
    assert build([{"redact": {"patterns": ["x"]}}]) == Pipeline((Redact(("x",)),))


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"shout": {"times": "2"}}, "policies[0].shout.times: input should be a valid integer"),
        ({"shout": {"loud": 2}}, "policies[0].shout.loud: unknown option; there are mark, times"),
        ({"quiet": {"level": -1}}, "policies[0].quiet: level is negative"),
        ({"quiet": {"volume": 1}}, "policies[0].quiet: quiet() got an unexpected keyword argument 'volume'"),
        ("nothing", "policies[0]: makes no policy"),
        ("absent", "policies[0]: package strange cannot be loaded: AttributeError"),
    ],
)
def test_a_strangers_mistake_is_named_too(strangers: None, entry: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build([entry])
    assert said in str(caught.value)


def test_policies_made_in_python_need_no_engine_nor_pydantic() -> None:
    program = """
import sys
sys.modules["pydantic"] = None
from leyline_lmcache.policies import KeepToolResults, apply, build
apply(KeepToolResults(), [{"role": "user", "content": "x"}])
try:
    build(["keep_tool_results"])
except ValueError as error:
    print(error)
print(*({"torch", "sglang", "lmcache", "transformers", "tokenizers"} & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == (
        "policies from a configuration need pydantic: pip install 'leyline-lmcache[policies]'"
    )
