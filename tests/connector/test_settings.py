"""Settings: where they come from, and what is said about wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from leyline_lmcache.connector.settings import InPlace, SessionMode, Settings, SettingsError


def test_defaults_need_no_file() -> None:
    assert Settings.load({}) == Settings()


def test_order_lmcache_file_then_own_file_then_environment(tmp_path: Path) -> None:
    lmcache = tmp_path / "lmcache.yaml"
    lmcache.write_text(
        "mp_host: h\n"
        "extra_config:\n  lmcache.mp.mq_timeout: 3\n  leyline.min_reuse: 5\n  leyline.drift_limit: 6\n"
    )
    own = tmp_path / "leyline.yaml"
    own.write_text("drift_limit: 7\ninplace: never\n")
    environment = {
        "LEYLINE_CONFIG": str(own),
        "LEYLINE_INPLACE": "always",
        "LEYLINE_JOURNAL_DIR": str(tmp_path),
    }
    found = Settings.load(environment, str(lmcache))
    assert (found.min_reuse, found.drift_limit, found.inplace) == (5, 7, InPlace.ALWAYS)
    assert found.journal_dir == tmp_path


def test_a_bare_off_is_a_mode_whatever_yaml_makes_of_it() -> None:
    assert Settings.load({"LEYLINE_SESSION_MODE": "off"}).session_mode is SessionMode.OFF
    assert Settings.load({"LEYLINE_SESSION_MODE": "amortize"}).session_mode is SessionMode.AMORTIZE


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"min_reus": 1}, "min_reus: unknown key; known keys are min_reuse"),
        ({"min_reuse": 0}, "min_reuse: expected an integer from 1"),
        ({"min_reuse": True}, "min_reuse: expected an integer"),
        ({"min_reuse": "16"}, "min_reuse: expected an integer"),
        ({"inplace": "sometimes"}, "inplace: expected one of auto, always, never"),
        ({"inplace": None}, "inplace: expected one of"),
        ({"invalidate": "forget"}, "invalidate: expected one of keep, release, delete"),
        ({"session_mode": "forget"}, "session_mode: expected one of off, amortize"),
        ({"max_sessions": 0}, "max_sessions: expected an integer from 1"),
        ({"prefetch": "yes"}, "prefetch: expected true or false"),
        ({"tier_running": 0}, "tier_running: expected an integer from 1"),
        ({"tier_waiting": 1.5}, "tier_waiting: expected an integer"),
        ({"tier_timeout": 0}, "tier_timeout: expected seconds"),
        ({"journal_dir": 3}, "journal_dir: expected a folder, got int"),
        ({"metrics_port": 70000}, "metrics_port: expected an integer from 1 to 65535"),
        ({"journal_max_bytes": 1}, "journal_max_bytes: expected an integer from 4096"),
    ],
)
def test_i9_a_wrong_value_is_named(values: dict[str, object], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        Settings.of(values)


def test_i9_a_wrong_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.yaml: cannot be read"):
        Settings.load({"LEYLINE_CONFIG": str(tmp_path / "absent.yaml")})
    bad = tmp_path / "bad.yaml"
    bad.write_text("a: [1")
    with pytest.raises(SettingsError, match="not valid YAML"):
        Settings.load({"LEYLINE_CONFIG": str(bad)})
    bad.write_text("- 1")
    with pytest.raises(SettingsError, match="expected a mapping"):
        Settings.load({"LEYLINE_CONFIG": str(bad)})
