"""The conversation of the demo without servers: what it says, where its edits are, what its results mean."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from leyline_lmcache.demo import picture, screen
from leyline_lmcache.demo.arms import envelope
from leyline_lmcache.demo.dialect import Dialect
from leyline_lmcache.demo.results import (
    Arm,
    ArmTurn,
    Conversation,
    Served,
    TurnResult,
    Verdict,
    condensed,
    last_ops,
)
from leyline_lmcache.demo.scenario import MOST_TURNS, Message, Place, write_scenario
from leyline_lmcache.demo.transcript import Replacement, Transcript
from leyline_lmcache.directive import apply_directives
from leyline_lmcache.envelope import parse_envelope
from leyline_lmcache.journal import OpRecord
from leyline_lmcache.ops import OpKind, Tier
from leyline_lmcache.stack import models
from leyline_lmcache.view import Edit, View


@pytest.fixture(scope="module")
def dialect() -> Dialect:
    return Dialect.of_model(models.resolve(models.TRAINED))


def every_message(turns: int, seed: int) -> Iterable[Message]:
    scenario = write_scenario(turns, seed)
    yield scenario.system
    for one in scenario.rounds:
        yield from (one.call, one.output, one.note, one.aside)
    for turn in scenario.turns:
        yield from (turn.stub, turn.question)


# -- the scenario ------------------------------------------------------------------------------------------


def test_a_seed_is_a_conversation() -> None:
    assert write_scenario(12, 5) == write_scenario(12, 5)
    assert write_scenario(12, 5) != write_scenario(12, 6)
    assert write_scenario(12, 5) != write_scenario(12, 5, version=1)


@pytest.mark.parametrize("turns", [1, 12, MOST_TURNS])
def test_every_turn_asks_for_a_value_whose_source_it_drops(turns: int) -> None:
    scenario = write_scenario(turns, seed=3)
    assert len(scenario.turns) == turns
    for turn in scenario.turns:
        stale = scenario.rounds[turn.stale]
        source, sign, value = stale.output.content.rstrip(";").split()[-3:]
        assert (sign, value) == ("=", turn.expected)
        assert stale.note.content == f"{stale.asked} = {source};"
        assert turn.question.content == f"{stale.asked} ?"
        assert turn.stale < turn.round
        # Neither the stub nor anything that stays says the value's name again.
        assert source not in turn.stub.content.split()
    dropped = [turn.stale for turn in scenario.turns]
    deleted = [turn.deleted for turn in scenario.turns if turn.deleted is not None]
    assert len(set(dropped)) == len(dropped)
    assert len(set(deleted)) == len(deleted)


@pytest.mark.parametrize("turns", [0, MOST_TURNS + 1])
def test_turns_are_bounded(turns: int) -> None:
    with pytest.raises(ValueError, match="turns: expected 1 to"):
        write_scenario(turns, 1)


def test_the_model_knows_every_word(dialect: Dialect) -> None:
    """A word outside the vocabulary would be spelled in bytes, which the model was not trained to read."""
    for message in every_message(MOST_TURNS, 7):
        tokens = dialect.message(message)
        words = message.content.replace(";", " ;").replace("[", "[ ").replace(":", " :").replace("]", " ]")
        assert len(tokens) <= len(words.replace(".", " .").split()) + 3, message


# -- tokens ------------------------------------------------------------------------------------------------


def test_messages_one_by_one_are_the_model_s_own_template(dialect: Dialect) -> None:
    import jinja2

    template = (models.resolve(models.TRAINED) / "chat_template.jinja").read_text()
    messages = list(every_message(4, 2))
    text = jinja2.Template(template).render(
        messages=[{"role": one.role, "content": one.content} for one in messages], add_generation_prompt=True
    )
    whole = dialect.tokenizer.encode(text, add_special_tokens=False).ids
    ours = [*dialect.opening(), *(token for one in messages for token in dialect.message(one))]
    assert whole == [*ours, *dialect.prompt_end()]
    assert dialect.first + "".join(dialect.text(one) for one in messages) + dialect.asking == text


def test_an_answer_ends_at_the_end_of_its_message(dialect: Dialect) -> None:
    (end,) = dialect.tokenizer.encode("<|end|>", add_special_tokens=False).ids
    value = dialect.message(Message("assistant", "42"))[1]
    assert dialect.answered([value, end, value]) == (value, end)
    assert dialect.answered([value]) == (value, end)
    assert dialect.read([value, end, value]) == "42"
    newline = dialect.tokenizer.encode("\n", add_special_tokens=False).ids
    assert dialect.read([value, *newline, value, end]) == "42· 42"


def test_a_transcript_says_where_its_edits_are() -> None:
    transcript = Transcript([("a", (1, 2)), ("b", (3, 4, 5)), ("c", (6,))])
    assert transcript.edit({"c": (), "b": (9,)}) == (Replacement(2, 5, (9,)), Replacement(5, 6, ()))
    assert transcript.tokens == [1, 2, 9]
    transcript.append("d", (7,), (8,))
    assert transcript.edit({"d": (0,)}) == (Replacement(3, 5, (0,)),)
    with pytest.raises(KeyError, match="never"):
        transcript.edit({"never": ()})


def test_edits_become_directives_that_give_the_edited_text() -> None:
    transcript = Transcript([("a", (1, 2)), ("b", (3, 4, 5)), ("c", (6,)), ("d", (7, 8))])
    before = transcript.tokens
    edits = transcript.edit({"b": (9, 9), "d": ()})
    directives = parse_envelope(envelope("r1", edits)).directives
    text = list(before)
    for directive in reversed(directives):
        text[directive.start : directive.end] = directive.replacement
    assert text == transcript.tokens
    assert apply_directives(View.of_buffer("b", len(before)), directives).length == len(text)
    (only,) = parse_envelope(envelope("r1", ())).directives
    assert only.is_identity


# -- results -----------------------------------------------------------------------------------------------


def served(answer: str = "42", **changes: object) -> Served:
    made = Served(100, 20, 70, 9, 1, 12.0, answer, 70, "spliced", "", "abc")
    return replace(made, **changes)  # type: ignore[arg-type]


def conversation(splice: Served, *, again: str = "unknown", trained: bool = True) -> Conversation:
    plain = {"spliced": 0, "filled": 0, "amortized": 0, "outcome": ""}
    turns = [
        TurnResult(
            number,
            (Edit(20, 40, 9), Edit(50, 60, 0)),
            "port ?",
            "42",
            {
                Arm.FULL: ArmTurn(served(), served(**plain, prefix=99, milliseconds=10.0)),
                Arm.REPREFILL: ArmTurn(served(), served(again, **plain, prefilled=80, milliseconds=40.0)),
                Arm.SPLICE: ArmTurn(served(), splice if number == 2 else served()),
            },
        )
        for number in (1, 2)
    ]
    return Conversation("tiny-mla", trained, 1, 0, turns)


@pytest.mark.parametrize(
    ("splice", "verdict"),
    [
        (served(), Verdict.HELD),
        (served("41"), Verdict.BROKEN),
        (served(outcome="fallback", reason="no_memory", amortized=0), Verdict.NOT_SPLICED),
        (served(amortized=0), Verdict.NOT_SPLICED),
        (served(outcome="exact"), Verdict.NOT_SPLICED),
    ],
)
def test_one_turn_decides_the_verdict(splice: Served, verdict: Verdict) -> None:
    assert conversation(splice).verdict is verdict


def test_random_weights_and_no_turns_prove_nothing() -> None:
    assert conversation(served("41"), trained=False).verdict is Verdict.UNMEASURED
    assert Conversation("mla", True, 1, 0, []).verdict is Verdict.NOT_SPLICED


def test_figures_add_up() -> None:
    found = json.loads(json.dumps(conversation(served()).to_json()))
    summary = found["summary"]
    assert (summary["turns"], summary["edits"], summary["turns_spliced"]) == (2, 4, 2)
    assert (summary["splice_equals_full"], summary["reprefill_equals_full"]) == (2, 0)
    assert (summary["computed_tokens_splice"], summary["computed_tokens_reprefill"]) == (20, 160)
    assert (summary["edited_over_reprefill"], summary["edited_over_hit"]) == (0.3, 1.2)
    assert found["totals"]["splice"]["prompt"] == 200


def test_the_last_ops_are_those_of_the_lineage() -> None:
    records = [OpRecord(1.0, "r", name, Tier.GPU, OpKind.FILL) for name in ("abc1", "abd2", "")]
    assert last_ops(records, "abc") == records[:1]
    assert last_ops(records, "") == []


def test_ops_of_one_kind_are_one_line() -> None:
    def op(request: str, tier: Tier, kind: OpKind, shift: int, tokens: int) -> OpRecord:
        return OpRecord(1.0, request, "abc", tier, kind, 1, tokens, shift, tokens * 9, 5)

    ops = [
        op("f", Tier.CPU, OpKind.COPY, 0, 10),
        op("f", Tier.CPU, OpKind.COPY_ROTATE, -3, 20),
        op("f", Tier.CPU, OpKind.COPY, 0, 5),
        op("f", Tier.CPU, OpKind.COPY_ROTATE, -4, 20),
        op("r", Tier.REDIS, OpKind.COPY_ROTATE, -4, 7),
    ]
    found = [(one.request, one.op, one.blocks, one.tokens, one.shift, one.micros) for one in condensed(ops)]
    assert found == [
        ("f", OpKind.COPY, 2, 15, 0, 10),
        ("f", OpKind.COPY_ROTATE, 2, 40, 0, 10),
        ("r", OpKind.COPY_ROTATE, 1, 7, -4, 5),
    ]


def test_the_screen_has_80_columns() -> None:
    made = conversation(served(), again="some long answer")
    lines = [screen.legend(), screen.column_heads()]
    for turn in made.turns:
        lines += screen.turn_lines(turn, 120)
    lines += [*screen.total_lines(made), *screen.verdict_lines(made)]
    lines += [*screen.verdict_lines(conversation(served(), trained=False))]
    assert max(len(line) for text in lines for line in text.plain.rstrip().splitlines()) <= 80
    assert max(map(len, screen.EXPLANATION)) <= 80
    shown = "\n".join(line.plain for line in lines)
    assert "42 ✓" in shown
    assert "some l… ✗" in shown
    refused = conversation(served(outcome="fallback", reason="no_memory"))
    assert "no_memory" in "\n".join(line.plain for line in screen.turn_lines(refused.turns[1], 120))


def test_the_screen_says_where_the_kv_came_from() -> None:
    made = conversation(served(gpu=5, cpu=60))
    turns = [replace(turn, place=place) for turn, place in zip(made.turns, Place, strict=False)]
    turns.append(replace(turns[1], place=Place.REDIS))
    shown = ["\n".join(line.plain for line in screen.turn_lines(turn, 120)) for turn in turns]
    assert "emptied" not in shown[0]
    assert "the GPU was emptied" in shown[1] and "KV came from: GPU 5  CPU 60  Redis ·" in shown[1]
    assert "GPU and L1 were emptied" in shown[2]
    whole = replace(made, turns=turns)
    assert "GPU 10, CPU 120, Redis 0" in "\n".join(line.plain for line in screen.verdict_lines(whole))
    summary = whole.to_json()["summary"]
    assert (summary["turns_from_redis"], summary["tokens_from_cpu"]) == (1, 120)


def test_in_two_turns_of_three_the_kv_leaves_the_gpu() -> None:
    places = [turn.place for turn in write_scenario(7, 1).turns]
    assert places == [*Place, *Place, Place.GPU]


def test_small_parts_of_a_bar_are_seen() -> None:
    text = screen.bar(Served(1000, 10, 980, 9, 1, 1.0, ""), 1000, 20).plain
    assert text == "█" + "▓" * 17 + "▒" + "░"
    assert len(screen.bar(Served(500, 499, 0, 0, 1, 1.0, ""), 1000, 20).plain) == 20


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    file = tmp_path / "new" / "picture.png"
    picture.draw(conversation(served("41")), file)
    assert file.read_bytes().startswith(b"\x89PNG")
