"""Messages between the engine and the LMCache server module: msgpack, versioned, strict.

They travel as the opaque payload of LMCache's ``server_module_call``. A message of another version, with
an unknown field or a wrong type, is refused with the path of the field.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

WIRE_VERSION = 1

HELLO = "leyline.hello"
FETCH = "leyline.fetch"
POLL = "leyline.poll"
RELEASE = "leyline.release"
INVALIDATE = "leyline.invalidate"
LOCATE = "leyline.locate"
PUBLISH = "leyline.publish"
RESOLVE = "leyline.resolve"
STATS = "leyline.stats"


class WireError(ValueError):
    """A payload that is not the expected message; names the field."""


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all messages."""

    v: int = WIRE_VERSION


class Hello(Message, frozen=True):
    """The engine says who it is. ``instance``: its LMCache instance id. ``version``: of this package."""

    instance: int
    version: str


class Welcome(Message, frozen=True):
    """``boot`` changes when the server restarts; ``registered``: it knows the instance's KV layout."""

    boot: str
    registered: bool
    chunk_size: int
    version: str
    shared: bool
    """Whether records are shared with other nodes (Redis), not only kept in this process."""


class Part(Message, frozen=True):
    """Chunks of one shelf. ``tokens``: the ids that name them, int32 little-endian, from the first chunk on.
    ``chunks``: half-open index ranges."""

    tokens: bytes
    salt: str
    chunks: tuple[tuple[int, int], ...]


class Fetch(Message, frozen=True):
    """Bring chunks into L1 and lock them until they are retrieved or released, at most ``ttl_s`` seconds."""

    job: str
    model: str
    world_size: int
    readers: int
    ttl_s: float
    parts: tuple[Part, ...]


class Job(Message, frozen=True):
    """Names a fetch. For RELEASE, ``keep``: per part, chunks that were retrieved and hold no lock now."""

    job: str
    keep: tuple[tuple[int, ...], ...] = ()


class Fetched(Message, frozen=True):
    """State of a fetch. ``hits``: per part, indexes of the chunks that are in L1 and locked. ``brought``:
    those of them that came from L2."""

    done: bool
    hits: tuple[tuple[int, ...], ...] = ()
    brought: tuple[tuple[int, ...], ...] = ()


class Locate(Message, frozen=True):
    """Where are these chunks? Nothing is moved or locked."""

    model: str
    world_size: int
    readers: int
    parts: tuple[Part, ...]


class Located(Message, frozen=True):
    """Per part, indexes of the chunks in L1 and in Redis. ``redis`` is None when it could not be asked."""

    cpu: tuple[tuple[int, ...], ...]
    redis: tuple[tuple[int, ...], ...] | None


class Invalidate(Message, frozen=True):
    """Delete chunks that no view refers to any more: from L1, and ``everywhere``: from the shared store too.
    What is locked stays; it is evicted like anything else."""

    model: str
    world_size: int
    readers: int
    parts: tuple[Part, ...]
    everywhere: bool


class Invalidated(Message, frozen=True):
    """Objects deleted from L1, left there because they are locked, and deleted from the shared store."""

    l1: int
    locked: int
    l2: int


class PieceMessage(Message, frozen=True):
    """A piece of a view."""

    buffer: str
    src_start: int
    length: int


class BufferMessage(Message, frozen=True):
    """What a buffer's KV was computed from. ``lineage``: fingerprint of the view, empty for exact KV.
    ``packs``: runs of positions that are stored besides whole chunks of the prefix (see packs.py)."""

    id: str
    tokens: bytes
    lineage: bytes
    packs: tuple[tuple[tuple[int, int], ...], ...] = ()


class RecordMessage(Message, frozen=True):
    """A base record. ``namespace``: digest of tenant and adapter. ``spans``: start and lineage of each tagged
    run."""

    response: str
    namespace: str
    model: str
    buffer: str
    view: tuple[PieceMessage, ...]
    spans: tuple[tuple[int, bytes], ...]


class Publish(Message, frozen=True):
    """Make a record, the buffer it computed, and what is new of others, known to every node."""

    record: RecordMessage
    buffers: tuple[BufferMessage, ...]


class Resolve(Message, frozen=True):
    """Ask for a record and for the buffers of its view."""

    response: str
    namespace: str
    model: str


class Resolved(Message, frozen=True):
    """``record`` is None when it is not known; ``buffers`` are those that are."""

    record: RecordMessage | None
    buffers: tuple[BufferMessage, ...] = ()


class Done(Message, frozen=True):
    """Nothing to say."""


class Stats(Message, frozen=True):
    """Counters of the server module."""

    counters: dict[str, int]


M = TypeVar("M", bound=Message)


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(payload: bytes, kind: type[M]) -> M:
    """Raises :class:`WireError`."""
    try:
        head: Any = msgspec.msgpack.decode(payload)
        version = head.get("v") if isinstance(head, dict) else None
        if version != WIRE_VERSION:
            raise WireError(
                f"v: this side speaks version {WIRE_VERSION}, the other sent {version!r}; "
                "install the same release of leyline-lmcache on engine and server"
            )
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.DecodeError as error:
        raise WireError(f"{kind.__name__}: {error}") from None
