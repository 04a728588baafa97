"""Pictures of numerics show the figures of the rows."""

from matplotlib.image import imread

from trainer.observe.heatmap import draw_all

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
