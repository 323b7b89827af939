"""``leyline doctor``: real findings, servers that answer wrongly, and nothing installed."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import Leyline

from leyline_lmcache.cli import checks
from leyline_lmcache.cli.checks import Check, Status
from leyline_lmcache.stack import redis
from leyline_lmcache.stack.ports import PortLease
from leyline_lmcache.stack.process import ServerProcess

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
SERVER = {
    "version": "0.5.23",
    "served_model_name": "m",
    "radix_cache_backend": "leyline",
    "enable_lmcache": True,
    "lmcache_config_file": "lmcache.yaml",
    "page_size": 16,
    "enable_metrics": True,
}


@contextmanager
def answering(answers: Mapping[str, Any]) -> Iterator[str]:
    """A server with fixed answers: text as it is, anything else as JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path)
            body = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            self.send_response(404 if answer is None else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def by_name(found: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in found}


# -- what is installed -------------------------------------------------------------------------------------


def test_what_is_installed_here_is_fine(leyline: Leyline) -> None:
    found = {check["name"]: check for check in leyline("doctor", "--json").json["checks"]}
    for name in ("python", "leyline", "sglang", "lmcache", "torch", "plugin", "settings"):
        assert found[name]["status"] == "ok", found[name]
    assert found["sglang"]["seen"] == metadata.version("sglang")


def test_the_releases_come_from_the_distribution() -> None:
    wanted = checks.engine_requirements()
    assert wanted["sglang"] == ("==", "0.5.23")
    assert set(wanted) == {"sglang", "lmcache", "torch", "triton", "redis", "xxhash"}


@pytest.mark.parametrize(
    ("versions", "name", "status"),
    [
        ({"sglang": "0.5.24"}, "sglang", Status.FAIL),
        ({"sglang": "0.5.23+local"}, "sglang", Status.OK),
        ({"sglang": None}, "sglang", Status.FAIL),
        ({"lmcache": "0.5.5"}, "lmcache", Status.FAIL),
        ({"lmcache": None}, "lmcache", Status.WARN),
        ({"torch": "2.8.1"}, "torch", Status.FAIL),
        ({"torch": "2.10.0"}, "torch", Status.OK),
    ],
)
def test_other_releases(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str | None], name: str, status: Status
) -> None:
    real = metadata.version

    def version(package: str) -> str:
        if package not in versions:
            return real(package)
        found = versions[package]
        if found is None:
            raise metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(metadata, "version", version)
    check = by_name(list(checks.check_packages()))[name]
    assert check.status is status
    assert bool(check.todo) is (status is not Status.OK)


def test_a_plugin_that_is_not_chosen() -> None:
    check = checks.check_plugin({"SGLANG_PLUGINS": "other,another"})
    assert check.status is Status.FAIL
    assert "SGLANG_PLUGINS" in check.todo
    assert checks.check_plugin({"SGLANG_PLUGINS": "other, leyline"}).status is Status.OK


def test_settings_that_are_wrong(tmp_path: Path) -> None:
    file = tmp_path / "leyline.yaml"
    file.write_text("min_reuze: 3\n")
    check = checks.check_settings({"LEYLINE_CONFIG": str(file)})
    assert check.status is Status.FAIL
    assert "min_reuze" in check.seen
    file.write_text("journal_dir: /dev/null/journal\n")
    assert checks.check_settings({"LEYLINE_CONFIG": str(file)}).status is Status.FAIL
    file.write_text(f"journal_dir: {tmp_path}/journal\n")
    assert checks.check_settings({"LEYLINE_CONFIG": str(file)}).status is Status.OK


def test_without_the_engine_it_reports_and_fails(tmp_path: Path) -> None:
    """A core-only install: everything the `engine` extra brings is hidden from the interpreter."""
    hidden = ("torch", "sglang", "lmcache", "triton", "redis", "xxhash", "transformers", "numpy")
    code = (
        "import sys\nfrom importlib import metadata\n"
        f"hidden = {hidden}\n"
        "for name in hidden: sys.modules[name] = None\n"
        "real = metadata.version\n"
        "def version(name):\n"
        "    if name in hidden: raise metadata.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "metadata.version = version\n"
        "from leyline_lmcache.cli import main\n"
        f"sys.exit(main(['doctor', '--json', '--model', {str(tmp_path)!r}, '--redis', 'redis://127.0.0.1:1']))"
    )
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    for name in ("sglang", "lmcache", "torch", "triton", "redis", "xxhash"):
        assert found[name]["seen"] == "not installed"
        assert "pip install" in found[name]["todo"]
    assert found["sglang"]["status"] == "fail"
    for name in ("gpu", "rope", "redis server", "plugin"):
        assert found[name]["status"] == "warn"


# -- a model -----------------------------------------------------------------------------------------------


def test_a_model_whose_keys_can_be_moved(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    check = checks.check_model(tmp_path)
    assert (check.status, check.seen) == (Status.OK, "16 elements of a key turn, pairs are halves")


def test_models_whose_keys_cannot_be_moved(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"rope_parameters": rope}))
    check = checks.check_model(tmp_path)
    assert check.status is Status.FAIL
    assert "dynamic_ntk" in check.seen


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model_type": "llama"}'])
def test_folders_that_are_no_models(tmp_path: Path, text: str) -> None:
    assert checks.check_model(tmp_path).status is Status.FAIL
    (tmp_path / "config.json").write_text(text)
    assert checks.check_model(tmp_path).status is Status.FAIL


# -- servers -----------------------------------------------------------------------------------------------


def test_a_server_as_it_should_be() -> None:
    with answering({"/server_info": SERVER}) as url:
        found = by_name(list(checks.check_sglang(url)))
    assert all(check.status is Status.OK for check in found.values()), found
    assert "15 tokens" in found["page size"].seen


@pytest.mark.parametrize(
    ("change", "name", "status", "named"),
    [
        ({"radix_cache_backend": None}, "backend", Status.FAIL, "--radix-cache-backend leyline"),
        ({"enable_lmcache": False}, "lmcache flag", Status.WARN, "--enable-lmcache"),
        ({"enable_metrics": False}, "metrics", Status.WARN, "--enable-metrics"),
        ({"disable_radix_cache": True}, "flags", Status.FAIL, "--disable-radix-cache"),
        ({"enable_hierarchical_cache": True}, "flags", Status.FAIL, "--enable-hierarchical-cache"),
        ({"speculative_algorithm": "EAGLE"}, "flags", Status.FAIL, "--speculative-algorithm"),
        ({"pp_size": 2}, "flags", Status.FAIL, "--pp-size"),
    ],
)
def test_flags_of_a_server(change: dict[str, Any], name: str, status: Status, named: str) -> None:
    with answering({"/server_info": SERVER | change}) as url:
        found = by_name(list(checks.check_sglang(url)))
    assert found[name].status is status
    assert named in found[name].seen + found[name].todo


def test_things_that_are_no_sglang(closed_port: int) -> None:
    with answering({"/server_info": "<html>"}) as url:
        assert [check.status for check in checks.check_sglang(url)] == [Status.FAIL]
        assert [check.status for check in checks.check_sglang(f"{url}/nothing")] == [Status.FAIL]
    for url in (f"http://127.0.0.1:{closed_port}", "nonsense", "http://"):
        assert [check.status for check in checks.check_sglang(url)] == [Status.FAIL]


def test_an_lmcache_server(closed_port: int) -> None:
    with answering({"/healthcheck": {"status": "healthy"}}) as url:
        address = url.removeprefix("http://")
        assert [check.status for check in checks.check_lmcache(address, url)] == [Status.OK, Status.OK]
        assert [check.status for check in checks.check_lmcache(address, None)] == [Status.OK]
    for address in (f"127.0.0.1:{closed_port}", "nowhere", "127.0.0.1:x", "127.0.0.1:99999"):
        assert [check.status for check in checks.check_lmcache(address, None)] == [Status.FAIL]


MODULE = {"version": "1.0", "engines": {"7": "1.0"}, "shared": True, "shared_errors": 0}


def module(status: Any) -> dict[str, Check]:
    with answering({"/status": status}) as url:
        return by_name(list(checks.check_module(url)))


def test_the_module_in_lmcache_server() -> None:
    found = module({"leyline": MODULE, "storage_manager": {"l2_adapters": [{"type": "leyline"}]}})
    assert [check.status for check in found.values()] == [Status.OK] * 4, found
    assert list(found) == ["module", "pairing", "bases", "l2 adapter"]


@pytest.mark.parametrize(
    ("change", "name", "status", "named"),
    [
        ({"engines": {"7": "1.0", "8": "1.1"}}, "pairing", Status.FAIL, "1.1"),
        ({"unreadable_hellos": 1}, "pairing", Status.FAIL, "same leyline-lmcache"),
        ({"engines": {}}, "pairing", Status.WARN, "--enable-lmcache"),
        ({"shared": False}, "bases", Status.WARN, '"redis"'),
        ({"shared_errors": 3}, "bases", Status.WARN, "3 failures"),
    ],
)
def test_t10_a_module_that_does_not_fit(change: Any, name: str, status: Status, named: str) -> None:
    check = module({"leyline": MODULE | change})[name]
    assert check.status is status
    assert named in check.seen + check.todo


def test_an_lmcache_server_without_the_module_or_with_another_adapter() -> None:
    storage = {"l2_adapters": [{"type": "RESPConnector", "is_healthy": True}]}
    found = module({"storage_manager": storage})
    assert found["module"].status is Status.WARN and "--server-module" in found["module"].todo
    assert found["l2 adapter"].status is Status.WARN and "LeylineL2Adapter" in found["l2 adapter"].todo
    storage = {"l2_adapters": [{"type": "leyline", "is_healthy": False}]}
    assert module({"storage_manager": storage})["l2 adapter"].status is Status.FAIL
    assert module("<html>")["module"].status is Status.WARN
    assert module({})["module"].status is Status.WARN


@pytest.mark.redis
def test_a_real_redis(tmp_path: Path) -> None:
    with PortLease() as lease:
        port = lease.take("redis", 0)
    server = ServerProcess(redis.command(port, tmp_path), tmp_path)
    server.start()
    try:
        server.wait_ready(lambda: redis.is_ready(port), 10)
        import redis as client

        with client.Redis(port=port) as direct:
            for limit, policy, status in (
                ("0", "noeviction", Status.WARN),
                ("1gb", "noeviction", Status.WARN),
                ("1gb", "allkeys-lru", Status.OK),
            ):
                direct.config_set("maxmemory", limit)
                direct.config_set("maxmemory-policy", policy)
                answers, memory = checks.check_redis(f"redis://127.0.0.1:{port}/0")
                assert answers.status is Status.OK
                assert memory.status is status
                assert policy in memory.seen
    finally:
        server.stop()


def test_a_redis_that_is_not_there_keeps_its_password_to_itself(closed_port: int) -> None:
    (check,) = checks.check_redis(f"redis://me:secret@127.0.0.1:{closed_port}")
    assert check.status is Status.FAIL
    assert "secret" not in check.seen + check.todo
    (check,) = checks.check_redis("http://127.0.0.1")
    assert check.status is Status.FAIL


# -- the command -------------------------------------------------------------------------------------------


def test_failures_make_the_status_1(leyline: Leyline, closed_port: int) -> None:
    done = leyline("doctor", "--url", f"http://127.0.0.1:{closed_port}")
    assert done.status == 1
    assert "fail  sglang server" in done.out
    assert "start it, or correct --url" in done.out
    assert done.out.splitlines()[-1].endswith("1 failed")


def test_a_check_of_ours_that_breaks_is_a_finding() -> None:
    def broken() -> Iterator[Check]:
        raise KeyError("x")
        yield

    (check,) = checks.guarded("thing", broken)
    assert (check.name, check.status) == ("thing", Status.FAIL)


@pytest.mark.parametrize(
    ("words", "named"),
    [(["--stack", "never"], "--stack"), (["--lmcache-http", "http://x"], "--lmcache HOST:PORT")],
)
def test_a_mistake_names_the_field(leyline: Leyline, words: list[str], named: str) -> None:
    done = leyline("doctor", *words)
    assert (done.status, done.out) == (2, "")
    assert named in done.error
