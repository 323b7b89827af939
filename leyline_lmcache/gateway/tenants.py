"""Whose request it is, and the secrets that follow from it."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from leyline_lmcache.gateway.errors import ApiError
from leyline_lmcache.gateway.settings import GatewaySettings, KeyCheck, Tenant


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request.

    Attributes:
        tenant: what is configured for it.
        identity: tells callers apart; the tenant's name, or what stands for a key that is passed on.
        authorization: the header to send on; None: none.
    """

    tenant: Tenant
    identity: str
    authorization: str | None = field(default=None, repr=False)


class Tenants:
    """From API keys to callers, and from callers to salts."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._digests = [(_digest(key), settings.tenants[name]) for key, name in settings.keys.items()]
        self._secret = settings.salt_secret.encode() if settings.salt_secret is not None else None

    def caller(self, authorization: str | None) -> Caller:
        """Who sends this header. Raises :class:`ApiError` 401 for a key that is not known."""
        if self._settings.auth is KeyCheck.PASS:
            identity = "" if authorization is None else _digest(authorization).hex()
            return Caller(self._settings.tenant, identity, authorization)
        scheme, _, key = (authorization or "").partition(" ")
        shown = _digest(key.strip())
        found = None
        # All of them, each in constant time: how long it takes tells nothing of the keys.
        for digest, tenant in self._digests:
            if hmac.compare_digest(digest, shown):
                found = tenant
        if found is None or scheme.lower() != "bearer":
            said = "no API key" if not key else "this API key is not known"
            raise ApiError(401, "invalid_api_key", said, headers={"www-authenticate": "Bearer"})
        return Caller(found, found.name)

    def salt(self, caller: Caller, asked: str | None) -> str | None:
        """The ``cache_salt`` of a caller's request; what it asked for cannot lead to another tenant's."""
        if self._secret is None:
            return asked
        text = f"{caller.identity}\0{'' if asked is None else asked}"
        return hmac.new(self._secret, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()[:32]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
