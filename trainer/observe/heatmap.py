"""Heat maps of a run's numerics: layers over steps, one image for each tensor class."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from trainer.files import write_atomically

LEAST_SHARE = 1e-6  # smaller shares are drawn as zero
ZERO_EXPONENT = -126  # exponent of the scale of an all-zero tensor
SHARES = {
    "underflow": "share that underflows (white: none)",
    "saturated": "share that saturates (white: none)",
}
PANELS = {
    "rms": "log2 RMS of the data (black: zeros)",
    "exponent": "log2 of the scale (black: of zeros)",
    **SHARES,
}
TITLES = {
    "weights": "Weights",
    "activations": "Activations",
    "activation_gradients": "Gradients of activations",
    "weight_gradients": "Gradients of weights",
    "mu": (
        "First moments (narrow ones nearly fill their format: an RMS far above 1 is"
        " right)"
    ),
    "nu": (
        "Second moments (narrow ones are roots that nearly fill their format: an RMS"
        " far above 1 is right)"
    ),
}
# inches: of the picture, and of what is above and below the panels
WIDTH, ABOVE, BELOW = 17, 0.8, 1.2
INCHES_PER_LAYER = 0.17
MOST_LABELS = 90


def table(
    rows: Sequence[Mapping[str, Any]], kind: str
) -> tuple[list[str], list[int], dict[str, np.ndarray]]:
    """Return layers, steps and each figure of a tensor class, from metrics.jsonl rows.

    Returns:
      names of the layers, steps, and by figure an array [layers, steps] with NaN where
      a row lacks the figure.
    """
    prefix = f"numerics/{kind}/"
    measured = {
        row["step"]: row for row in rows if any(name.startswith(prefix) for name in row)
    }
    layers: dict[str, None] = {}
    for row in measured.values():
        for name in row:
            if name.startswith(prefix):
                layers[name.removeprefix(prefix).rsplit("/", 1)[0]] = None
    values = {}
    for figure in PANELS:
        keys = [f"{prefix}{layer}/{figure}" for layer in layers]
        values[figure] = np.array(
            [
                [float(row.get(key, math.nan)) for row in measured.values()]
                for key in keys
            ]
        )
    return list(layers), list(measured), values


def draw_all(rows: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, Path]:
    """Draw a PNG in `folder` for each tensor class in the rows; return paths by class.

    Without numerics in the rows nothing is written.
    """
    paths = {}
    for kind in TITLES:
        layers, steps, values = table(rows, kind)
        if steps:
            folder.mkdir(exist_ok=True)
            paths[kind] = folder / f"{kind}.png"
            draw(paths[kind], TITLES[kind], layers, steps, values)
    return paths


def draw(
    path: Path,
    title: str,
    layers: list[str],
    steps: list[int],
    values: dict[str, np.ndarray],
) -> None:
    """Draw one class: four panels, with layers as rows and steps as columns."""
    height = (
        INCHES_PER_LAYER * min(max(len(layers), 16), 4 * MOST_LABELS) + ABOVE + BELOW
    )
    figure = Figure(figsize=(WIDTH, height), dpi=100)
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=14, y=1 - 0.15 / height, verticalalignment="top")
    # Placed by hand: a layout engine draws every label several times, which took most
    # of the time.
    edges = {
        "left": 1.8 / WIDTH,
        "right": 1 - 0.2 / WIDTH,
        "top": 1 - ABOVE / height,
        "bottom": BELOW / height,
    }
    axes = figure.subplots(1, len(PANELS), gridspec_kw=edges | {"wspace": 0.06})
    for i, (ax, (name, label)) in enumerate(zip(axes, PANELS.items(), strict=True)):
        image = panel(ax, name, label, values[name])
        box = ax.get_position()
        bar = figure.add_axes(
            (box.x0 + 0.05 * box.width, 0.4 / height, 0.9 * box.width, 0.1 / height)
        )
        ticks = None if name in SHARES else MaxNLocator(nbins=8, integer=True)
        figure.colorbar(image, cax=bar, orientation="horizontal", ticks=ticks)
        label_steps(ax, steps)
        if i == 0:
            label_layers(ax, layers)
        else:
            ax.set_yticks([])  # 50 ticks take longer than the rest of the picture
    png = io.BytesIO()
    figure.savefig(png, format="png")
    write_atomically(path, png.getvalue())


def panel(ax: Axes, name: str, label: str, values: np.ndarray) -> AxesImage:
    """Draw one figure of all layers.

    Values outside of the color bar are shares of zero, zero tensors, and NaN (grey).
    """
    norm: Normalize
    if name in SHARES:
        colors, under, norm = "YlOrRd", "white", LogNorm(LEAST_SHARE, 1)
        # zero has no logarithm
        shown = np.where(values < LEAST_SHARE, LEAST_SHARE / 2, values)
    elif name == "rms":
        with np.errstate(divide="ignore"):
            shown = np.log2(values)
        real = np.abs(shown[np.isfinite(shown)])
        largest = max(8, 2 * math.ceil(np.max(real, initial=0) / 2))
        colors, under, norm = "RdBu_r", "black", Normalize(-largest, largest)
        shown = np.where(np.isneginf(shown), -largest - 1, shown)
    else:
        real = values[values > ZERO_EXPONENT]
        low, high = (real.min(), real.max()) if real.size else (0, 0)
        colors, under, norm, shown = (
            "viridis",
            "black",
            Normalize(low - 1, high + 1),
            values,
        )
    color_map = colormaps[colors].with_extremes(bad="grey", under=under)
    image = ax.imshow(
        shown, aspect="auto", interpolation="nearest", cmap=color_map, norm=norm
    )
    ax.set_title(label, fontsize=11)
    return image


def label_steps(ax: Axes, steps: list[int]) -> None:
    """Label at most six steps along the x-axis."""
    at = sorted({round(i * (len(steps) - 1) / 5) for i in range(6)})
    ax.set_xticks(at, [str(steps[i]) for i in at], fontsize=8)
    ax.set_xlabel("step", fontsize=9)


def label_layers(ax: Axes, layers: list[str]) -> None:
    """Label the layers along the y-axis; of many, only the first of each block."""
    blocks = [".".join(name.split(".")[:2]) for name in layers]
    at = [
        i
        for i in range(len(layers))
        if len(layers) <= MOST_LABELS or i == 0 or blocks[i] != blocks[i - 1]
    ]
    ax.set_yticks(
        at,
        [layers[i] if len(layers) <= MOST_LABELS else blocks[i] for i in at],
        fontsize=8,
    )
