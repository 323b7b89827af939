"""The contract on a model that was trained for it: a splice answers like the unedited context, in every case.

Cases and arms are the benchmark's (benchmarks/_contract.py), which goes on to other dtypes, page sizes and
endpoints.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from leyline_lmcache.stack import Stack

from .driver import quiet_log

# Appended, so that nothing of that folder can shadow a module of the tests.
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from _contract import MIN_REUSE, Arm, Form, load_cases, run_cases


@pytest.mark.parametrize(
    ("form", "isolated"),
    [
        # The form that notices keys which were not turned, or turned wrongly.
        pytest.param(Form.BEFORE, True, id="question_before_edit"),
        # All arms in one cache: the same text, prefilled after it was spliced, sees nothing of that (I1).
        pytest.param(Form.AFTER, False, id="question_after_edit-one_cache"),
    ],
)
def test_a_splice_answers_like_full_context_and_a_reprefill_never_does(
    stack_tiny: Stack, form: Form, isolated: bool
) -> None:
    """One to three edits, shifts of both signs, one and two hops: all 160 cases, or some of every kind."""
    assert stack_tiny.spec.leyline["min_reuse"] == MIN_REUSE, "many cases keep fewer tokens than the default"
    cases = load_cases(None if isolated else 40)
    assert len(cases) == (160 if isolated else 40)
    with quiet_log(stack_tiny):
        outcomes = run_cases(stack_tiny, cases, [form], isolated=isolated)
    assert [(each.case, each.reason) for each in outcomes if not each.is_spliced] == []
    assert [each.case for each in outcomes if not each.same(Arm.SPLICE)] == []
    assert [each.case for each in outcomes if each.same(Arm.REPREFILL)] == []
    # The full arm is the measure, so it has to be good: the model is right in all but one case of 240.
    assert sum(each.replies[Arm.FULL].answer != each.expected for each in outcomes) <= 1
