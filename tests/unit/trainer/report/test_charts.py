"""The part of a chart's values that is shown."""

import pytest

from trainer.report.charts import Line, value_range

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
