"""The Redis tier: KV blocks and small records on redis-py.

Nothing in this package imports torch, SGLang or LMCache, so the command line and other nodes' processes
can use it as it is. Sources of the layout and of the failure rules: DESIGN §7 and docs/redis.md.

================  =======================================================================================
``options``       typed options with redis-py's names; JSON, YAML, environment
``credentials``   passwords from files and the environment, never from a command line
``outcome``       the one list of names for how an operation ended, and counters by name
``keys``          the key schema
``codec``         the header in front of every value
``breaker``       when to stop asking a node that does not answer
``client``        topologies (one server, Sentinel, Cluster), connections, probes
``wire``          large values over one connection without needless copies
``store``         KV blocks: store, load, lookup, delete, list, verify
``metadata``      small records with TTL, written atomically
``memory``        both interfaces in process memory
================  =======================================================================================
"""

from .keys import KVKey
from .memory import MemoryKVStore, MemoryMetadata
from .metadata import MetadataStore, Record, RedisMetadata, open_metadata
from .options import OptionsError, RedisOptions
from .outcome import Outcome, StorageError
from .store import KVStore, Page, RedisKVStore

__all__ = [
    "KVKey",
    "KVStore",
    "MemoryKVStore",
    "MemoryMetadata",
    "MetadataStore",
    "OptionsError",
    "Outcome",
    "Page",
    "Record",
    "RedisKVStore",
    "RedisMetadata",
    "RedisOptions",
    "StorageError",
    "open_metadata",
]
