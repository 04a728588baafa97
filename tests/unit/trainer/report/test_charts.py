"""What a chart shows of its values, and what it leaves out."""

import math

from trainer.report.charts import (
    MAX_POINTS,
    Chart,
    Clock,
    Line,
    smoothed,
    thinned,
    value_range,
)

NAN = math.nan


def test_a_median_over_a_window_leaves_out_what_is_not_finite_and_bears_spikes():
    assert smoothed([1.0, 3.0, NAN, 5.0, 900.0, 6.0], 3) == [
        1.0,
        3.0,
        3.0,
        5.0,
        900.0,
        6.0,
    ]
    assert math.isnan(smoothed([NAN, 1.0], 1)[0])


def test_a_long_line_keeps_its_extremes_and_gaps():
    ys = [1.0 + 0.001 * (i % 7) for i in range(10_000)]
    ys[1234], ys[5678], ys[9000] = 50.0, -3.0, NAN
    points = thinned(range(10_000), ys)
    assert len(points) <= 1.6 * MAX_POINTS
    assert [p for p in points if not 0.9 < p[1] < 1.1 and p[1] == p[1]] == [
        (1234, 50.0),
        (5678, -3.0),
    ]
    assert sum(math.isnan(y) for _, y in points) == 1


def test_a_few_values_far_above_the_rest_are_cut_off_and_counted():
    ys = [1.0 + i / 1000 for i in range(1000)] + [1e6] * 3
    low, high, above = value_range([Line("", range(1003), ys)], from_zero=False)
    assert 0.9 < low < 1.0
    assert 2.0 < high < 2.5
    assert above == 3


def test_a_spike_of_a_short_run_is_cut_off_and_the_fall_from_its_start_is_not():
    ys = [5.6, 5.0, 4.4, 3.9, 3.5, *(3.2 - 0.01 * i for i in range(40))]
    assert value_range([Line("", range(45), ys)], from_zero=False)[2] == 0
    ys[13:15] = [40.0, 4.8]
    _, high, above = value_range([Line("", range(45), ys)], from_zero=False)
    assert (5.6 < high < 7.0, above) == (True, 1)


def test_a_limit_is_drawn_across_lines_that_have_values():
    assert Chart("T", [Line("x", [1], [NAN])], limit=2.0).shown == []
    line, limit = Chart("T", [Line("x", [3, 9], [1.0, 1.5])], limit=2.0).shown
    assert (line.name, limit.xs, limit.ys) == ("x", (3, 9), (2.0, 2.0))


def test_tokens_and_hours_lie_between_those_of_the_steps_with_rows():
    clock = Clock([10, 20], [100, 200], [1.0, 3.0])
    assert clock.at([10, 15, 20]) == ([100, 150, 200], [1.0, 2.0, 3.0])
    assert all(map(math.isnan, Clock().at([1])[0]))
