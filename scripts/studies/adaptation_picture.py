"""The picture of an adaptation study: bits per byte over the bytes of the new text that were seen."""

import statistics
from collections.abc import Mapping
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from scripts.studies.parity_picture import COLOURS

LABELS = {"focus": "new tokenizer, FOCUS", "random": "new tokenizer, random rows", "old": "old tokenizer"}


def draw(path: Path, curves: Mapping[tuple[str, int], Mapping[int, float]], bytes_a_step: Mapping[str, float]) -> None:
    """Write a PNG: of each kind of adaptation the mean curve, and those of its seeds in faint lines.

    Args:
      path: of the PNG.
      curves: by kind and seed, bits per byte by step.
      bytes_a_step: by kind, the bytes of text that a step sees.
    """
    figure = Figure(figsize=(8, 5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    for colour, (arm, label) in zip(COLOURS, LABELS.items(), strict=False):
        own = [curve for (kind, _), curve in sorted(curves.items()) if kind == arm]
        if not own:
            continue
        steps = sorted(set.intersection(*(set(curve) for curve in own)))
        seen = [step * bytes_a_step[arm] / 1e6 for step in steps]
        for curve in own:
            ax.plot(seen, [curve[step] for step in steps], color=colour, linewidth=0.6, alpha=0.4)
        means = [statistics.fmean(curve[step] for curve in own) for step in steps]
        ax.plot(seen, means, color=colour, linewidth=2, label=f"{label}, {len(own)} seeds")
    ax.set_xlabel("text seen, million bytes")
    ax.set_ylabel("validation, bits per byte")
    ax.grid(alpha=0.3)
    ax.legend()
    new = path.with_name(path.name + ".new")
    figure.savefig(new, format="png")
    new.replace(path)  # whole or not at all
