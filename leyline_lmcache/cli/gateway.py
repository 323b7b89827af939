"""``leyline gateway``."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from leyline_lmcache.cli.errors import CliError, ExitCode
from leyline_lmcache.cli.output import print_json, stdout


def run(
    config: Annotated[
        Path | None, typer.Option(help="YAML file; docs/gateway.md has its keys.", dir_okay=False)
    ] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="URL of an SGLang server; repeatable, instead of a file.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.", min=0, max=65535)] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check the configuration, and start nothing.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    as_json: Annotated[bool, typer.Option("--json", help="With --check: print what was read.")] = False,
) -> None:
    """Serve OpenAI's API in front of SGLang servers: chat completions, completions and models.

    Sessions are recognised and kept on their server, configured policies edit their messages, and the servers
    keep the KV of what stays. A SIGTERM lets requests under way finish.

    Example: `leyline gateway --backend http://127.0.0.1:30000 --port 8080`
    """
    try:
        from leyline_lmcache.gateway.app import Gateway
        from leyline_lmcache.gateway.server import serve
    except ModuleNotFoundError as error:
        raise CliError(
            f"{error.name} is not installed; pip install 'leyline-lmcache[gateway]' brings it"
        ) from None
    from leyline_lmcache.gateway.settings import ConfigError, GatewaySettings

    if (config is None) == (not backend):
        raise CliError("expected either --config or --backend", ExitCode.USAGE)
    levels = {"debug", "info", "warning", "error"}
    if log_level not in levels:
        raise CliError(f"--log-level: expected one of debug, info, warning, error, got {log_level}",
                       ExitCode.USAGE)  # fmt: skip
    try:
        if config is not None:
            settings = GatewaySettings.load(config)
        else:
            settings = GatewaySettings.of_urls(backend or [])
    except ConfigError as error:
        raise CliError(str(error), ExitCode.USAGE) from None
    changed: dict[str, Any] = {"host": host, "port": port}
    settings = replace(settings, **{key: value for key, value in changed.items() if value is not None})
    gateway = Gateway(settings)
    if check:
        _show(settings, as_json)
        return
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # One line for each request that goes out says nothing that ours does not.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    serve(gateway)


def _show(settings: Any, as_json: bool) -> None:
    said = {
        "listen": f"{settings.host}:{settings.port}",
        "backends": {backend.name: backend.url for backend in settings.backends},
        "auth": str(settings.auth),
        "salted": settings.salt_secret is not None,
        "policy": settings.tenant.policy,
        "tenants": {
            tenant.name: {"policy": tenant.policy, "mode": str(tenant.mode), "concurrent": tenant.concurrent}
            for tenant in settings.tenants.values()
        },
    }
    if as_json:
        print_json(said)
        return
    out = stdout()
    for key, value in said.items():
        out.print(f"{key:9} {value}", markup=False)
