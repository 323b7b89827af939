"""``leyline up``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
import yaml

from leyline_lmcache.cli.errors import CliError, ExitCode
from leyline_lmcache.cli.output import print_json, stderr, stdout
from leyline_lmcache.stack import Progress, StackSpec
from leyline_lmcache.stack.state import Record, up

_SERVERS = "Servers"
_SIZES = "Sizes"
_PORTS = "Ports (0: any free one)"
_MORE = "Passed on"
_DEFAULT = StackSpec()


def _option(text: str, panel: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel)


def _pairs(option: str, items: list[str]) -> dict[str, str]:
    """``KEY=VALUE`` arguments."""
    for item in items:
        if not item.partition("=")[0] or "=" not in item:
            raise CliError(f"{option}: expected KEY=VALUE, got {item}", ExitCode.USAGE)
    return {key: value for key, _, value in (item.partition("=") for item in items)}


def run(
    name: Annotated[str, typer.Option(help="Name of the stack; several run side by side.")] = "default",
    model: Annotated[
        str, _option("mla, mla-512, gqa (random), tiny-mla (trained), or a model's folder.", _SERVERS)
    ] = _DEFAULT.model,
    plugin: Annotated[
        bool, _option("Serve with Leyline's cache.", _SERVERS, "--plugin/--no-plugin")
    ] = _DEFAULT.plugin,
    lmcache: Annotated[
        bool, _option("Start lmcache server.", _SERVERS, "--lmcache/--no-lmcache")
    ] = _DEFAULT.lmcache,
    redis: Annotated[
        bool, _option("Start Redis behind lmcache server.", _SERVERS, "--redis/--no-redis")
    ] = _DEFAULT.redis,
    l2: Annotated[
        str | None,
        _option("What carries KV to Redis: leyline (with the plugin), resp (without it) or none.", _SERVERS),
    ] = None,
    server_module: Annotated[
        bool | None,
        _option(
            "Load Leyline into lmcache server (with the plugin).",
            _SERVERS,
            "--server-module/--no-server-module",
        ),
    ] = None,
    redis_url: Annotated[str | None, _option("Use this Redis instead of starting one.", _SERVERS)] = None,
    dtype: Annotated[str, _option("float32, bfloat16, float16 or auto.", _SERVERS)] = _DEFAULT.dtype,
    device: Annotated[str, _option("auto, cpu or cuda.", _SERVERS)] = _DEFAULT.device,
    page_size: Annotated[int, _option("Tokens per SGLang page.", _SIZES)] = _DEFAULT.page_size,
    chunk_size: Annotated[int, _option("Tokens per LMCache chunk.", _SIZES)] = _DEFAULT.chunk_size,
    context_length: Annotated[
        int, _option("Tokens of the longest request.", _SIZES)
    ] = _DEFAULT.context_length,
    max_total_tokens: Annotated[
        int, _option("Tokens of SGLang's KV pool.", _SIZES)
    ] = _DEFAULT.max_total_tokens,
    chunked_prefill_size: Annotated[int | None, _option("Tokens per prefill step.", _SIZES)] = None,
    l1_size_gb: Annotated[float, _option("Size of LMCache's CPU tier.", _SIZES)] = _DEFAULT.l1_size_gb,
    port: Annotated[int, _option("Of SGLang.", _PORTS)] = 0,
    lmcache_port: Annotated[int, _option("Of lmcache server.", _PORTS)] = 0,
    lmcache_http_port: Annotated[int, _option("Of lmcache server's HTTP interface.", _PORTS)] = 0,
    redis_port: Annotated[int, _option("Of Redis.", _PORTS)] = 0,
    threads: Annotated[int | None, _option("OpenMP threads of SGLang on CPU.", _MORE)] = None,
    log_level: Annotated[str, _option("Of SGLang.", _MORE)] = _DEFAULT.log_level,
    setting: Annotated[
        list[str] | None, _option("A setting of the plugin, KEY=VALUE; repeatable.", _MORE, "--set")
    ] = None,
    env: Annotated[
        list[str] | None, _option("A variable for SGLang and lmcache server, KEY=VALUE; repeatable.", _MORE)
    ] = None,
    sglang_arg: Annotated[list[str] | None, _option("An argument for SGLang; repeatable.", _MORE)] = None,
    lmcache_arg: Annotated[
        list[str] | None, _option("An argument for lmcache server; repeatable.", _MORE)
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds SGLang may take to start.")
    ] = _DEFAULT.start_timeout_s,
    as_json: Annotated[bool, typer.Option("--json", help="Print the endpoints as JSON.")] = False,
) -> None:
    """Start Redis, lmcache server and SGLang here and leave them running.

    On a machine without a GPU they run on CPU, with tiny models.
    Interrupted before all are ready, it stops what it had started.

    Example: `leyline up --name try --model gqa --page-size 16 --json`
    """
    spec = StackSpec(
        model=model,
        plugin=plugin,
        lmcache=lmcache,
        redis=redis,
        redis_url=redis_url,
        l2=l2 or ("leyline" if plugin else "resp"),
        server_module=plugin and lmcache if server_module is None else server_module,
        dtype=dtype,
        device=device,
        page_size=page_size,
        chunk_size=chunk_size,
        context_length=context_length,
        max_total_tokens=max_total_tokens,
        chunked_prefill_size=chunked_prefill_size,
        l1_size_gb=l1_size_gb,
        sglang_port=port,
        lmcache_port=lmcache_port,
        lmcache_http_port=lmcache_http_port,
        redis_port=redis_port,
        threads=threads,
        log_level=log_level,
        leyline={key: yaml.safe_load(value) for key, value in _pairs("--set", setting or []).items()},
        env=_pairs("--env", env or []),
        sglang_args=tuple(sglang_arg or ()),
        lmcache_args=tuple(lmcache_arg or ()),
        start_timeout_s=timeout,
    )
    record = start(name, spec)
    if as_json:
        print_json(record.to_json())
    else:
        _describe(record)


def start(name: str, spec: StackSpec) -> Record:
    """Start a stack and show on stderr what is being waited for."""
    with stderr().status(f"starting {', '.join(spec.roles)}") as status:
        return up(name, spec, show_progress(status.update))


def show_progress(update: Callable[[str], None]) -> Callable[[Progress], None]:
    """Turn progress into lines such as ``sglang 12 s``."""
    console = stderr()

    def on_progress(progress: Progress) -> None:
        if progress.ready:
            console.print(f"{progress.role} is ready after {progress.elapsed_s:.0f} s")
        else:
            update(f"{progress.role} {progress.elapsed_s:.0f} s")

    return on_progress


def _describe(record: Record) -> None:
    out = stdout()
    url = record.endpoints["sglang"]["url"]
    out.print(f"[bold]{record.name}[/bold] is running")
    out.print(f"  SGLang     {url}   (OpenAI: {url}/v1, model {record.endpoints['sglang']['model']})")
    if "lmcache" in record.endpoints:
        lmcache = record.endpoints["lmcache"]
        out.print(f"  LMCache    {lmcache['host']}:{lmcache['port']}   (status: {lmcache['url']}/status)")
    if "redis" in record.endpoints:
        out.print(f"  Redis      {record.endpoints['redis']['url']}")
    out.print(f"  logs       {record.endpoints['directory']}/logs")
    out.print(f"Try: curl -s {url}/generate -H 'Content-Type: application/json' -d '{{\"text\": \"hello\"}}'")
    out.print(f"Stop: leyline down --name {record.name}")
