"""Fixtures of the end-to-end tests; the stacks themselves come from tests/conftest.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from reference.model import Reference

from leyline_lmcache.stack import Stack
from leyline_lmcache.stack.client import Client
from leyline_lmcache.stack.models import resolve

from .driver import Twin, quiet_log


@pytest.fixture(scope="session")
def reference_of() -> Callable[[str], Reference]:
    """The fp32 reference of a model, loaded once per run."""
    loaded: dict[str, Reference] = {}

    def get(model: str) -> Reference:
        if model not in loaded:
            loaded[model] = Reference(resolve(model))
        return loaded[model]

    return get


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    """A client of the test's ``stack``, whose log must stay free of trouble."""
    with quiet_log(stack), stack.client(timeout_s=120.0) as client:
        yield client


@pytest.fixture
def twin(stack: Stack, client: Client, reference_of: Callable[[str], Reference]) -> Twin:
    """The test's ``stack`` beside the reference of its model."""
    spec = stack.spec
    return Twin(
        client,
        reference_of(spec.model),
        page_size=spec.page_size,
        min_reuse=spec.leyline.get("min_reuse", 16),
    )
