"""Plot a parity study: validation curves, and paired differences with intervals."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from scripts.studies.pairs import Outcome, PairedDifference

# Told apart by people with any color vision. Reference: Okabe and Ito 2008, "Color
# universal design".
COLORS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "--", ":", "-.")  # for more items than colors


def draw(
    path: Path,
    rows: Sequence[PairedDifference],
    outcomes: Mapping[Any, Outcome],
    base: str,
    *,
    last: int,
) -> None:
    """Write a PNG with two panels for each learning rate.

    Left: validation loss (nats) over steps, the mean over the seeds that did not
    diverge. Right: each item's difference to the base (nats): a small dot for each
    pair, a large one for the mean, a bar for its 95% interval.
    """
    rates = list(dict.fromkeys(row.lr for row in rows))
    names = list(dict.fromkeys(row.item for row in rows))
    styles = {
        name: (COLORS[i % len(COLORS)], DASHES[i // len(COLORS) % len(DASHES)])
        for i, name in enumerate(names)
    }
    figure = Figure(
        figsize=(15, max(1, len(rates)) * (2 + 0.3 * max(6, len(names)))),
        dpi=100,
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    for lr, (left, right) in zip(
        rates,
        figure.subplots(len(rates), 2, squeeze=False) if rates else (),
        strict=True,
    ):
        of_rate = {key: outcome for key, outcome in outcomes.items() if key.lr == lr}
        shown = [row for row in rows if row.lr == lr]
        draw_curves(left, lr, shown, of_rate, styles)
        draw_differences(right, shown, of_rate, styles, base, last)
    new = path.with_name(path.name + ".new")
    figure.savefig(new, format="png")
    new.replace(path)  # whole or not at all


def draw_curves(
    ax: Axes,
    lr: float,
    rows: Sequence[PairedDifference],
    outcomes: Mapping[Any, Outcome],
    styles: Mapping[str, tuple[str, str]],
) -> None:
    """Draw the left panel.

    Its range leaves out the first losses, which would squeeze the final ones together.
    """
    shown = []
    for row in rows:
        runs = [
            outcome.curve
            for key, outcome in outcomes.items()
            if key.item == row.item and not outcome.diverged
        ]
        steps = sorted(set[int]().union(*runs))
        losses = [
            statistics.fmean(run[step] for run in runs if step in run) for step in steps
        ]
        shown += [loss for loss in losses if math.isfinite(loss)]
        color, dash = styles[row.item]
        ax.plot(steps, losses, color=color, linestyle=dash, linewidth=1.5)
    if shown:
        low, high = min(shown), sorted(shown)[math.ceil(0.7 * (len(shown) - 1))]
        room = max(0.05 * (high - low), 1e-3)
        ax.set_ylim(low - room, high + room)
    ax.set_title(f"validation loss, nats; learning rate {lr:g}x")
    ax.set_xlabel("step")
    ax.grid(alpha=0.3)


def draw_differences(
    ax: Axes,
    rows: Sequence[PairedDifference],
    outcomes: Mapping[Any, Outcome],
    styles: Mapping[str, tuple[str, str]],
    base: str,
    last: int,
) -> None:
    """Draw the right panel, whose rows are also the legend of the left one.

    Its range is that of the pairs.
    """
    final = {
        (key.item, key.seed): outcome.final(last) for key, outcome in outcomes.items()
    }
    furthest = 0.0
    for y, row in enumerate(rows):
        color, dash = styles[row.item]
        ax.plot(
            [0, 0.03],
            [y, y],
            color=color,
            linestyle=dash,
            linewidth=3,
            transform=ax.get_yaxis_transform(),
        )
        if row.item == base or not row.n:
            continue
        pairs = [
            loss - final[base, seed]
            for (item, seed), loss in final.items()
            if item == row.item
            and math.isfinite(loss)
            and math.isfinite(final.get((base, seed), math.inf))
        ]
        furthest = max(furthest, *map(abs, pairs))
        ax.plot(pairs, [y] * len(pairs), ".", color="grey", markersize=5)
        ax.errorbar(
            row.difference,
            y,
            xerr=row.half_width if row.n > 1 else None,
            fmt="o",
            color=color,
            capsize=3,
        )
    ax.axvline(0, color="grey", linewidth=1)
    reach = 1.2 * furthest or 1e-3
    ax.set_xlim(-reach, reach)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    labels = [
        f"{row.item}  n={row.n}"
        + (f", {row.diverged} diverged" if row.diverged else "")
        for row in rows
    ]
    ax.set_yticks(range(len(rows)), labels, fontsize=8)
    ax.set_title(f"final loss minus that of {base}, nats; mean and 95% interval")
    ax.set_xlabel("worse to the right")
    ax.grid(alpha=0.3, axis="x")
