"""Charts of a page: their lines, and the part of the values that is shown.

`trainer.report.interactive` draws them.
"""

import bisect
import colorsys
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# About one for each pixel of a chart's width: two charts share 1,200 pixels.
MAX_POINTS = 600  # points of a line
# Clip the y-axis above CLIPPED times the usual range. Usual: up to the 95th percentile,
# or the largest median of SPIKE consecutive values, at most the 99th percentile. So
# high losses at the start are shown; isolated spikes are not.
CLIPPED = 2.0
SPIKE = 5
# Distinct in print and for the color-blind (Okabe and Ito, "Color Universal Design",
# 2008).
COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#7f7f7f",
    "#000000",
)

LIMIT_COLOR = "#7f7f7f"


def color_number(i: int) -> str:
    """Return the i-th of any number of colors.

    From the ninth on they are not distinct for the color-blind.
    """
    if i < len(COLORS):
        return COLORS[i]
    # hues by the golden angle: neighbors are far apart
    parts = colorsys.hls_to_rgb(137.5 * i / 360 % 1, 0.42, 0.65)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


@dataclass(frozen=True)
class StepAxes:
    """Tokens and hours of a run at its steps; both are unknown without steps."""

    steps: Sequence[float] = ()
    tokens: Sequence[float] = ()
    hours: Sequence[float] = ()

    def at(self, steps: Sequence[float]) -> tuple[list[float], list[float]]:
        """Return tokens and hours at these steps, interpolated linearly."""
        # np.interp raises for an empty list. Beyond its ends it returns their values,
        # which is right for an event behind the last row.
        if not self.steps:
            return [math.nan] * len(steps), [math.nan] * len(steps)
        return (
            np.interp(steps, self.steps, self.tokens).tolist(),
            np.interp(steps, self.steps, self.hours).tolist(),
        )


@dataclass(frozen=True)
class Line:
    """A series, in which values that are not finite leave a gap.

    Attributes:
      axes: tokens and hours of the steps.
      dots: whether points are marked, for short series.
      faint: whether it is the raw series behind a smoothed one; not in the legend.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: str = COLORS[0]
    dots: bool = False
    faint: bool = False
    axes: StepAxes = StepAxes()


@dataclass(frozen=True)
class EventMark:
    """An event at x: a vertical line with a tooltip."""

    x: float
    text: str
    color: str


@dataclass(frozen=True)
class Chart:
    """Lines over steps.

    Attributes:
      unit: of the values, after the title.
      from_zero: whether the vertical axis starts at zero.
      limit: a value that is drawn as a horizontal line; None: none.
    """

    title: str
    lines: Sequence[Line]
    unit: str = ""
    from_zero: bool = False
    limit: float | None = None
    event_marks: Sequence[EventMark] = ()

    @property
    def shown(self) -> list[Line]:
        """The lines that have a finite value, and the limit."""
        shown = [line for line in self.lines if any(map(math.isfinite, line.ys))]
        if not shown or self.limit is None:
            return shown
        # The first line's axes serve the limit: a chart with a limit shows one run.
        xs = (min(min(line.xs) for line in shown), max(max(line.xs) for line in shown))
        ys = (self.limit, self.limit)
        return [*shown, Line("limit", xs, ys, LIMIT_COLOR, axes=shown[0].axes)]


class SweepPoint(NamedTuple):
    """The result of a run of a sweep.

    Attributes:
      x: the value of the swept key.
      text: the tooltip.
      group: the line that it belongs to.
    """

    x: str
    y: float
    text: str
    group: str = ""


@dataclass(frozen=True)
class SweepChart:
    """Results over the values of a key, in the given order.

    A line for each group joins the lowest result of each value.

    Attributes:
      xs: the values of the swept key.
      unit: of the results, after the title.
    """

    title: str
    xs: Sequence[str]
    points: Sequence[SweepPoint]
    unit: str = ""

    @property
    def shown(self) -> list[SweepPoint]:
        """The points with a finite value."""
        return [point for point in self.points if math.isfinite(point.y)]


def smoothed(ys: Sequence[float], window: int) -> list[float]:
    """Return the running median of the finite values among the last `window`.

    A median ignores spikes. It is NaN where no value is finite.
    """
    medians: list[float] = []
    # The window stays sorted: each step inserts one value and deletes one, where a sort
    # of every window would take its whole length.
    ordered: list[float] = []
    for i, y in enumerate(ys):
        if math.isfinite(y):
            bisect.insort(ordered, y)
        if i >= window and math.isfinite(ys[i - window]):
            del ordered[bisect.bisect_left(ordered, ys[i - window])]
        # The upper one of two middle values, so that each value shown was measured.
        medians.append(ordered[len(ordered) // 2] if ordered else math.nan)
    return medians


def value_range(
    lines: Sequence[Line], *, from_zero: bool = False
) -> tuple[float, float, int]:
    """Return the lowest and highest value to show, and the number of values above."""
    values = sorted(y for line in lines for y in line.ys if math.isfinite(y))
    if not values:
        return 0.0, 1.0, 0
    # An axis from zero must still show values below it.
    low = min(0.0, values[0]) if from_zero else values[0]
    high = values[-1]
    medians: list[float] = []
    for line in lines:
        # A series with dots is short, and each of its values counts: a median of five
        # would hide the high ones.
        ys = line.ys if line.dots else smoothed(line.ys, SPIKE)
        medians += filter(math.isfinite, ys)
    # Of up to 20 values both are the largest, so a short series is never clipped.
    percentile_95, percentile_99 = (
        values[min(len(values) - 1, int(share * len(values)))] for share in (0.95, 0.99)
    )
    usual = min(percentile_99, max(percentile_95, *medians))
    # Where nearly all values are equal, the usual range is 0 and no scale to clip by.
    if high - low > CLIPPED * (usual - low) > 0:
        high = low + 1.2 * (usual - low)
    # A constant series has no range, and one of zeros no size: an axis needs two ends.
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    high += margin
    # Below an axis from zero, a margin would look like negative values.
    if not (from_zero and low == 0):
        low -= margin
    return low, high, sum(y > high for y in values)


def thinned(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """Return at most `MAX_POINTS` points: the minimum and maximum of each bin.

    A bin with a gap keeps the gap, as one more point.
    """
    # Means, or every n-th point, would hide single spikes, which readers look for.
    size = max(1, math.ceil(2 * len(xs) / MAX_POINTS))
    points = list(zip(xs, ys, strict=True))
    if size <= 2:
        return points
    remaining = []
    for i in range(0, len(points), size):
        part = points[i : i + size]
        gaps = [p for p in part if not math.isfinite(p[1])]
        finite = sorted((p for p in part if math.isfinite(p[1])), key=lambda p: p[1])
        # A set, as the minimum of a bin may be its maximum; sorted by step again.
        remaining += sorted({*finite[:1], *finite[-1:], *gaps[:1]})
    return remaining
