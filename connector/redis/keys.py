"""The key schema: what every key of ours in Redis looks like.

    <prefix>:1:kv:<model>:<identity>:<rank>:<group>:<salt>:<chunk>     one KV block
    <prefix>:1:meta:{<family>}:<kind>:<name>                           one record

The second field is the schema version: another version neither reads nor overwrites these keys. Fields are
percent-encoded (RFC 3986), so a colon, a brace or a wildcard in a model's name or a salt cannot change
what a key means. KV keys carry no braces and spread over a Cluster's slots; the records of one family
share a slot, so that several are written in one transaction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from urllib.parse import quote, unquote_to_bytes

SCHEMA_VERSION = 1
_SAFE = "/._~-"  # what stays as it is besides letters and digits


@dataclass(frozen=True, slots=True)
class KVKey:
    """One KV block: what LMCache's ObjectKey says, without LMCache.

    Attributes:
        model: the model's name.
        chunk: hash of the tokens up to the block's end.
        rank: which slice of the KV (world size and ranks, packed).
        group: index of the object group.
        salt: tenant, and lineage after an edit.
    """

    model: str
    chunk: bytes
    rank: int = 0
    group: int = 0
    salt: str = ""

    def __repr__(self) -> str:
        # A salt may be a secret of the tenant's.
        return f"KVKey({self.model!r}, {self.chunk.hex()[:12]}, rank={self.rank:x}, salted={bool(self.salt)})"


class KeySchema:
    """Keys of one deployment.

    Args:
        prefix: first part of every key; letters, digits, dots, dashes, underscores.
        identity: tells models of one name apart.
    """

    def __init__(self, prefix: str, identity: str = "") -> None:
        self.prefix = prefix
        self.identity = identity
        self._root = f"{prefix}:{SCHEMA_VERSION}:"
        self._identity = _quoted(identity)

    def kv(self, key: KVKey) -> bytes:
        """The key of a block."""
        return (
            f"{self._root}kv:{_quoted(key.model)}:{self._identity}:{key.rank:x}:{key.group:x}:"
            f"{_quoted(key.salt)}:{key.chunk.hex()}"
        ).encode()

    def parse_kv(self, raw: bytes) -> KVKey | None:
        """The reverse of `kv`; None if the key is not one of ours."""
        head = f"{self._root}kv:".encode()
        if not raw.startswith(head):
            return None
        parts = raw[len(head) :].split(b":")
        if len(parts) != 6 or parts[1] != self._identity.encode():
            return None
        try:
            model, _, rank, group, salt, chunk = parts
            key = KVKey(
                model=unquote_to_bytes(model).decode(),
                chunk=bytes.fromhex(chunk.decode()),
                rank=int(rank, 16),
                group=int(group, 16),
                salt=unquote_to_bytes(salt).decode(),
            )
        except (ValueError, UnicodeDecodeError):
            return None
        # Only what `kv` writes: not upper-case digits, signs, or needless escapes.
        return key if self.kv(key) == raw else None

    def kv_pattern(self, model: str | None = None) -> bytes:
        """SCAN pattern of all blocks, or of those of one model."""
        chosen = "*" if model is None else _quoted(model)
        return f"{self._root}kv:{chosen}:{self._identity}:*".encode()

    def meta(self, family: str, kind: str, name: str) -> bytes:
        """The key of a record."""
        return f"{self._root}meta:{{{_quoted(family)}}}:{_quoted(kind)}:{_quoted(name)}".encode()

    def meta_pattern(self, family: str | None = None, kind: str | None = None) -> bytes:
        """SCAN pattern of records."""
        chosen = [part if part == "*" else _quoted(part) for part in (family or "*", kind or "*")]
        return f"{self._root}meta:{{{chosen[0]}}}:{chosen[1]}:*".encode()

    def parse_meta(self, raw: bytes) -> tuple[str, str, str] | None:
        """Family, kind and name of a record's key; None if it is not one of ours."""
        head = f"{self._root}meta:{{".encode()
        parts = raw[len(head) :].split(b":")
        if not raw.startswith(head) or len(parts) != 3 or not parts[0].endswith(b"}"):
            return None
        try:
            family, kind, name = (unquote_to_bytes(part).decode() for part in (parts[0][:-1], *parts[1:]))
        except UnicodeDecodeError:
            return None
        return (family, kind, name) if self.meta(family, kind, name) == raw else None


def digest(raw: bytes) -> bytes:
    """Eight bytes that stand for a whole key in its value's header."""
    return blake2b(raw, digest_size=8).digest()


@lru_cache(maxsize=4096)
def _quoted(text: str) -> str:
    return quote(text, safe=_SAFE)
