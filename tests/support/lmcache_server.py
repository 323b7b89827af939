"""A real ``lmcache server`` by itself, and connectors to it over KV pools of our own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import yaml

from leyline_lmcache.stack import StackSpec, lmcache
from leyline_lmcache.stack.ports import PortLease
from leyline_lmcache.stack.process import ServerProcess

MODEL = "unit"


class LMCacheServer:
    """Stops with the process that started it, however that ends."""

    def __init__(self, folder: Path, *args: str, chunk_size: int = 16) -> None:
        self._folder = folder
        lease = PortLease()
        self.port, self.http_port = lease.take("lmcache"), lease.take("http")
        lease.release()
        self._shm = f"leyline-test-{self.port}"
        self._spec = StackSpec(
            redis=False,
            l2="none",
            server_module=True,
            chunk_size=chunk_size,
            l1_size_gb=0.1,
            # Shared memory is where a store can be interrupted.
            lmcache_args=("--shm-name", self._shm, *args),
        )
        self._lifeline = os.pipe()
        self._process: ServerProcess | None = None

    def start(self, **changes: Any) -> None:
        """Start it on the same ports, with other settings if wished."""
        self.stop()
        spec = replace(self._spec, **changes)
        command = lmcache.command(spec, "cpu", self.port, self.http_port, None)
        self._process = ServerProcess(command, self._folder)
        self._process.start(self._lifeline[0])
        self._process.wait_ready(lambda: lmcache.is_ready(self.http_port), 60.0)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()

    @contextmanager
    def hung(self) -> Iterator[None]:
        """Stopped within, so that it answers nothing but its connections stay."""
        pid = self.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def l1(self) -> dict[str, int]:
        """Counts of L1: objects, locks."""
        status = httpx.get(f"http://127.0.0.1:{self.http_port}/status", timeout=30, trust_env=False).json()
        return dict(status.get("storage_manager", status)["l1_manager"])

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None

    def close(self) -> None:
        self.stop()
        for end in self._lifeline:
            os.close(end)
        # One that was killed leaves it behind.
        with suppress(FileNotFoundError):
            Path(f"/dev/shm/lmcache_l1_pool_{self._shm}").unlink()

    def config(self, **extra: Any) -> Path:
        """The file for ``--lmcache-config-file``."""
        values = {
            "lmcache.mp.mq_timeout": 60,
            "lmcache.mp.heartbeat_interval": 2,
            "lmcache.mp.mp_transfer_mode": "engine_driven",
            **extra,
        }
        file = self._folder / "lmcache.yaml"
        file.write_text(
            yaml.safe_dump({"mp_host": "127.0.0.1", "mp_port": self.port, "extra_config": values})
        )
        return file

    def connector(self, engine: Any, kind: type[Any]) -> Any:
        """A connector over the pool of ``engine`` (tests/connector/engine.py)."""
        from sglang.srt.configs.model_config import AttentionArch
        from sglang.srt.mem_cache.unified_cache.components import ComponentType

        return kind(
            config_file=str(self.config()),
            model_config=SimpleNamespace(
                model_path=MODEL,
                attention_arch=AttentionArch.MLA,
                hf_config=SimpleNamespace(architectures=[]),
            ),
            tp_size=1,
            tp_rank=0,
            tp_group=None,
            page_size=engine.page_size,
            token_to_kv_pool_allocator=engine.allocator,
            req_to_token_pool=engine.rows,
            tree_components=(ComponentType.FULL,),
            mamba_component=None,
            sliding_window_size=None,
        )
