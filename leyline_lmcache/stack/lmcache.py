"""The ``lmcache server`` of a local stack, and the file that tells SGLang where it is."""

from __future__ import annotations

import json
import sys
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import yaml

from leyline_lmcache.stack import device as devices
from leyline_lmcache.stack.errors import StackError
from leyline_lmcache.stack.probe import answers
from leyline_lmcache.stack.process import Command
from leyline_lmcache.stack.spec import StackSpec, without_password

# The console script of the wheel is bound to the interpreter it was installed with, which need not be ours.
_RUN = "from lmcache.cli.main import main; main()"
_LEYLINE_ADAPTER = {"module_path": "leyline_lmcache.connector.l2", "class_name": "LeylineL2Adapter"}
_MODULE = "leyline_lmcache.connector.server"


def l2_adapter(spec: StackSpec, redis_url: str | None) -> dict[str, Any] | None:
    """The object of ``--l2-adapter``; None if there is no L2 tier.

    Raises:
        StackError: LMCache's adapter cannot use that URL.
    """
    if redis_url is None:
        return None
    if spec.l2 == "leyline":
        params = {"url": _split_password(redis_url)[0], **spec.l2_options}
        return {"type": "plugin", **_LEYLINE_ADAPTER, "adapter_params": params}
    address = urlsplit(redis_url)
    if address.path.strip("/") not in ("", "0"):
        raise StackError(
            f"redis_url: LMCache's adapter has no database number, is {without_password(redis_url)}"
        )
    login = {"username": unquote(address.username or ""), "password": unquote(address.password or "")}
    return {
        "type": "resp",
        "host": address.hostname,
        "port": address.port or 6379,
        "num_workers": 2,
        **{key: value for key, value in login.items() if value},
        **spec.l2_options,
    }


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
    if spec.server_module:
        options["--server-module"] = json.dumps({"module_path": _MODULE, "config": _module(spec, redis_url)})
    flat = [text for pair in options.items() for text in pair]
    argv = [sys.executable, "-c", _RUN, "server", *flat, "--disable-observability", *spec.lmcache_args]
    return Command("lmcache", argv, devices.server_env(device, {**_secrets(redis_url), **spec.env}))


def _module(spec: StackSpec, redis_url: str | None) -> dict[str, Any]:
    """The module's configuration; bases go where our adapter puts KV, unless it says otherwise."""
    config = dict(spec.server_options)
    if spec.l2 == "leyline" and redis_url is not None:
        config.setdefault("redis", {"url": _split_password(redis_url)[0]})
    return config


def _split_password(url: str) -> tuple[str, str | None]:
    """The URL without its password, and the password."""
    parts = urlsplit(url)
    if parts.password is None:
        return url, None
    user, host = quote(unquote(parts.username or ""), safe=""), parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{user}@{host}" if user else host).geturl(), unquote(parts.password)


def _secrets(redis_url: str | None) -> dict[str, str]:
    """The Redis password for our adapter and module, which take none from a command line."""
    password = None if redis_url is None else _split_password(redis_url)[1]
    return {} if password is None else {"LEYLINE_REDIS_PASSWORD": password}


def is_ready(http_port: int) -> bool:
    """True if the server's engine runs."""
    return answers(f"http://127.0.0.1:{http_port}/healthcheck")


def client_config(spec: StackSpec, device: str, port: int) -> str:
    """YAML for SGLang's ``--lmcache-config-file``."""
    extra: dict[str, Any] = {"lmcache.mp.mq_timeout": spec.mq_timeout_s}
    if device == "cpu":
        extra["lmcache.mp.mp_transfer_mode"] = "engine_driven"
    return yaml.safe_dump({"mp_host": "127.0.0.1", "mp_port": port, "extra_config": extra})
