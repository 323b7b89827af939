"""The journal of executed ops: JSON lines, bounded, off the hot path.

Each writer has files of its own, `ops-<writer>-<number>.jsonl`, so that several processes can share a
directory. The file being written is locked (`flock`), which tells it apart from files left behind: those are
pruned, oldest first, when there are more than the bound. Records hold ids, counts, positions and reasons;
never prompt text (I10).
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from heapq import merge
from pathlib import Path
from typing import IO, Any, TypeAlias

from leyline_lmcache.ops import OpKind, Tier
from leyline_lmcache.reasons import FallbackReason

logger = logging.getLogger(__name__)

JOURNAL_VERSION = 1
_FILE = re.compile(r"ops-(?P<writer>[A-Za-z0-9_.]+)-(?P<number>\d{6,})\.jsonl")
_MAX_LINE = 1 << 16
_REPORT_EVERY_S = 60.0

# Under names of their own: `bytes` is a field of OpRecord and `list` a method of JournalReader.
_Line: TypeAlias = str | bytes
_Paths: TypeAlias = list[Path]
_Records: TypeAlias = list["OpRecord"]


class RecordError(ValueError):
    """A line is not a record; the message names the field."""


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One executed op, or one refused edit.

    Attributes:
        ts: when it ended, seconds since the epoch.
        request: id of the request it served.
        lineage: the view's fingerprint, hexadecimal; "" for exact KV.
        tier: where.
        op: what; None for a refused edit, whose `reason` is set.
        blocks: blocks written or given up.
        tokens: tokens moved, turned, filled or given up.
        shift: positions turned by; 0 for none.
        bytes: bytes written.
        micros: microseconds taken.
        reason: why an edit was refused or an op failed; None otherwise.
    """

    ts: float
    request: str
    lineage: str
    tier: Tier
    op: OpKind | None
    blocks: int = 0
    tokens: int = 0
    shift: int = 0
    bytes: int = 0
    micros: int = 0
    reason: FallbackReason | None = None

    def to_json(self) -> str:
        """One line, without its newline."""
        out: dict[str, Any] = {"v": JOURNAL_VERSION}
        for field in fields(self):
            out[field.name] = getattr(self, field.name)
        return json.dumps(out, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: _Line) -> OpRecord:
        """Read a line. Fields that are not known are ignored, so that a newer writer's journal can be read.

        Raises:
            RecordError: for anything that is not a record.
        """
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"record: not JSON ({type(error).__name__})") from None
        if not isinstance(raw, dict):
            raise RecordError(f"record: expected an object, got {type(raw).__name__}")
        ts = raw.get("ts")
        if not isinstance(ts, int | float) or isinstance(ts, bool) or not abs(ts) < 2**53:
            raise RecordError("ts: expected seconds since the epoch")
        try:
            tier = Tier(str(raw.get("tier")))
            op = None if raw.get("op") is None else OpKind(str(raw["op"]))
            reason = None if raw.get("reason") is None else FallbackReason(str(raw["reason"]))
        except ValueError as error:
            raise RecordError(f"tier, op or reason: {error}") from None
        return cls(
            float(ts),
            _string(raw, "request"),
            _string(raw, "lineage"),
            tier,
            op,
            _number(raw, "blocks"),
            _number(raw, "tokens"),
            _number(raw, "shift"),
            _number(raw, "bytes"),
            _number(raw, "micros"),
            reason,
        )


class JournalWriter:
    """Writes records from a thread of its own; `write` never blocks and never raises.

    Args:
        directory: made when it is missing.
        max_bytes: a file is closed and the next one begun when it would grow past this.
        max_files: files kept in the directory, among them those left by writers that have ended. Files that
            other writers have open are never removed.
        queue_size: records waiting to be written; more are dropped and counted.
        writer: the writer's name in file names; by default the process id and a random part.

    Raises:
        ValueError: for a bound below 1 or a name that cannot be part of a file name.
        OSError: when the directory cannot be made or written to.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_bytes: int = 16 << 20,
        max_files: int = 8,
        queue_size: int = 8192,
        writer: str | None = None,
    ) -> None:
        for name, value in (("max_bytes", max_bytes), ("max_files", max_files), ("queue_size", queue_size)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        self._writer = f"{os.getpid()}.{uuid.uuid4().hex[:8]}" if writer is None else writer
        if not re.fullmatch(r"[A-Za-z0-9_.]+", self._writer):
            raise ValueError(f"writer: expected letters, digits, '_' and '.', got {self._writer!r}")
        self._directory = Path(directory)
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._queue_size = queue_size
        self._lock = threading.Condition()
        self._waiting: deque[OpRecord] = deque()
        self._busy = False
        self._closing = False
        self._dropped = 0
        self._failed = 0
        self._written = 0
        self._reported = -_REPORT_EVERY_S
        self._number = 0
        self._size = 0
        self._file: IO[bytes] | None = None
        self._directory.mkdir(parents=True, exist_ok=True)
        self._open()
        self._thread = threading.Thread(target=self._run, name="leyline-journal", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Records lost because the queue was full or the writer closed."""
        return self._dropped

    @property
    def failed(self) -> int:
        """Records lost because the disk refused them."""
        return self._failed

    @property
    def written(self) -> int:
        """Records that reached a file."""
        return self._written

    def write(self, record: OpRecord) -> bool:
        """Hand over a record; False when it was dropped instead."""
        with self._lock:
            if self._closing or len(self._waiting) >= self._queue_size:
                self._dropped += 1
                return False
            self._waiting.append(record)
            self._lock.notify_all()
            return True

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until what was handed over is written (or has failed); False when that took longer."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._waiting and not self._busy, timeout)

    def close(self, timeout: float = 5.0) -> bool:
        """Write what is waiting and end the thread; False when that took longer. May be repeated."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    self._busy = False
                    self._lock.notify_all()
                    self._lock.wait_for(lambda: self._waiting or self._closing)
                    if not self._waiting:
                        return
                    batch = list(self._waiting)
                    self._waiting.clear()
                    self._busy = True
                self._write_batch(batch)
        finally:
            if self._file is not None:
                self._file.close()

    def _write_batch(self, batch: list[OpRecord]) -> None:
        lines: list[bytes] = []
        for record in batch:
            try:
                lines.append(record.to_json().encode() + b"\n")
            except Exception as error:
                self._report(error, 1)
        start = 0
        while start < len(lines):
            size = self._size
            stop = start
            while stop < len(lines) and (size + len(lines[stop]) <= self._max_bytes or size == 0):
                size += len(lines[stop])
                stop += 1
            try:
                if self._file is None or stop == start:
                    self._rotate()
                    continue
                self._write_all(b"".join(lines[start:stop]))
                self._size = size
                self._written += stop - start
            except Exception as error:
                # A full or vanished disk must not end the thread; the next batch tries again in a new file.
                self._report(error, len(lines) - start)
                self._abandon()
                return
            start = stop

    def _write_all(self, data: bytes) -> None:
        assert self._file is not None
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def _open(self) -> None:
        # The directory may have been removed under us.
        self._directory.mkdir(parents=True, exist_ok=True)
        while self._file is None:
            self._number += 1
            path = self._directory / f"ops-{self._writer}-{self._number:06d}.jsonl"
            try:
                # Unbuffered: one write per batch, and a crash loses only what is in the queue.
                file = path.open("xb", buffering=0)
            except FileExistsError:
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                lost = os.fstat(file.fileno()).st_nlink == 0
            except BlockingIOError:
                lost = True
            except OSError:
                # A file system without locks: others will not prune this file, nor will we theirs.
                lost = False
            if lost:
                # Another writer pruned the file between its creation and our lock.
                file.close()
                continue
            self._file, self._size = file, 0
        self._prune()

    def _rotate(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._open()

    def _abandon(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError:
                logger.debug("journal: closing a file failed", exc_info=True)
            self._file = None
            self._size = 0

    def _prune(self) -> None:
        """Remove the oldest files beyond the bound, but none that somebody is writing."""
        found: list[tuple[float, Path]] = []
        for path in _journal_files(self._directory):
            try:
                found.append((path.stat().st_mtime, path))
            except FileNotFoundError:
                continue
        excess = len(found) - self._max_files
        for _, path in sorted(found):
            if excess <= 0:
                return
            try:
                with path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
            except FileNotFoundError:
                pass
            except OSError:
                # Somebody is writing it, or it is not ours to remove.
                continue
            excess -= 1

    def _report(self, error: Exception, lost: int) -> None:
        self._failed += lost
        now = time.monotonic()
        if now - self._reported >= _REPORT_EVERY_S:
            self._reported = now
            logger.warning(
                "journal: %d records lost so far, %s; check the space and rights of %s",
                self._failed,
                error,
                self._directory,
            )


@dataclass(frozen=True, slots=True)
class Filter:
    """Which records to read; None lets everything through.

    Attributes:
        tier, op, request, reason: only these.
        since: only records at or after this time, seconds since the epoch.
    """

    tier: Tier | None = None
    op: OpKind | None = None
    request: str | None = None
    reason: FallbackReason | None = None
    since: float | None = None

    def accepts(self, record: OpRecord) -> bool:
        """True when the record passes."""
        return (
            (self.tier is None or record.tier is self.tier)
            and (self.op is None or record.op is self.op)
            and (self.request is None or record.request == self.request)
            and (self.reason is None or record.reason is self.reason)
            and (self.since is None or record.ts >= self.since)
        )


class JournalReader:
    """Reads all journals of a directory, while writers may be at work.

    Attributes:
        corrupt: lines met that were no records; they are skipped.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self.corrupt = 0

    def list(self, wanted: Filter | None = None, *, limit: int | None = None) -> _Records:
        """The records that pass, oldest first; with `limit`, the newest so many."""
        kept: deque[OpRecord] = deque(maxlen=limit)
        kept.extend(self.records(wanted))
        return list(kept)

    def records(self, wanted: Filter | None = None) -> Iterator[OpRecord]:
        """The records that pass, oldest first. A last line still being written is left out."""
        accepts = (wanted or Filter()).accepts
        by_writer = [self._read_all(files) for files in _by_writer(self._directory).values()]
        yield from (r for r in merge(*by_writer, key=lambda r: r.ts) if accepts(r))

    def follow(
        self,
        wanted: Filter | None = None,
        *,
        from_start: bool = False,
        poll_s: float = 0.2,
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[OpRecord]:
        """Records as they are written, across rotations and new writers, until `stop()` is true.

        Args:
            wanted: which records.
            from_start: begin with what is already there; else with what comes.
            poll_s: seconds between looks.
            stop: asked between looks; what was written before it turned true is still given.
        """
        accepts = (wanted or Filter()).accepts
        # None stands for a file read to its end.
        tails: dict[Path, _Tail | None] = {}
        first = True
        try:
            while True:
                last_look = stop()
                files = _by_writer(self._directory)
                for path in (path for paths in files.values() for path in paths):
                    if path not in tails:
                        tails[path] = _Tail.open(path, at_end=first and not from_start)
                first = False
                # A writer begins its next file when it has closed the one before, and only closed files are
                # removed. So what is not the newest of its writer in this listing is complete by now.
                growing = {paths[-1] for paths in files.values()}
                present = {path for paths in files.values() for path in paths}
                batch: _Records = []
                for path, tail in list(tails.items()):
                    if tail is not None:
                        batch.extend(self._parse(tail.lines()))
                        if path not in growing:
                            tail.close()
                            tails[path] = None
                    if path not in present:
                        del tails[path]
                yield from (r for r in sorted(batch, key=lambda r: r.ts) if accepts(r))
                if last_look:
                    return
                time.sleep(poll_s)
        finally:
            for tail in tails.values():
                if tail is not None:
                    tail.close()

    def _read_all(self, files: _Paths) -> Iterator[OpRecord]:
        for path in files:
            tail = _Tail.open(path, at_end=False)
            if tail is not None:
                try:
                    yield from self._parse(tail.lines())
                finally:
                    tail.close()

    def _parse(self, lines: Iterator[bytes | None]) -> Iterator[OpRecord]:
        for line in lines:
            try:
                if line is None:
                    raise RecordError("line: too long")
                yield OpRecord.from_json(line)
            except RecordError as error:
                self.corrupt += 1
                logger.debug("journal: skipped a line, %s", error)


class _Tail:
    """An open journal file and the unfinished line at its end."""

    def __init__(self, file: IO[bytes], skip: bool) -> None:
        self._file = file
        self._part = b""
        self._skip = skip

    @classmethod
    def open(cls, path: Path, *, at_end: bool) -> _Tail | None:
        """None when the file has gone meanwhile."""
        try:
            file = path.open("rb", buffering=0)
        except FileNotFoundError:
            return None
        skip = False
        if at_end and (size := file.seek(0, os.SEEK_END)):
            # In the middle of a line, the rest of it is no record.
            file.seek(size - 1)
            skip = file.read(1) != b"\n"
        return cls(file, skip)

    def lines(self) -> Iterator[bytes | None]:
        """The lines completed since the last call, without newlines; None for one that was too long."""
        while chunk := self._file.read(1 << 20):
            *whole, self._part = (self._part + chunk).split(b"\n")
            for line in whole:
                if self._skip:
                    self._skip = False
                elif len(line) > _MAX_LINE:
                    yield None
                elif line:
                    yield line
            if len(self._part) > _MAX_LINE:
                if not self._skip:
                    yield None
                self._part, self._skip = b"", True

    def close(self) -> None:
        self._file.close()


def _by_writer(directory: Path) -> dict[str, list[Path]]:
    """The files of each writer, in the order written."""
    files: dict[str, list[tuple[int, Path]]] = {}
    for path in _journal_files(directory):
        name = _FILE.fullmatch(path.name)
        if name is not None:
            files.setdefault(name["writer"], []).append((int(name["number"]), path))
    return {writer: [path for _, path in sorted(found)] for writer, found in files.items()}


def _journal_files(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if _FILE.fullmatch(path.name)]
    except FileNotFoundError:
        return []


def _string(raw: dict[str, Any], name: str) -> str:
    value = raw.get(name)
    if not isinstance(value, str):
        raise RecordError(f"{name}: expected text, got {type(value).__name__}")
    return value


def _number(raw: dict[str, Any], name: str) -> int:
    value = raw.get(name)
    if type(value) is not int or abs(value) >= 2**63:
        raise RecordError(f"{name}: expected an integer of at most 64 bits, got {type(value).__name__}")
    return value
