"""The SGLang server of a local stack."""

from __future__ import annotations

import sys
from pathlib import Path

from leyline_lmcache.stack import device as devices
from leyline_lmcache.stack.probe import answers
from leyline_lmcache.stack.process import Command
from leyline_lmcache.stack.spec import StackSpec

BACKEND = "leyline"
# Name of the entry point in cpu_shim/; SGLang loads only the plugins it is told to.
_SHIM_PLUGIN = "leyline_cpu"
_NO_PLUGIN = "none"


def command(
    spec: StackSpec,
    device: str,
    model: Path,
    port: int,
    nccl_port: int,
    *,
    lmcache_config: Path | None,
    leyline_config: Path,
) -> Command:
    """The server, on 127.0.0.1, with or without the plugin and LMCache."""
    options = {
        "--model-path": str(model),
        "--served-model-name": spec.model,
        "--device": device,
        "--dtype": spec.dtype,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--nccl-port": str(nccl_port),
        "--page-size": str(spec.page_size),
        "--context-length": str(spec.context_length),
        "--max-total-tokens": str(spec.max_total_tokens),
        "--mem-fraction-static": "0.5",
        "--random-seed": "0",
        "--log-level": spec.log_level,
    }
    if spec.chunked_prefill_size is not None:
        options["--chunked-prefill-size"] = str(spec.chunked_prefill_size)
    if spec.plugin:
        options["--radix-cache-backend"] = BACKEND
    flags = ["--enable-cache-report", "--sleep-on-idle"]
    if spec.metrics:
        flags.append("--enable-metrics")
    if lmcache_config is not None:
        flags.append("--enable-lmcache")
        options["--lmcache-config-file"] = str(lmcache_config)

    plugins = ([BACKEND] if spec.plugin else []) + ([_SHIM_PLUGIN] if device == "cpu" else [])
    env = {"SGLANG_PLUGINS": ",".join(plugins) or _NO_PLUGIN}
    if spec.plugin:
        env["LEYLINE_CONFIG"] = str(leyline_config)
    if spec.threads is not None:
        env["OMP_NUM_THREADS"] = str(spec.threads)
    flat = [text for pair in options.items() for text in pair]
    argv = [sys.executable, "-m", "sglang.launch_server", *flat, *flags, *spec.sglang_args]
    # SGLang stops its own workers; it takes about four seconds.
    return Command("sglang", argv, devices.server_env(device, env | dict(spec.env)), grace_s=20.0)


def is_ready(port: int) -> bool:
    """True if the server takes requests."""
    return answers(f"http://127.0.0.1:{port}/ready")
