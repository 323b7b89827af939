"""The configuration in docs/gateway.md is one."""

from __future__ import annotations

import re
from pathlib import Path

from leyline_lmcache.gateway.metrics import Metrics
from leyline_lmcache.gateway.settings import GatewaySettings, Limits

DOCUMENT = Path(__file__).parents[2] / "docs" / "gateway.md"


def test_the_documented_configuration_can_be_read(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    keys = tmp_path / "keys"
    keys.write_text("acme k\n")
    environ = {"SGLANG_KEY": "k", "LEYLINE_SALT": "s"}
    read = GatewaySettings.parse(text.replace("/etc/leyline/keys", str(keys)), "docs", environ)
    default = GatewaySettings.of_urls(["http://a"])
    # What the document says are the defaults.
    assert read.limits == default.limits == Limits()
    names = "host port sources retries max_moved health_path health_interval_s health_timeout_s".split()
    for name in [*names, "health_failures", "drain_delay_s", "drain_s", "on_policy_error"]:
        assert getattr(read, name) == getattr(default, name), name


def test_every_metric_is_documented() -> None:
    text = DOCUMENT.read_text()
    for family in Metrics().registry.collect():
        assert family.name in text, family.name
