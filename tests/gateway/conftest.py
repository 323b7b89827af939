"""Fixtures: a server, two servers, and gateways in front of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import pytest

from leyline_lmcache.gateway.settings import GatewaySettings
from leyline_lmcache.policies import Policy

from .servers import Running, Server, serving

Start = Callable[..., Running]


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[tuple[Server, Server]]:
    made = (Server(), Server())
    yield made
    for each in made:
        each.close()


@pytest.fixture
def start() -> Iterator[Start]:
    """`start([server], "limits: {concurrent: 1}")`; servers are named a, b, …"""
    with ExitStack() as stack:

        def run(
            servers: Sequence[Server],
            text: str = "",
            *,
            policies: Mapping[str, Policy] | None = None,
            **environ: str,
        ) -> Running:
            names = "abcdefgh"
            listed = "".join(f"- {{name: {names[i]}, url: '{each.url}'}}\n" for i, each in enumerate(servers))
            text = f"listen: {{port: 0}}\nbackends:\n{listed}{text}"
            if "health:" not in text:
                text += "\nhealth: {interval_s: 0.05}\n"
            settings = GatewaySettings.parse(text, "test.yaml", environ)
            if policies is not None:
                settings = replace(settings, policies=policies)
            return stack.enter_context(serving(settings))

        yield run
