"""Numbers that people read: ticks, ranges, what is left out of a line and what is
not."""

import math
import xml.etree.ElementTree as ET

import pytest

from trainer.report.charts import (
    MOST_POINTS,
    Chart,
    Clock,
    Line,
    Mark,
    chart_figure,
    smoothed,
    stretches,
    thinned,
    tick_label,
    ticks,
    value_range,
)

NAN = math.nan


def svg(text):
    return ET.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 6, ["0", "1", "2", "3", "4", "5", "6"]),
        (1.3, 5.6, ["2", "3", "4", "5"]),
        (-0.1, 0.35, ["-0.1", "0", "0.1", "0.2", "0.3"]),
        (0, 4e-4, ["0", "1.0e-04", "2.0e-04", "3.0e-04", "4.0e-04"]),
        (0, 23000, ["0", "5000", "10k", "15k", "20k"]),
    ],
)
def test_ticks_are_round_and_written_with_the_digits_they_need(low, high, expected):
    actual = ticks(low, high)
    assert [tick_label(x, actual[1] - actual[0]) for x in actual] == expected


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
    assert len(points) <= 1.6 * MOST_POINTS
    assert [p for p in points if not 0.9 < p[1] < 1.1 and p[1] == p[1]] == [
        (1234, 50.0),
        (5678, -3.0),
    ]
    assert len(list(stretches(points))) == 2


def test_a_few_values_far_above_the_rest_are_cut_off_and_counted():
    ys = [1.0 + i / 1000 for i in range(1000)] + [1e6] * 3
    low, high, above = value_range([Line("", range(1003), ys)], from_zero=False)
    assert 0.9 < low < 1.0
    assert 2.0 < high < 2.5
    assert above == 3
    drawing = chart_figure(Chart("Loss", [Line("x", range(1003), ys)]))
    assert "3 values above the top" in drawing
    paths = svg(drawing).findall("path")
    line = [path for path in paths if path.get("class") != "frame"][-1]
    heights = [float(p.split(",")[1]) for p in line.get("d")[1:].split("L")]
    assert min(heights) >= 14  # inside of the plot


def test_a_spike_of_a_short_run_is_cut_off_and_the_fall_from_its_start_is_not():
    ys = [5.6, 5.0, 4.4, 3.9, 3.5, *(3.2 - 0.01 * i for i in range(40))]
    assert value_range([Line("", range(45), ys)], from_zero=False)[2] == 0
    ys[13:15] = [40.0, 4.8]
    _, high, above = value_range([Line("", range(45), ys)], from_zero=False)
    assert (5.6 < high < 7.0, above) == (True, 1)


def test_a_chart_is_well_formed_whatever_the_names_and_draws_gaps_dots_and_marks():
    lines = [Line('<a & "b">', [1, 2, 3, 4], [1.0, NAN, 2.0, 3.0], dots=True)]
    text = chart_figure(
        Chart("T<", lines, "u&", [Mark(2, "step 2: <skipped>", "#f00")])
    )
    actual = svg(text)
    assert len([p for p in actual.findall("path") if p.get("class") is None]) == 2
    assert len(actual.findall("circle")) == 3
    (mark,) = [line for line in actual.findall("line") if line.get("class") == "mark"]
    assert mark.find("title").text == "step 2: <skipped>"
    assert "&lt;a &amp; &quot;b&quot;&gt;" in text


@pytest.mark.parametrize("ys", [[], [NAN], [2.0], [2.0, 2.0], [0.0, 0.0]])
def test_nothing_and_constants_can_be_drawn(ys):
    text = chart_figure(Chart("T", [Line("x", range(len(ys)), ys)]))
    assert ("not recorded" in text) == (not any(map(math.isfinite, ys)))


def test_tokens_and_hours_lie_between_those_of_the_steps_with_rows():
    clock = Clock([10, 20], [100, 200], [1.0, 3.0])
    assert clock.at([10, 15, 20]) == ([100, 150, 200], [1.0, 2.0, 3.0])
    assert all(map(math.isnan, Clock().at([1])[0]))
