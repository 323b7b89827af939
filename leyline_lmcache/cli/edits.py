"""What `leyline plan` reads: edits, token files, envelopes and views."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from leyline_lmcache.cli.errors import CliError, ExitCode
from leyline_lmcache.directive import MAX_REPLACEMENT, Directive, Mode, first_bad_token
from leyline_lmcache.envelope import MAX_ENVELOPE_BYTES, parse_envelope
from leyline_lmcache.reasons import Fallback
from leyline_lmcache.view import Piece, View

BASE = "base"
"""Name of the sequence that is edited, where nothing else names it."""


def parse_edit(text: str, index: int) -> Directive:
    """Read `START:END`, `START:END:LENGTH`, `START:END:IDS` or `START:END:@FILE`, with `:forget` after it.

    IDS are token ids joined by commas; in brackets, or with a comma at the end, when there is only one. A
    replacement given by its length alone is planned with ids of 0: a plan depends on lengths only.

    Raises:
        CliError: naming the field.
    """
    where = f"--edit {text}"
    body, mode = text, Mode.AMORTIZE
    for each in Mode:
        if body.endswith(f":{each.value}"):
            body, mode = body.removesuffix(f":{each.value}"), each
    parts = body.split(":", 2)
    if len(parts) < 2:
        raise _wrong(f"{where}: expected START:END or START:END:REPLACEMENT")
    start, end = _number(parts[0], f"{where}: start"), _number(parts[1], f"{where}: end")
    replacement = _replacement(parts[2], f"{where}: replacement") if len(parts) == 3 else ()
    try:
        return Directive(BASE, start, end, replacement, mode, f"edit-{index}")
    except Fallback as error:
        raise _wrong(f"{where}: {error.detail}") from None


def read_envelope(path: Path) -> tuple[Directive, ...]:
    """The directives of an envelope in a file (`-`: standard input).

    Raises:
        CliError: naming the field.
    """
    text = _read_text(path, "--envelope")
    try:
        found = parse_envelope(text)
    except Fallback as error:
        raise _wrong(f"--envelope {path}: {error.detail}") from None
    directives = (*found.directives, *found.forgets)
    if not directives:
        raise _wrong(f"--envelope {path}: actions: expected at least one kv.splice or kv.forget")
    return directives


def read_tokens(path: Path, option: str) -> tuple[int, ...]:
    """Token ids of a file: a JSON list, or numbers between spaces, commas or line ends.

    Raises:
        CliError: naming the file.
    """
    text = _read_text(path, option)
    found: Any
    try:
        found = json.loads(text)
    except ValueError:
        found = [int(word) if word.isdecimal() else word for word in text.replace(",", " ").split()]
    if isinstance(found, int):
        found = [found]
    if not isinstance(found, list):
        raise _wrong(f"{option} {path}: expected a list of token ids, got {type(found).__name__}")
    bad = first_bad_token(found)
    if bad is not None:
        raise _wrong(f"{option} {path}: expected a list of token ids, number {bad + 1} is none")
    return tuple(found)


def read_view(path: Path) -> View:
    """A view as `leyline plan --json` prints it, alone or with everything around it.

    Raises:
        CliError: naming the field.
    """
    option = f"--view {path}"
    try:
        found = json.loads(_read_text(path, "--view"))
    except ValueError:
        raise _wrong(f"{option}: expected JSON, as leyline plan --json prints it") from None
    if isinstance(found, dict) and isinstance(found.get("view"), dict):
        found = found["view"]
    pieces = found.get("pieces") if isinstance(found, dict) else None
    if not isinstance(pieces, list):
        raise _wrong(f"{option}: pieces: expected a list of pieces")
    return View(tuple(_piece(piece, f"{option}: pieces[{i}]") for i, piece in enumerate(pieces)))


def view_json(view: View) -> dict[str, Any]:
    """The reverse of `read_view`."""
    return {
        "length": view.length,
        "pieces": [
            {"buffer": piece.buffer, "src_start": piece.src_start, "length": piece.length}
            for piece in view.pieces
        ],
    }


def _piece(raw: object, where: str) -> Piece:
    if not isinstance(raw, dict):
        raise _wrong(f"{where}: expected an object with buffer, src_start, length")
    buffer = raw.get("buffer")
    if buffer is not None and not isinstance(buffer, str):
        raise _wrong(f"{where}.buffer: expected text, or null for a hole")
    numbers: list[int] = []
    for name in ("src_start", "length"):
        value = raw.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise _wrong(f"{where}.{name}: expected a whole number")
        numbers.append(value)
    try:
        return Piece(buffer, *numbers)
    except ValueError as error:
        raise _wrong(f"{where}.{error}") from None


def _replacement(text: str, where: str) -> tuple[int, ...]:
    if text.startswith("@"):
        return read_tokens(Path(text[1:]), f"{where}:")
    if text.isdecimal():
        length = int(text)
        if length > MAX_REPLACEMENT:
            raise _wrong(f"{where}: expected at most {MAX_REPLACEMENT} tokens, got {length}")
        return (0,) * length
    words = text.strip("[]").replace(",", " ").split()
    return tuple(_number(word, f"{where}[{i}]") for i, word in enumerate(words))


def _number(text: str, where: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise _wrong(f"{where}: expected a whole number from 0, got {text!r}")
    return int(text)


def _read_text(path: Path, option: str) -> str:
    try:
        if str(path) == "-":
            return sys.stdin.read(MAX_ENVELOPE_BYTES + 1)
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise _wrong(f"{option} {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise _wrong(f"{option} {path}: cannot be read: not text") from None


def _wrong(message: str) -> CliError:
    return CliError(message, ExitCode.USAGE)
