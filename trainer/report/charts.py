"""Line charts as SVG text, without a library, for pages that need no network."""

import bisect
import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainer.observe.display import short

WIDTH, HEIGHT = 560, 240  # of a chart, in the units of its view box
LEFT, RIGHT, TOP, BOTTOM = 58, 26, 14, 30  # around the plot
MOST_POINTS = 600  # of a line, which keeps the minimum and maximum of each part
CLIPPED = 3.0  # a range beyond this multiple of that of 99% of the values is cut off
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
    return COLORS[i] if i < len(COLORS) else f"hsl({137.5 * i % 360:.0f} 65% 42%)"


@dataclass(frozen=True)
class Line:
    """A series, in which values that are not finite leave a gap.

    Attributes:
      dots: whether points are marked, for short series.
      faint: whether it is the raw series behind a smoothed one; not in the legend.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: str = COLORS[0]
    dots: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Mark:
    """An event at x: a vertical line with a tooltip."""

    x: float
    text: str
    color: str


class Choice(NamedTuple):
    """A value of one of several choices: the choice's index, the value, its tooltip."""

    choice: int
    y: float
    text: str


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
    usual = values[min(len(values) - 1, int(0.99 * len(values)))]
    if high - low > CLIPPED * (usual - low) > 0:
        high = low + 1.2 * (usual - low)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    high += margin
    if not (from_zero and low == 0):
        low -= margin
    return low, high, sum(y > high for y in values)


def chart(
    title: str,
    lines: Sequence[Line],
    *,
    unit: str = "",
    marks: Sequence[Mark] = (),
    from_zero: bool = False,
    x_range: tuple[float, float] | None = None,
) -> str:
    """Return a figure with title, legend and axes, or with "not recorded"."""
    shown = [line for line in lines if any(map(math.isfinite, line.ys))]
    named = [line for line in shown if not line.faint]
    swatches = {
        x.name: f'<i style="background:{x.color}"></i>' for x in named if x.name
    }
    legend = "".join(
        f"<span>{swatch}{html.escape(name)}</span> "
        for name, swatch in swatches.items()
    )
    head = (
        f"<figcaption><b>{html.escape(title)}</b> <small>{html.escape(unit)}</small>"
        f" {legend}</figcaption>"
    )
    if not shown:
        return f"<figure>{head}<p>not recorded</p></figure>"
    xs = [x for line in shown for x in line.xs]
    first, last = x_range or (min(xs), max(xs))
    across = Scale(first, last if last > first else first + 1, LEFT, WIDTH - RIGHT)
    low, high, above = value_range(shown, from_zero=from_zero)
    up = Scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = [
        *axes(across, up),
        *(mark(m, across) for m in marks),
        *(part for x in shown for part in draw(x, across, up)),
    ]
    if above:
        parts.append(
            f'<text x="{WIDTH - RIGHT}" y="11" text-anchor="end">{above} values above'
            " the top</text>"
        )
    label = html.escape(f"{title} by step", quote=True)
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="{label}">{"".join(parts)}</svg>'
    )
    return f"<figure>{head}{svg}</figure>"


def by_choice(
    title: str, choices: Sequence[str], points: Sequence[Choice], *, unit: str = ""
) -> str:
    """Return a figure of values over choices, in the given order.

    A line joins the lowest value of each choice.
    """
    shown = [p for p in points if math.isfinite(p.y)]
    head = (
        f"<figcaption><b>{html.escape(title)}</b>"
        f" <small>{html.escape(unit)}</small></figcaption>"
    )
    if not shown:
        return f"<figure>{head}<p>not recorded</p></figure>"
    across = Scale(-0.5, len(choices) - 0.5, LEFT, WIDTH - RIGHT)
    low, high, _ = value_range(
        [Line("", [0.0] * len(shown), [p.y for p in shown])], from_zero=False
    )
    up = Scale(low, high, HEIGHT - BOTTOM, TOP)
    best = {
        i: min(p.y for p in shown if p.choice == i)
        for i in sorted({p.choice for p in shown})
    }
    path = "L".join(f"{across(i):.1f},{up(y):.1f}" for i, y in best.items())
    parts = [*heights(up), f'<path stroke="{COLORS[0]}" d="M{path}"/>']
    for p in shown:
        place = f'cx="{across(p.choice):.1f}" cy="{up(p.y):.1f}"'
        parts.append(
            f'<circle {place} r="3.5"'
            f' fill="{COLORS[0]}"><title>{html.escape(p.text)}</title></circle>'
        )
    for i, choice in enumerate(choices):
        place = f'x="{across(i):.1f}" y="{HEIGHT - BOTTOM + 15}"'
        parts.append(f'<text {place} text-anchor="middle">{html.escape(choice)}</text>')
    parts.append(
        f'<path class="frame" d="M{LEFT},{TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>'
    )
    label = html.escape(title, quote=True)
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="{label}">{"".join(parts)}</svg>'
    )
    return f"<figure>{head}{svg}</figure>"


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
    """Yield grid, frame and numbers of both axes."""
    yield from heights(up)
    for value in ticks(across.low, across.high):
        if value == int(value):
            yield (
                f'<text x="{across(value):.1f}" y="{HEIGHT - BOTTOM + 15}"'
                f' text-anchor="middle">{int(value):,}</text>'
            )
    yield f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 2}" text-anchor="end">step</text>'
    yield f'<path class="frame" d="M{LEFT},{TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>'


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
