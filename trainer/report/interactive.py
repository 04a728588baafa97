"""Charts that zoom, by Bokeh, whose code the page contains: it needs no network.

A reader without JavaScript sees the same charts as pictures (`trainer.report.charts`).
"""

from collections.abc import Sequence
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

from trainer.report.charts import Chart, Line, thinned, value_range

AXES = ("step", "tokens", "hours")
TOOLS = "box_zoom,pan,wheel_zoom,reset,save"
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
  return Bokeh.documents.flatMap((doc) => doc.roots());
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
    "<p class=controls hidden>x-axis: "
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
    """Return a line's points by column, at most as many as a picture has."""
    points = thinned(line.xs, line.ys)
    steps = [x for x, _ in points]
    tokens, hours = line.clock.at(steps)
    return {
        "x": steps,
        "y": [y for _, y in points],
        "step": steps,
        "tokens": tokens,
        "hours": hours,
    }


def plot(chart: Chart, x_range: DataRange1d) -> Any:
    """Return a Bokeh figure of a chart that has values.

    `x_range`: of all figures of the page, which zoom together.
    """
    low, high, _ = value_range(chart.shown, from_zero=chart.from_zero)
    positive = [y for line in chart.shown for y in line.ys if y > 0]
    fig = figure(
        height=250,
        sizing_mode="stretch_width",
        tools=TOOLS,
        active_drag="box_zoom",
        x_range=x_range,
        y_range=Range1d(start=low, end=high),
        x_axis_label=AXES[0],
        background_fill_color=None,
        border_fill_color=None,
        toolbar_location="right",
    )
    fig.toolbar.logo = None
    fig.axis.formatter = CustomJSTickFormatter(code=NUMBER)
    is_positive = all(not y <= 0 for line in chart.shown for y in line.ys)
    if is_positive and positive:
        fig.tags = [low, high, 0.95 * min(positive)]
    named = []
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
        if line.dots or len(line.xs) == 1:
            fig.scatter("x", "y", source=source, color=line.color, size=5)
        if not line.faint:
            named.append((renderer, line.name))
    for renderer, name in named:
        fig.add_tools(
            HoverTool(
                renderers=[renderer],
                tooltips=[
                    (name or chart.title, "@y{0.0000[00]}"),
                    ("step", "@step{0,0}"),
                    ("tokens", "@tokens{0.0a}"),
                    ("hours", "@hours{0.000}"),
                ],
                visible=False,
            )
        )
    if chart.marks:
        steps = [m.x for m in chart.marks]
        clock = chart.shown[0].clock
        tokens, hours = clock.at(steps)
        marks = {
            "x": steps,
            "step": steps,
            "tokens": tokens,
            "hours": hours,
            "color": [m.color for m in chart.marks],
            "text": [m.text for m in chart.marks],
        }
        spans = fig.vspan(
            "x", source=ColumnDataSource(marks), color="color", line_dash="dashed"
        )
        fig.add_tools(HoverTool(renderers=[spans], tooltips="@text", visible=False))
    return fig


def drawn(charts: Sequence[Chart]) -> tuple[list[str], str]:
    """Return the element of each chart, and the scripts that fill them."""
    shown = [chart for chart in charts if chart.shown]
    if not shown:
        return [""] * len(charts), ""
    x_range = DataRange1d()
    script, elements = components([plot(chart, x_range) for chart in shown])
    library = Resources(mode="inline", components=["bokeh"]).render_js()
    remaining = iter(elements)
    filled = [next(remaining) if chart.shown else "" for chart in charts]
    return filled, f"{library}<script>{SCRIPT}</script>{script}"
