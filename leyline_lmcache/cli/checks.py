"""The checks of `leyline doctor`: each looks at one thing and says what it saw and what to do.

Nothing here needs the engine to be installed: what is missing is a finding, not an error.
"""

from __future__ import annotations

import importlib
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

_DISTRIBUTION = "leyline-lmcache"
_ENGINE = f"pip install '{_DISTRIBUTION}[engine]'"
_PLUGIN_GROUP = "sglang.srt.plugins"
_BACKEND = "leyline"
_SERVER_MODULE = '{"module_path": "leyline_lmcache.connector.server"}'
_PYTHON = (3, 11)
_REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*(?P<rule>==|>=)\s*(?P<version>[0-9.]+)"
)
_TIMEOUT_S = 3.0


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    """It works, or may be meant so, but look at it."""
    FAIL = "fail"
    """Edits cannot be spliced like this."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding.

    Attributes:
        name: what was looked at.
        status: how it is.
        seen: what is there.
        todo: what to do about it; "" for nothing.
    """

    name: str
    status: Status
    seen: str
    todo: str = ""


# ------------------------------------------------------------------------------------------- installation


def check_python() -> Check:
    """The interpreter."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < _PYTHON:
        return Check("python", Status.FAIL, version, f"use Python {'.'.join(map(str, _PYTHON))} or newer")
    return Check("python", Status.OK, version)


def check_packages() -> Iterator[Check]:
    """This package, and the engine's packages against the releases that are supported."""
    try:
        yield Check("leyline", Status.OK, metadata.version(_DISTRIBUTION))
    except metadata.PackageNotFoundError:
        yield Check("leyline", Status.FAIL, "not installed, run from its source", "pip install -e .")
        return
    for name, (rule, wanted) in engine_requirements().items():
        yield _check_package(name, rule, wanted)


def engine_requirements() -> dict[str, tuple[str, str]]:
    """`{package: (== or >=, version)}` of the `engine` extra, as installed."""
    found: dict[str, tuple[str, str]] = {}
    for requirement in metadata.requires(_DISTRIBUTION) or ():
        match = _REQUIREMENT.match(requirement)
        if match and re.search(r"extra\s*==\s*['\"]engine['\"]", requirement):
            found[match["name"].lower()] = (match["rule"], match["version"])
    return found


def _check_package(name: str, rule: str, wanted: str) -> Check:
    # Without these a server still splices: LMCache and Redis are a choice, and on CPU torch turns the keys.
    missing = Status.WARN if name in ("lmcache", "triton", "redis", "xxhash") else Status.FAIL
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Check(name, missing, "not installed", _ENGINE)
    have, want = _numbers(version), _numbers(wanted)
    fits = have == want if rule == "==" else have >= want
    if fits:
        return Check(name, Status.OK, version)
    return Check(
        name, Status.FAIL, f"{version}, supported is {rule}{wanted}", f"pip install '{name}{rule}{wanted}'"
    )


def _numbers(version: str) -> tuple[int, ...]:
    """A release's numbers: `2.13.0+cpu` is (2, 13)."""
    numbers = [int(part) for part in re.match(r"[0-9.]*", version).group().split(".") if part]  # type: ignore[union-attr]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def check_plugin(environ: Mapping[str, str] = os.environ) -> Check:
    """The entry point by which SGLang finds the plugin."""
    found = [point for point in metadata.entry_points(group=_PLUGIN_GROUP) if point.name == _BACKEND]
    if not found:
        return Check(
            "plugin",
            Status.FAIL,
            f"no entry point {_BACKEND} in {_PLUGIN_GROUP}",
            "reinstall leyline-lmcache",
        )
    chosen = environ.get("SGLANG_PLUGINS")
    if chosen is not None and _BACKEND not in [name.strip() for name in chosen.split(",")]:
        return Check(
            "plugin",
            Status.FAIL,
            f"SGLANG_PLUGINS is {chosen}",
            f"add {_BACKEND} to SGLANG_PLUGINS, or unset it",
        )
    try:
        metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return Check(
            "plugin", Status.WARN, f"entry point {found[0].value}; there is no SGLang to load it", _ENGINE
        )
    try:
        found[0].load()
        importlib.import_module("leyline_lmcache.connector.versions").check("sglang")
    except Exception as error:
        return Check(
            "plugin", Status.FAIL, f"{type(error).__name__}: {error}", "SGLang starts without the backend"
        )
    return Check("plugin", Status.OK, f"entry point {found[0].value}")


def check_settings(environ: Mapping[str, str] = os.environ) -> Check:
    """The plugin's configuration as this environment has it."""
    from leyline_lmcache.connector.settings import CONFIG_VARIABLE, Settings, SettingsError

    name = environ.get(CONFIG_VARIABLE)
    try:
        settings = Settings.load(environ)
    except SettingsError as error:
        return Check("settings", Status.FAIL, str(error), f"correct the file named by {CONFIG_VARIABLE}")
    journal = settings.journal_dir
    if journal is None:
        return Check("settings", Status.OK, f"{name or 'defaults'}, no journal")
    parent = next((path for path in (journal, *journal.parents) if path.exists()), Path("/"))
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        return Check(
            "settings", Status.FAIL, f"journal_dir {journal} cannot be written", "choose another journal_dir"
        )
    return Check("settings", Status.OK, f"{name or 'defaults'}, journal in {journal}")


def check_device() -> Iterator[Check]:
    """The accelerator and the kernel's compiler."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        yield Check("gpu", Status.WARN, "not known: torch is not installed", _ENGINE)
        return
    except Exception as error:
        yield Check("gpu", Status.FAIL, f"torch cannot be imported: {error}", "reinstall torch")
        return
    if not torch.cuda.is_available():
        yield Check(
            "gpu", Status.WARN, "none: SGLang would run on CPU", "for trials only; serve on a CUDA GPU"
        )
        return
    yield Check("gpu", Status.OK, ", ".join(_gpu_names(torch)))
    try:
        importlib.import_module("triton")
    except Exception as error:
        yield Check("kernel", Status.FAIL, f"triton cannot be imported: {type(error).__name__}", _ENGINE)
    else:
        yield Check("kernel", Status.OK, "triton compiles it at the first splice")


def _gpu_names(torch: Any) -> list[str]:
    return [str(torch.cuda.get_device_name(index)) for index in range(torch.cuda.device_count())]


def check_model(folder: Path) -> Check:
    """Whether a model's keys can be moved, as far as its configuration tells."""
    if not (folder / "config.json").is_file():
        return Check("rope", Status.FAIL, f"{folder} has no config.json", "name a model's folder")
    try:
        config = importlib.import_module("leyline_lmcache.kernels.model_config")
        rope = importlib.import_module("leyline_lmcache.kernels.rope")
    except ImportError as error:
        return Check("rope", Status.WARN, f"not probed: {error.name} is not installed", _ENGINE)
    try:
        spec = config.probe_config(folder)
    except rope.UnsupportedRope as error:
        return Check("rope", Status.FAIL, str(error), "SGLang serves this model, but prefills every edit")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Check("rope", Status.FAIL, f"config.json cannot be read: {error}", "check the model's folder")
    turned = f"{spec.rotary_dim} elements of a key turn, pairs are {spec.pairing.value}"
    scale = "" if spec.amplitude == 1.0 else f", amplitude {spec.amplitude:.4g}"
    return Check("rope", Status.OK, f"{turned}{scale}")


# ------------------------------------------------------------------------------------------------ servers


def check_sglang(url: str) -> Iterator[Check]:
    """The flags of a running SGLang server."""
    try:
        info = _get_json(f"{url.rstrip('/')}/server_info")
    except _Unreachable as error:
        yield Check("sglang server", Status.FAIL, f"{url}: {error}", "start it, or correct --url")
        return
    version = str(info.get("version") or "of unknown version")
    yield Check("sglang server", Status.OK, f"{url}, {version}, serves {info.get('served_model_name')}")
    backend = info.get("radix_cache_backend")
    if backend == _BACKEND:
        yield Check("backend", Status.OK, f"--radix-cache-backend {backend}")
    else:
        yield Check(
            "backend",
            Status.FAIL,
            f"--radix-cache-backend is {backend}",
            f"start with --radix-cache-backend {_BACKEND}",
        )
    if info.get("enable_lmcache"):
        yield Check("lmcache flag", Status.OK, f"--enable-lmcache, {info.get('lmcache_config_file')}")
    else:
        yield Check(
            "lmcache flag",
            Status.WARN,
            "off: KV lives on the GPU only",
            "add --enable-lmcache --lmcache-config-file FILE",
        )
    yield Check("page size", Status.OK, _page_size(int(info.get("page_size") or 1)))
    for flag, seen in _ruled_out(info):
        yield Check("flags", Status.FAIL, seen, f"splicing needs the server without {flag}")
    if not info.get("enable_metrics"):
        yield Check("metrics", Status.WARN, "off", "--enable-metrics shows Leyline's counters at /metrics")


def _page_size(size: int) -> str:
    if size == 1:
        return "1: edits are exact to the token"
    return f"{size}: up to {size - 1} tokens on each side of a replacement are filled with it"


def _ruled_out(info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Flags with which the plugin refuses every edit (`unsupported_runtime`)."""
    if info.get("disable_radix_cache"):
        yield "--disable-radix-cache", "the radix cache is off"
    if info.get("enable_hierarchical_cache"):
        yield "--enable-hierarchical-cache", "HiCache is on"
    if info.get("speculative_algorithm"):
        yield "--speculative-algorithm", f"speculative decoding ({info['speculative_algorithm']}) is on"
    if info.get("kv_events_config"):
        yield "--kv-events-config", "KV cache events are on"
    if int(info.get("pp_size") or 1) > 1:
        yield "--pp-size", f"pipeline parallelism over {info['pp_size']} ranks"


def check_lmcache(address: str, http_url: str | None) -> Iterator[Check]:
    """The message port and the HTTP interface of `lmcache server`."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT_S):
            pass
    except (OSError, ValueError, OverflowError) as error:
        seen = f"{address}: {getattr(error, 'strerror', None) or error}"
        yield Check(
            "lmcache server", Status.FAIL, seen, "start lmcache server, or correct --lmcache HOST:PORT"
        )
    else:
        yield Check("lmcache server", Status.OK, f"{address} answers")
    if http_url is None:
        return
    try:
        found = _get_json(f"{http_url.rstrip('/')}/healthcheck")
    except _Unreachable as error:
        yield Check(
            "lmcache http",
            Status.WARN,
            f"{http_url}: {error}",
            "see --http-host, --http-port of lmcache server",
        )
    else:
        healthy = str(found.get("status", "")).lower() in ("healthy", "ok", "")
        status = Status.OK if healthy else Status.FAIL
        yield Check("lmcache http", status, f"{http_url}, {found.get('status', 'healthy')}")


def check_module(http_url: str) -> Iterator[Check]:
    """Our module in `lmcache server`, the engines that have spoken to it, and what carries KV to Redis."""
    try:
        status = _get_json(f"{http_url.rstrip('/')}/status")
    except _Unreachable as error:
        yield Check("module", Status.WARN, f"{http_url}/status: {error}", "see --http-port of lmcache server")
        return
    found = status.get("leyline")
    if not isinstance(found, dict):
        yield Check(
            "module",
            Status.WARN,
            "not loaded: edits use the GPU tier alone",
            f"start lmcache server with --server-module '{_SERVER_MODULE}'",
        )
    else:
        yield Check("module", Status.OK, f"{_DISTRIBUTION} {found.get('version')}")
        yield _check_pairing(found)
        yield _check_shared(found)
    storage = status.get("storage_manager")
    for adapter in storage.get("l2_adapters") or () if isinstance(storage, dict) else ():
        yield _check_adapter(adapter)


def _check_pairing(found: Mapping[str, Any]) -> Check:
    """Engine and module understand each other only in the same release."""
    mine, engines = found.get("version"), found.get("engines") or {}
    others = sorted({str(version) for version in engines.values()} - {str(mine)})
    if others or found.get("unreadable_hellos"):
        seen = ", ".join(others) or "of a release with other messages"
        return Check(
            "pairing",
            Status.FAIL,
            f"lmcache server has {mine}, an engine {seen}",
            f"install the same {_DISTRIBUTION} for SGLang and lmcache server, and restart both",
        )
    if not engines:
        return Check(
            "pairing",
            Status.WARN,
            "no engine has asked for the module since it started",
            "start SGLang with --enable-lmcache, and lmcache server before it",
        )
    return Check("pairing", Status.OK, f"{len(engines)} of {mine}")


def _check_shared(found: Mapping[str, Any]) -> Check:
    errors = int(found.get("shared_errors") or 0)
    if not found.get("shared"):
        return Check(
            "bases",
            Status.WARN,
            "known to this node, until lmcache server ends",
            'give the module "redis": {"url": ...} in its config, and other nodes can go on with a session',
        )
    if errors:
        return Check("bases", Status.WARN, f"shared by Redis, {errors} failures so far", "look at its log")
    return Check("bases", Status.OK, "shared by Redis")


def _check_adapter(adapter: Mapping[str, Any]) -> Check:
    kind, healthy = str(adapter.get("type") or "unknown"), bool(adapter.get("is_healthy", True))
    if not healthy:
        return Check(
            "l2 adapter", Status.FAIL, f"{kind}: not healthy", "is Redis up? see lmcache server's log"
        )
    if "resp" in kind.lower():
        return Check(
            "l2 adapter",
            Status.WARN,
            f"{kind}: does not reconnect, and a vanished key stops all lookups",
            "use LeylineL2Adapter, see docs/redis.md",
        )
    return Check("l2 adapter", Status.OK, kind)


def check_redis(url: str) -> Iterator[Check]:
    """Redis behind `lmcache server`: that it answers, its version, and what it does when it is full."""
    shown = _without_password(url)
    try:
        redis = importlib.import_module("redis")
    except ImportError:
        yield Check("redis server", Status.WARN, f"{shown}: not checked, redis-py is not installed", _ENGINE)
        return
    try:
        client = redis.Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
    except ValueError as error:
        yield Check("redis server", Status.FAIL, f"{shown}: {error}", "give --redis redis://HOST:PORT")
        return
    with client:
        try:
            client.ping()
            info = client.info()
        except redis.RedisError as error:
            yield Check(
                "redis server", Status.FAIL, f"{shown}: {error}", "start Redis, or correct --redis URL"
            )
            return
        yield Check("redis server", Status.OK, f"{shown}, {info.get('redis_version', 'of unknown version')}")
        yield _check_eviction(info)


def _check_eviction(info: Mapping[str, Any]) -> Check:
    policy, limit = str(info.get("maxmemory_policy", "unknown")), int(info.get("maxmemory", 0))
    if not limit:
        return Check(
            "redis memory",
            Status.WARN,
            f"no limit (policy {policy})",
            "set maxmemory and maxmemory-policy allkeys-lru before it fills the machine",
        )
    seen = f"at most {limit / 2**30:.3g} GiB, then {policy}"
    if policy == "noeviction":
        return Check(
            "redis memory", Status.WARN, seen, "a full Redis refuses KV: set maxmemory-policy allkeys-lru"
        )
    return Check("redis memory", Status.OK, seen)


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


class _Unreachable(Exception):
    """A server did not answer as it should."""


def _get_json(url: str) -> dict[str, Any]:
    try:
        answer = httpx.get(url, timeout=_TIMEOUT_S, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _Unreachable(str(error) or type(error).__name__) from None
    if answer.status_code != 200:
        raise _Unreachable(f"HTTP {answer.status_code}")
    try:
        found = answer.json()
    except ValueError:
        raise _Unreachable("answers something else than JSON") from None
    if not isinstance(found, dict):
        raise _Unreachable("answers something else than a JSON object")
    return found


def guarded(name: str, check: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """A check whose own fault is a finding too: the doctor never dies of it."""
    try:
        yield from check()
    except Exception as error:
        yield Check(
            name, Status.FAIL, f"{type(error).__name__}: {error}", "a fault of leyline; please report it"
        )
