"""Starts the servers of a spec, in parallel where they do not need each other, and stops them in order."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from leyline_lmcache.stack import device as devices
from leyline_lmcache.stack import lmcache, models, redis, sglang
from leyline_lmcache.stack.client import Client
from leyline_lmcache.stack.errors import StackError
from leyline_lmcache.stack.paths import ensure_dir
from leyline_lmcache.stack.ports import PortLease
from leyline_lmcache.stack.process import Command, ServerProcess, log_tail
from leyline_lmcache.stack.spec import ROLES, StackSpec, without_password

_SMALL_SERVER_TIMEOUT_S = 60.0
_REPORT_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Progress:
    """What happens while a stack starts.

    Attributes:
        role: the server that is being waited for.
        ready: it has just become ready.
        elapsed_s: seconds since it was started.
        line: the last line of its log, as it is.
    """

    role: str
    ready: bool
    elapsed_s: float
    line: str


class Stack:
    """The running servers of one spec. A context manager: all is stopped, however the block ends.

    If this process dies, even by SIGKILL, the servers stop by themselves, unless `detach` was called.
    """

    def __init__(
        self,
        spec: StackSpec | None = None,
        *,
        directory: Path | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        """
        Args:
            spec: what to start.
            directory: folder for logs and configuration, kept afterwards; by default a temporary one, removed
                when a stack that had started is stopped.
            on_progress: called about twice a second while `start` waits.
        """
        self.spec = spec or StackSpec()
        self._given_directory = directory
        self._on_progress = on_progress
        self._directory: Path | None = None
        self._lifeline: tuple[int, int] | None = None
        self._servers: dict[str, ServerProcess] = {}
        self._ports: Mapping[str, int] = {}
        self._device = ""
        self._detached = False
        # `stop` may come from another thread while `start` waits: it makes `start` give up, and waits for it.
        self._stopping = threading.Event()
        self._lock = threading.RLock()

    # -- life ----------------------------------------------------------------------------------------------

    def start(self) -> Stack:
        """Start all servers and wait until they answer.

        Raises:
            StackError: one could not be started; the others are stopped again.
        """
        with self._lock:
            if self._servers:
                raise StackError("the stack is already started")
            try:
                self._start()
            except BaseException as error:
                self._stop_servers()
                self._close_lifeline()
                if not isinstance(error, StackError):  # whose message points to a log
                    self._remove_directory()
                raise
        return self

    def _check_wanted(self) -> None:
        if self._stopping.is_set():
            raise StackError("the stack was stopped; start a new one")

    def _start(self) -> None:
        spec = self.spec
        self._device = devices.detect() if spec.device == "auto" else spec.device
        if "redis" in spec.roles:
            redis.find_server()  # rather before half a minute of waiting than after
        model = models.resolve(spec.model)
        self._directory = self._make_directory()
        self._lifeline = os.pipe()
        with PortLease() as lease:
            for purpose, wanted in self._wanted_ports():
                lease.take(purpose, wanted)
            self._ports = dict(lease.ports)
            self._servers = {c.role: ServerProcess(c, self._directory) for c in self._commands(model)}
            # SGLang imports for many seconds before it first needs lmcache, and lmcache connects to Redis
            # when it needs it, so all of them start at once.
            self._check_wanted()
            for server in self._servers.values():
                server.start(self._lifeline[0])
            for role in self._servers:
                self._wait_ready(role)

    def _make_directory(self) -> Path:
        if self._given_directory is None:
            try:
                return Path(tempfile.mkdtemp(prefix="leyline-stack-"))
            except OSError as error:
                raise StackError(
                    f"no temporary folder: {error}; set TMPDIR to a folder you may write to"
                ) from error
        directory = ensure_dir(self._given_directory.absolute(), "another folder")
        shutil.rmtree(directory / "logs", ignore_errors=True)
        return directory

    def _wanted_ports(self) -> list[tuple[str, int]]:
        spec = self.spec
        wanted = {
            "redis": [("redis", spec.redis_port)],
            "lmcache": [("lmcache", spec.lmcache_port), ("lmcache_http", spec.lmcache_http_port)],
            "sglang": [("sglang", spec.sglang_port), ("nccl", 0)],
        }
        # Ports somebody asked for come first, so that a random choice never takes one of them.
        ports = [pair for role in spec.roles for pair in wanted[role]]
        return sorted(ports, key=lambda pair: not pair[1])

    def _commands(self, model: Path) -> list[Command]:
        spec, ports, folder = self.spec, self._ports, self.directory
        made: dict[str, Callable[[], Command]] = {
            "redis": lambda: redis.command(ports["redis"], folder),
            "lmcache": lambda: lmcache.command(
                spec, self._device, ports["lmcache"], ports["lmcache_http"], self.redis_url
            ),
            "sglang": lambda: self._sglang_command(model),
        }
        return [made[role]() for role in spec.roles]

    def _sglang_command(self, model: Path) -> Command:
        spec, folder = self.spec, self.directory
        settings: dict[str, Any] = {"journal_dir": str(folder / "journal"), **spec.leyline}
        leyline_config = folder / "leyline.yaml"
        leyline_config.write_text(yaml.safe_dump(settings))
        lmcache_config = None
        if spec.lmcache:
            lmcache_config = folder / "lmcache.yaml"
            lmcache_config.write_text(lmcache.client_config(spec, self._device, self._ports["lmcache"]))
        return sglang.command(
            spec,
            self._device,
            model,
            self._ports["sglang"],
            self._ports["nccl"],
            lmcache_config=lmcache_config,
            leyline_config=leyline_config,
        )

    def _wait_ready(self, role: str) -> None:
        server = self._servers[role]
        ports = self._ports
        probes: dict[str, Callable[[], bool]] = {
            "redis": lambda: redis.is_ready(ports["redis"]),
            "lmcache": lambda: lmcache.is_ready(ports["lmcache_http"]),
            "sglang": lambda: sglang.is_ready(ports["sglang"]),
        }
        reported = time.monotonic()

        def on_wait() -> None:
            nonlocal reported
            self._check_wanted()
            if time.monotonic() - reported >= _REPORT_EVERY_S:
                reported = time.monotonic()
                self._report(role, ready=False)

        timeout_s = self.spec.start_timeout_s if role == "sglang" else _SMALL_SERVER_TIMEOUT_S
        server.wait_ready(probes[role], timeout_s, on_wait)
        self._report(role, ready=True)

    def _report(self, role: str, *, ready: bool) -> None:
        if self._on_progress is not None:
            server = self._servers[role]
            self._on_progress(Progress(role, ready, server.elapsed_s, log_tail(server.log, 1)))

    def stop(self) -> None:
        """Stop all servers, SGLang first, for good. Does nothing the second time, or to a detached stack."""
        if self._detached:
            return
        self._stopping.set()
        with self._lock:
            started = bool(self._servers)
            self._stop_servers()
            self._close_lifeline()
            if started:
                self._remove_directory()

    def _remove_directory(self) -> None:
        if self._given_directory is None and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _stop_servers(self) -> None:
        # SGLang must still find lmcache while it stops; the other two need nobody.
        for role in reversed(ROLES):
            if role in self._servers:
                self._servers[role].stop()
        self._servers = {}

    def _close_lifeline(self) -> None:
        if self._lifeline is not None:
            for fd in self._lifeline:
                os.close(fd)
            self._lifeline = None

    def detach(self) -> None:
        """Let the servers run on after this process; they are stopped through `process_refs`."""
        if self._lifeline is None:
            raise StackError("the stack is not started")
        os.write(self._lifeline[1], b"D" * len(self._servers))
        self._detached = True
        self._close_lifeline()

    def __enter__(self) -> Stack:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- one server ----------------------------------------------------------------------------------------

    def server(self, role: str) -> ServerProcess:
        """The server of a role ("redis", "lmcache", "sglang").

        Raises:
            StackError: this stack runs no such server.
        """
        if role not in self._servers:
            raise StackError(f"role: this stack runs {', '.join(self._servers) or 'nothing'}, not {role}")
        return self._servers[role]

    def kill(self, role: str) -> None:
        """Kill one server as a crash would; the others go on."""
        self.server(role).kill()

    def restart(self, role: str, *, wait: bool = True) -> None:
        """Stop one server if it still runs, and start it again on the same ports."""
        server = self.server(role)
        server.stop()
        server.start(None if self._lifeline is None else self._lifeline[0])
        if wait:
            self._wait_ready(role)

    # -- where things are ----------------------------------------------------------------------------------

    @property
    def directory(self) -> Path:
        """Folder of logs, generated configuration and the journal."""
        if self._directory is None:
            raise StackError("the stack is not started")
        return self._directory

    @property
    def logs(self) -> Mapping[str, Path]:
        """Log file by role."""
        return {role: server.log for role, server in self._servers.items()}

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""
        return self._device

    def _port(self, purpose: str, role: str) -> int:
        if purpose not in self._ports:
            raise StackError(f"this stack runs no {role}")
        return self._ports[purpose]

    @property
    def sglang_url(self) -> str:
        """Base URL of SGLang; the OpenAI endpoints are below ``/v1``."""
        return f"http://127.0.0.1:{self._port('sglang', 'sglang')}"

    @property
    def lmcache_address(self) -> tuple[str, int]:
        """Host and port of ``lmcache server``'s message queue."""
        return "127.0.0.1", self._port("lmcache", "lmcache server")

    @property
    def lmcache_url(self) -> str:
        """Base URL of ``lmcache server``'s HTTP interface."""
        return f"http://127.0.0.1:{self._port('lmcache_http', 'lmcache server')}"

    @property
    def redis_url(self) -> str | None:
        """The Redis behind ``lmcache server``; None if there is none."""
        if "redis" in self._ports:
            return f"redis://127.0.0.1:{self._ports['redis']}"
        return self.spec.redis_url if self.spec.lmcache and self.spec.l2 != "none" else None

    @property
    def journal_dir(self) -> Path:
        """Folder of the plugin's journal."""
        return Path(self.spec.leyline.get("journal_dir") or self.directory / "journal")

    def client(self, timeout_s: float = 300.0) -> Client:
        """A client of the SGLang server."""
        return Client(self.sglang_url, model=self.spec.model, timeout_s=timeout_s)

    def endpoints(self) -> dict[str, Any]:
        """All of it as plain data, as `leyline up` prints it."""
        found: dict[str, Any] = {
            "sglang": {
                "url": self.sglang_url,
                "openai_url": f"{self.sglang_url}/v1",
                "model": self.spec.model,
            },
            "directory": str(self.directory),
            "logs": {role: str(log) for role, log in self.logs.items()},
        }
        if self.spec.plugin:
            found["journal_dir"] = str(self.journal_dir)
        if self.spec.lmcache:
            host, port = self.lmcache_address
            found["lmcache"] = {"host": host, "port": port, "url": self.lmcache_url}
        if self.redis_url is not None:
            found["redis"] = {"url": without_password(self.redis_url)}
        return found
