"""The stability study: each figure by hand on made-up runs, and a short study of real
ones that can fail."""

import math

import pytest

from scripts.studies import stable


@pytest.mark.parametrize(
    ("curve", "stopped", "right"),
    [
        ([4.0, 3.0, 2.0], False, False),
        ([4.0, 2.0, 3.4], False, False),
        ([4.0, 2.0, 3.6], False, True),
        ([4.0, 2.0, math.nan], False, True),
        ([4.0, 2.0], True, True),
        ([5.1, 5.2, 5.1], False, True),
        ([], False, True),
    ],
)
def test_a_run_has_diverged_that_was_stopped_learnt_nothing_or_lost_half_of_it(
    curve, stopped, right
):
    assert stable.has_diverged(5.0, curve, stopped=stopped) == right
