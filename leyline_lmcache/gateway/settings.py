"""The gateway's configuration: one YAML file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from leyline_lmcache.gateway import fields
from leyline_lmcache.gateway.section import Section
from leyline_lmcache.policies import ConfigError, Document, Policy, build

__all__ = [
    "Backend",
    "ConfigError",
    "GatewaySettings",
    "KeyCheck",
    "Limits",
    "Mode",
    "OnPolicyError",
    "Source",
    "Tenant",
]


class KeyCheck(StrEnum):
    """What is done with a client's API key."""

    PASS = "pass"
    """Sent on to the servers, which may check it."""
    CHECK = "check"
    """Looked up among the configured ones; it names the tenant and goes no further."""


class Mode(StrEnum):
    """What the servers are asked to do with edits of a session."""

    AMORTIZE = "amortize"
    OFF = "off"


class OnPolicyError(StrEnum):
    """What becomes of a request whose policy fails."""

    PASS = "pass"
    """Its messages are sent on as they are."""
    REFUSE = "refuse"
    """It is answered 500: for policies that must not be left out."""


class Source(StrEnum):
    """What may name a session."""

    HEADER = "header"
    USER = "user"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class Backend:
    """One SGLang server.

    Attributes:
        name: in metrics and logs, and what sessions are spread by: it should survive a change of address.
        key: the server's own ``--api-key``.
    """

    name: str
    url: str
    key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose requests these are.

    Attributes:
        policy: name of the policy applied to its messages; None: none.
        concurrent: requests under way at a time; None: as many as the gateway takes.
    """

    name: str
    policy: str | None = None
    mode: Mode = Mode.AMORTIZE
    concurrent: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request, and all of them, may take. Times in seconds.

    Attributes:
        body_bytes: of a request.
        body_s: until the body is there.
        concurrent: requests under way at a time.
        connect_s: until a server accepts the connection.
        answer_s: until the first byte of a stream, or the whole of another answer.
        idle_s: between two pieces of a stream.
        total_s: for everything.
    """

    body_bytes: int = 16 * 1024 * 1024
    body_s: float = 30.0
    concurrent: int = 512
    connect_s: float = 3.0
    answer_s: float = 600.0
    idle_s: float = 120.0
    total_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Everything `leyline gateway` is told.

    Attributes:
        keys: tenant of each API key; only with ``auth: check``.
        salt_secret: what ``cache_salt`` is derived with; None: clients' own are sent on.
        policies: those that tenants may have, by name.
        on_policy_error: what becomes of a request whose policy fails.
        refused_fields: of a request; see :mod:`leyline_lmcache.gateway.fields`.
        retries: further servers tried before the first byte was sent to the client.
        drain_delay_s: seconds between a SIGTERM and the end of listening; /ready says no at once.
        drain_s: seconds that requests under way then have.
    """

    backends: tuple[Backend, ...]
    host: str = "127.0.0.1"
    port: int = 8080
    auth: KeyCheck = KeyCheck.PASS
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    salt_secret: str | None = field(default=None, repr=False)
    sources: tuple[Source, ...] = tuple(Source)
    tenant: Tenant = Tenant("default")
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    policies: Mapping[str, Policy] = field(default_factory=dict)
    on_policy_error: OnPolicyError = OnPolicyError.PASS
    limits: Limits = Limits()
    refused_fields: tuple[str, ...] = ()
    retries: int = 2
    max_moved: int = 65536
    health_path: str = "/health"
    health_interval_s: float = 5.0
    health_timeout_s: float = 10.0
    health_failures: int = 2
    drain_delay_s: float = 0.0
    drain_s: float = 60.0

    @classmethod
    def load(cls, path: Path, environ: Mapping[str, str] = os.environ) -> GatewaySettings:
        """Read a file. Raises :class:`ConfigError`."""
        return _read(Document.read(path), environ)

    @classmethod
    def parse(cls, text: str, name: str, environ: Mapping[str, str] = os.environ) -> GatewaySettings:
        """Read a text. Raises :class:`ConfigError`."""
        return _read(Document.parse(text, name), environ)

    @classmethod
    def of_urls(cls, urls: list[str]) -> GatewaySettings:
        """Defaults in front of these servers. Raises :class:`ConfigError`."""
        return _read(Document("--backend", {"backends": [{"url": url} for url in urls]}), {})


def _read(document: Document, environ: Mapping[str, str]) -> GatewaySettings:
    root = Section(document, {} if document.value is None else document.value)
    backends = tuple(_backend(each, environ) for each in root.sections("backends"))
    if not backends:
        raise root.error("backends", "expected at least one server, such as - url: http://127.0.0.1:30000")
    names = [backend.name for backend in backends]
    if len(set(names)) != len(names):
        raise root.error("backends", "two of them have the same name; give each a name of its own")
    listen, auth, session = root.section("listen"), root.section("auth"), root.section("session")
    health, routing, drain = root.section("health"), root.section("routing"), root.section("drain")
    limits, policies = root.section("limits"), root.section("policies")
    known: dict[str, Policy] = {
        name: build(policies.take(name), document=document, at=(*policies.at, name)) for name in policies.keys
    }
    if "none" in known:
        raise policies.error("none", "is what says that there is no policy; choose another name")
    default = _tenant("default", root, known, Tenant("default"))
    people = root.section("tenants")
    tenants = {}
    for name in people.keys:
        below = people.section(name)
        tenants[name] = _tenant(name, below, known, default)
        below.done()
    check = auth.choice("mode", KeyCheck, KeyCheck.PASS)
    keys = _keys(auth, check, environ)
    for tenant in sorted(set(keys.values()) - set(tenants)):
        tenants[tenant] = Tenant(tenant, default.policy, default.mode, default.concurrent)
    secret = _secret(root, "salt_secret", environ)
    if people.keys and check is KeyCheck.PASS:
        raise root.error("tenants", "nothing tells tenants apart; set auth.mode: check")
    if len(tenants) > 1 and secret is None:
        raise root.error(
            "salt_secret_env", "expected a secret, from which each of the tenants gets a cache_salt"
        )
    settings = GatewaySettings(
        backends=backends,
        host=listen.text("host", "127.0.0.1") or "",
        port=listen.count("port", 8080, 0, 65535),
        auth=check,
        keys=MappingProxyType(keys),
        salt_secret=secret,
        sources=_sources(session),
        tenant=default,
        tenants=MappingProxyType(tenants),
        policies=MappingProxyType(known),
        on_policy_error=root.choice("on_policy_error", OnPolicyError, OnPolicyError.PASS),
        limits=_limits(limits),
        refused_fields=root.texts("refuse_fields", fields.SHARED if check is KeyCheck.CHECK else ()),
        retries=routing.count("retries", 2, 0, 16),
        max_moved=routing.count("max_moved", 65536, 1, 2**24),
        health_path=_path(health),
        health_interval_s=health.seconds("interval_s", 5.0, 0.05, 3600),
        health_timeout_s=health.seconds("timeout_s", 10.0, 0.05, 3600),
        health_failures=health.count("failures", 2, 1, 100),
        drain_delay_s=drain.seconds("delay_s", 0.0, 0, 3600),
        drain_s=drain.seconds("timeout_s", 60.0, 0, 86400),
    )
    for section in (listen, auth, session, health, routing, drain, limits, root):
        section.done()
    return settings


def _backend(section: Section, environ: Mapping[str, str]) -> Backend:
    url = section.text("url")
    if url is None:
        raise section.error("url", "is missing; expected the server's address")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment or parts.username:
        raise section.error("url", f"expected http://HOST:PORT or https://…, got {url!r}")
    key = _secret(section, "api_key", environ)
    name = section.text("name", parts.netloc)
    section.done()
    assert name is not None
    return Backend(name, url.rstrip("/"), key)


def _tenant(name: str, section: Section, policies: Mapping[str, Policy], default: Tenant) -> Tenant:
    policy = section.text("policy", default.policy)
    # What to write where a tenant shall have none although others do.
    policy = None if policy == "none" else policy
    if policy is not None and policy not in policies:
        raise section.error("policy", f"no policy {policy!r}; policies has {', '.join(policies) or 'none'}")
    most = section.take("concurrent", default.concurrent)
    return Tenant(
        name,
        policy,
        section.choice("mode", Mode, default.mode),
        None if most is None else section.count("concurrent", most, 1, 2**20),
    )


def _keys(auth: Section, check: KeyCheck, environ: Mapping[str, str]) -> dict[str, str]:
    text = _secret(auth, "keys", environ)
    if check is KeyCheck.PASS:
        if text is not None:
            raise auth.error("mode", "keys are given, but passed on; set it to check")
        return {}
    if text is None:
        raise auth.error("keys_file", "is missing; expected a file of lines TENANT KEY, or keys_env")
    keys: dict[str, str] = {}
    for number, line in enumerate(text.replace(",", "\n").splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        # Never what stands there: it may be a key.
        if len(words) != 2:
            raise auth.error("keys_file", f"line {number}: expected TENANT KEY, got {len(words)} words")
        tenant, key = words
        if keys.setdefault(key, tenant) != tenant:
            raise auth.error("keys_file", f"line {number}: the key of {tenant} is another tenant's too")
    if not keys:
        raise auth.error("keys_file", "has no keys; expected lines TENANT KEY")
    return keys


def _secret(section: Section, name: str, environ: Mapping[str, str]) -> str | None:
    """From a file or a variable; never from the configuration itself."""
    file, variable = section.text(f"{name}_file"), section.text(f"{name}_env")
    if file is not None and variable is not None:
        raise section.error(f"{name}_file", f"stands beside {name}_env; expected one of them")
    if file is not None:
        try:
            found = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "not UTF-8 text"
            raise section.error(f"{name}_file", f"{file}: cannot be read: {why}") from None
    elif variable is not None:
        found = environ.get(variable, "").strip()
    else:
        return None
    if not found:
        raise section.error(f"{name}_file" if file else f"{name}_env", f"{file or variable}: is empty")
    return found


def _sources(session: Section) -> tuple[Source, ...]:
    given = session.take("from", [str(source) for source in Source])
    if not isinstance(given, list) or len(set(map(str, given))) != len(given):
        raise session.error("from", f"expected a list of {', '.join(Source)}, got {given!r}")
    try:
        return tuple(Source(each) for each in given)
    except ValueError:
        raise session.error("from", f"expected a list of {', '.join(Source)}, got {given!r}") from None


def _path(health: Section) -> str:
    path = health.text("path", "/health") or ""
    if not path.startswith("/"):
        raise health.error("path", f"expected a path such as /health, got {path!r}")
    return path


def _limits(section: Section) -> Limits:
    default = Limits()
    seconds: Callable[[str], float] = lambda key: section.seconds(key, getattr(default, key), 0.05, 86400)  # noqa: E731
    return Limits(
        body_bytes=section.count("body_bytes", default.body_bytes, 1024, 2**32),
        concurrent=section.count("concurrent", default.concurrent, 1, 2**20),
        body_s=seconds("body_s"),
        connect_s=seconds("connect_s"),
        answer_s=seconds("answer_s"),
        idle_s=seconds("idle_s"),
        total_s=seconds("total_s"),
    )
