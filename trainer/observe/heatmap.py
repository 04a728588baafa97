"""Heat maps of a run's numerics: layers over steps, one image for each tensor class.

The color of an RMS shows how near it is to an end of the tensor's format, so that red
and blue mean the same in FP32 and in FP8. Panels with nothing to see are left out.
"""

import io
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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

from scalify_core.numerics.formats import FloatFormat
from trainer.files import write_atomically
from trainer.observe.numerics import CLASS_TITLES
from trainer.observe.records import FIGURE_NAMES

MIN_SHARE = 1e-6  # smaller shares are drawn as zero
ZERO_EXPONENT = -126  # exponent of the scale of an all-zero tensor
NEAR = 8  # powers of two from an end of the format, within which an RMS is colored
# The panels of shares, and what a picture without the panel has none of.
SHARES = {"underflow": "underflow", "saturated": "saturation"}
PANELS = {
    "rms": "RMS near an end of its format (black: zeros)",
    "size": f"log2 of the RMS, {NEAR} or more from both ends of its format",
    "exponent": "log2 of the scale (black: of zeros)",
    "underflow": "share that underflows (white: none)",
    "saturated": "share that saturates (white: none)",
}
# Sizes are in inches; MARGIN_* are above and below the panels.
WIDTH, MARGIN_TOP, MARGIN_BOTTOM = 17, 0.8, 1.2
INCHES_PER_LAYER = 0.17
MAX_LABELS = 90
# Cells of a picture: more would not be visible, and rows of a stranger, each with other
# layers, would take the memory.
MAX_CELLS = 1 << 20


def figures_by_layer(
    rows: Sequence[Mapping[str, Any]], kind: str
) -> tuple[list[str], list[int], dict[str, np.ndarray]]:
    """Return the figures of a tensor class in rows of metrics.jsonl.

    Returns:
      the layers, the steps, and for each figure an array [layers, steps] with NaN where
      a row lacks it. Steps are left out evenly if there are more than `MAX_CELLS`
      cells.
    """
    prefix = f"numerics/{kind}/"
    measured: dict[int, dict[tuple[str, str], float]] = {}
    layers: dict[str, int] = {}
    for row in rows:
        figures = {}
        for name, value in row.items():
            if name.startswith(prefix):
                layer, figure = name.removeprefix(prefix).rsplit("/", 1)
                layers.setdefault(layer, len(layers))
                figures[layer, figure] = float(value)
        if figures:
            measured[row["step"]] = figures
    # Rounded up, so that the cells stay within MAX_CELLS.
    stride = max(1, -(-len(layers) * len(measured) // MAX_CELLS))
    steps = list(measured)[::-stride][::-1]  # the newest is drawn
    shape = len(layers), len(steps)
    values = {figure: np.full(shape, math.nan) for figure in FIGURE_NAMES}
    for column, step in enumerate(steps):
        for (layer, figure), value in measured[step].items():
            # Figures of blocks have no panel.
            if figure in values:
                values[figure][layers[layer], column] = value
    return list(layers), steps, values


def draw_all(
    rows: Sequence[Mapping[str, Any]],
    folder: Path,
    format_name: Callable[[str, str], str],
) -> dict[str, Path]:
    """Draw a PNG for each tensor class in the rows, and return the paths by class.

    If the rows have no numerics, nothing is written.

    Args:
      rows: rows of metrics.jsonl.
      folder: directory of the pictures; it is made if needed.
      format_name: returns the format of a tensor of a class and layer.
    """
    paths = {}
    for kind, title in CLASS_TITLES.items():
        layers, steps, values = figures_by_layer(rows, kind)
        if steps:
            folder.mkdir(exist_ok=True)
            paths[kind] = folder / f"{kind}.png"
            formats = [format_name(kind, layer) for layer in layers]
            draw(paths[kind], title, layers, formats, steps, values)
    return paths


def shown_panels(
    formats: Sequence[str], values: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the arrays to draw by panel, without the panels with nothing to see.

    If no RMS is near an end of its format, the panel shows log2 of the RMS. Shares are
    left out if they are all zero or all tensors are FP32, and scales if all are 1.
    """
    near = nearness(values["rms"], formats)
    # Zeros (-inf) and missing figures (NaN) are no reason to show a panel.
    if np.any(near[np.isfinite(near)]):
        panels = {"rms": near}
    else:
        with np.errstate(divide="ignore"):
            panels = {"size": np.log2(values["rms"])}
    candidates = ["exponent"]
    # In FP32 a share counts true zeros, too, and would look like a loss.
    if set(formats) != {"fp32"}:
        candidates += SHARES
    for name in candidates:
        if np.any(values[name][np.isfinite(values[name])]):
            panels[name] = values[name]
    return panels


def draw(
    path: Path,
    title: str,
    layers: list[str],
    formats: list[str],
    steps: list[int],
    values: dict[str, np.ndarray],
) -> None:
    """Draw one class: a panel for each figure, layers as rows, steps as columns."""
    panels = shown_panels(formats, values)
    counts = Counter(formats)
    if len(counts) > 1:
        title += ": " + ", ".join(f"{name} ({n})" for name, n in counts.items())
        pairs = zip(layers, formats, strict=True)
        layers = [f"{layer}  {fmt}" for layer, fmt in pairs]
    else:
        title += f": {formats[0]}"
    if "fp32" not in formats:
        missing = [noun for name, noun in SHARES.items() if name not in panels]
        title += "".join(f"; no {noun}" for noun in missing)
    # Between 16 rows, for the title and the color bar, and a bound: the rows of a file
    # can name any number of layers.
    height = INCHES_PER_LAYER * min(max(len(layers), 16), 4 * MAX_LABELS)
    height += MARGIN_TOP + MARGIN_BOTTOM
    figure = Figure(figsize=(WIDTH, height), dpi=100)
    # Not by pyplot, which keeps every figure until it is closed, and picks a backend
    # with windows where it can.
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=14, y=1 - 0.15 / height, verticalalignment="top")
    # Matplotlib's layout engines draw every label several times, which took most of the
    # time.
    edges = {
        "left": 2.2 / WIDTH,
        "right": 1 - 0.2 / WIDTH,
        "top": 1 - MARGIN_TOP / height,
        "bottom": MARGIN_BOTTOM / height,
    }
    axes = figure.subplots(
        1, len(panels), gridspec_kw=edges | {"wspace": 0.06}, squeeze=False
    )[0]
    for i, (ax, (name, x)) in enumerate(zip(axes, panels.items(), strict=True)):
        image = panel(ax, name, PANELS[name], x)
        draw_color_bar(figure, ax, image, name, height)
        label_steps(ax, steps)
        if i == 0:
            label_layers(ax, layers)
        else:
            ax.set_yticks([])  # 50 ticks take longer than the rest of the picture
    # Drawn in memory first: a kill must not leave half a picture beside the complete
    # ones.
    png = io.BytesIO()
    figure.savefig(png, format="png")
    write_atomically(path, png.getvalue())


def draw_color_bar(
    figure: Figure, ax: Axes, image: AxesImage, name: str, height: float
) -> None:
    """Draw the color bar of a panel below it, in a figure of a height in inches."""
    box = ax.get_position()
    bar = figure.add_axes(
        (box.x0 + 0.05 * box.width, 0.4 / height, 0.9 * box.width, 0.1 / height)
    )
    ticks = None if name in SHARES else MaxNLocator(nbins=8, integer=True)
    colors = figure.colorbar(image, cax=bar, orientation="horizontal", ticks=ticks)
    if name == "rms":
        ends = ["smallest normal", f"{NEAR} or more powers of two off", "largest"]
        colors.set_ticks([-NEAR, 0, NEAR], labels=ends, fontsize=8)


def nearness(rms: np.ndarray, formats: Sequence[str]) -> np.ndarray:
    """Return how near values are to an end of their format, in powers of two.

    Args:
      rms: [layers, steps].
      formats: the format of each layer.

    Returns:
      `NEAR` at the format's largest number, -`NEAR` at its smallest normal number, 0 at
      `NEAR` powers of two or more from both; -inf for zeros.
    """
    parsed = [FloatFormat.parse(name) for name in formats]
    top = np.log2([[fmt.max] for fmt in parsed])
    bottom = np.log2([[fmt.min_normal] for fmt in parsed])
    with np.errstate(divide="ignore"):
        log_rms = np.log2(rms)
    near_top = np.clip(NEAR - (top - log_rms), 0, NEAR)
    near_bottom = np.clip(NEAR - (log_rms - bottom), 0, NEAR)
    return np.where(np.isneginf(log_rms), -np.inf, near_top - near_bottom)


def panel(ax: Axes, name: str, label: str, values: np.ndarray) -> AxesImage:
    """Draw one figure of all layers.

    Three colors are not on the color bar: white for shares of zero, black for tensors
    of zeros, and grey for NaN.
    """
    norm: Normalize
    if name in SHARES:
        colors = "YlOrRd"
        under = "white"
        norm = LogNorm(MIN_SHARE, 1)
        below = MIN_SHARE / 2
        # Zero has no logarithm, so small shares get a value below the color bar.
        values = np.where(values < MIN_SHARE, below, values)
    elif name == "rms":
        colors = "RdBu_r"
        under = "black"
        norm = Normalize(-NEAR, NEAR)
        below = -NEAR - 1
    else:
        # A comparison with NaN is false. The scale of zeros would spread the colors
        # over more than a hundred powers of two.
        nonzero = values[values > ZERO_EXPONENT]
        low, high = 0, 0
        if nonzero.size:
            low, high = nonzero.min(), nonzero.max()
        colors = "viridis"
        under = "black"
        # A range also where all values are equal.
        norm = Normalize(low - 1, high + 1)
        below = low - 2
    # Matplotlib masks infinities as it does NaN, so zeros would be grey.
    drawn = np.where(np.isneginf(values), below, values)
    color_map = colormaps[colors].with_extremes(bad="grey", under=under)
    image = ax.imshow(
        drawn, aspect="auto", interpolation="nearest", cmap=color_map, norm=norm
    )
    ax.set_title(label, fontsize=11)
    return image


def label_steps(ax: Axes, steps: list[int]) -> None:
    """Label at most six steps along the x-axis."""
    # A set, because with fewer than six steps some columns are equal.
    columns = sorted({round(i * (len(steps) - 1) / 5) for i in range(6)})
    ax.set_xticks(columns, [str(steps[i]) for i in columns], fontsize=8)
    ax.set_xlabel("step", fontsize=9)


def label_layers(ax: Axes, layers: list[str]) -> None:
    """Label the layers along the y-axis, or the blocks if there are many layers."""
    rows = list(range(len(layers)))
    labels = layers
    if len(layers) > MAX_LABELS:
        blocks = [".".join(name.split(".")[:2]) for name in layers]
        # The first layer of each block stands for it.
        rows = [i for i in rows if i == 0 or blocks[i] != blocks[i - 1]]
        rows = rows[:: -(-len(rows) // MAX_LABELS)]
        labels = [blocks[i] for i in rows]
    ax.set_yticks(rows, labels, fontsize=8)
