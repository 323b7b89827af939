"""Hypothesis strategies for sessions, and the number of examples.

`LEYLINE_EXAMPLES` sets the number for the tests that play whole sessions; the soak run (`python -m
tests.core.soak`) is faster for millions.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from leyline_lmcache.pieces import Piece, View

from .oracle import Back, Cut, Script, Turn

EXAMPLES = int(os.environ.get("LEYLINE_EXAMPLES", "2500"))
MANY = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
SOME = settings(MANY, max_examples=max(1, EXAMPLES // 5))

lengths = st.one_of(st.sampled_from((0, 1)), st.integers(0, 8), st.integers(0, 70))
"""Lengths of gaps, spans, replacements and tails: often nothing or one token."""
block_sizes = st.one_of(st.sampled_from((1, 2, 3, 16, 64, 256)), st.integers(1, 256), st.integers(1, 9))
edits = st.tuples(lengths, lengths, lengths)
turns = st.builds(Turn, st.lists(edits, max_size=5).map(tuple), lengths)
steps = st.one_of(turns, turns, turns, st.builds(Back, st.integers(0, 7)), st.builds(Cut, lengths))
scripts = st.builds(
    Script,
    st.one_of(st.integers(0, 40), st.integers(0, 300)),
    block_sizes,
    st.lists(steps, min_size=1, max_size=6).map(tuple),
    st.integers(0, 2**32 - 1),
)

pieces = st.one_of(
    st.builds(Piece, st.sampled_from("ab"), st.integers(0, 12), st.integers(1, 6)),
    st.builds(Piece, st.none(), st.just(0), st.integers(1, 6)),
)
views = st.lists(pieces, max_size=8).map(lambda some: View(tuple(some)))
"""Any views at all, holes and repeated pieces included; more than a session can reach."""
related_views = st.one_of(
    st.tuples(views, views),
    # With a beginning in common.
    st.tuples(views, views, views).map(lambda v: (joined(v[0], v[1]), joined(v[0], v[2]))),
)


def joined(a: View, b: View) -> View:
    """One view after the other."""
    return View(a.pieces + b.pieces)
