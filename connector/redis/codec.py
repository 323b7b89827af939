"""The header in front of every value.

    4 bytes   "LEY" and the schema version
    2 bytes   length of the map, big endian
    map       msgpack: {"n": payload length, "c": checksum, "k": key digest, "m": model}
    payload   the KV bytes as they are

A reader knows from the header alone whether the value is ours, whole, and the one it asked for; the
checksum is xxh3 over the payload, which runs at memory speed. Records (`metadata`) use the same header.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

import msgpack
import xxhash

from .outcome import Outcome

SCHEMA_VERSION = 1
MAGIC = b"LEY" + bytes([SCHEMA_VERSION])
PREAMBLE = struct.Struct(">4sH")
MAX_HEADER_BYTES = 4096
MAX_MODEL_CHARS = 512
MAX_VALUE_BYTES = 512 * 1024 * 1024
"""Longest value Redis takes unless its ``proto-max-bulk-len`` says otherwise."""

CHECKSUM_BYTES = KEY_BYTES = 8
_FIELDS = {"n": int, "c": bytes, "k": bytes, "m": str}


class ValueFault(Exception):
    """A value cannot be used.

    Attributes:
        outcome: SHORT, FOREIGN or CORRUPT.
        detail: the field, what was expected and what was found.
    """

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(outcome, detail)
        self.outcome = outcome
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.outcome.value}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Header:
    """What a value says of itself.

    Attributes:
        length: of the payload in bytes.
        checksum: xxh3-64 of the payload, 8 bytes.
        key: digest of the key it was written under.
        model: identity of the model that computed it; of a record, its kind.
    """

    length: int
    checksum: bytes
    key: bytes
    model: str


@dataclass(frozen=True, slots=True)
class Template:
    """The header of all values of one length and model: only the checksum and the key differ.

    So writing one is joining five pieces, and reading one is comparing it with what it must be.
    """

    before: bytes
    between: bytes
    after: bytes

    @property
    def size(self) -> int:
        """Bytes of preamble and map."""
        return len(self.before) + CHECKSUM_BYTES + len(self.between) + KEY_BYTES + len(self.after)

    def fill(self, checksum: bytes, key: bytes) -> bytes:
        """Preamble and map."""
        return b"".join((self.before, checksum, self.between, key, self.after))

    def match(self, head: bytes, key: bytes) -> bytes | None:
        """The checksum in `head` if all else is as it must be, else None."""
        start = len(self.before)
        found = head[start : start + CHECKSUM_BYTES]
        return found if head == self.fill(found, key) else None


def checksum(payload: bytes | memoryview) -> bytes:
    """xxh3-64 of the payload."""
    value: bytes = xxhash.xxh3_64_digest(payload)
    return value


@lru_cache(maxsize=1024)
def template(length: int, model: str) -> Template:
    """Raises ValueError if the model's name is too long."""
    if len(model) > MAX_MODEL_CHARS:
        raise ValueError(f"model: at most {MAX_MODEL_CHARS} characters, got {len(model)}")
    pack = msgpack.packb
    # A map of four pairs, written out, so that the places of the two that vary are known.
    before = bytes([0x84]) + pack("n") + pack(length) + pack("c") + bytes([0xC4, CHECKSUM_BYTES])
    between = pack("k") + bytes([0xC4, KEY_BYTES])
    after = pack("m") + pack(model)
    size = len(before) + CHECKSUM_BYTES + len(between) + KEY_BYTES + len(after)
    return Template(PREAMBLE.pack(MAGIC, size) + before, between, after)


def encode_header(header: Header) -> bytes:
    """Preamble and map. Raises ValueError if the model's name is too long."""
    return template(header.length, header.model).fill(header.checksum, header.key)


def header_length(preamble: bytes) -> int:
    """Length of the map, from the first `PREAMBLE.size` bytes. Raises ValueFault."""
    if len(preamble) < PREAMBLE.size:
        raise ValueFault(Outcome.FOREIGN, f"header: expected {PREAMBLE.size} bytes, got {len(preamble)}")
    magic, length = PREAMBLE.unpack(preamble)
    if magic[:3] != MAGIC[:3]:
        raise ValueFault(Outcome.FOREIGN, "header: no Leyline value")
    if magic != MAGIC:
        raise ValueFault(Outcome.FOREIGN, f"v: expected schema version {SCHEMA_VERSION}, got {magic[3]}")
    if length > MAX_HEADER_BYTES:
        raise ValueFault(Outcome.FOREIGN, f"header: expected at most {MAX_HEADER_BYTES} bytes, got {length}")
    return int(length)


def decode_header(packed: bytes, size: int | None = None) -> Header:
    """The map.

    Args:
        packed: its bytes.
        size: how many there must be, by the preamble.

    Raises:
        ValueFault: naming the field.
    """
    if size is not None and len(packed) != size:
        raise ValueFault(Outcome.SHORT, f"header: expected {size} bytes, got {len(packed)}")
    try:
        raw = msgpack.unpackb(packed, raw=False, strict_map_key=True)
    except Exception as error:
        # msgpack raises a dozen unrelated types here.
        raise ValueFault(Outcome.CORRUPT, f"header: not msgpack ({type(error).__name__})") from None
    if not isinstance(raw, dict):
        raise ValueFault(Outcome.CORRUPT, f"header: expected a map, got {type(raw).__name__}")
    for name, kind in _FIELDS.items():
        if type(raw.get(name)) is not kind:
            raise ValueFault(Outcome.CORRUPT, f"{name}: expected {kind.__name__}")
    if len(raw) != len(_FIELDS):
        raise ValueFault(Outcome.CORRUPT, f"header: expected the fields {', '.join(_FIELDS)}, got {len(raw)}")
    if raw["n"] < 0:
        raise ValueFault(Outcome.CORRUPT, "n: expected a length, got a negative number")
    for name, size in (("c", CHECKSUM_BYTES), ("k", KEY_BYTES)):
        if len(raw[name]) != size:
            raise ValueFault(Outcome.CORRUPT, f"{name}: expected {size} bytes, got {len(raw[name])}")
    return Header(raw["n"], raw["c"], raw["k"], raw["m"])


def check_header(found: Header, expected_key: bytes, expected_model: str) -> None:
    """Raises ValueFault if the value belongs to another key or model."""
    if found.model != expected_model:
        raise ValueFault(Outcome.FOREIGN, "m: written for another model")
    if found.key != expected_key:
        raise ValueFault(Outcome.FOREIGN, "k: written under another key")


def pack(payload: bytes, key: bytes, model: str) -> bytes:
    """Header and payload in one; for small values."""
    return encode_header(Header(len(payload), checksum(payload), key, model)) + payload


def unpack(value: bytes, key: bytes, model: str) -> bytes:
    """The payload of a small value. Raises ValueFault."""
    size = header_length(value[: PREAMBLE.size])
    start = PREAMBLE.size + size
    header = decode_header(value[PREAMBLE.size : start], size)
    check_header(header, key, model)
    payload = value[start:]
    if len(payload) != header.length:
        raise ValueFault(Outcome.SHORT, f"n: expected {header.length} bytes, got {len(payload)}")
    if checksum(payload) != header.checksum:
        raise ValueFault(Outcome.CORRUPT, "c: the checksum differs")
    return payload
