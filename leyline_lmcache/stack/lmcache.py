"""The ``lmcache server`` of a local stack, and the file that tells SGLang where it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import yaml

from leyline_lmcache.stack import device as devices
from leyline_lmcache.stack.probe import answers
from leyline_lmcache.stack.process import Command
from leyline_lmcache.stack.spec import StackSpec

# The console script of the wheel is bound to the interpreter it was installed with, which need not be ours.
_RUN = "from lmcache.cli.main import main; main()"


def l2_adapter(spec: StackSpec, redis_url: str | None) -> Mapping[str, Any] | None:
    """The L2 tier: the one the spec names, else LMCache's own adapter on `redis_url`, else none."""
    if spec.l2_adapter is not None or redis_url is None:
        return spec.l2_adapter
    address = urlsplit(redis_url)
    return {"type": "resp", "host": address.hostname, "port": address.port or 6379, "num_workers": 2}


def command(spec: StackSpec, device: str, port: int, http_port: int, redis_url: str | None) -> Command:
    """The server, on 127.0.0.1."""
    options = {
        "--host": "127.0.0.1",
        "--port": str(port),
        "--http-host": "127.0.0.1",
        "--http-port": str(http_port),
        "--chunk-size": str(spec.chunk_size),
        "--l1-size-gb": f"{spec.l1_size_gb:g}",
        "--eviction-policy": "LRU",
        "--max-workers": "2",
    }
    if device == "cpu":
        # The other mode moves nothing on CPU, and does not say so.
        options["--supported-transfer-mode"] = "engine_driven"
    adapter = l2_adapter(spec, redis_url)
    if adapter is not None:
        options["--l2-adapter"] = json.dumps(adapter)
    flat = [text for pair in options.items() for text in pair]
    argv = [sys.executable, "-c", _RUN, "server", *flat, "--disable-observability", *spec.lmcache_args]
    return Command("lmcache", argv, devices.server_env(device, spec.env))


def is_ready(http_port: int) -> bool:
    """True if the server's engine runs."""
    return answers(f"http://127.0.0.1:{http_port}/healthcheck")


def client_config(spec: StackSpec, device: str, port: int) -> str:
    """YAML for SGLang's ``--lmcache-config-file``."""
    extra: dict[str, Any] = {"lmcache.mp.mq_timeout": spec.mq_timeout_s}
    if device == "cpu":
        extra["lmcache.mp.mp_transfer_mode"] = "engine_driven"
    return yaml.safe_dump({"mp_host": "127.0.0.1", "mp_port": port, "extra_config": extra})
