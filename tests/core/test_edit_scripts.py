"""Whole sessions against the naive model: views, undo, plans in any allowed order, provenance."""

from __future__ import annotations

import random

from hypothesis import given

from leyline_lmcache.ops import Tier

from .oracle import Script, random_script, run_script
from .soak import main
from .strategies import MANY, SOME, scripts


@MANY
@given(scripts)
def test_sessions_equal_the_naive_model_gpu_and_cpu(script: Script) -> None:
    run_script(script, tiers=(Tier.GPU, Tier.CPU))


@SOME
@given(scripts)
def test_sessions_equal_the_naive_model_redis_and_provenance(script: Script) -> None:
    run_script(script, tiers=(Tier.REDIS,), influence=True)


def test_soak_examples_are_the_same_however_they_are_split() -> None:
    assert random_script(random.Random("3:14")) == random_script(random.Random("3:14"))
    assert main(["--examples", "60", "--seed", "5", "--jobs", "1"]) == 0
