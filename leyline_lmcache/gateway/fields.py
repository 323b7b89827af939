"""Fields of SGLang's own that a client must not set where several tenants share the servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leyline_lmcache.gateway.errors import ApiError

SHARED = (
    "rid",  # another's request may have it
    "session_params",  # may name another's session
    "priority",
    "data_parallel_rank",
    "routed_dp_rank",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "custom_logit_processor",  # code
    "custom_labels",  # of the servers' metrics
)
"""Refused unless the configuration says otherwise."""


def refuse(body: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raises :class:`ApiError` 400 if a request has one of these fields."""
    for name in names:
        if body.get(name) is not None:
            raise ApiError(400, "field_not_allowed", f"{name}: is not for clients to set here", param=name)
