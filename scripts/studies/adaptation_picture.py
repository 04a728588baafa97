"""Plot an adaptation study: bits per byte over the bytes of new text seen."""

import statistics
from collections.abc import Mapping
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from scripts.studies.parity_picture import COLORS
from scripts.studies.runs import Trial

LABELS = {
    "focus": "new tokenizer, FOCUS",
    "random": "new tokenizer, random rows",
    "old": "old tokenizer",
}


def draw(
    path: Path,
    curves: Mapping[Trial, Mapping[int, float]],
    bytes_a_step: Mapping[str, float],
) -> None:
    """Write a PNG with a panel for each rate: a mean curve for each kind of
    adaptation, and its seeds in faint lines.
    Args:
      path: the file to write.
      curves: by run, bits per byte by step.
      bytes_a_step: by kind, the bytes of text that a step sees.
    """
    rates = sorted({job.lr for job in curves})
    figure = Figure(figsize=(7 * len(rates), 5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for lr, ax in zip(
        rates,
        figure.subplots(1, len(rates), sharey=True, squeeze=False)[0],
        strict=True,
    ):
        for color, (arm, label) in zip(COLORS, LABELS.items(), strict=False):
            arm_curves = [
                curve
                for job, curve in sorted(curves.items())
                if (job.lr, job.item) == (lr, arm)
            ]
            if not arm_curves:
                continue
            steps = sorted(set.intersection(*(set(curve) for curve in arm_curves)))
            seen = [step * bytes_a_step[arm] / 1e6 for step in steps]
            for curve in arm_curves:
                ax.plot(
                    seen,
                    [curve[step] for step in steps],
                    color=color,
                    linewidth=0.6,
                    alpha=0.4,
                )
            means = [
                statistics.fmean(curve[step] for curve in arm_curves) for step in steps
            ]
            ax.plot(
                seen,
                means,
                color=color,
                linewidth=2,
                label=f"{label}, {len(arm_curves)} seeds",
            )
        ax.set_title(f"rate {lr:g}")
        ax.set_xlabel("text seen, million bytes")
        ax.grid(alpha=0.3)
        ax.legend()
        ax.set_ylabel("validation, bits per byte")
    new = path.with_name(path.name + ".new")
    figure.savefig(new, format="png")
    new.replace(path)  # whole or not at all
