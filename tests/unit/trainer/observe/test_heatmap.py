"""Pictures of numerics: what is drawn is what the rows say."""

import math

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from trainer.observe.heatmap import (
    LEAST_SHARE,
    draw_all,
    label_layers,
    label_steps,
    panel,
    table,
)

LAYERS = ["wte.embedding", "h.0.mlp.c_fc.kernel", "h.1.mlp.c_fc.kernel"]


def row(step, layers=LAYERS, kind="weights", **figures):
    values = {"exponent": -3, "rms": 1.0, "underflow": 0.0, "saturated": 0.0} | figures
    return {"step": step, "train/loss": 1.0} | {
        f"numerics/{kind}/{layer}/{name}": value
        for layer in layers
        for name, value in values.items()
    }


def test_rows_become_an_array_of_layers_and_steps_and_what_is_missing_is_not_a_number():
    rows = [
        row(10, rms=2.0),
        {"step": 11, "train/loss": 1.0},
        row(20, LAYERS[:2], rms=4.0),
        row(30, rms="NaN"),
    ]
    layers, steps, values = table(rows, "weights")
    assert layers == LAYERS
    assert steps == [10, 20, 30]
    np.testing.assert_array_equal(
        values["rms"], [[2, 4, math.nan], [2, 4, math.nan], [2, math.nan, math.nan]]
    )
    assert table(rows, "mu")[:2] == ([], [])


def test_each_class_that_the_rows_have_is_one_png_and_nothing_else_is_written(tmp_path):
    rows = [row(10) | row(10, kind="mu"), row(20) | row(20, kind="mu")]
    paths = draw_all(rows, tmp_path / "numerics")
    assert sorted(paths) == ["mu", "weights"]
    assert sorted(path.name for path in (tmp_path / "numerics").iterdir()) == [
        "mu.png",
        "weights.png",
    ]
    assert imread(paths["weights"]).shape[1] == 1700
    assert draw_all([{"step": 1}], tmp_path / "none") == {}
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("name", "values", "shown"),
    [
        ("rms", [4.0, 0.25, 0.0, math.nan], [2, -2, -9, math.nan]),
        ("saturated", [1.0, 1e-3, 0.0, math.nan], [1, 1e-3, LEAST_SHARE / 2, math.nan]),
        ("exponent", [3.0, -7.0, -126.0, math.nan], [3, -7, -126, math.nan]),
    ],
)
def test_a_panel_shows_the_values(name, values, shown):
    image = panel(Figure().subplots(), name, "label", np.array([values]))
    data = np.ma.filled(image.get_array().astype(float), math.nan)
    np.testing.assert_allclose(data, [shown], rtol=1e-6)
    colours = image.to_rgba(image.get_array())[0]
    # told apart, the lost value too
    assert len({tuple(colour) for colour in colours}) == 4


def test_few_layers_are_all_named_and_of_many_the_first_of_each_block():
    ax = Figure().subplots()
    label_layers(ax, LAYERS)
    assert [label.get_text() for label in ax.get_yticklabels()] == LAYERS
    label_layers(ax, [f"h.{i}.part{j}" for i in range(20) for j in range(10)])
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        f"h.{i}" for i in range(20)
    ]
    label_steps(ax, list(range(0, 1010, 10)))
    assert [label.get_text() for label in ax.get_xticklabels()] == [
        "0",
        "200",
        "400",
        "600",
        "800",
        "1000",
    ]
