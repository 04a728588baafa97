"""Line charts as SVG text, without a library, for pages that need no network."""

import bisect
import colorsys
import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trainer.observe.display import short

WIDTH, HEIGHT = 560, 240  # of a chart, in the units of its view box
LEFT, RIGHT, TOP, BOTTOM = 58, 26, 14, 30  # around the plot
MOST_POINTS = 600  # of a line, which keeps the minimum and maximum of each part
# A range beyond this multiple of that of the usual values is cut off. Usual are the
# lowest 95%, and of the lowest 99% those up to the highest median of SPIKE values in a
# row: a loss before it falls, but no spike.
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
class Clock:
    """Tokens and hours of a run at its steps; without steps it knows neither."""

    steps: Sequence[float] = ()
    tokens: Sequence[float] = ()
    hours: Sequence[float] = ()

    def at(self, steps: Sequence[float]) -> tuple[list[float], list[float]]:
        """Return tokens and hours at these steps, between known ones linearly."""
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
      clock: tokens and hours of the steps.
      dots: whether points are marked, for short series.
      faint: whether it is the raw series behind a smoothed one; not in the legend.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: str = COLORS[0]
    dots: bool = False
    faint: bool = False
    clock: Clock = Clock()


@dataclass(frozen=True)
class Mark:
    """An event at x: a vertical line with a tooltip."""

    x: float
    text: str
    color: str


@dataclass(frozen=True)
class Chart:
    """Lines over steps.

    Attributes:
      unit: of the values, beside the title.
      from_zero: whether the vertical axis starts at zero.
      x_range: first and last step; None: those of the lines.
    """

    title: str
    lines: Sequence[Line]
    unit: str = ""
    marks: Sequence[Mark] = ()
    from_zero: bool = False
    x_range: tuple[float, float] | None = None

    @property
    def shown(self) -> list[Line]:
        """The lines that have a finite value."""
        return [line for line in self.lines if any(map(math.isfinite, line.ys))]


class Choice(NamedTuple):
    """A value of one of several choices.

    Attributes:
      choice: its index.
      text: the tooltip.
      group: the line that it belongs to.
    """

    choice: int
    y: float
    text: str
    group: str = ""


@dataclass(frozen=True)
class Scale:
    """A linear map from values to coordinates."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value, clamped to the range."""
        clamped = min(max(value, self.low), self.high)
        share = (clamped - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def smoothed(ys: Sequence[float], window: int) -> list[float]:
    """Return the running median of the finite values among the last `window`.

    A median ignores spikes. It is NaN where no value is finite.
    """
    medians: list[float] = []
    ordered: list[float] = []
    for i, new in enumerate(ys):
        if math.isfinite(new):
            bisect.insort(ordered, new)
        if i >= window and math.isfinite(ys[i - window]):
            del ordered[bisect.bisect_left(ordered, ys[i - window])]
        medians.append(ordered[len(ordered) // 2] if ordered else math.nan)
    return medians


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Return at most `count` + 1 round numbers within [low, high].

    They are 1, 2 or 5 times a power of ten apart.
    """
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    steps = (power, 2 * power, 5 * power, 10 * power)
    step = next(step for step in steps if step >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def tick_label(value: float, step: float) -> str:
    """Return a tick's number, with the digits that ticks `step` apart need."""
    if value == 0:
        return "0"
    if abs(value) >= 1e4:
        return short(value)
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def value_range(lines: Sequence[Line], *, from_zero: bool) -> tuple[float, float, int]:
    """Return the lowest and highest value to show, and the number of values above."""
    values = sorted(y for line in lines for y in line.ys if math.isfinite(y))
    if not values:
        return 0.0, 1.0, 0
    low, high = (min(0.0, values[0]) if from_zero else values[0]), values[-1]
    medians = [
        y
        for line in lines
        for y in (line.ys if line.dots else smoothed(line.ys, SPIKE))
        if math.isfinite(y)
    ]
    most, nearly_all = (
        values[min(len(values) - 1, int(share * len(values)))] for share in (0.95, 0.99)
    )
    usual = min(nearly_all, max(most, *medians))
    if high - low > CLIPPED * (usual - low) > 0:
        high = low + 1.2 * (usual - low)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    high += margin
    if not (from_zero and low == 0):
        low -= margin
    return low, high, sum(y > high for y in values)


def chart_figure(chart: Chart, drawn: str = "") -> str:
    """Return a figure with title, legend and axes, or with "not recorded".

    Args:
      chart: what to draw.
      drawn: the element that JavaScript fills; the picture is for readers without.
    """
    shown = chart.shown
    named = [line for line in shown if not line.faint]
    head = caption(chart.title, chart.unit, {x.name: x.color for x in named})
    if not shown:
        return f"<figure>{head}<p>not recorded</p></figure>"
    xs = [x for line in shown for x in line.xs]
    first, last = chart.x_range or (min(xs), max(xs))
    across = Scale(first, last if last > first else first + 1, LEFT, WIDTH - RIGHT)
    low, high, above = value_range(shown, from_zero=chart.from_zero)
    up = Scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = [
        *axes(across, up),
        *(mark(m, across) for m in chart.marks),
        *(part for x in shown for part in draw(x, across, up)),
    ]
    clipped = f"{above} value{'s' * (above > 1)} above the top" if above else ""
    if above and not drawn:
        parts.append(
            f'<text x="{WIDTH - RIGHT}" y="11" text-anchor="end">{clipped}</text>'
        )
    svg = picture(f"{chart.title} by step", parts)
    if drawn:
        note = f"<small>{clipped}</small>" if above else ""
        return f"<figure>{head}{drawn}{note}<noscript>{svg}</noscript></figure>"
    return f"<figure>{head}{svg}</figure>"


def by_choice(
    title: str, choices: Sequence[str], points: Sequence[Choice], *, unit: str = ""
) -> str:
    """Return a figure of values over choices, in the given order.

    A line for each group joins the lowest value of each choice.
    """
    shown = [p for p in points if math.isfinite(p.y)]
    groups = dict.fromkeys(p.group for p in shown)
    colors = {group: color_number(i) for i, group in enumerate(groups)}
    head = caption(title, unit, colors)
    if not shown:
        return f"<figure>{head}<p>not recorded</p></figure>"
    across = Scale(-0.5, len(choices) - 0.5, LEFT, WIDTH - RIGHT)
    low, high, _ = value_range(
        [Line("", [0.0] * len(shown), [p.y for p in shown], dots=True)], from_zero=False
    )
    up = Scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = list(heights(up))
    for group, color in colors.items():
        best: dict[int, float] = {}
        for p in sorted(p for p in shown if p.group == group):
            best.setdefault(p.choice, p.y)
        path = "L".join(f"{across(i):.1f},{up(y):.1f}" for i, y in best.items())
        parts.append(f'<path stroke="{color}" d="M{path}"/>')
    for p in shown:
        place = f'cx="{across(p.choice):.1f}" cy="{up(p.y):.1f}"'
        parts.append(
            f'<circle {place} r="3.5" fill="{colors[p.group]}">'
            f"<title>{html.escape(p.text)}</title></circle>"
        )
    for i, choice in enumerate(choices):
        place = f'x="{across(i):.1f}" y="{HEIGHT - BOTTOM + 15}"'
        parts.append(f'<text {place} text-anchor="middle">{html.escape(choice)}</text>')
    return f"<figure>{head}{picture(title, parts)}</figure>"


def caption(title: str, unit: str, colors: Mapping[str, str]) -> str:
    """Return the caption of a figure, with a legend of the names and their colors."""
    legend = "".join(
        f'<span><i style="background:{color}"></i>{html.escape(name)}</span> '
        for name, color in colors.items()
        if name
    )
    return (
        f"<figcaption><b>{html.escape(title)}</b>"
        f" <small>{html.escape(unit)}</small> {legend}</figcaption>"
    )


def picture(label: str, parts: Iterable[str]) -> str:
    """Return a plot as SVG: its parts and its frame."""
    frame = f'<path class="frame" d="M{LEFT},{TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>'
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="{html.escape(label, quote=True)}">{"".join(parts)}{frame}</svg>'
    )


def heights(up: Scale) -> Iterator[str]:
    """Yield grid and numbers of the vertical axis."""
    values = ticks(up.low, up.high)
    for value in values:
        y = up(value)
        yield (
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}"'
            f' y2="{y:.1f}"/>'
        )
        spacing = values[1] - values[0] if len(values) > 1 else abs(value) or 1.0
        number = tick_label(value, spacing)
        yield (
            f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{number}</text>'
        )


def axes(across: Scale, up: Scale) -> Iterator[str]:
    """Yield grid and numbers of both axes."""
    yield from heights(up)
    for value in ticks(across.low, across.high):
        if value == int(value):
            yield (
                f'<text x="{across(value):.1f}" y="{HEIGHT - BOTTOM + 15}"'
                f' text-anchor="middle">{int(value):,}</text>'
            )
    yield f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 2}" text-anchor="end">step</text>'


def mark(m: Mark, across: Scale) -> str:
    """Return a vertical line with its tooltip."""
    x = across(m.x)
    where = f'x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"'
    return (
        f'<line class="mark" {where}'
        f' stroke="{m.color}"><title>{html.escape(m.text)}</title></line>'
    )


def draw(line: Line, across: Scale, up: Scale) -> Iterator[str]:
    """Yield a path for each stretch of finite values, and dots."""
    for stretch in stretches(thinned(line.xs, line.ys)):
        path = "L".join(f"{across(x):.1f},{up(y):.1f}" for x, y in stretch)
        kind = ' class="faint"' if line.faint else ""
        yield f'<path{kind} stroke="{line.color}" d="M{path}"/>'
        if not line.dots and len(stretch) > 1:
            continue
        for x, y in stretch:
            text = html.escape(f"{line.name} {y:.6g} after step {x:,.0f}")
            place = f'cx="{across(x):.1f}" cy="{up(y):.1f}"'
            yield (
                f'<circle {place} r="3"'
                f' fill="{line.color}"><title>{text}</title></circle>'
            )


def thinned(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """Return at most `MOST_POINTS` points, with the extremes of equal parts.

    A part with a gap keeps the gap.
    """
    size = max(1, math.ceil(2 * len(xs) / MOST_POINTS))
    points = list(zip(xs, ys, strict=True))
    if size <= 2:
        return points
    remaining = []
    for i in range(0, len(points), size):
        part = points[i : i + size]
        gaps = [p for p in part if not math.isfinite(p[1])]
        finite = sorted((p for p in part if math.isfinite(p[1])), key=lambda p: p[1])
        remaining += sorted({*finite[:1], *finite[-1:], *gaps[:1]})
    return remaining


def stretches(points: list[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    """Yield the runs of points between gaps."""
    stretch: list[tuple[float, float]] = []
    for point in [*points, (math.nan, math.nan)]:
        if math.isfinite(point[1]):
            stretch.append(point)
        elif stretch:
            yield stretch
            stretch = []
