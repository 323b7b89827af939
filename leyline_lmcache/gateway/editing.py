"""The policies of a request: the one it brings along, then its tenant's."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

from leyline_lmcache.gateway.errors import ApiError
from leyline_lmcache.gateway.metrics import Metrics
from leyline_lmcache.gateway.settings import OnPolicyError
from leyline_lmcache.policies import ConfigError, Policy, apply, erased, from_context_management

log = logging.getLogger(__name__)

FIELD = "context_management"
_ITS_OWN = "context_management"


class Editor:
    """Applies policies to requests."""

    def __init__(self, policies: Mapping[str, Policy], on_error: OnPolicyError, metrics: Metrics) -> None:
        self._policies = policies
        self._on_error = on_error
        self._metrics = metrics

    async def edit(self, body: dict[str, Any], policy: str | None) -> str:
        """Apply to the messages of a request what it asks for itself, and then a policy.

        Args:
            body: the request, which is changed.
            policy: its tenant's, by name. What a request asks for does not replace it.

        Returns:
            What marks the model's own words that were erased (see `leyline_lmcache.policies.Erasing`): KV
            that has read them must not be kept, so the session goes on under another name.

        Raises:
            ApiError: 400, what it asks for is malformed; 500, a policy failed and must not be left out.
        """
        asked = body.pop(FIELD, None)
        steps: list[tuple[str, Policy]] = []
        if asked is not None:
            try:
                steps.append((_ITS_OWN, from_context_management(asked)))
            except ConfigError as error:
                raise ApiError(400, "invalid_context_management", str(error), param=FIELD) from None
        if policy is not None:
            steps.append((policy, self._policies[policy]))
        messages = body.get("messages")
        # What are no messages is for the server to refuse, in its own words.
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            return ""
        gone = ""
        for name, step in steps:
            edited, erasing = await self._apply(name, step, messages)
            body["messages"] = messages = edited
            gone += erasing
        return gone

    async def _apply(self, name: str, policy: Policy, messages: list[Any]) -> tuple[list[Any], str]:
        try:
            edited, gone = await asyncio.to_thread(_plain, policy, messages)
        except Exception as error:
            # Its type only: the text may quote the conversation.
            log.error("policy %s failed: %s", name, type(error).__name__)
            self._metrics.policies.labels(name, "failed").inc()
            if self._on_error is OnPolicyError.REFUSE:
                raise ApiError(500, "policy_failed", f"policy {name} failed on these messages") from None
            return messages, ""
        self._metrics.policies.labels(name, "unchanged" if edited == messages else "changed").inc()
        return edited, gone


def _plain(policy: Policy, messages: list[Any]) -> tuple[list[Any], str]:
    """What a policy, perhaps a stranger's, makes of messages, as plain data that can be sent; what it
    erased."""
    edited: list[Any] = json.loads(json.dumps([dict(message) for message in apply(policy, messages)]))
    return edited, erased(policy, messages)
