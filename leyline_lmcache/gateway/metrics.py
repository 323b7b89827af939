"""The gateway's counters. Labels are names from the configuration, and never what a client sends."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from leyline_lmcache.gateway.usage import Tokens

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """Counters of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "leyline_gateway_requests",
            "Requests by what they were answered.",
            ["endpoint", "tenant", "status"],
            registry=self.registry,
        )
        self.errors = Counter(
            "leyline_gateway_errors",
            "Requests that the gateway itself ended, by reason.",
            ["code"],
            registry=self.registry,
        )
        self.running = Gauge(
            "leyline_gateway_running_requests", "Requests under way.", registry=self.registry
        )
        self.first_byte = Histogram(
            "leyline_gateway_first_byte_seconds",
            "Time until the answer, or its first piece, was there.",
            ["endpoint"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.seconds = Histogram(
            "leyline_gateway_request_seconds",
            "Time until the answer was sent.",
            ["endpoint"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.retries = Counter(
            "leyline_gateway_failovers",
            "Requests that were asked of another server, by the one that failed.",
            ["backend"],
            registry=self.registry,
        )
        self.up = Gauge(
            "leyline_gateway_backend_up", "1: the server is up.", ["backend"], registry=self.registry
        )
        self.tokens = Counter(
            "leyline_gateway_tokens",
            "Tokens as the servers report them.",
            ["tenant", "kind"],
            registry=self.registry,
        )
        self.policies = Counter(
            "leyline_gateway_policy_runs",
            "Policies applied, by what they did: changed, unchanged, failed.",
            ["policy", "outcome"],
            registry=self.registry,
        )

    def count_tokens(self, tenant: str, tokens: Tokens) -> None:
        """Add the tokens of one answer."""
        for kind in ("prompt", "cached", "spliced", "completion"):
            count = getattr(tokens, kind)
            if count is not None:
                self.tokens.labels(tenant, kind).inc(count)

    def text(self) -> bytes:
        """All of it, for Prometheus."""
        return generate_latest(self.registry)
