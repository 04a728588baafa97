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

from scalify_core.array.tree import leaves
from trainer.model import Model
from trainer.models.llama.spec import LlamaSpec
from trainer.observe.numerics import CLASSES, format_name, gradients, make_numerics
from trainer.observe.probe import FIGURES
from trainer.parallel.mesh import make_mesh
from trainer.precision.blocks import BLOCK_FIGURES
from trainer.step.clip_and_decay import optimizer_from_roles
from trainer.workload import TrainTask, first_state

TWO = dataclasses.replace(SPEC, n_layer=2)
LINEAR = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
PARAMETERS = [
    "wte.embedding",
    "wpe.embedding",
    *(f"h.0.{n}.{leaf}" for n in LINEAR for leaf in ("kernel", "bias")),
    *(f"h.0.{n}.{leaf}" for n in ("ln_1", "ln_2") for leaf in ("scale", "bias")),
    "ln_f.scale",
    "ln_f.bias",
]
LAYERS = [
    *(f"h.0.{n}.{side}" for n in LINEAR for side in ("in", "out")),
    *(f"h.0.{n}" for n in ("in", "ln_1.out", "ln_2.out")),
    "ln_f.in",
    "ln_f.out",
]


@functools.cache
def made(preset, spec=SPEC):
    """The task and its numerics, compiled once for all states of a form."""
    w = workload(preset, spec=spec)
    return w, make_numerics(w)


@functools.cache
def row(preset, spec=SPEC):
    w, numerics = made(preset, spec)
    return numerics(first_state(w, seed=0), batch(w), 0)


@pytest.mark.parametrize("preset", ["scalify_fp8_fp16", "fp32"])
def test_the_row_has_every_figure_of_every_layer_and_class(preset):
    expected = {
        f"numerics/{kind}/{layer}/{figure}"
        for kind in CLASSES
        for layer in (LAYERS if kind.startswith("activation") else PARAMETERS)
        for figure in FIGURES
    }
    actual = row(preset)
    assert set(actual) == expected
    assert all(np.isfinite(list(actual.values())))
    for layer in LAYERS:
        assert actual[f"numerics/activations/{layer}/rms"] > 0
        assert actual[f"numerics/activation_gradients/{layer}/rms"] > 0


@pytest.mark.parametrize(
    ("preset", "kernel", "rest"),
    [
        (
            "scalify_fp8_fp16",
            ["e4m3", "e4m3", "e5m2", "e5m2", "fp16", "fp16"],
            ["fp16", "fp16", "fp16", "fp16", "fp16", "fp16"],
        ),
        ("fp32", ["fp32"] * 6, ["fp32"] * 6),
        # the scale of its casts is not the tensors' own
        (
            "fp8_current",
            ["fp32", "bf16", "bf16", "fp32", "fp32", "fp32"],
            ["fp32", "bf16", "bf16", "fp32", "fp32", "fp32"],
        ),
    ],
)
def test_every_tensor_has_the_format_of_its_cast_or_its_own(preset, kernel, rest):
    linear = ["h.1.mlp.c_fc." + end for end in ("kernel", "in", "out", *["kernel"] * 3)]
    other = ["h.1.ln_2.scale", "h.1.in", "h.1.ln_2.out", *["h.1.ln_2.scale"] * 3]
    for scan in (False, True):
        spec = dataclasses.replace(TWO, scan_layers=scan)
        model = Model.make(spec, policy(preset))
        assert [
            format_name(model, *x) for x in zip(CLASSES, linear, strict=True)
        ] == kernel
        assert [
            format_name(model, *x) for x in zip(CLASSES, other, strict=True)
        ] == rest


@pytest.mark.parametrize("layer", ["", "h", "h.kernel", "h.1", "another.1.kernel"])
def test_a_layer_that_the_model_lacks_has_a_format_too(layer):
    """Somebody may have edited the log that a resumed run draws."""
    for scan in (False, True):
        spec = dataclasses.replace(TWO, scan_layers=scan)
        model = Model.make(spec, policy("fp32"))
        assert {format_name(model, kind, layer) for kind in CLASSES} == {"fp32"}


def test_layers_come_in_the_order_of_a_forward_pass():
    names = [
        name.split("/")[2]
        for name in row("fp32")
        if name.startswith("numerics/activations/h.0")
    ]
    assert list(dict.fromkeys(names)) == [
        "h.0.in", "h.0.ln_1.out", "h.0.attn.c_attn.in", "h.0.attn.c_attn.out", "h.0.attn.c_proj.in",
        "h.0.attn.c_proj.out", "h.0.ln_2.out", "h.0.mlp.c_fc.in", "h.0.mlp.c_fc.out", "h.0.mlp.c_proj.in",
        "h.0.mlp.c_proj.out",
    ]  # fmt: skip


@pytest.mark.slow  # two more programs; the names: test_library.py
def test_scanned_layers_of_another_family_have_the_names_and_figures_of_unrolled_ones():
    spec = LlamaSpec(
        vocab_size=64,
        context=16,
        n_layer=2,
        n_head=2,
        n_kv_head=1,
        d_model=32,
        tied=False,
    )
    unrolled = row("fp32", spec)
    scanned = row("fp32", dataclasses.replace(spec, scan_layers=True))
    assert list(unrolled) == list(scanned)
    for name, value in unrolled.items():
        # Differences of equal numbers (a position that attends to itself alone) are
        # zero, or the sums' rounding.
        if "gradients" not in name or not name.endswith("/underflow"):
            assert scanned[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    names = dict.fromkeys(
        name.split("/")[2] for name in scanned if "/activations/" in name
    )
    layers = [f"attn.{x}_proj" for x in "qkvo"]
    layers += [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    inside = [f"{layer}.{side}" for layer in layers for side in ("in", "out")]
    block = ["in", "attn_norm.out", *inside[:8], "mlp_norm.out", *inside[8:]]
    blocks = [f"h.{i}.{name}" for i in (0, 1) for name in block]
    assert list(names) == [*blocks, "norm.in", "norm.out"]


def test_plain_arrays_have_no_scale_and_scaled_ones_are_near_rms_1():
    assert {v for name, v in row("fp32").items() if name.endswith("/exponent")} == {0}
    scaled = row("scalify_fp8_fp16")
    for kind in ("activations", "activation_gradients"):
        for layer in LAYERS:
            assert 2**-4 < scaled[f"numerics/{kind}/{layer}/rms"] < 2**4, (kind, layer)


@pytest.mark.parametrize(
    "preset",
    ["scalify_fp8_fp16", *map(slow, ("fp16_loss_scaled", "fp8_delayed", "sim"))],
)
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


@pytest.mark.parametrize("name", ["muon", slow("sgd")])
def test_moments_are_those_that_the_optimiser_has(name):
    settings = {
        "sgd": {"momentum": 0.9},
        "muon": {"momentum": 0.9, "b1": 0.9, "b2": 0.99, "eps": 1e-8},
    }
    model = Model.make(SPEC, policy("fp32"))
    w = TrainTask(
        model,
        name,
        optimizer_from_roles(name, weight_decay=0.1, clip_norm=1.0, **settings[name]),
        make_mesh(1),
    )
    actual = make_numerics(w)(first_state(w, seed=0), batch(w), 0)
    layers = {
        kind: {n.split("/")[2] for n in actual if n.startswith(f"numerics/{kind}/")}
        for kind in ("mu", "nu")
    }
    assert layers["mu"] == set(PARAMETERS)
    assert layers["nu"] == (
        {n for n in PARAMETERS if not n.endswith("kernel")} if name == "muon" else set()
    )


@pytest.mark.parametrize("preset", ["scalify_fp8_fp16", slow("sim")])
def test_what_saturates_shows_as_saturated_and_what_is_lost_as_underflow(preset):
    w, numerics = made(preset)
    state = first_state(w, seed=0)
    h = state.params["h"][0]

    def times(kernel, factor):  # the data, so that a scaled array has the wrong scale
        return jax.tree.map(lambda data: data * factor, kernel)

    h["mlp"]["c_fc"]["kernel"] = times(
        h["mlp"]["c_fc"]["kernel"], 2.0**15 if preset == "sim" else 2.0**12
    )
    h["attn"]["c_proj"]["kernel"] = times(
        h["attn"]["c_proj"]["kernel"], 2.0**-9 if preset == "sim" else 2.0**-13
    )
    actual = numerics(state, batch(w), 0)
    assert actual["numerics/weights/h.0.mlp.c_fc.kernel/saturated"] > 0.3
    assert actual["numerics/activations/h.0.mlp.c_proj.in/saturated"] > 0.1
    assert actual["numerics/weights/h.0.attn.c_proj.kernel/underflow"] > 0.9
    assert actual["numerics/weights/h.0.mlp.c_proj.kernel/saturated"] == 0
    assert actual["numerics/weights/h.0.mlp.c_proj.kernel/underflow"] < 0.1


def test_what_was_zero_from_the_start_is_no_underflow_and_a_lost_moment_is():
    w, numerics = made("scalify_fp8_fp16")
    state, actual = first_state(w, seed=0), row("scalify_fp8_fp16")
    zeros = [f"{kind}/{name}" for kind in ("mu", "nu") for name in PARAMETERS]
    for name in [
        *zeros,
        *(f"weights/{name}" for name in PARAMETERS if name.endswith("bias")),
    ]:
        assert (
            actual[f"numerics/{name}/rms"] == actual[f"numerics/{name}/underflow"] == 0
        ), name
    lost = jax.tree_util.tree_map_with_path(
        lambda path, x: (
            jnp.ones_like(x) if "nu" in {getattr(k, "name", None) for k in path} else x
        ),
        state.opt_state,
    )
    actual = numerics(dataclasses.replace(state, opt_state=lost), batch(w), 0)
    assert actual["numerics/mu/wte.embedding/underflow"] == 1


@pytest.mark.slow  # operation by operation; the figures: above
def test_gradients_with_probes_are_those_of_the_step_bit_for_bit():
    """Operation by operation: fused by a compiler, values that are stored no more may
    keep more bits than they have."""
    w = workload("scalify_fp8_fp16")
    state, tokens = first_state(w, seed=0), batch(w)
    key = jax.random.fold_in(jax.random.fold_in(state.key, 3), 0)
    probed, _ = gradients(w.model, state, tokens, jnp.int32(3))
    _, plain, _ = w.model.differentiate().value_and_grad(
        state.params, (), tokens.tokens_AxBxT1[0], None, key
    )
    for a, b in zip(leaves(probed), leaves(plain), strict=True):
        assert a.scale == b.scale
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a.data, b.data)


@pytest.mark.slow  # above without a trainer; the golden flagship has numerics
def test_numerics_change_nothing_and_leave_rows_and_pictures(tmp_path):
    args = [
        "train.steps=10",
        "model.n_layer=1",
        "checkpoint.every=0",
        "tracker=jsonl",
        "precision=scalify_fp8_fp16",
    ]
    args += ["metrics.sharpness=true"]
    output = here(tmp_path, "A", *args, "metrics.numerics_every=5")
    here(tmp_path, "B", *args, "metrics.numerics_every=0")
    with_numerics = {
        row["step"]
        for row in values(tmp_path / "A")
        if any(n.startswith("numerics/") for n in row)
    }
    assert with_numerics == {5, 10}, output
    sharp = {
        row["step"]
        for row in values(tmp_path / "A")
        if {"sharpness/logits", "sharpness/critical"} <= set(row)
    }
    assert sharp == with_numerics
    actual = ("numerics/", "sharpness/")
    bare = [
        {n: v for n, v in row.items() if not n.startswith(actual)}
        for row in values(tmp_path / "A")
    ]
    assert bare == values(tmp_path / "B")
    assert parameters(tmp_path / "A", 10) == parameters(tmp_path / "B", 10)
    assert sorted(
        path.name for path in (tmp_path / "A" / "numerics").iterdir()
    ) == sorted(f"{c}.png" for c in CLASSES)
    assert not (tmp_path / "B" / "numerics").exists()


@pytest.mark.parametrize(
    ("preset", "scan"), [("scalify_mxfp8", False), slow("mxfp8", True)]
)
def test_operands_in_blocks_have_figures_of_their_blocks(preset, scan):
    spec = dataclasses.replace(TWO, scan_layers=scan)
    w = workload(preset, spec=spec, exclude=("h.*.mlp.c_proj",))
    state = first_state(w, seed=0)
    actual = make_numerics(w)(state, batch(w), 0)
    found = {
        tuple(name.split("/")[1:3])
        for name in actual
        if name.rpartition("/")[2] in BLOCK_FIGURES
    }
    assert found == {
        operand
        for layer in (f"h.{i}.{name}" for i in (0, 1) for name in LINEAR[:3])
        for operand in (
            ("weights", f"{layer}.kernel"),
            ("activations", f"{layer}.in"),
            ("activation_gradients", f"{layer}.out"),
        )
    }
    assert all(np.isfinite(list(actual.values())))
    gradient = "numerics/activation_gradients/h.1.attn.c_attn.out"
    assert actual[f"{gradient}/block_spread"] > 0
    blocks = state.params["h"]
    kernel = (blocks if scan else blocks[1])["attn"]["c_attn"]["kernel"]
    largest = np.abs(np.asarray(kernel)[1 if scan else ...]).max(axis=0)  # of 32 rows
    expected = np.std(np.ceil(np.log2(largest / 448)))
    key = "numerics/weights/h.1.attn.c_attn.kernel/block_spread"
    assert actual[key] == pytest.approx(expected, rel=1e-4)
