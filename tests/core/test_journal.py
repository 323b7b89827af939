"""The journal: written off the hot path, bounded, readable while it is written."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_lmcache.journal import Filter, JournalReader, JournalWriter, OpRecord, RecordError
from leyline_lmcache.ops import OpKind, Tier
from leyline_lmcache.reasons import FallbackReason

from .strategies import SOME


def record(n: int, tier: Tier = Tier.GPU, reason: FallbackReason | None = None) -> OpRecord:
    op = None if reason else OpKind.COPY_ROTATE
    return OpRecord(1000.0 + n, f"r{n % 3}", "ab" * 16, tier, op, 2, 30, -7, 4096, 55, reason)


def fill(directory: Path, numbers: range, **bounds: int) -> JournalWriter:
    with JournalWriter(directory, **bounds) as writer:
        for n in numbers:
            assert writer.write(record(n))
    return writer


def test_what_is_written_is_read(tmp_path: Path) -> None:
    writer = fill(tmp_path / "deep" / "er", range(50))
    assert (writer.written, writer.dropped, writer.failed) == (50, 0, 0)
    reader = JournalReader(tmp_path / "deep" / "er")
    assert reader.list() == [record(n) for n in range(50)]
    assert reader.list(limit=2) == [record(48), record(49)]
    assert reader.corrupt == 0


def test_filters(tmp_path: Path) -> None:
    records = [
        record(0),
        record(1, Tier.CPU),
        record(2, Tier.REDIS, FallbackReason.NO_MEMORY),
        record(3, Tier.GPU, FallbackReason.TIER_ERROR),
    ]
    with JournalWriter(tmp_path) as writer:
        for r in records:
            writer.write(r)
    reader = JournalReader(tmp_path)
    assert reader.list(Filter(tier=Tier.GPU)) == [records[0], records[3]]
    assert reader.list(Filter(op=OpKind.COPY_ROTATE)) == records[:2]
    assert reader.list(Filter(op=OpKind.FILL)) == []
    assert reader.list(Filter(request="r0")) == [records[0], records[3]]
    assert reader.list(Filter(reason=FallbackReason.NO_MEMORY)) == [records[2]]
    assert reader.list(Filter(since=1002.0)) == records[2:]
    assert reader.list(Filter(tier=Tier.GPU, since=1002.0)) == [records[3]]


def test_files_are_rotated_by_size_and_their_number_is_bounded(tmp_path: Path) -> None:
    writer = fill(tmp_path, range(400), max_bytes=2000, max_files=4)
    assert writer.written == 400
    files = sorted(tmp_path.iterdir())
    assert len(files) == 4
    assert all(0 < f.stat().st_size <= 2000 for f in files)
    read = JournalReader(tmp_path).list()
    # The newest are what is kept, without a gap.
    assert read == [record(n) for n in range(400 - len(read), 400)]


def test_a_record_longer_than_a_file_gets_one_of_its_own(tmp_path: Path) -> None:
    fill(tmp_path, range(3), max_bytes=1)
    assert len(list(tmp_path.iterdir())) == 3
    assert len(JournalReader(tmp_path).list()) == 3


def test_writers_share_a_directory_and_are_merged_by_time(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, writer="tp0") as a, JournalWriter(tmp_path, writer="tp1") as b:
        for n in range(20):
            (a if n % 3 else b).write(record(n))
    assert JournalReader(tmp_path).list() == [record(n) for n in range(20)]


def test_two_writers_of_one_name_do_not_mix(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, writer="x") as a, JournalWriter(tmp_path, writer="x") as b:
        for n in range(20):
            (a if n % 2 else b).write(record(n))
        a.flush()
        b.flush()
    assert len(JournalReader(tmp_path).list()) == 20


def test_a_file_in_use_is_never_pruned(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, writer="old") as old:
        old.write(record(0))
        old.flush()
        fill(tmp_path, range(1, 200), max_bytes=1000, max_files=2)
        old.write(record(200))
        old.flush()
        assert any("old" in f.name for f in tmp_path.iterdir())
    read = JournalReader(tmp_path).list()
    assert read[0] == record(0)
    assert read[-1] == record(200)
    # Once its writer is gone it is like any other.
    fill(tmp_path, range(300, 400), max_bytes=1000, max_files=2)
    assert not any("old" in f.name for f in tmp_path.iterdir())


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text("mine")
    fill(tmp_path, range(100), max_bytes=500, max_files=1)
    assert (tmp_path / "notes.jsonl").read_text() == "mine"
    assert JournalReader(tmp_path).corrupt == 0


def test_a_full_queue_drops_and_counts_and_never_waits(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, queue_size=5)
    hold, held = threading.Event(), threading.Event()
    write_batch = writer._write_batch

    def slow_disk(batch: list[OpRecord]) -> None:
        held.set()
        hold.wait(30)
        write_batch(batch)

    writer._write_batch = slow_disk  # type: ignore[method-assign]
    assert writer.write(record(0))
    assert held.wait(30)
    assert [writer.write(record(n)) for n in range(1, 9)] == [True] * 5 + [False] * 3
    assert writer.dropped == 3
    assert not writer.flush(timeout=0.01)
    hold.set()
    assert writer.close()
    assert writer.written == 6
    assert [r.ts for r in JournalReader(tmp_path).list()] == [1000.0 + n for n in range(6)]


def test_after_close_records_are_dropped_and_nothing_leaks(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    writer = fill(tmp_path, range(3))
    assert not writer.write(record(4))
    assert writer.dropped == 1
    assert writer.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not any(t.name == "leyline-journal" and t.is_alive() for t in threading.enumerate())


def test_the_disk_failing_costs_records_and_not_the_thread(tmp_path: Path) -> None:
    directory = tmp_path / "j"
    with JournalWriter(directory) as writer:
        writer.write(record(0))
        writer.flush()
        assert writer._file is not None
        # Stands for a disk that refuses: the descriptor is gone under the writer.
        os.close(writer._file.fileno())
        writer.write(record(1))
        writer.flush()
        assert writer.failed == 1
        writer.write(record(2))
        writer.flush()
        assert (writer.written, writer.failed) == (2, 1)
    assert [r.ts for r in JournalReader(directory).list()] == [1000.0, 1002.0]


def test_a_directory_that_cannot_be_is_an_error_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        JournalWriter(tmp_path / "file")


@pytest.mark.parametrize("bound", ["max_bytes", "max_files", "queue_size"])
def test_bounds_below_one_are_refused(tmp_path: Path, bound: str) -> None:
    with pytest.raises(ValueError, match=bound):
        JournalWriter(tmp_path, **{bound: 0})
    with pytest.raises(ValueError, match="writer"):
        JournalWriter(tmp_path, writer="../up")


def test_no_directory_reads_as_nothing(tmp_path: Path) -> None:
    assert JournalReader(tmp_path / "none").list() == []
    assert list(JournalReader(tmp_path / "none").follow(stop=lambda: True)) == []


def test_corrupt_lines_are_counted_and_skipped(tmp_path: Path) -> None:
    good = record(1).to_json()
    bad = [
        "not json",
        "[]",
        "{}",
        good.replace('"tokens":30', '"tokens":"30"'),
        good.replace('"tier":"gpu"', '"tier":"moon"'),
        good.replace('"op":"copy_rotate"', '"op":"melt"'),
        good.replace('"reason":null', '"reason":"bored"'),
        good.replace('"ts":1001.0', '"ts":NaN'),
        good.replace('"request":"r1"', '"request":5'),
        good.replace('"bytes":4096', '"bytes":1e3'),
        good.replace('"tier":"gpu"', '"tier":[1]'),
        "x" * 200_000,
    ]
    data = "\n".join([good, *bad, "", good]).encode() + b"\n\xff\xfe\n" + good.encode()[:20]
    (tmp_path / "ops-w-000001.jsonl").write_bytes(data)
    reader = JournalReader(tmp_path)
    assert reader.list() == [record(1), record(1)]
    # The unfinished last line is not corrupt: it may be on its way.
    assert reader.corrupt == len(bad) + 1


def test_a_newer_writers_extra_fields_are_ignored() -> None:
    line = record(1).to_json().replace('{"v":1', '{"v":2,"colour":"red"')
    assert OpRecord.from_json(line) == record(1)


def test_follow_sees_what_is_written_across_rotations_and_new_writers(tmp_path: Path) -> None:
    done = threading.Event()
    got: list[OpRecord] = []
    reader = JournalReader(tmp_path)
    fill(tmp_path, range(5))
    before = len(os.listdir("/proc/self/fd"))

    def follow() -> None:
        got.extend(reader.follow(Filter(tier=Tier.CPU), from_start=True, poll_s=0.005, stop=done.is_set))

    follower = threading.Thread(target=follow)
    follower.start()
    for first in (10, 110):
        with JournalWriter(tmp_path, max_bytes=700, max_files=200) as writer:
            for n in range(first, first + 100):
                writer.write(record(n, Tier.CPU))
                if n % 10 == 0:
                    writer.flush()
    done.set()
    follower.join(30)
    assert sorted(r.ts for r in got) == [1000.0 + n for n in range(10, 210)]
    assert reader.corrupt == 0
    assert len(os.listdir("/proc/self/fd")) == before


def test_follow_from_now_on_and_a_line_that_comes_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "ops-w-000001.jsonl"
    lines = [record(n).to_json() + "\n" for n in range(5)]
    path.write_text(lines[0] + lines[1][:15])
    pieces = [lines[1][15:], lines[2][:7], lines[2][7:-1], "\n" + lines[3]]
    seen: list[float] = []
    looks = 0

    def stop() -> bool:
        nonlocal looks
        looks += 1
        if looks > 1 and pieces:
            with path.open("a") as file:
                file.write(pieces.pop(0))
        return looks > 8

    reader = JournalReader(tmp_path)
    seen.extend(r.ts for r in reader.follow(poll_s=0, stop=stop))
    # Line 0 was there before; line 1 began before, so what is left of it is no record.
    assert seen == [1002.0, 1003.0]
    assert reader.corrupt == 0


def test_follow_holds_open_only_the_files_that_grow(tmp_path: Path) -> None:
    fill(tmp_path, range(40), max_bytes=1, max_files=100)
    assert len(list(tmp_path.iterdir())) == 40
    before = len(os.listdir("/proc/self/fd"))
    held: list[int] = []

    def stop() -> bool:
        held.append(len(os.listdir("/proc/self/fd")) - before)
        return len(held) > 2

    assert len(list(JournalReader(tmp_path).follow(from_start=True, poll_s=0, stop=stop))) == 40
    assert held == [0, 1, 1]


def test_follow_reads_a_file_to_its_end_although_it_is_pruned(tmp_path: Path) -> None:
    path = tmp_path / "ops-w-000001.jsonl"
    path.write_text("")
    looks = 0

    def stop() -> bool:
        nonlocal looks
        looks += 1
        if looks == 2:
            path.write_text(record(1).to_json() + "\n")
            path.rename(tmp_path / "gone")
        return looks > 3

    reader = JournalReader(tmp_path)
    assert list(reader.follow(from_start=True, poll_s=0, stop=stop)) == [record(1)]


def test_the_file_being_written_is_locked(tmp_path: Path) -> None:
    with JournalWriter(tmp_path), next(tmp_path.iterdir()).open("rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_records_of_many_threads_all_arrive(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, max_bytes=5000, max_files=1000) as writer:
        threads = [
            threading.Thread(target=lambda k=k: [writer.write(record(k * 100 + n)) for n in range(100)])
            for k in range(8)
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert sorted(r.ts for r in JournalReader(tmp_path).list()) == [1000.0 + n for n in range(800)]


numbers = st.integers(-(2**63) + 1, 2**63 - 1)


@SOME
@given(
    st.builds(
        OpRecord,
        st.floats(0, 2**52),
        st.text(),
        st.text(),
        st.sampled_from(Tier),
        st.none() | st.sampled_from(OpKind),
        numbers,
        numbers,
        numbers,
        numbers,
        numbers,
        st.none() | st.sampled_from(FallbackReason),
    )
)
def test_any_record_is_one_line_and_comes_back(original: OpRecord) -> None:
    line = original.to_json()
    assert "\n" not in line
    assert OpRecord.from_json(line) == original


@SOME
@given(st.binary(max_size=80))
def test_any_line_is_a_record_or_refused(line: bytes) -> None:
    try:
        OpRecord.from_json(line)
    except RecordError as error:
        assert ":" in str(error)
