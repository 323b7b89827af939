"""Whole sessions against the naive model: views, undo, plans in any allowed order, provenance."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from leyline_lmcache.ops import Tier
from leyline_lmcache.pieces import View

from .oracle import Script, check_plan, random_script, run_script
from .soak import main
from .strategies import MANY, SOME, block_sizes, related_views, scripts


@MANY
@given(scripts)
def test_sessions_equal_the_naive_model_gpu_and_cpu(script: Script) -> None:
    run_script(script, tiers=(Tier.GPU, Tier.CPU))


@SOME
@given(scripts)
def test_sessions_equal_the_naive_model_redis_and_provenance(script: Script) -> None:
    run_script(script, tiers=(Tier.REDIS,), influence=True)


@SOME
@given(related_views, block_sizes, st.integers(0, 2**32 - 1))
def test_plans_between_any_two_views_are_sound(pair: tuple[View, View], size: int, seed: int) -> None:
    check_plan(*pair, min(size, 20), random.Random(seed), (Tier.GPU, Tier.CPU))


def test_soak_examples_are_the_same_however_they_are_split() -> None:
    assert random_script(random.Random("3:14")) == random_script(random.Random("3:14"))
    assert main(["--examples", "60", "--seed", "5", "--jobs", "1"]) == 0
