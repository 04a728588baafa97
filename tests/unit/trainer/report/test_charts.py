"""The part of a chart's values that is shown."""

import math

import pytest
from run_records import run_records

from trainer.report.charts import Line, StepAxes, value_range

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


def test_a_row_counts_the_time_of_all_steps_since_the_row_before():
    logged = [
        {"step": step, "tokens": step * 8, "perf/step_ms": ms}
        for step, ms in ((10, 9e9), (20, 3.6e6), (40, 7.2e6), (50, math.nan))
    ]
    axes = run_records(logged).step_axes
    assert (axes.steps, axes.tokens) == ([10, 20, 40, 50], [80, 160, 320, 400])
    assert axes.hours == [0, 10, 50, 50]


def test_tokens_and_hours_at_a_step_are_interpolated_and_unknown_without_steps():
    axes = StepAxes([0, 10], [0, 5120], [0, 2])
    assert axes.at([5, 10]) == ([2560, 5120], [1, 2])
    assert all(math.isnan(x) for values in StepAxes().at([5]) for x in values)
