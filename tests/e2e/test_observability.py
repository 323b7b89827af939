"""Counters, journal and logs tell what happened, in ids, counts and reasons; never in prompts (I10)."""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import Any

import pytest
from reference.rules import Edit

from leyline_lmcache.journal import JournalReader, OpRecord
from leyline_lmcache.ops import OpKind, Tier
from leyline_lmcache.stack import Stack
from leyline_lmcache.stack.client import Client

from .driver import edited, envelope, eventually, refused, spliced, tokens

EDIT: Edit = (100, 200, (7, 8, 9))


@pytest.fixture
def stack(stack_gqa: Stack) -> Stack:
    return stack_gqa


@pytest.fixture(autouse=True)
def empty(client: Client) -> None:
    """With free slots at hand, they are copied into rather than taken over."""
    client.wait_idle()
    assert client.flush_cache()


def counters(client: Client) -> dict[str, float]:
    """All of Leyline's counters, by name and labels; the processes of a server summed."""
    out: dict[str, float] = {}
    for name, labels, value in re.findall(
        r"^(leyline_\w+?)(\{[^}]*\})? (\S+)$", client.metrics(), re.MULTILINE
    ):
        key = name + labels
        out[key] = out.get(key, 0) + float(value)
    return out


class Delta:
    """What the counters did since."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._before = counters(client)

    def __call__(self, name: str, **labels: str) -> float:
        def total(found: dict[str, float]) -> float:
            wanted = [f'{key}="{value}"' for key, value in labels.items()]
            return sum(
                value
                for key, value in found.items()
                if key.split("{")[0] == name and all(each in key for each in wanted)
            )

        return total(counters(self._client)) - total(self._before)


def test_counters_move(client: Client) -> None:
    prompt = tokens(400, "counted")
    base = client.generate(prompt, max_new_tokens=1)
    moved = Delta(client)
    changed = edited(prompt, EDIT) + tokens(9, "t")
    spliced(client.generate(changed, kv_hints=envelope(base.id, EDIT)))
    client.generate([*prompt, 5], kv_hints=envelope(base.id, (0, 0, [])))
    refused(client.generate(changed, kv_hints=envelope("nobody", EDIT)), "unknown_base")
    refused(client.generate(changed, kv_hints=envelope(base.id, (5, 3, []))), "invalid_directive")
    client.generate(changed)  # whoever sends no directives is not counted
    assert moved("leyline_edits_total") == 4
    assert moved("leyline_edits_total", outcome="spliced") == 1
    assert moved("leyline_edits_total", outcome="exact") == 1
    assert moved("leyline_edits_total", outcome="fallback", reason="unknown_base") == 1
    assert moved("leyline_edits_total", outcome="fallback", reason="invalid_directive") == 1
    assert moved("leyline_tokens_total", how="spliced") == 200
    assert moved("leyline_tokens_total", how="filled") == 3
    assert moved("leyline_ops_total", tier="gpu", op="copy_rotate") == 1
    assert moved("leyline_ops_total", tier="gpu", op="fill") == 1
    assert moved("leyline_ops_total", tier="gpu", op="invalidate") == 1
    assert moved("leyline_splice_seconds_count") == 1
    assert moved("leyline_splice_seconds_sum") > 0


def test_reprefilled_tokens_are_counted(client: Client) -> None:
    """What an edit wanted to keep and did not get."""
    prompt = tokens(400, "again")
    base = client.generate(prompt, max_new_tokens=1)
    assert client.flush_cache()
    moved = Delta(client)
    changed = edited(prompt, EDIT) + tokens(9, "t")
    refused(client.generate(changed, kv_hints=envelope(base.id, EDIT)), "source_missing")
    assert moved("leyline_tokens_total", how="reprefilled") == 200


def journal(stack: Stack) -> list[OpRecord]:
    return list(JournalReader(stack.journal_dir).list())


def test_journal_names_each_op(stack: Stack, client: Client) -> None:
    prompt = tokens(400, "journal")
    names = [uuid.uuid4().hex for _ in range(3)]
    base = client.generate(prompt, max_new_tokens=1, rid=names[0])
    changed = edited(prompt, EDIT) + tokens(9, "t")
    answer = client.generate(changed, kv_hints=envelope(base.id, EDIT), rid=names[1])
    lineage = spliced(answer)["lineage"]
    refused(client.generate(changed, kv_hints=envelope("nobody", EDIT), rid=names[2]), "unknown_base")

    def records(rid: str) -> list[OpRecord]:
        return [record for record in journal(stack) if record.request == rid]

    eventually(lambda: len(records(names[2])) == 1 and len(records(names[1])) >= 2, "it is written")
    (no,) = records(names[2])
    assert (no.op, no.reason) == (None, "unknown_base")
    ops = {record.op: record for record in records(names[1])}
    moved = ops[OpKind.COPY_ROTATE]
    assert (moved.tier, moved.tokens, moved.shift, moved.reason) == (Tier.GPU, 200, -97, None)
    assert moved.lineage.startswith(lineage)
    # Per token and layer: two heads of 32 floats of key and as many of value, read and written.
    assert moved.bytes >= 200 * 3 * 2 * 2 * 32 * 4
    assert moved.micros > 0
    assert ops[OpKind.INVALIDATE].tokens >= 100
    fills = [
        record for record in journal(stack) if record.op is OpKind.FILL and record.lineage == moved.lineage
    ]
    assert [record.tokens for record in fills] == [3]
    assert not records(names[0])


def test_no_prompt_in_logs_and_journal_I10(stack: Stack, client: Client) -> None:
    """Neither text nor token ids, of prompts, replacements and refused directives."""
    marker = "Xyzzy-the-secret-word"
    text = marker + "".join(chr(97 + token % 26) for token in tokens(300, "private"))
    base = client.generate(text, max_new_tokens=1)
    secret = tokens(40, "private ids", low=300, high=500)
    prompt = tokens(100, "private p") + secret + tokens(100, "private q")
    other = client.generate(prompt, max_new_tokens=1)
    hidden: Edit = (50, 60, secret)
    attempts: list[dict[str, Any]] = [
        envelope(base.id, (30, 60, [])),
        envelope(other.id, hidden),
        envelope("nobody", hidden),
        envelope(other.id, hidden, hidden),
        envelope(other.id, (50, 60, [*secret, -1])),
        envelope(other.id, (50, 60, secret), mode=marker),
    ]
    attempts[-1]["actions"][0]["payload"][marker] = marker
    client.generate(text[:30] + text[60:], kv_hints=attempts[0])
    for hints in attempts[1:]:
        client.generate([*edited(prompt, hidden), 5, 6], kv_hints=hints)
    wrong = envelope(other.id, hidden)
    wrong["actions"][0]["payload"]["replacement_ids"] = marker
    client.generate(prompt, kv_hints=wrong)
    client.chat([{"role": "user", "content": marker}], max_tokens=1, custom_params={"kv_hints": marker})
    eventually(lambda: any(record.reason == "overlapping_edits" for record in journal(stack)), "written")

    files = [stack.logs["sglang"], *sorted(Path(stack.journal_dir).glob("*.jsonl"))]
    assert len(files) > 1
    some = secret[5:9]
    for file in files:
        written = file.read_text(errors="replace")
        assert marker not in written
        for form in (", ".join(map(str, some)), ",".join(map(str, some)), " ".join(map(str, some))):
            assert form not in written
