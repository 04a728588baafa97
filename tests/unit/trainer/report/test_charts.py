"""The part of a chart's values that is shown."""

import math

import pytest

from trainer.report.charts import (
    MAX_POINTS,
    Line,
    smoothed,
    thinned,
    value_range,
)

NAN = math.nan


def test_a_running_median_leaves_out_values_that_are_not_finite_and_bears_spikes():
    medians = smoothed([1.0, 3.0, NAN, 5.0, 900.0, 6.0], 3)
    assert medians == [1.0, 3.0, 3.0, 5.0, 900.0, 6.0]
    assert math.isnan(smoothed([NAN, 1.0], 1)[0])


def test_a_long_line_keeps_its_extremes_and_gaps():
    ys = [1.0 + 0.001 * (i % 7) for i in range(10_000)]
    ys[1234], ys[5678], ys[9000] = 50.0, -3.0, NAN
    points = thinned(range(10_000), ys)
    assert len(points) <= 1.6 * MAX_POINTS
    extremes = [p for p in points if abs(p[1] - 1.0) > 0.1]
    assert extremes == [(1234, 50.0), (5678, -3.0)]
    assert sum(math.isnan(y) for _, y in points) == 1


FALL = [5.6, 5.0, 4.4, 3.9, 3.5, *(3.2 - 0.01 * i for i in range(40))]


@pytest.mark.parametrize(
    ("ys", "least", "most", "count"),
    [
        ([1.0 + i / 1000 for i in range(1000)] + [1e6] * 3, 2.0, 2.5, 3),
        (FALL, 5.6, 7.0, 0),
        ([*FALL[:13], 40.0, 4.8, *FALL[15:]], 5.6, 7.0, 1),
    ],
)
def test_a_few_values_far_above_the_rest_are_cut_off_and_counted(
    ys, least, most, count
):
    _, high, above = value_range([Line("", range(len(ys)), ys)])
    assert (least < high < most, above) == (True, count)
