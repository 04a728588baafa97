"""Pictures of numerics show the figures of the rows."""

import math
import tracemalloc

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from trainer.observe import heatmap
from trainer.observe.heatmap import draw_all, figures_by_layer, panel

LAYERS = ["wte.embedding", "h.0.mlp.c_fc.kernel", "h.1.mlp.c_fc.kernel"]


def row(step, layers=LAYERS, kind="weights", **figures):
    values = {"exponent": -3, "rms": 1.0, "underflow": 0.0, "saturated": 0.0} | figures
    result = {"step": step, "train/loss": 1.0}
    for layer in layers:
        for name, value in values.items():
            result[f"numerics/{kind}/{layer}/{name}"] = value
    return result


def test_each_class_that_the_rows_have_is_one_png_and_nothing_else_is_written(tmp_path):
    rows = [row(10) | row(10, kind="mu"), row(20) | row(20, kind="mu")]
    paths = draw_all(rows, tmp_path / "numerics", lambda kind, layer: "fp16")
    names = sorted(path.name for path in (tmp_path / "numerics").iterdir())
    assert (sorted(paths), names) == (["mu", "weights"], ["mu.png", "weights.png"])
    assert imread(paths["weights"]).shape[1] == 1700
    assert draw_all([{"step": 1}], tmp_path / "none", lambda *tensor: "fp16") == {}
    assert not (tmp_path / "none").exists()


def test_a_table_has_the_figures_of_each_row_and_nan_where_a_row_lacks_them():
    rows = [row(10), row(20, LAYERS[:2], rms=2.0), {"step": 30, "train/loss": 1.0}]
    layers, steps, values = figures_by_layer(rows, "weights")
    assert (layers, steps) == (LAYERS, [10, 20])
    expected = [[1.0, 2.0], [1.0, 2.0], [1.0, math.nan]]
    np.testing.assert_array_equal(values["rms"], expected)


@pytest.mark.parametrize("name", ["rms", "size"])
def test_zeros_are_black_and_missing_figures_grey(name):
    values = np.array([[-math.inf, math.nan, 1.0]])
    image = panel(Figure().subplots(), name, "", values)
    black, grey = image.to_rgba(image.get_array())[0, :2, :3]
    np.testing.assert_array_equal(black, 0)
    np.testing.assert_allclose(grey, 128 / 255)


def test_rows_with_a_layer_of_their_own_each_are_not_a_table_of_all_pairs():
    count = 3000
    rows = [{"step": i, f"numerics/nu/{i}/rms": 1.0} for i in range(count)]
    tracemalloc.start()
    layers, steps, values = figures_by_layer(rows, "nu")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(layers) == count
    assert steps[-1] == count - 1
    cells = len(layers) * len(steps)
    assert heatmap.MAX_CELLS / 2 < cells <= heatmap.MAX_CELLS
    assert np.isfinite(values["rms"]).sum() == len(steps)
    assert peak < 2 * cells * 8 * len(heatmap.FIGURE_NAMES)
