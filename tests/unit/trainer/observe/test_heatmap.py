"""Pictures of numerics: what is drawn is what the rows say."""

import math

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from trainer.observe.heatmap import (
    MIN_SHARE,
    draw_all,
    label_layers,
    label_steps,
    nearness,
    panel,
    shown_panels,
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
    paths = draw_all(rows, tmp_path / "numerics", lambda kind, layer: "fp16")
    assert sorted(paths) == ["mu", "weights"]
    assert sorted(path.name for path in (tmp_path / "numerics").iterdir()) == [
        "mu.png",
        "weights.png",
    ]
    assert imread(paths["weights"]).shape[1] == 1700
    assert draw_all([{"step": 1}], tmp_path / "none", lambda *tensor: "fp16") == {}
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("name", "values", "shown"),
    [
        ("rms", [2.0, -2.0, -math.inf, math.nan], [2, -2, -9, math.nan]),
        ("saturated", [1.0, 1e-3, 0.0, math.nan], [1, 1e-3, MIN_SHARE / 2, math.nan]),
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


def test_colors_say_how_near_an_rms_is_to_an_end_of_the_format():
    rms = np.array([[2.0**7, 2.0**-7], [2.0**7, 2.0**-7], [2.0**7, 0.0]])
    near = nearness(rms, ["fp32", "fp16", "e4m3"])
    # FP16 ends at 2^16 and 2^-14, E4M3 at 1.75 * 2^8 and 2^-6
    np.testing.assert_allclose(near[0], [0, 0])
    np.testing.assert_allclose(near[1], [0, -1])
    np.testing.assert_allclose(near[2], [8 - (1 + np.log2(1.75)), -math.inf])
    assert nearness(np.array([[448.0, 2.0**-6]]), ["e4m3"]).tolist() == [[8.0, -8.0]]


@pytest.mark.parametrize(
    ("fmt", "figures", "shown"),
    [
        ("fp32", {"exponent": 0, "underflow": 0.5}, ["size"]),
        ("fp16", {"exponent": 0}, ["size"]),
        ("fp16", {"exponent": 2, "underflow": 0.5}, ["size", "exponent", "underflow"]),
        ("e4m3", {"exponent": 0, "rms": 100.0}, ["rms"]),
    ],
)
def test_panels_without_anything_to_see_are_left_out(fmt, figures, shown):
    layers, _, values = table([row(10, **figures)], "weights")
    assert list(shown_panels([fmt] * len(layers), values)) == shown


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
