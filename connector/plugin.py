"""Entry point of the SGLang plugin (group ``sglang.srt.plugins``).

SGLang calls :func:`register` in its main process before arguments are parsed, and again in each worker
process. It logs and swallows exceptions of plugins, and looks the backend's name up only when the cache
is built, so what goes wrong here is also raised again from the factory.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

log = logging.getLogger(__name__)

BACKEND = "leyline"
_GENERATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
_ABORT = "sglang.srt.managers.tokenizer_manager.TokenizerManager.abort_request"


def register() -> None:
    """Make ``--radix-cache-backend leyline`` known and hook the request path. Does nothing to a server
    that does
    not choose the backend, beyond one look at each request."""
    from . import versions

    versions.check("sglang")
    from sglang.srt.mem_cache.registry import register_radix_cache_backend, registered_radix_cache_backends
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if BACKEND in registered_radix_cache_backends():
        return
    register_radix_cache_backend(BACKEND, _factory)

    runner: Any = None

    def _runner() -> Any:
        nonlocal runner
        if runner is None:
            from sglang.srt.runtime_context import get_memory

            memory = get_memory()
            if memory.radix_cache_backend != BACKEND:
                return None
            from .fills import FillRunner
            from .settings import Settings

            runner = FillRunner(Settings.load(lmcache_config=memory.lmcache_config_file))
        return runner

    async def generate(original: Any, manager: Any, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        from contextlib import aclosing

        active = _runner()
        answers = (
            original(manager, obj, request)
            if active is None
            else active.generate(original, manager, obj, request)
        )
        async with aclosing(answers):
            async for answer in answers:
                yield answer

    def abort(original: Any, manager: Any, rid: str = "", abort_all: bool = False) -> Any:
        active = _runner()
        if active is None:
            return original(manager, rid, abort_all)
        return active.abort(original, manager, rid, abort_all)

    HookRegistry.register(_GENERATE, generate, HookType.AROUND)
    HookRegistry.register(_ABORT, abort, HookType.AROUND)


def _factory(ctx: Any) -> Any:
    from .cache import build_cache

    return build_cache(ctx)
