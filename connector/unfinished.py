"""Stores that never ended: LMCache admits the memory they had reserved, written or not; here it is dropped.

When an engine leaves, or is silent for long, ``EngineDrivenTransferModule._release_entry`` finishes its open
stores as if they were done: what happens to lie in their memory becomes KV in L1, and a moment later in
Redis. So it is after an engine was killed between the two steps of a store, or its store failed.
Upstream: ``lmcache/v1/multiprocess/modules/engine_driven_transfer.py``, ``distributed/l1_manager.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from lmcache.v1.distributed.storage_manager import _L1_WRITE_TAG
from lmcache.v1.multiprocess.modules.engine_driven_transfer import EngineDrivenTransferModule

log = logging.getLogger(__name__)


def drop_unfinished(modules: Iterable[Any], storage: Any, dropped: Callable[[int], None]) -> None:
    """Make every engine-driven module among ``modules`` drop what an engine left unfinished.

    LMCache has no hook there, so the module's own method is stood in for, on this object alone. It is what
    unregistering and the reaper of silent engines have in common.

    Args:
        storage: LMCache's storage manager.
        dropped: told how many chunks were dropped.
    """
    for module in modules:
        if isinstance(module, EngineDrivenTransferModule):
            module._release_entry = _Release(module, storage, dropped)


class _Release:
    def __init__(self, module: Any, storage: Any, dropped: Callable[[int], None]) -> None:
        self._module = module
        self._admit = module._release_entry
        self._storage = storage
        self._dropped = dropped

    def __call__(self, instance_id: int, entry: Any) -> None:
        keys = self._unfinished(instance_id)
        if keys:
            # Staged, so that no reader has ever seen them, and nobody else's: the tag is the stores' own.
            for manager in self._storage._l1_managers_by_id.values():
                manager.finish_write_and_delete(keys, tag=_L1_WRITE_TAG)
            self._dropped(len(keys))
            log.warning("engine %d left %d chunks unfinished; they are dropped", instance_id, len(keys))
        self._admit(instance_id, entry)

    def _unfinished(self, instance_id: int) -> list[Any]:
        module = self._module
        with module._pending_shm_lock:
            writes = [each for each in module._pending_shm_writes if each[0] == instance_id]
            return [key for each in writes for key in module._pending_shm_writes.pop(each)]
