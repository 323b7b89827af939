"""The policies of a request: its tenant's, or the one it brings along."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Protocol

from leyline_lmcache.gateway.metrics import Metrics

log = logging.getLogger(__name__)

Message = dict[str, Any]


class Policy(Protocol):
    """Rewrites a conversation."""

    def transform(self, messages: list[Message], turn_idx: int) -> list[Message]:
        """The messages that the model shall see."""


class Editor:
    """Applies policies to requests."""

    def __init__(self, policies: Mapping[str, Policy], metrics: Metrics) -> None:
        self._policies = policies
        self._metrics = metrics

    async def edit(self, body: dict[str, Any], policy: str | None) -> None:
        """Apply a policy to the messages of a request; ``body`` is changed.

        A policy that fails leaves them as they are: the request is answered all the same.
        """
        messages = body.get("messages")
        # What are no messages is for the server to refuse, in its own words.
        if policy is None or not isinstance(messages, list):
            return
        if not all(isinstance(message, dict) for message in messages):
            return
        turn = sum(message.get("role") == "assistant" for message in messages)
        try:
            edited = await asyncio.to_thread(self._policies[policy].transform, messages, turn)
        except Exception as error:
            # Its type only: the text may quote the conversation.
            log.error("policy %s failed: %s", policy, type(error).__name__)
            self._metrics.policies.labels(policy, "failed").inc()
            return
        self._metrics.policies.labels(policy, "unchanged" if edited == messages else "changed").inc()
        body["messages"] = edited
