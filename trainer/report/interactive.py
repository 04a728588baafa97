"""Charts that zoom, by Bokeh, whose code the page contains: it needs no network."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from bokeh.embed import components
from bokeh.models import (
    ColumnDataSource,
    CustomJSTickFormatter,
    DataRange1d,
    HoverTool,
    Range1d,
)
from bokeh.plotting import figure
from bokeh.resources import Resources

from trainer.report.charts import (
    Chart,
    Line,
    SweepChart,
    color_number,
    thinned,
    value_range,
)
from trainer.text import plural

# The first one is what the page opens with. Each is a column of every data source.
AXES = ("step", "tokens", "hours")
TOOLS = "box_zoom,pan,wheel_zoom,reset,save"
# Bokeh writes ticks from 10^5 on in scientific notation. The unary plus removes the
# zeros that toPrecision leaves at the end.
NUMBER = """
const unit = [[1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([u]) => Math.abs(tick) >= u);
const [by, name] = unit || [1, ""];
return +(tick / by).toPrecision(4) + name;
"""
# The column `x` is a copy of the chosen one, which glyphs and range follow. A plot of
# positive values has tags: its range, and the lowest value of a logarithmic axis.
SCRIPT = """
document.querySelector(".controls").hidden = false;
function plots() {
  const all = Bokeh.documents.flatMap((doc) => doc.roots());
  return all.filter((plot) => plot.name != "sweep");
}
function showX(name) {
  for (const plot of plots()) {
    plot.below[0].axis_label = name;
    for (const renderer of plot.renderers) {
      const source = renderer.data_source;
      source.data.x = source.data[name];
      source.change.emit();
    }
  }
}
function showLog(on) {
  for (const plot of plots().filter((plot) => plot.tags.length)) {
    const [low, high, lowest] = plot.tags;
    const make = (name) => new (Bokeh.Models.get(name))();
    const ticker = make(on ? "LogTicker" : "BasicTicker");
    plot.y_scale = make(on ? "LogScale" : "LinearScale");
    plot.left[0].ticker = ticker;
    plot.center.filter((g) => g.dimension == 1).forEach((g) => (g.ticker = ticker));
    plot.y_range.setv({ start: on ? lowest : low, end: high });
  }
}
"""
CONTROLS = (
    # The controls are hidden until SCRIPT runs, since they do nothing without it.
    "<noscript><p>The charts need JavaScript; metrics.jsonl has their"
    " numbers.</p></noscript><p class=controls hidden>x-axis: "
    + " ".join(
        f"<label><input type=radio name=x onclick=\"showX('{name}')\""
        f"{' checked' * (name == AXES[0])}>{name}</label>"
        for name in AXES
    )
    + ' &nbsp; <label><input type=checkbox onclick="showLog(this.checked)">logarithmic'
    " y-axis</label> <small>drag over a chart to zoom; its tools are on the"
    " right</small></p>"
)


def columns(line: Line) -> dict[str, Any]:
    """Return a line's points by column, at most `MAX_POINTS`."""
    # Every point is five numbers in a file that people send to each other.
    points = thinned(line.xs, line.ys)
    steps = [x for x, _ in points]
    tokens, hours = line.axes.at(steps)
    return {
        "x": steps,
        "y": [y for _, y in points],
        "step": steps,
        "tokens": tokens,
        "hours": hours,
    }


def empty_plot(low: float, high: float, **settings: Any) -> Any:
    """Return a Bokeh figure without glyphs, whose y-axis goes from `low` to `high`."""
    fig = figure(
        height=250,
        sizing_mode="stretch_width",
        tools=TOOLS,
        active_drag="box_zoom",
        # A DataRange1d would follow the data, and show the spikes that value_range
        # clips.
        y_range=Range1d(start=low, end=high),
        background_fill_color=None,
        border_fill_color=None,
        toolbar_location="right",
        **settings,
    )
    # The logo is a link to Bokeh's site in each chart.
    fig.toolbar.logo = None
    fig.yaxis.formatter = CustomJSTickFormatter(code=NUMBER)
    return fig


def plot(chart: Chart, x_range: DataRange1d) -> Any:
    """Return a Bokeh figure of a chart with a finite value.

    `x_range`: of all figures of the page, which zoom together.
    """
    low, high, _ = value_range(chart.shown, from_zero=chart.from_zero)
    fig = empty_plot(low, high, x_range=x_range, x_axis_label=AXES[0])
    fig.xaxis.formatter = CustomJSTickFormatter(code=NUMBER)
    # NaN leaves a gap on any axis.
    # Infinite values count: one of -inf must not get a logarithmic axis.
    lowest = min(y for line in chart.shown for y in line.ys if not math.isnan(y))
    # A logarithmic axis cannot show zero; from_zero's `low` is 0, so it needs a start
    # of its own.
    if lowest > 0:
        fig.tags = [low, high, 0.95 * lowest]
    for line in chart.shown:
        source = ColumnDataSource(columns(line))
        renderer = fig.line(
            "x",
            "y",
            source=source,
            color=line.color,
            line_width=1 if line.faint else 1.6,
            line_alpha=0.3 if line.faint else 1,
        )
        # A line through one point is invisible.
        if line.dots or len(line.xs) == 1:
            fig.scatter("x", "y", source=source, color=line.color, size=5)
        # The smoothed line has the tooltip: two at one place would cover each other.
        if line.faint:
            continue
        # Invisible, because each hover tool would add a button to the toolbar.
        fig.add_tools(
            HoverTool(
                renderers=[renderer],
                tooltips=[
                    (line.name or chart.title, "@y{0.0000[00]}"),
                    ("step", "@step{0,0}"),
                    ("tokens", "@tokens{0.0a}"),
                    ("hours", "@hours{0.000}"),
                ],
                visible=False,
            )
        )
    if chart.event_marks:
        steps = [mark.x for mark in chart.event_marks]
        tokens, hours = chart.shown[0].axes.at(steps)
        # Columns of all AXES, as SCRIPT exchanges x in each source of a chart.
        marks = {
            "x": steps,
            "step": steps,
            "tokens": tokens,
            "hours": hours,
            "color": [mark.color for mark in chart.event_marks],
            "text": [mark.text for mark in chart.event_marks],
        }
        spans = fig.vspan(
            "x", source=ColumnDataSource(marks), color="color", line_dash="dashed"
        )
        fig.add_tools(HoverTool(renderers=[spans], tooltips="@text", visible=False))
    return fig


def plot_sweep(chart: SweepChart) -> Any:
    """Return a Bokeh figure of the results of a sweep."""
    ys = [point.y for point in chart.shown]
    # With dots, so that each run's result counts for the usual range.
    low, high, _ = value_range([Line("", [0.0] * len(ys), ys, dots=True)])
    # SCRIPT leaves plots of this name alone: their x-axis has texts, no steps.
    fig = empty_plot(low, high, name="sweep", x_range=list(chart.xs))
    for group, color in group_colors(chart).items():
        points = [point for point in chart.shown if point.group == group]
        lowest: dict[str, float] = {}
        for point in sorted(points, key=lambda point: point.y):
            lowest.setdefault(point.x, point.y)
        # In the order of the key's values; a line in the order of losses would zigzag.
        ordered = [x for x in chart.xs if x in lowest]
        fig.line(ordered, [lowest[x] for x in ordered], color=color)
        columns = {
            "x": [point.x for point in points],
            "y": [point.y for point in points],
            "text": [point.text for point in points],
        }
        source = ColumnDataSource(columns)
        dots = fig.scatter("x", "y", source=source, color=color, size=7)
        fig.add_tools(HoverTool(renderers=[dots], tooltips="@text", visible=False))
    return fig


def group_colors(chart: SweepChart) -> dict[str, str]:
    """Return the color of each group that has a value."""
    groups = dict.fromkeys(point.group for point in chart.shown)
    return {group: color_number(i) for i, group in enumerate(groups)}


def legend(colors: Mapping[str, str]) -> str:
    """Return names after samples of their colors."""
    return "".join(
        f'<span><i style="background:{color}"></i>{html.escape(name)}</span> '
        for name, color in colors.items()
        # A chart of one unnamed line is named by its title.
        if name
    )


def framed(chart: Chart | SweepChart, element: str) -> str:
    """Return a drawn chart below its title and its legend."""
    note = ""
    if isinstance(chart, SweepChart):
        colors = group_colors(chart)
    else:
        colors = {line.name: line.color for line in chart.shown if not line.faint}
        *_, above = value_range(chart.shown, from_zero=chart.from_zero)
        if above:
            note = f"<small>{plural(above, 'value')} above the top</small>"
    return (
        f"<figure><figcaption><b>{html.escape(chart.title)}</b>"
        f" <small>{html.escape(chart.unit)}</small> {legend(colors)}</figcaption>"
        f"{element}{note}</figure>"
    )


def chart_grid(charts: Sequence[Chart | SweepChart]) -> list[str]:
    """Return the controls, the charts that show values, and the scripts of a page."""
    shown = [chart for chart in charts if chart.shown]
    if not shown:
        return []
    # One object, so that a zoom into one chart zooms all of them to the same steps.
    x_range = DataRange1d()
    plots = []
    for chart in shown:
        if isinstance(chart, SweepChart):
            plots.append(plot_sweep(chart))
        else:
            plots.append(plot(chart, x_range))
    # One call for all: models that are shared, such as x_range, must be in one
    # document.
    script, elements = components(plots)
    # Without Bokeh's widgets, tables and formulas: 1.4 MB in place of 4.3 (3.10).
    library = Resources(mode="inline", components=["bokeh"]).render_js()
    figures = map(framed, shown, elements)
    return [
        CONTROLS,
        f'<div class="charts">{"".join(figures)}</div>',
        f"{library}<script>{SCRIPT}</script>{script}",
    ]
