"""Plot a stability study: final loss against learning rate, and both sharpnesses over
the steps.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from scripts.studies.parity_picture import COLORS, DASHES
from scripts.studies.stable import EDGE, Run


def draw(path: Path, runs: Mapping[Any, Run], rates: Sequence[float]) -> None:
    """Write a PNG with three panels.

    Left: every run's final loss (nats) over the learning rate, not above its first
    loss, crosses for those that diverged, and for each item the line through the means.
    Middle and right: the logits' sharpness, and the learning rate over the critical
    one, of every run over its steps; dotted for those that diverged.
    """
    names = list(dict.fromkeys(key.item for key in runs))
    styles = {
        name: (COLORS[i % len(COLORS)], DASHES[i // len(COLORS) % len(DASHES)])
        for i, name in enumerate(names)
    }
    figure = Figure(figsize=(18, 6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    draw_losses(left, runs, rates, styles)
    draw_looks(middle, runs, styles, "logits", "sharpness of the logits, %")
    draw_looks(right, runs, styles, "edge", "learning rate over the critical one")
    right.axhline(EDGE, color="grey", linewidth=1)
    new = path.with_name(path.name + ".new")
    figure.savefig(new, format="png")
    new.replace(path)  # whole or not at all


def draw_losses(
    ax: Axes,
    runs: Mapping[Any, Run],
    rates: Sequence[float],
    styles: Mapping[str, tuple[str, str]],
) -> None:
    """Draw the left panel; items stand beside each other at each rate."""
    for i, (name, (color, dash)) in enumerate(styles.items()):
        aside = 1 + 0.04 * (i - (len(styles) - 1) / 2)
        item_runs = {key: run for key, run in runs.items() if key.item == name}
        for diverged, marker in ((False, "o"), (True, "x")):
            shown = [
                (key.lr * aside, run.clipped)
                for key, run in item_runs.items()
                if run.diverged == diverged
            ]
            ax.plot(
                [x for x, _ in shown],
                [y for _, y in shown],
                marker,
                color=color,
                markersize=4,
                alpha=0.6,
            )
        means = [
            (lr, [run.clipped for key, run in item_runs.items() if key.lr == lr])
            for lr in sorted(rates)
        ]
        line = [
            (lr * aside, statistics.fmean(losses)) for lr, losses in means if losses
        ]
        ax.plot(
            [x for x, _ in line],
            [y for _, y in line],
            color=color,
            linestyle=dash,
            label=name,
        )
    ax.set_xscale("log")
    ax.set_title("final loss, nats; x: diverged")
    ax.set_xlabel("learning rate over model.lr")
    ax.grid(alpha=0.3)
    if styles:
        ax.legend(fontsize=8)


def draw_looks(
    ax: Axes,
    runs: Mapping[Any, Run],
    styles: Mapping[str, tuple[str, str]],
    kind: str,
    title: str,
) -> None:
    """Draw a panel of one sharpness; values not finite or not above zero leave gaps."""
    for key, run in runs.items():
        series: dict[int, float] = getattr(run, kind)
        steps = sorted(series)
        values = [
            (
                series[step]
                if math.isfinite(series[step]) and series[step] > 0
                else math.nan
            )
            for step in steps
        ]
        dash = ":" if run.diverged else "-"
        ax.plot(steps, values, dash, color=styles[key.item][0], linewidth=1, alpha=0.6)
    ax.set_yscale("log")
    ax.set_title(title)
    ax.set_xlabel("step")
    ax.grid(alpha=0.3)
