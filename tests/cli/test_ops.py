"""``leyline ops``: what it lets through, sums up, follows, and where it looks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.conftest import Leyline

from leyline_lmcache.cli.ops import HEADER, human_bytes
from leyline_lmcache.journal import JournalReader, JournalWriter, OpRecord
from leyline_lmcache.ops import OpKind, Tier
from leyline_lmcache.reasons import FallbackReason

NOW = time.time()
RECORDS = (
    OpRecord(NOW - 2 * 86400, "old", "aa11", Tier.GPU, OpKind.FILL, 5, 5, 0, 5760, 900),
    OpRecord(NOW - 30, "leyline-fill-0001", "bb22", Tier.GPU, OpKind.FILL, 9, 9, 0, 10368, 1500),
    OpRecord(NOW - 29, "req-2", "bb22", Tier.GPU, OpKind.COPY_ROTATE, 1500, 1500, -195, 3456000, 2911),
    OpRecord(NOW - 28, "req-2", "bb22", Tier.GPU, OpKind.INVALIDATE, 1707, 1707),
    OpRecord(NOW - 27, "req-3", "", Tier.GPU, None, reason=FallbackReason.UNKNOWN_BASE),
)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "journal"
    with JournalWriter(folder) as writer:
        for record in RECORDS:
            writer.write(record)
        assert writer.flush()
    yield folder


def read(out: str) -> list[OpRecord]:
    return [OpRecord.from_json(line) for line in out.splitlines()]


def test_all_of_it(leyline: Leyline, journal: Path) -> None:
    assert read(leyline("ops", "--dir", journal, "--json").out) == list(RECORDS)


@pytest.mark.parametrize(
    ("words", "indices"),
    [
        (["--op", "fill"], [0, 1]),
        (["--tier", "redis"], []),
        (["--request", "req"], [2, 3, 4]),
        (["--lineage", "bb"], [1, 2, 3]),
        (["--reason", "unknown_base"], [4]),
        (["--since", "12h"], [1, 2, 3, 4]),
        (["--since", "1d", "--op", "fill"], [1]),
        (["--since", "2000-01-01T00:00:00"], [0, 1, 2, 3, 4]),
        (["--limit", "2"], [3, 4]),
        (["--op", "fill", "--limit", "1"], [1]),
    ],
)
def test_filters(leyline: Leyline, journal: Path, words: list[str], indices: list[int]) -> None:
    done = leyline("ops", "--dir", journal, "--json", *words)
    assert read(done.out) == [RECORDS[index] for index in indices]


def test_a_person_sees_lines_in_80_columns(leyline: Leyline, journal: Path) -> None:
    lines = leyline("ops", "--dir", journal).out.splitlines()
    assert lines[0] == HEADER
    assert len(lines) == 1 + len(RECORDS)
    assert max(map(len, lines)) <= 80
    assert lines[3].split()[1:] == [
        "req-2",
        "bb22",
        "gpu",
        "copy+rotate",
        "1500",
        "1500",
        "-195",
        "3.3M",
        "2911",
    ]
    assert lines[5].split()[1:] == ["req-3", "gpu", "refused", "unknown_base"]


def test_totals(leyline: Leyline, journal: Path) -> None:
    found = leyline("ops", "--dir", journal, "--totals", "--json").json
    fills = {
        "tier": "gpu",
        "op": "fill",
        "ops": 2,
        "blocks": 14,
        "tokens": 14,
        "bytes": 16128,
        "micros": 2400,
    }
    assert fills in found["ops"]
    assert found["refused"] == {"unknown_base": 1}
    shown = leyline("ops", "--dir", journal, "--totals").out
    assert "copy+rotate" in shown
    assert "refused, unknown_base: 1" in shown


def test_follow_goes_on_where_the_list_ended(journal: Path) -> None:
    words = ["ops", "--dir", str(journal), "--follow", "--json", "--limit", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "leyline_lmcache", *words],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ) | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        assert OpRecord.from_json(process.stdout.readline()) == RECORDS[-1]
        later = OpRecord(NOW + 1, "req-4", "cc33", Tier.GPU, OpKind.COPY, 1, 1)
        with JournalWriter(journal) as writer:
            writer.write(later)
        assert OpRecord.from_json(process.stdout.readline()) == later
    finally:
        process.kill()
        process.communicate()


def test_lines_that_are_no_records_are_counted(leyline: Leyline, journal: Path) -> None:
    (file,) = journal.glob("*.jsonl")
    with file.open("a") as out:
        out.write("{}\n")
    done = leyline("ops", "--dir", journal, "--json")
    assert read(done.out) == list(RECORDS)
    assert "1 lines of the journal are no records" in done.err
    assert JournalReader(journal).list() == list(RECORDS)


def test_the_folder_comes_from_the_configuration(
    leyline: Leyline, journal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "leyline.yaml"
    config.write_text(json.dumps({"journal_dir": str(journal)}))
    monkeypatch.setenv("LEYLINE_CONFIG", str(config))
    assert read(leyline("ops", "--json").out) == list(RECORDS)


def test_the_folder_comes_from_a_stack(leyline: Leyline, journal: Path, tmp_path: Path) -> None:
    def start(name: str, folder: Path) -> None:
        record = tmp_path / "state" / "leyline" / "stacks" / name / "stack.json"
        record.parent.mkdir(parents=True)
        ends = {"journal_dir": str(folder), "sglang": {"url": "http://127.0.0.1:1"}}
        fields = {"version": 1, "created": "now", "endpoints": ends, "spec": {}, "guards": {}}
        record.write_text(json.dumps(fields))

    start("one", journal)
    assert read(leyline("ops", "--json").out) == list(RECORDS)
    start("two", tmp_path / "empty")
    assert "several stacks have a journal (one, two): name one" in leyline("ops").error
    assert read(leyline("ops", "--stack", "one", "--json").out) == list(RECORDS)


@pytest.mark.parametrize(
    ("words", "status", "named"),
    [
        ([], 2, "--dir: no journal is known"),
        (["--dir", "/nonexistent"], 1, "/nonexistent"),
        (["--stack", "never"], 1, "--stack: no stack never"),
        (["--dir", "/", "--stack", "x"], 2, "--dir, --stack"),
        (["--dir", "/", "--since", "soon"], 2, "--since"),
        (["--dir", "/", "--op", "melt"], 2, "--op"),
        (["--dir", "/", "--totals", "--follow"], 2, "--totals"),
    ],
)
def test_a_mistake_names_the_field(leyline: Leyline, words: list[str], status: int, named: str) -> None:
    done = leyline("ops", *words)
    assert (done.status, done.out) == (status, "")
    assert named in done.error


@pytest.mark.parametrize(
    ("size", "shown"), [(0, ""), (999, "999B"), (1024, "1.0K"), (3456000, "3.3M"), (5 * 2**40, "5120G")]
)
def test_sizes_are_short(size: int, shown: str) -> None:
    assert human_bytes(size) == shown
