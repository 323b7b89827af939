"""``leyline doctor``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from leyline_lmcache.cli import checks
from leyline_lmcache.cli.checks import Check, Status, guarded
from leyline_lmcache.cli.errors import CliError, ExitCode
from leyline_lmcache.cli.output import print_json, stdout

_STYLE = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


@dataclass(frozen=True, slots=True)
class _Targets:
    """Servers to look at; None: not this one."""

    sglang: str | None = None
    lmcache: str | None = None
    lmcache_http: str | None = None
    redis: str | None = None


def run(
    url: Annotated[str | None, typer.Option(help="A running SGLang server.")] = None,
    model: Annotated[Path | None, typer.Option(help="A model's folder: can its keys be moved?")] = None,
    lmcache: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="A running lmcache server.")
    ] = None,
    lmcache_http: Annotated[str | None, typer.Option(help="URL of its HTTP interface.")] = None,
    redis: Annotated[str | None, typer.Option(metavar="URL", help="The Redis behind it.")] = None,
    stack: Annotated[str | None, typer.Option(help="The servers of this stack (see leyline status).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> int:
    """Check the installation, a model and the servers around it; each finding says what to do.

    Without options only what is installed here is looked at. The status is 1 if any check fails; warnings
    leave it 0.

    Example: `leyline doctor --url http://127.0.0.1:30000 --redis redis://127.0.0.1:6379`
    """
    targets = _targets(stack, _Targets(url, lmcache, lmcache_http, redis))
    found: list[Check] = []
    for check in _all(targets, model):
        found.append(check)
        if not as_json:
            _show(check)
    failed = sum(check.status is Status.FAIL for check in found)
    warned = sum(check.status is Status.WARN for check in found)
    if as_json:
        print_json({"ok": not failed, "checks": [asdict(check) for check in found]})
    else:
        stdout().print(f"\n{len(found) - failed - warned} ok, {warned} to look at, {failed} failed")
    return ExitCode.FAILED if failed else ExitCode.OK


def _all(targets: _Targets, model: Path | None) -> Iterator[Check]:
    steps: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("python", lambda: iter([checks.check_python()])),
        ("packages", checks.check_packages),
        ("plugin", lambda: iter([checks.check_plugin()])),
        ("settings", lambda: iter([checks.check_settings()])),
        ("gpu", checks.check_device),
    ]
    if model is not None:
        steps.append(("rope", lambda: iter([checks.check_model(model)])))
    sglang, lmcache, http, redis = targets.sglang, targets.lmcache, targets.lmcache_http, targets.redis
    if sglang is not None:
        steps.append(("sglang server", lambda: checks.check_sglang(sglang)))
    if lmcache is not None:
        steps.append(("lmcache server", lambda: checks.check_lmcache(lmcache, http)))
        if http is not None:
            steps.append(("module", lambda: checks.check_module(http)))
    if redis is not None:
        steps.append(("redis server", lambda: checks.check_redis(redis)))
    for name, step in steps:
        yield from guarded(name, step)


def _targets(stack: str | None, given: _Targets) -> _Targets:
    """The servers named one by one, else those of a stack."""
    if stack is None:
        if given.lmcache_http is not None and given.lmcache is None:
            raise CliError("--lmcache-http: expected --lmcache HOST:PORT with it", ExitCode.USAGE)
        return given
    from leyline_lmcache.stack.state import check_name, load

    record = load(check_name(stack))
    if record is None:
        raise CliError(f"--stack: no stack {stack} was started; see leyline status", ExitCode.USAGE)
    ends = record.endpoints
    daemon = ends.get("lmcache")
    return _Targets(
        sglang=given.sglang or ends["sglang"]["url"],
        lmcache=given.lmcache or (f"{daemon['host']}:{daemon['port']}" if daemon else None),
        lmcache_http=given.lmcache_http or (daemon["url"] if daemon else None),
        redis=given.redis or ends.get("redis", {}).get("url"),
    )


def _show(check: Check) -> None:
    style = _STYLE[check.status]
    out = stdout()
    out.print(f"[{style}]{check.status.value:4}[/{style}]  {check.name:15} {escape(check.seen)}")
    if check.todo:
        out.print(f"      {'':15} [dim]→[/dim] {escape(check.todo)}")
