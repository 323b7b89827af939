"""Configuration of the plugin: defaults, then a YAML file, then ``LEYLINE_*`` variables.

The file is named by ``LEYLINE_CONFIG``; the same keys may stand in the LMCache configuration under
``extra_config`` with the prefix ``leyline.`` (``--lmcache-config-file``), so that one file configures both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import yaml

CONFIG_VARIABLE = "LEYLINE_CONFIG"
LMCACHE_PREFIX = "leyline."

_COUNTS = (
    "min_reuse",
    "drift_limit",
    "tier_running",
    "tier_waiting",
    "max_sessions",
    "max_session_views",
    "max_records",
    "max_lineages",
    "journal_max_files",
)

E = TypeVar("E", bound=StrEnum)


class SettingsError(ValueError):
    """A configuration value is wrong; the message names the key, what was found and what is accepted."""


class InPlace(StrEnum):
    """When the slots of the old view are taken over instead of copied."""

    AUTO = "auto"
    """When copying would have to evict something else."""
    ALWAYS = "always"
    """Whenever nothing else uses the old view."""
    NEVER = "never"


class Invalidate(StrEnum):
    """What happens to stored KV that an edit took out of a session, once no view refers to it."""

    KEEP = "keep"
    """Nothing: it is evicted in its time, and an edit of the old turn still finds it."""
    RELEASE = "release"
    """It leaves this node's memory; the shared store keeps it for its time to live."""
    DELETE = "delete"
    """It is deleted from the shared store too. Not an erasure: see FORGET."""


class SessionMode(StrEnum):
    """What is done with requests that name a session and no directives."""

    OFF = "off"
    """Nothing."""
    AMORTIZE = "amortize"
    """They are compared with the session's earlier views, and what was kept is spliced."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of the SGLang plugin.

    Attributes:
        min_reuse: an edit that would keep fewer tokens after it is not applied; shorter kept runs between two
            replacements are prefilled with them.
        inplace: see :class:`InPlace`.
        tier_timeout: seconds a request waits for the CPU and Redis tiers before it is prefilled.
        tier_running: fetches from the CPU and Redis tiers under way at a time.
        tier_waiting: requests that wait for their turn; more are prefilled.
        prefetch: bring what an edit will need to CPU memory while its replacements are prefilled.
        invalidate: see :class:`Invalidate`.
        drift_limit: roundings a key may accumulate through in-place rotations before its view is
            prefilled again.
        session_mode: see :class:`SessionMode`; a request may say otherwise.
        max_sessions: sessions remembered.
        max_session_views: answers remembered of each.
        max_session_tokens: tokens over all of them, 4 bytes each, in SGLang's main process.
        max_records: responses remembered as bases.
        max_record_tokens: tokens over all remembered bases (8 bytes each, twice).
        max_lineages: edit lineages remembered.
        journal_dir: folder of the op journal; none: no journal.
        journal_max_bytes: size of one journal file.
        journal_max_files: journal files kept.
        metrics_port: serve this process's counters here when SGLang runs without ``--enable-metrics``.
    """

    min_reuse: int = 16
    inplace: InPlace = InPlace.AUTO
    drift_limit: int = 32
    tier_timeout: float = 2.0
    tier_running: int = 16
    tier_waiting: int = 256
    prefetch: bool = True
    invalidate: Invalidate = Invalidate.KEEP
    session_mode: SessionMode = SessionMode.OFF
    max_sessions: int = 4096
    max_session_views: int = 8
    max_session_tokens: int = 64 * 1024 * 1024
    max_records: int = 4096
    max_record_tokens: int = 64 * 1024 * 1024
    max_lineages: int = 65536
    journal_dir: Path | None = None
    journal_max_bytes: int = 64 * 1024 * 1024
    journal_max_files: int = 8
    metrics_port: int | None = None

    @classmethod
    def load(cls, environ: Mapping[str, str] = os.environ, lmcache_config: str | None = None) -> Settings:
        """Read the settings. Raises :class:`SettingsError` for an unknown key or a wrong value."""
        values: dict[str, Any] = {}
        if lmcache_config:
            extra = _read_yaml(Path(lmcache_config)).get("extra_config") or {}
            values |= {
                key.removeprefix(LMCACHE_PREFIX): value
                for key, value in extra.items()
                if isinstance(key, str) and key.startswith(LMCACHE_PREFIX)
            }
        if environ.get(CONFIG_VARIABLE):
            values |= _read_yaml(Path(environ[CONFIG_VARIABLE]))
        for field in fields(cls):
            name = f"LEYLINE_{field.name.upper()}"
            if name in environ:
                values[field.name] = yaml.safe_load(environ[name])
        return cls.of(values)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Settings:
        """Check a mapping. Raises :class:`SettingsError`."""
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                raise SettingsError(f"{key}: unknown key; known keys are {', '.join(known)}")
        checked: dict[str, Any] = {}
        for key, value in values.items():
            if key == "inplace":
                checked[key] = _choice(key, value, InPlace)
            elif key == "invalidate":
                checked[key] = _choice(key, value, Invalidate)
            elif key == "session_mode":
                # YAML reads a bare off as false.
                checked[key] = _choice(key, "off" if value is False else value, SessionMode)
            elif key == "prefetch":
                if not isinstance(value, bool):
                    raise SettingsError(f"{key}: expected true or false, got {value!r}")
                checked[key] = value
            elif key == "journal_dir":
                checked[key] = None if value is None else _path(key, value)
            elif key == "tier_timeout":
                if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 600:
                    raise SettingsError(
                        f"{key}: expected seconds, more than 0 and at most 600, got {value!r}"
                    )
                checked[key] = float(value)
            elif key == "metrics_port":
                checked[key] = None if value is None else _integer(key, value, 1, 65535)
            elif key in _COUNTS:
                checked[key] = _integer(key, value, 1, 2**31)
            else:
                checked[key] = _integer(key, value, 4096, 2**50)
        return cls(**checked)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise SettingsError(f"{path}: expected a mapping of keys to values, got {type(data).__name__}")
    return data


def _integer(key: str, value: object, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise SettingsError(f"{key}: expected an integer from {least} to {most}, got {value!r}")
    return value


def _choice(key: str, value: object, kind: type[E]) -> E:
    try:
        return kind(str(value))
    except ValueError:
        raise SettingsError(f"{key}: expected one of {', '.join(kind)}, got {value!r}") from None


def _path(key: str, value: object) -> Path:
    if not isinstance(value, str | Path):
        raise SettingsError(f"{key}: expected a folder, got {type(value).__name__}")
    return Path(value).expanduser()
