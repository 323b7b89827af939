"""``leyline view``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.text import Text

from leyline_lmcache.cli.errors import CliError, ExitCode
from leyline_lmcache.cli.output import print_json, stdout, table
from leyline_lmcache.cli.strip import Part, Run, draw, legend
from leyline_lmcache.envelope import ENVELOPE_VERSION
from leyline_lmcache.journal import JournalReader
from leyline_lmcache.ops import Tier

ACTION = "leyline.view"
_FILL = "leyline-fill-"
_STRIP = 68
_PARTS = {
    "kept": Part.KEPT,
    "moved": Part.MOVED,
    "filled": Part.WAS_FILLED,
    "computed": Part.COMPUTED,
    "gone": Part.GONE,
}


def run(
    response: Annotated[
        str | None,
        typer.Argument(help="Id of a response; by default the last edited one of the stack's journal."),
    ] = None,
    session: Annotated[
        str | None, typer.Option(help="Instead: the last answer of this session (its session_id).")
    ] = None,
    url: Annotated[str | None, typer.Option(help="The SGLang server that knows the response.")] = None,
    stack: Annotated[str | None, typer.Option(help="The server of this stack (see leyline status).")] = None,
    cache_salt: Annotated[str | None, typer.Option(help="The cache_salt it was asked under.")] = None,
    extra_key: Annotated[str | None, typer.Option(help="The extra_key it was asked under.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds the server may take.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the view as JSON.")] = False,
) -> None:
    """Show what a response left in the caches: its pieces, and in which tiers each of them lies.

    The server is asked by a request of its own, so a node that never saw the response finds it in Redis. A
    response of another cache_salt is unknown. The status is 3 if there is no such view.

    Example: `leyline view 5f0c1e7a --url http://127.0.0.1:30000 --json`
    """
    url, journal = _server(url, stack)
    if session is not None and response is not None:
        raise CliError("RESPONSE, --session: expected one of them", ExitCode.USAGE)
    fields = {"cache_salt": cache_salt, "extra_key": extra_key, "session_id": session}
    view = _ask(url, response if session is not None else response or _last(journal), fields, timeout)
    if as_json:
        print_json(view)
        return
    out = stdout()
    for line in _lines(view):
        out.print(line)


def _server(url: str | None, stack: str | None) -> tuple[str, Path | None]:
    """URL of SGLang, and the journal's folder, if it is known."""
    if url is not None and stack is not None:
        raise CliError("--url, --stack: expected one of them", ExitCode.USAGE)
    if url is not None:
        return url, None
    from leyline_lmcache.stack.state import check_name, load, names

    found = [load(each) for each in ([check_name(stack)] if stack is not None else names())]
    records = [record for record in found if record is not None and record.state != "stopped"]
    if stack is not None and not records:
        raise CliError(f"--stack: no stack {stack} runs; see leyline status", ExitCode.USAGE)
    if len(records) != 1:
        known = ", ".join(record.name for record in records) or "none"
        raise CliError(f"--url: expected a server's URL, or --stack (running: {known})", ExitCode.USAGE)
    ends = records[0].endpoints
    journal = ends.get("journal_dir")
    return str(ends["sglang"]["url"]), Path(journal) if journal else None


def _last(journal: Path | None) -> str:
    """The last response that was served from edited KV."""
    if journal is None:
        raise CliError("RESPONSE: expected the id of a response", ExitCode.USAGE)
    ids = [
        record.request
        for record in JournalReader(journal).records()
        if record.op is not None and not record.request.startswith(_FILL)
    ]
    if not ids:
        raise CliError(f"RESPONSE: there is no edited one in {journal} yet; name an id", ExitCode.NOT_SO)
    return ids[-1]


def _ask(url: str, response: str | None, fields: Mapping[str, str | None], timeout: float) -> dict[str, Any]:
    action = {
        "action_id": "view",
        "action_type": ACTION,
        "action_version": ENVELOPE_VERSION,
        "payload": {} if response is None else {"base": response},
    }
    # Without an output token SGLang sends no report.
    body = {
        "input_ids": [0, 0],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "kv_hints": {"protocol_version": ENVELOPE_VERSION, "message_id": "view", "actions": [action]},
        **{name: value for name, value in fields.items() if value is not None},
    }
    where = f"{url.rstrip('/')}/generate"
    try:
        answer = httpx.post(where, json=body, timeout=timeout, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CliError(f"--url: {where}: {error or type(error).__name__}") from None
    if answer.status_code != 200:
        raise CliError(f"--url: {where}: HTTP {answer.status_code}")
    try:
        said = answer.json()["meta_info"].get("leyline")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise CliError(f"--url: {where}: answers something else than SGLang does") from None
    if not isinstance(said, dict) or not (said.get("view") or said.get("reason")):
        raise CliError(f"--url: {url} serves without Leyline; see leyline doctor --url {url}")
    view = said.get("view")
    if not isinstance(view, dict):
        named = response or f"--session {fields['session_id']}"
        raise CliError(f"{named}: {said['reason']}: {said.get('detail', '')}", ExitCode.NOT_SO)
    return view


# ------------------------------------------------------------------------------------------------ for people


def _lines(view: Mapping[str, Any]) -> Iterator[Any]:
    stretches: Sequence[Mapping[str, Any]] = view["stretches"]
    yield f"{view['response']}: {view['length']:,} tokens"
    runs = [Run(_PARTS[each["kind"]], _size(each)) for each in stretches]
    yield ""
    yield Text("  view    ").append_text(draw(runs, _STRIP))
    for tier in view["tiers"]:
        yield Text(f"  {tier:7} ").append_text(draw([_held(each, tier) for each in stretches], _STRIP))
    yield Text("          ").append_text(legend(runs))
    if len(view["tiers"]) < len(Tier):
        missing = ", ".join(tier.value for tier in Tier if tier.value not in view["tiers"])
        yield Text(f"          not asked, or no answer: {missing}", "dim")
    yield ""
    made = table(("piece", "at", "tokens", "shift", "computed in", "lies in"), map(_row, stretches))
    for column in made.columns[1:4]:
        column.justify = "right"
    yield made
    yield Text("  ".join(_total(view, tier) for tier in view["tiers"]))


def _size(stretch: Mapping[str, Any]) -> int:
    return int(stretch.get("gone") or stretch["length"])


def _held(stretch: Mapping[str, Any], tier: str) -> Run:
    if stretch["kind"] == "gone":
        return Run(Part.BLANK, _size(stretch))
    return Run(Part.HELD if tier in stretch["tiers"] else Part.ABSENT, _size(stretch))


def _row(stretch: Mapping[str, Any]) -> tuple[str, ...]:
    if stretch["kind"] == "gone":
        return ("gone", f"{stretch['start']:,}", f"{stretch['gone']:,}", "", "", "")
    lies = ", ".join(stretch["tiers"]) or "nowhere: it would be prefilled"
    shift = f"{stretch['shift']:+,}" if stretch["shift"] else ""
    where = f"{stretch['start']:,}"
    return (stretch["kind"], where, f"{stretch['length']:,}", shift, stretch["buffer"], lies)


def _total(view: Mapping[str, Any], tier: str) -> str:
    held = sum(each["length"] for each in view["stretches"] if tier in each.get("tiers", ()))
    return f"{tier} {held:,} of {view['length']:,}"
