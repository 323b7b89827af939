"""Options of the Redis tier, under the names that redis-py users know.

They come from JSON (``adapter_params`` of ``--l2-adapter``), from a YAML file (``config_file``) and, for the
address and the secrets, from the environment. An unknown key is an error that lists the known ones.
"""

from __future__ import annotations

import os
import re
import ssl as tls
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import yaml

from .credentials import PasswordSource, Secret

URL_VARIABLE = "LEYLINE_REDIS_URL"
USERNAME_VARIABLE = "LEYLINE_REDIS_USERNAME"
PASSWORD_VARIABLE = "LEYLINE_REDIS_PASSWORD"
PASSWORD_FILE_VARIABLE = "LEYLINE_REDIS_PASSWORD_FILE"
SENTINEL_PASSWORD_VARIABLE = "LEYLINE_REDIS_SENTINEL_PASSWORD"

_PREFIX = re.compile(r"[A-Za-z0-9._-]{1,64}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SCHEMES = ("redis", "rediss", "unix")
_TLS_VERSIONS = {"TLSv1.2": tls.TLSVersion.TLSv1_2, "TLSv1.3": tls.TLSVersion.TLSv1_3}
_CERT_REQS = ("none", "optional", "required")
_SECRETS = ("password", "sentinel_password")

Address = tuple[str, int]


class OptionsError(ValueError):
    """An option is wrong; the message names the key, what was found and what is accepted."""


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """How to reach Redis, how long to wait for it, and how keys are named.

    Where: one server (`url`, or `host` and `port`, or `unix_socket_path`), or Sentinel (`sentinels` and
    `service_name`), or Cluster (`cluster`, with `startup_nodes` or `host` and `port`).

    Attributes:
        host, port, db, unix_socket_path: as in redis-py. `url` (``redis://``, ``rediss://``, ``unix://``) is
            taken apart into these.
        sentinels: addresses of the sentinels, ``"host:port"`` each.
        service_name: the master's name there.
        min_other_sentinels: a sentinel that sees fewer peers is not believed.
        cluster: the servers are a Redis Cluster.
        startup_nodes: addresses of some of its nodes.
        username: ACL user; none: the default user.
        password: see `PasswordSource`; given as ``password_file`` or ``password_env``.
        sentinel_username, sentinel_password: the same for the sentinels themselves.
        client_name: shown by ``CLIENT LIST``; none for an ACL user without ``client|setname``.
        ssl, ssl_ca_certs, ssl_certfile, ssl_keyfile, ssl_cert_reqs, ssl_check_hostname, ssl_min_version: TLS,
            also towards sentinels.
        socket_timeout: seconds without a single byte after which a connection is given up.
        socket_connect_timeout: seconds to connect.
        socket_keepalive: TCP keep-alive.
        task_timeout: seconds a whole task may take, from its submission; `socket_timeout` may come on top.
        max_connections: per node.
        retries: further attempts of what a broken connection interrupted; time-outs are not tried again.
        backoff_base, backoff_cap: seconds between attempts, doubling.
        breaker_threshold: failures in a row after which a node is not asked any more.
        breaker_base, breaker_cap: seconds until such a node is probed, doubling with every failed probe.
        prefix: first part of every key.
        model_identity: tells models of one name apart (weights' revision, KV dtype, rope scaling).
        ttl: seconds that KV lives after its last use; none: for ever (Redis may evict it).
        metadata_ttl: the same for records; orphans expire by it.
        pipeline_bytes: bytes under way on one connection before the first answer is waited for.
        verify_checksum: check each value that is loaded.
    """

    host: str = "localhost"
    port: int = 6379
    db: int = 0
    unix_socket_path: str | None = None
    sentinels: tuple[Address, ...] = ()
    service_name: str | None = None
    min_other_sentinels: int = 0
    cluster: bool = False
    startup_nodes: tuple[Address, ...] = ()
    username: str | None = None
    password: PasswordSource = field(default_factory=PasswordSource)
    sentinel_username: str | None = None
    sentinel_password: PasswordSource = field(default_factory=PasswordSource)
    client_name: str | None = "leyline"
    ssl: bool = False
    ssl_ca_certs: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_cert_reqs: str = "required"
    ssl_check_hostname: bool = True
    ssl_min_version: str = "TLSv1.2"
    socket_timeout: float = 1.0
    socket_connect_timeout: float = 1.0
    socket_keepalive: bool = True
    task_timeout: float = 5.0
    max_connections: int = 64
    retries: int = 1
    backoff_base: float = 0.02
    backoff_cap: float = 0.5
    breaker_threshold: int = 1
    breaker_base: float = 0.1
    breaker_cap: float = 5.0
    prefix: str = "leyline"
    model_identity: str = ""
    ttl: int | None = None
    metadata_ttl: int | None = 7 * 24 * 3600
    pipeline_bytes: int = 512 * 1024
    verify_checksum: bool = True

    @classmethod
    def known(cls) -> tuple[str, ...]:
        """Keys that `of` accepts."""
        return tuple(_READERS)

    @classmethod
    def of(cls, values: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> RedisOptions:
        """Check a mapping, as it comes from JSON or YAML.

        Raises:
            OptionsError: for an unknown key, a wrong value, or two that exclude each other.
        """
        for key in values:
            if key in _SECRETS:
                raise OptionsError(
                    f"{key}: not accepted here, where process lists and logs show it; put it into a file "
                    f"({key}_file) or an environment variable ({key}_env)"
                )
            if key not in _READERS:
                raise OptionsError(f"{key}: unknown key; known keys are {', '.join(_READERS)}")
        checked = {key: _READERS[key](key, value) for key, value in values.items()}
        _take_environment(checked, environ)
        _take_url(checked)
        _take_password(checked, "password")
        _take_password(checked, "sentinel_password")
        _check_topology(checked)
        options = cls(**checked)
        if options.breaker_cap < options.breaker_base:
            raise OptionsError(f"breaker_cap: must be at least breaker_base ({options.breaker_base})")
        if options.backoff_cap < options.backoff_base:
            raise OptionsError(f"backoff_cap: must be at least backoff_base ({options.backoff_base})")
        if options.task_timeout < options.socket_timeout:
            raise OptionsError(f"task_timeout: must be at least socket_timeout ({options.socket_timeout})")
        if not options.ssl:
            for key in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
                if getattr(options, key) is not None:
                    raise OptionsError(f"{key}: needs ssl: true, or a rediss:// URL")
        return options

    @classmethod
    def load(cls, path: Path, environ: Mapping[str, str] = os.environ) -> RedisOptions:
        """Read a YAML file. Raises OptionsError."""
        return cls.of(read_yaml(path), environ)

    @property
    def where(self) -> str:
        """The address in a form that may be logged."""
        if self.sentinels:
            return f"sentinel {self.service_name} at {_shown(self.sentinels)}"
        if self.cluster:
            return f"cluster at {_shown(self.startup_nodes or ((self.host, self.port),))}"
        if self.unix_socket_path:
            return f"unix {self.unix_socket_path}"
        return f"{self.host}:{self.port}/{self.db}"

    @property
    def tls_version(self) -> tls.TLSVersion:
        return _TLS_VERSIONS[self.ssl_min_version]


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping. Raises OptionsError."""
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise OptionsError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionsError(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise OptionsError(f"{path}: expected a mapping of keys to values, got {type(data).__name__}")
    return {str(key): value for key, value in data.items()}


def _take_environment(checked: dict[str, Any], environ: Mapping[str, str]) -> None:
    places = ("url", "host", "unix_socket_path", "sentinels", "startup_nodes")
    if environ.get(URL_VARIABLE) and not any(key in checked for key in places):
        # Only here may a URL carry a password: the environment is not a command line.
        checked["url"] = _url(URL_VARIABLE, environ[URL_VARIABLE], with_password=True)
    if environ.get(USERNAME_VARIABLE):
        checked.setdefault("username", environ[USERNAME_VARIABLE])
    if "password_file" not in checked and "password_env" not in checked:
        if environ.get(PASSWORD_FILE_VARIABLE):
            checked["password_file"] = Path(environ[PASSWORD_FILE_VARIABLE])
        elif environ.get(PASSWORD_VARIABLE):
            checked["password_env"] = PASSWORD_VARIABLE
    if environ.get(SENTINEL_PASSWORD_VARIABLE) and "sentinel_password_file" not in checked:
        checked.setdefault("sentinel_password_env", SENTINEL_PASSWORD_VARIABLE)


def _take_url(checked: dict[str, Any]) -> None:
    url = checked.pop("url", None)
    if url is None:
        return
    for key, value in url.items():
        if key in checked and key not in ("username", "literal"):
            raise OptionsError(f"{key}: given both in the URL and as an option; leave one out")
        checked.setdefault(key, value)


def _take_password(checked: dict[str, Any], key: str) -> None:
    file, variable = checked.pop(f"{key}_file", None), checked.pop(f"{key}_env", None)
    literal = checked.pop("literal", None) if key == "password" else None
    if file is not None and variable is not None:
        raise OptionsError(f"{key}_file: {key}_env is given too; leave one out")
    checked[key] = PasswordSource(file, variable, literal if file is None and variable is None else None)


def _check_topology(checked: dict[str, Any]) -> None:
    sentinels, cluster = checked.get("sentinels"), checked.get("cluster")
    if sentinels and cluster:
        raise OptionsError("cluster: sentinels are given too; a Redis is one or the other")
    if sentinels and not checked.get("service_name"):
        raise OptionsError("service_name: needed with sentinels: the name of the master they watch")
    if not sentinels:
        for key in ("service_name", "min_other_sentinels", "sentinel_username"):
            if key in checked:
                raise OptionsError(f"{key}: needs sentinels")
    if checked.get("startup_nodes") and not cluster:
        raise OptionsError("startup_nodes: needs cluster: true")
    if cluster and checked.get("db"):
        raise OptionsError("db: a Redis Cluster has database 0 only")
    if checked.get("unix_socket_path") and (sentinels or cluster or "host" in checked):
        raise OptionsError("unix_socket_path: excludes host, sentinels and cluster")


def _shown(addresses: tuple[Address, ...]) -> str:
    return ",".join(f"{host}:{port}" for host, port in addresses)


def _text(key: str, value: object) -> str:
    if not isinstance(value, str) or not value or len(value) > 4096 or "\x00" in value:
        raise OptionsError(f"{key}: expected text, got {_type(value)}")
    return value


def _file(key: str, value: object) -> str:
    path = Path(_text(key, value)).expanduser()
    if not path.is_file():
        raise OptionsError(f"{key}: {path} is not a file")
    return str(path)


def _secret_file(key: str, value: object) -> Path:
    # Not opened yet: a secret may be mounted after the process starts.
    return Path(_text(key, value)).expanduser()


def _variable(key: str, value: object) -> str:
    text = _text(key, value)
    if not _VARIABLE.fullmatch(text):
        # Perhaps somebody put the password itself here: it is not repeated.
        raise OptionsError(f"{key}: expected the name of an environment variable")
    return text


def _flag(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise OptionsError(f"{key}: expected true or false, got {_type(value)}")
    return value


def _integer(least: int, most: int) -> Callable[[str, object], int]:
    def read(key: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise OptionsError(f"{key}: expected an integer from {least} to {most}, got {value!r}")
        return value

    return read


def _seconds(least: float, most: float) -> Callable[[str, object], float]:
    def read(key: str, value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise OptionsError(f"{key}: expected seconds from {least:g} to {most:g}, got {value!r}")
        return float(value)

    return read


def _or_none(read: Callable[[str, object], Any]) -> Callable[[str, object], Any]:
    return lambda key, value: None if value is None else read(key, value)


def _choice(*accepted: str) -> Callable[[str, object], str]:
    def read(key: str, value: object) -> str:
        if not isinstance(value, str) or value not in accepted:
            raise OptionsError(f"{key}: expected one of {', '.join(accepted)}, got {value!r}")
        return value

    return read


def _address(key: str, value: object) -> Address:
    if isinstance(value, str):
        host, _, port = value.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if host and port.isdecimal() and 0 < int(port) < 65536:
            return host, int(port)
    elif isinstance(value, list | tuple) and len(value) == 2:
        host, port = value
        if isinstance(host, str) and host and type(port) is int and 0 < port < 65536:
            return host, port
    raise OptionsError(f'{key}: expected "host:port", got {value!r}')


def _addresses(key: str, value: object) -> tuple[Address, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise OptionsError(f'{key}: expected a list of "host:port", got {_type(value)}')
    return tuple(_address(f"{key}[{index}]", item) for index, item in enumerate(value))


def _prefix(key: str, value: object) -> str:
    # No braces (they choose the slot in a Cluster), no colon (it parts the fields), nothing a SCAN pattern
    # would take for a wildcard.
    if not isinstance(value, str) or not _PREFIX.fullmatch(value):
        raise OptionsError(f"{key}: expected 1 to 64 letters, digits, dots, dashes or underscores")
    return value


def _url(key: str, value: object, with_password: bool = False) -> dict[str, Any]:
    text = _text(key, value)
    parts = urlsplit(text)
    if parts.scheme not in _SCHEMES:
        raise OptionsError(f"{key}: must begin with {', '.join(f'{scheme}://' for scheme in _SCHEMES)}")
    out: dict[str, Any] = {}
    if parts.password is not None:
        if not with_password:
            raise OptionsError(
                f"{key}: holds a password, which process lists and logs would show; leave it out and use "
                f"password_file, password_env, or the variable {URL_VARIABLE}"
            )
        out["literal"] = Secret(unquote(parts.password))
    if parts.username:
        out["username"] = unquote(parts.username)
    queries = dict(parse_qsl(parts.query))
    if parts.scheme == "unix":
        out["unix_socket_path"] = unquote(parts.path)
        database = queries.pop("db", None)
    else:
        try:
            port = parts.port
        except ValueError:
            raise OptionsError(f"{key}: the port is not a number from 1 to 65535") from None
        out["host"] = parts.hostname or "localhost"
        if port is not None:
            out["port"] = port
        database = parts.path.strip("/") or queries.pop("db", None)
    if queries:
        raise OptionsError(f"{key}: unknown parameters {', '.join(queries)}; give them as options")
    if database is not None:
        if not database.isdecimal():
            raise OptionsError(f"{key}: the database after the slash must be a number")
        out["db"] = int(database)
    if parts.scheme == "rediss":
        out["ssl"] = True
    return out


def _type(value: object) -> str:
    return "nothing" if value is None or value == "" else type(value).__name__


_POSITIVE = _seconds(0.001, 3600.0)

_READERS: dict[str, Callable[[str, object], Any]] = {
    "url": _url,
    "host": _text,
    "port": _integer(1, 65535),
    "db": _integer(0, 2**31 - 1),
    "unix_socket_path": _or_none(_text),
    "sentinels": _addresses,
    "service_name": _text,
    "min_other_sentinels": _integer(0, 1000),
    "cluster": _flag,
    "startup_nodes": _addresses,
    "username": _or_none(_text),
    "password_file": _secret_file,
    "password_env": _variable,
    "sentinel_username": _text,
    "sentinel_password_file": _secret_file,
    "sentinel_password_env": _variable,
    "client_name": _or_none(_prefix),
    "ssl": _flag,
    "ssl_ca_certs": _or_none(_file),
    "ssl_certfile": _or_none(_file),
    "ssl_keyfile": _or_none(_file),
    "ssl_cert_reqs": _choice(*_CERT_REQS),
    "ssl_check_hostname": _flag,
    "ssl_min_version": _choice(*_TLS_VERSIONS),
    "socket_timeout": _POSITIVE,
    "socket_connect_timeout": _POSITIVE,
    "socket_keepalive": _flag,
    "task_timeout": _POSITIVE,
    "max_connections": _integer(1, 65536),
    "retries": _integer(0, 100),
    "backoff_base": _seconds(0.0, 60.0),
    "backoff_cap": _seconds(0.0, 60.0),
    "breaker_threshold": _integer(1, 1000),
    "breaker_base": _POSITIVE,
    "breaker_cap": _POSITIVE,
    "prefix": _prefix,
    "model_identity": lambda key, value: "" if value == "" else _text(key, value),
    "ttl": _or_none(_integer(1, 2**31 - 1)),
    "metadata_ttl": _or_none(_integer(1, 2**31 - 1)),
    "pipeline_bytes": _integer(65536, 1 << 30),
    "verify_checksum": _flag,
}

# Every field can be set, under its own name or as a password's source.
assert {f.name for f in fields(RedisOptions)} <= set(_READERS) | set(_SECRETS)
