"""The engine releases this package was written against, checked before any internal is touched."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires, version

_DISTRIBUTION = "leyline-lmcache"
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^;,\s]+)")


class UnsupportedVersion(RuntimeError):
    """An installed engine is not a release this package supports; the message names both."""


def supported() -> dict[str, str]:
    """Exact versions from the ``engine`` extra of the installed distribution (stated once, in
    pyproject.toml)."""
    pins: dict[str, str] = {}
    for requirement in requires(_DISTRIBUTION) or ():
        match = _PIN.match(requirement)
        if match and "extra" in requirement and "engine" in requirement:
            pins[match["name"].lower()] = match["version"]
    return pins


def check(*names: str) -> None:
    """Raise :class:`UnsupportedVersion` unless each of ``names`` is installed in the supported release."""
    pins = supported()
    for name in names:
        want = pins.get(name)
        if want is None:
            raise UnsupportedVersion(f"{_DISTRIBUTION} states no supported release of {name}; reinstall it")
        try:
            found = version(name)
        except PackageNotFoundError:
            raise UnsupportedVersion(f"{name} is not installed; this release needs {name}=={want}") from None
        if found.split("+")[0] != want:
            raise UnsupportedVersion(
                f"{name} {found} is installed, but {_DISTRIBUTION} {version(_DISTRIBUTION)} supports {want}; "
                f"install {name}=={want} or the matching release of {_DISTRIBUTION}"
            )
