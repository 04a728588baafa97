"""Pictures of numerics show the figures of the rows."""

import math

import numpy as np
from matplotlib.image import imread

from trainer.observe.heatmap import draw_all, nearness

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


def test_colors_say_how_near_an_rms_is_to_an_end_of_the_format():
    rms = np.array([[2.0**7, 2.0**-7], [2.0**7, 2.0**-7], [2.0**7, 0.0]])
    near = nearness(rms, ["fp32", "fp16", "e4m3"])
    # FP16 ends at 2^16 and 2^-14, E4M3 at 1.75 * 2^8 and 2^-6
    expected = [[0, 0], [0, -1], [8 - (1 + np.log2(1.75)), -math.inf]]
    np.testing.assert_allclose(near, expected)
