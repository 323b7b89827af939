"""``leyline view``: what a server answers, drawn; and servers that answer otherwise."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from cli.conftest import Leyline

VIEW = {
    "response": "r9",
    "length": 300,
    "tiers": ["gpu", "cpu", "redis"],
    "stretches": [
        {"kind": "kept", "start": 0, "length": 100, "shift": 0, "buffer": "aa", "tiers": ["gpu", "cpu"]},
        {"kind": "filled", "start": 100, "length": 5, "shift": 0, "buffer": "bb", "tiers": ["gpu"]},
        {"kind": "gone", "start": 105, "length": 0, "gone": 50},
        {"kind": "moved", "start": 105, "length": 175, "shift": -45, "buffer": "aa", "tiers": ["redis"]},
        {"kind": "computed", "start": 280, "length": 20, "shift": 0, "buffer": "bb", "tiers": []},
    ],
}


@contextmanager
def sglang(said: Any, status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers every request with ``said`` as Leyline's report; and what it was asked."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            meta = {"id": "x"} if said is None else {"id": "x", "leyline": said}
            body = json.dumps({"text": "", "meta_info": meta}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def test_the_strip_shows_pieces_and_tiers_one_above_the_other(leyline: Leyline) -> None:
    with sglang({"view": VIEW}) as (url, asked):
        done = leyline("view", "r9", "--url", url, "--cache-salt", "tenant")
    assert done.status == 0, done.err
    (body,) = asked
    assert body["cache_salt"] == "tenant" and "extra_key" not in body
    (action,) = body["kv_hints"]["actions"]
    assert (action["action_type"], action["payload"]) == ("leyline.view", {"base": "r9"})
    rows = {line[:10].strip(): line[10:] for line in done.out.splitlines() if line.startswith("  ")}
    strip = rows["view"]
    assert len(strip) == 68 and strip.lstrip("█").startswith("▒") and "×" in strip
    for i, cell in enumerate(strip):
        held = {tier for tier in ("gpu", "cpu", "redis") if rows[tier].ljust(68)[i] == "■"}
        want = {"█": {"gpu", "cpu"}, "▒": {"gpu"}, "×": set(), "▓": {"redis"}, "░": set()}[cell]
        assert held == want, (i, cell)
    assert "gpu 105 of 300  cpu 100 of 300  redis 175 of 300" in done.out
    assert "nowhere: it would be prefilled" in done.out
    assert any(line.split()[:4] == ["moved", "105", "175", "-45"] for line in done.out.splitlines())


def test_json_is_the_view_as_it_came(leyline: Leyline) -> None:
    with sglang({"view": VIEW}) as (url, _):
        assert leyline("view", "r9", "--url", url, "--json").json == VIEW


def test_a_tier_that_was_not_asked_is_said(leyline: Leyline) -> None:
    with sglang({"view": VIEW | {"tiers": ["gpu"]}}) as (url, _):
        assert "not asked, or no answer: cpu, redis" in leyline("view", "r9", "--url", url).out


def test_an_unknown_response_is_status_3(leyline: Leyline) -> None:
    with sglang({"reason": "unknown_base", "detail": "base: nothing remembered"}) as (url, _):
        done = leyline("view", "r1", "--url", url)
    assert (done.status, done.error) == (3, "r1: unknown_base: base: nothing remembered")


@pytest.mark.parametrize(("said", "status"), [(None, 200), ({}, 200), ({"view": VIEW}, 500)])
def test_servers_without_leyline(leyline: Leyline, said: Any, status: int) -> None:
    with sglang(said, status) as (url, _):
        done = leyline("view", "r1", "--url", url)
    assert done.status == 1
    assert done.error.startswith("--url")


def test_mistakes_name_the_option(leyline: Leyline) -> None:
    for words, named in (
        (["r"], "--url"),
        (["--url", "http://x"], "RESPONSE"),
        (["r", "--stack", "never"], "--stack"),
        (["r", "--url", "http://x", "--stack", "s"], "--url, --stack"),
    ):
        done = leyline("view", *words)
        assert done.status == 2 and done.error.startswith(named), done
    assert leyline("view", "r", "--url", "http://127.0.0.1:1").status == 1
