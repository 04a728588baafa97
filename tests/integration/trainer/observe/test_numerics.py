"""The figures of a run's tensors: there for every class and layer, right, and without
any effect on the run."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command import here, parameters, values
from families import slow
from precisions import SPEC, batch, policy, workload

from trainer.model import Model
from trainer.observe.numerics import CLASS_TITLES, format_name, make_numerics
from trainer.observe.records import FIGURE_NAMES
from trainer.parallel.mesh import make_mesh
from trainer.precision.blocks import BLOCK_FIGURES
from trainer.step.optimizers import Muon
from trainer.workload import TrainTask, first_state

LINEAR = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
PARAMETERS = [
    "wte.embedding",
    "wpe.embedding",
    *(f"h.0.{n}.{leaf}" for n in LINEAR for leaf in ("kernel", "bias")),
    *(f"h.0.{n}.{leaf}" for n in ("ln_1", "ln_2") for leaf in ("scale", "bias")),
    "ln_f.scale",
    "ln_f.bias",
]
# in the order of a forward pass
LAYERS = [
    *("h.0.in", "h.0.ln_1.out", "h.0.attn.c_attn.in", "h.0.attn.c_attn.out"),
    *("h.0.attn.c_proj.in", "h.0.attn.c_proj.out", "h.0.ln_2.out"),
    *("h.0.mlp.c_fc.in", "h.0.mlp.c_fc.out", "h.0.mlp.c_proj.in", "h.0.mlp.c_proj.out"),
    *("ln_f.in", "ln_f.out"),
]


@functools.cache
def made(preset):
    """The task and its numerics, compiled once for all states of a form."""
    w = workload(preset)
    return w, make_numerics(w)


def numerics_of(w):
    """The figures of a task's first state."""
    return make_numerics(w)(first_state(w, seed=0), batch(w), 0)


@functools.cache
def row(preset):
    w, numerics = made(preset)
    return numerics(first_state(w, seed=0), batch(w), 0)


@pytest.mark.parametrize("preset", ["scalify_fp8_fp16", "fp32"])
def test_the_row_has_every_figure_of_every_layer_and_class(preset):
    expected = {
        f"numerics/{kind}/{layer}/{figure}"
        for kind in CLASS_TITLES
        for layer in (LAYERS if kind.startswith("activation") else PARAMETERS)
        for figure in FIGURE_NAMES
    }
    actual = row(preset)
    assert set(actual) == expected
    assert all(np.isfinite(list(actual.values())))
    for kind in ("activations", "activation_gradients"):
        names = [name.split("/")[2] for name in actual if f"/{kind}/" in name]
        assert list(dict.fromkeys(names)) == LAYERS
        assert all(actual[f"numerics/{kind}/{layer}/rms"] > 0 for layer in LAYERS)


FP32 = ["fp32"] * 6


@pytest.mark.parametrize(
    ("preset", "kernel", "rest"),
    [
        (
            "scalify_fp8_fp16",
            ["e4m3", "e4m3", "e5m2", "e5m2", "fp16", "fp16"],
            ["fp16"] * 6,
        ),
        ("fp32", FP32, FP32),
        # the scale of its casts is not that of the tensors
        ("fp8_current", ["fp32", "bf16", "bf16", *FP32[3:]], None),
    ],
)
def test_every_tensor_has_the_format_of_its_cast_or_its_own(preset, kernel, rest):
    linear = ["h.1.mlp.c_fc." + end for end in ("kernel", "in", "out", *["kernel"] * 3)]
    other = ["h.1.ln_2.scale", "h.1.in", "h.1.ln_2.out", *["h.1.ln_2.scale"] * 3]
    for scan in (False, True):
        spec = dataclasses.replace(SPEC, n_layer=2, scan_layers=scan)
        model = Model.make(spec, policy(preset))
        for layers, formats in ((linear, kernel), (other, rest or kernel)):
            named = zip(CLASS_TITLES, layers, strict=True)
            assert [format_name(model, *tensor) for tensor in named] == formats


@pytest.mark.parametrize("scan", [False, True])
def test_a_gradient_has_the_format_that_backward_e4m3_gives_its_layer(scan):
    spec = dataclasses.replace(SPEC, n_layer=2, scan_layers=scan)
    fine = dataclasses.replace(policy("scalify_fp8_fp16"), backward_e4m3=("*.c_fc",))
    model = Model.make(spec, fine)
    for layer, expected in (("c_fc", "e4m3"), ("c_proj", "e5m2")):
        name = f"h.1.mlp.{layer}.out"
        assert format_name(model, "activation_gradients", name) == expected


def test_plain_arrays_have_no_scale_and_scaled_ones_are_near_rms_1():
    assert {v for name, v in row("fp32").items() if name.endswith("/exponent")} == {0}
    scaled = row("scalify_fp8_fp16")
    for kind in ("activations", "activation_gradients"):
        for layer in LAYERS:
            assert 2**-4 < scaled[f"numerics/{kind}/{layer}/rms"] < 2**4, (kind, layer)


@pytest.mark.parametrize("preset", ["scalify_fp8_fp16", slow("fp16_loss_scaled")])
def test_size_of_activations_and_of_their_gradients_is_that_of_fp32(preset):
    actual, right = row(preset), row("fp32")
    # A loss scale multiplies gradients on their way; what is shown is what the format
    # has to hold.
    factor = {"fp16_loss_scaled": 2.0**15}.get(preset, 1.0)
    for layer in LAYERS:
        for kind, times in (("activations", 1.0), ("activation_gradients", factor)):
            name = f"numerics/{kind}/{layer}"
            size = actual[f"{name}/rms"] * 2.0 ** actual[f"{name}/exponent"]
            # RMS of many elements: each rounding to E5M2 (2^-3) averages out; biased by
            # less than one of them.
            assert size == pytest.approx(times * right[f"{name}/rms"], rel=2**-3), name


def test_moments_are_those_that_the_optimizer_has():
    muon = Muon("muon", 1.0, 0.1, 1.0, momentum=0.9, b1=0.9, b2=0.99, eps=1e-8)
    w = TrainTask(workload("fp32").model, muon, make_mesh(1))
    names = [name.split("/")[1:3] for name in numerics_of(w)]
    for kind, expected in (
        ("mu", PARAMETERS),
        ("nu", [name for name in PARAMETERS if not name.endswith("kernel")]),
    ):
        assert {layer for k, layer in names if k == kind} == set(expected)


def test_what_saturates_shows_as_saturated_and_what_is_lost_as_underflow():
    w, numerics = made("scalify_fp8_fp16")
    state = first_state(w, seed=0)
    block = state.params["h"][0]
    for layer, factor in (
        (block["mlp"]["c_fc"], 2**12),
        (block["attn"]["c_proj"], 2**-13),
    ):
        # the data, so that the array has the wrong scale
        layer["kernel"] = jax.tree.map(lambda x, f=factor: x * f, layer["kernel"])
    actual = numerics(state, batch(w), 0)
    assert actual["numerics/weights/h.0.mlp.c_fc.kernel/saturated"] > 0.3
    assert actual["numerics/activations/h.0.mlp.c_proj.in/saturated"] > 0.1
    assert actual["numerics/weights/h.0.attn.c_proj.kernel/underflow"] > 0.9
    assert actual["numerics/weights/h.0.mlp.c_proj.kernel/saturated"] == 0
    assert actual["numerics/weights/h.0.mlp.c_proj.kernel/underflow"] < 0.1


def test_what_was_zero_from_the_start_is_no_underflow_and_a_lost_moment_is():
    w, numerics = made("scalify_fp8_fp16")
    state, actual = first_state(w, seed=0), row("scalify_fp8_fp16")
    for name in ("mu/wte.embedding", "nu/ln_f.scale", "weights/h.0.mlp.c_fc.bias"):
        figures = [
            actual[f"numerics/{name}/{figure}"] for figure in ("rms", "underflow")
        ]
        assert figures == [0, 0]

    def lost(path, x):
        in_nu = any(getattr(key, "name", None) == "nu" for key in path)
        return jnp.ones_like(x) if in_nu else x

    opt_state = jax.tree_util.tree_map_with_path(lost, state.opt_state)
    actual = numerics(dataclasses.replace(state, opt_state=opt_state), batch(w), 0)
    assert actual["numerics/mu/wte.embedding/underflow"] == 1


@pytest.mark.slow  # above without a trainer; the golden flagship has numerics
def test_numerics_change_nothing_and_leave_rows_and_pictures(tmp_path):
    args = ["train.steps=4", "checkpoint.every=0"]
    args += ["precision=scalify_fp8_fp16", "metrics.sharpness=true"]
    for name, every in (("A", 2), ("B", 0)):
        here(tmp_path, name, *args, f"metrics.numerics_every={every}")
    bare = []
    for row in values(tmp_path / "A"):
        looked = {"numerics/", "sharpness/"} & {
            n[: n.index("/") + 1] for n in row if "/" in n
        }
        assert bool(looked) == (row["step"] in (2, 4))
        bare.append(
            {
                n: v
                for n, v in row.items()
                if not n.startswith(("numerics/", "sharpness/"))
            }
        )
    assert bare == values(tmp_path / "B")
    assert parameters(tmp_path / "A", 4) == parameters(tmp_path / "B", 4)
    pictures = [path.name for path in (tmp_path / "A" / "numerics").iterdir()]
    assert sorted(pictures) == sorted(f"{c}.png" for c in CLASS_TITLES)
    assert not (tmp_path / "B" / "numerics").exists()


@pytest.mark.slow  # the figures: unit/trainer/precision/test_blocks.py
@pytest.mark.parametrize(("preset", "layers"), [("scalify_mxfp8", 1), ("mxfp8", 2)])
def test_operands_in_blocks_have_figures_of_their_blocks(preset, layers):
    """Two layers are scanned."""
    scan = layers == 2
    spec = dataclasses.replace(SPEC, n_layer=layers, scan_layers=scan)
    w = workload(preset, spec=spec, exclude=("h.*.mlp.c_proj",))
    actual = numerics_of(w)
    assert all(np.isfinite(list(actual.values())))
    operands = set()
    for name in actual:
        _, kind, layer, figure = name.split("/")
        if figure in BLOCK_FIGURES:
            operands.add((kind, layer))
    expected = set()
    for layer in (f"h.{i}.{name}" for i in range(layers) for name in LINEAR[:3]):
        expected.add(("weights", f"{layer}.kernel"))
        expected.add(("activations", f"{layer}.in"))
        expected.add(("activation_gradients", f"{layer}.out"))
    assert operands == expected
    spread = f"h.{layers - 1}.attn.c_attn.out/block_spread"
    assert actual[f"numerics/activation_gradients/{spread}"] > 0
