"""The loss curve of a run as a picture, for notebooks."""

import io

from matplotlib.figure import Figure

from trainer.report.charts import Chart, value_range


def curve_picture(chart: Chart) -> bytes:
    """Return a PNG of a chart with a finite value."""
    # pyplot would register the figure globally, which a notebook may then show twice.
    figure = Figure(figsize=(6.4, 2.8), layout="tight")
    axes = figure.subplots()
    for line in chart.shown:
        axes.plot(
            line.xs,
            line.ys,
            color=line.color,
            alpha=0.3 if line.faint else 1,
            # A label of None has no entry in the legend.
            label=None if line.faint else line.name,
            marker="o" if line.dots else None,
        )
    # The report clips isolated spikes in the same way.
    low, high, _ = value_range(chart.shown)
    axes.set(title=chart.title, xlabel="step", ylabel=chart.unit, ylim=(low, high))
    axes.legend()
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()
