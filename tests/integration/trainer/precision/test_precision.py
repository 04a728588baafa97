"""Every precision preset as users run it: its step compiled, its state stored, saved,
restored and converted."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import slow
from precisions import (
    ADAMW,
    PRESETS,
    SPEC,
    abstract,
    batch,
    bits,
    copied,
    policy,
    step_inputs,
    workload,
)

from scalify_core import ScaledArray, scalify
from scalify_core.array.scaled_array import asarray, is_scaled_array
from scalify_core.optim.weights import wide
from trainer.precision.arrays import dot_general_for
from trainer.precision.gradients import GROWTH_STEPS, LossScale, next_loss_scale
from trainer.run.builtin_callbacks import with_new_scales
from trainer.run.checkpoint import Checkpointer
from trainer.run.converting import convert_state
from trainer.step.packing import unpack
from trainer.step.state import from_checkpoint_form, to_checkpoint_form
from trainer.workload import (
    abstract_state,
    first_state,
    lower_step,
)

# One of each way to scale in make test; the others in make test-all.
FEW = ("fp32", "scalify_fp8_fp16", "fp8_delayed")
every_preset = pytest.mark.parametrize(
    "preset", [p if p in FEW else slow(p) for p in PRESETS]
)


@functools.cache
def lowered(preset, accum=1):
    w = workload(preset)
    # as a run has it
    state = from_checkpoint_form(to_checkpoint_form(first_state(w, seed=0)))
    return w, state, lower_step(w, abstract(w, accum), state)


@functools.cache
def compiled(preset, accum=1):
    """The step of a preset and its first state, which is copied before a step because
    the step donates it."""
    w, state, step = lowered(preset, accum)
    return w, state, step.compile()


def take(preset, steps, start=0, state=None, accum=1):
    w, first, step = compiled(preset, accum)
    state = copied(first if state is None else state)
    for n in range(start, start + steps):
        state, metrics = step(state, batch(w, n, accum), step_inputs(n, 1e-2))
    return state, metrics


def moments(state, name):
    return optax.tree_utils.tree_get(unpack(state.opt_state), name)


@every_preset
def test_every_preset_learns(preset):
    w, state, step = compiled(preset)
    state, tokens, losses = copied(state), batch(w, 0), []
    for n in range(12):
        state, metrics = step(state, tokens, step_inputs(n, 1e-2))
        assert metrics["finite"], n
        losses.append(metrics["loss"])
    # what knows nothing gets log 64
    np.testing.assert_allclose(losses[0], np.log(64), rtol=0.02)
    # the batch is learnt by heart: sooner or later, to zero
    assert losses[-1] < losses[0] - 0.3


def test_validation_has_the_loss_of_the_step():
    w, state, step = compiled("fp8_delayed")
    tokens = batch(w, 0)
    loss = jax.jit(w.model.eval_loss)(state, tokens.tokens_AxBxT1[0], None)
    np.testing.assert_allclose(
        loss, step(copied(state), tokens, step_inputs(0, 1e-2))[1]["loss"], rtol=2**-10
    )


def gradient(preset):
    """The first gradient, from the first moment after the step."""
    state, metrics = take(preset, 1)
    assert metrics["grad_norm"] < ADAMW.clip_norm
    exact = convert_state(
        workload("fp32"),
        to_checkpoint_form(state),
        workload(preset).model.policy,
        seed=0,
    )
    rest = np.float32(1 - ADAMW.b1)
    return jax.tree.map(lambda x: np.asarray(x) / rest, moments(exact, "mu"))


@every_preset
def test_the_first_gradient_is_that_of_fp32_up_to_the_formats(preset):
    grads, right = gradient(preset), gradient("fp32")
    difference = jax.tree.map(np.subtract, grads, right)
    norm, error = map(jax.jit(optax.global_norm), (right, difference))
    # A rounding to m mantissa bits is off by at most 2^-m / sqrt(12) in RMS. A gradient
    # at the bottom of the layer has passed four chosen matmuls, each with an E4M3 and
    # an E5M2 operand: sqrt(4 (0.036^2 + 0.072^2)) = 0.16, and a store in E5M2: 0.18.
    # Stochastic roundings of moments in FP8 add 2^-3 / sqrt(6) and, to the root that
    # the first one is relative to, 2^-2 / sqrt(6): 0.22. 16-bit formats: some thirty
    # roundings with m = 10 or 7.
    limit = {
        "fp32": 0,
        "fp16_loss_scaled": 2**-9,
        "scalify_fp16": 2**-9,
        "bf16": 2**-6,
        "bf16_pure": 2**-6,
    }
    assert error / norm <= limit.get(
        preset, 0.22 if preset == "scalify_fp8_fp8" else 0.18
    )
    if preset != "fp32":
        assert error > 0


# dtypes of weights, mu and nu, and bytes a parameter; the format of the head's product,
# and whether products are cast to E4M3 and E5M2
STATE = {
    "fp32": ("float32", "float32", "float32", 12, "f32", False, False),
    "bf16": ("float32", "float32", "float32", 12, "bf16", False, False),
    "bf16_pure": ("bfloat16", "bfloat16", "bfloat16", 6, "bf16", False, False),
    "fp16_loss_scaled": ("float32", "float32", "float32", 12, "f16", False, False),
    "scalify_fp16": ("float16", "float32", "float32", 10, "f16", False, False),
    "scalify_fp8": ("float16", "float32", "float32", 10, "f16", True, True),
    "scalify_fp8_fp16": ("float16", "float16", "float16", 6, "f16", True, True),
    "scalify_fp8_fp8": (
        "float16",
        "float8_e4m3fn",
        "float8_e5m2",
        4,
        "f16",
        True,
        True,
    ),
    "scalify_mxfp8": ("float16", "float16", "float16", 6, "f16", True, False),
    "fp8_delayed": ("float32", "float32", "float32", 12, "bf16", True, True),
    "fp8_current": ("float32", "float32", "float32", 12, "bf16", True, True),
    "sim": ("float32", "float32", "float32", 12, "f32", False, False),
}


@every_preset
def test_state_and_products_have_the_formats_of_the_preset(preset):
    weights, m, v, each, compute, *fp8 = STATE[preset]
    state, _ = take(preset, 1)
    mu, nu = (moments(state, name) for name in ("mu", "nu"))
    arrays = [
        [x for x in jax.tree.leaves(tree) if x.ndim] for tree in (state.params, mu, nu)
    ]
    assert [{str(x.dtype) for x in xs} for xs in arrays] == [{weights}, {m}, {v}]
    count = sum(x.size for x in arrays[0])
    assert sum(x.nbytes for xs in arrays for x in xs) == each * count
    params = jax.tree.leaves(state.params, is_leaf=is_scaled_array)
    assert any(map(is_scaled_array, params)) == preset.startswith("scalify")

    text = lowered(preset)[2].as_text()
    casts = [
        bool(re.search(rf"stablehlo.convert.*-> tensor<[0-9x]+x{name}>", text))
        for name in ("f8E4M3FN", "f8E5M2")
    ]
    assert casts == fp8
    operand = rf"tensor<[0-9x]*x{compute}>"
    assert re.search(rf"dot_general.*: \({operand}, {operand}\)", text)  # the head


@pytest.mark.parametrize("preset", [*FEW, slow("scalify_fp8_fp8")])
def test_a_saved_state_resumes_bitwise(preset, tmp_path):
    w, _, _ = compiled(preset)
    expected, _ = take(preset, 4)
    half, _ = take(preset, 2)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, to_checkpoint_form(half), {})
        checkpointer.wait()
        restored = from_checkpoint_form(checkpointer.restore(abstract_state(w)).state)
    assert jax.tree.structure(restored) == jax.tree.structure(half)
    resumed, _ = take(preset, 2, start=2, state=restored)
    assert bits(resumed) == bits(expected)


def test_micro_batches_make_the_same_step_up_to_the_formats():
    """Those of the flagship, to the bit: the golden run `accum`."""
    w, _, _ = compiled("fp8_delayed")
    one, a = take("fp8_delayed", 1)
    four, b = take("fp8_delayed", 1, accum=4)
    # FP16 losses of micro-batches, each rounded; the rest is the same forward pass.
    np.testing.assert_allclose(a["loss"], b["loss"], rtol=2**-10)
    # Both norms are off by the errors of their gradients, of which only what points
    # along the gradient counts: the mean of at least 1,000 roundings to E5M2, none off
    # by more than 2^-3.
    rtol = 2**-3 / np.sqrt(1000) * 4
    np.testing.assert_allclose(a["grad_norm"], b["grad_norm"], rtol=rtol)
    # the largest magnitude of all micro-batches is that of the batch
    histories = [
        [x for x in jax.tree.leaves(state.scaling) if x.shape == (16,)]
        for state in (one, four)
    ]
    assert len(histories[0]) == 3 * len(w.model.narrow)
    assert all(a[0] > 0 and b[0] > 0 for a, b in zip(*histories, strict=True))
    inputs = [
        state.scaling["h"][0]["attn"]["c_attn"]["dot_general"]["lhs_amax_history"][0]
        for state in (one, four)
    ]
    np.testing.assert_allclose(*inputs, rtol=2**-7)


def test_a_step_that_is_not_finite_changes_nothing():
    w, state, step = compiled("fp8_delayed")
    state = copied(state)
    gain = state.params["ln_f"]["scale"]
    nan = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), gain)
    state.params["ln_f"]["scale"] = nan
    state_bits = bits(state)
    after, metrics = step(state, batch(w), step_inputs(0, 1e-2))
    assert not metrics["finite"]
    assert bits(after) == state_bits


def test_the_loss_scale_falls_with_a_step_that_is_not_finite_and_the_rest_stays():
    w, state, step = compiled("fp16_loss_scaled")
    state = copied(
        dataclasses.replace(
            state, scaling=state.scaling._replace(value=jnp.float32(2.0**24))
        )
    )
    state_bits = bits((state.params, state.opt_state))
    after, metrics = step(state, batch(w), step_inputs(0, 1e-2))
    assert not metrics["finite"]
    assert after.scaling.value == 2.0**23
    assert bits((after.params, after.opt_state)) == state_bits


def test_the_loss_scale_doubles_once_after_many_finite_steps():
    scaling = LossScale(jnp.float32(8), jnp.int32(GROWTH_STEPS - 1))
    grown = next_loss_scale(scaling, (), jnp.bool_(True))
    assert (grown.value, grown.finite_steps) == (16, 0)
    assert next_loss_scale(grown, (), jnp.bool_(True)).value == 16


def test_stochastic_rounding_of_weights_depends_on_seed_and_step_alone():
    one, _ = take("scalify_fp8_fp16", 2)
    repeated, _ = take("scalify_fp8_fp16", 2)
    assert bits(one) == bits(repeated)
    w, first, step = compiled("scalify_fp8_fp16")
    other = step(copied(first), batch(w), step_inputs(0, 1e-2, seed=1))[0]
    assert bits(other.params) != bits(take("scalify_fp8_fp16", 1)[0].params)


def test_weights_that_left_their_place_get_a_new_scale_and_a_new_program():
    w, state, _ = compiled("scalify_fp8_fp16")
    assert with_new_scales(state, w, abstract(w)) is None
    state = copied(state)
    mlp = state.params["h"][0]["mlp"]
    first_kernels = {name: mlp[name]["kernel"] for name in ("c_fc", "c_proj")}

    def grow(name, factor):
        old = first_kernels[name]
        mlp[name]["kernel"] = type(old)(old.data * factor, old.scale)

    grow("c_fc", 2)
    grow("c_proj", 2)
    assert with_new_scales(state, w, abstract(w)) is None
    grow("c_fc", 4)
    new, step, text = with_new_scales(state, w, abstract(w))
    # what has not left its place gets the scale of its RMS too: it costs nothing more
    assert "2 weights" in text
    for name, factor in (("c_fc", 4), ("c_proj", 2)):
        assert f"h.0.mlp.{name}.kernel 2^" in text
        kernel = new.params["h"][0]["mlp"][name]["kernel"]
        assert kernel.scale == factor * first_kernels[name].scale
        np.testing.assert_array_equal(wide(kernel), wide(mlp[name]["kernel"]))
    assert step(new, batch(w), step_inputs(0, 1e-3))[1]["finite"]


def test_gradients_of_chosen_layers_are_in_e4m3():
    spec = dataclasses.replace(SPEC, n_layer=2, scan_layers=True)

    def casts_to_e5m2(patterns):
        changes = {"weight_grad": "fp16", "backward_e4m3": patterns}
        w = workload("scalify_fp8", spec=spec, **changes)
        text = lower_step(w, abstract(w)).as_text()
        return len(re.findall(r"stablehlo.convert.*-> tensor<[0-9x]+xf8E5M2>", text))

    assert casts_to_e5m2(None) == 4
    assert casts_to_e5m2(("h.*.mlp.*",)) == 2


def product(policy, x, w, *scales):
    """The product that a policy gives an FP32 layer, of arrays, or of their data at
    scales."""
    dot = dot_general_for(policy, ["h.0"], keep_weights=False)("h.0")
    multiply = lambda a, b: dot(a, b, (((1,), (0,)), ((), ())))
    if not scales:
        return multiply(x, w)
    operands = map(ScaledArray, (x, w), map(np.float32, scales))
    return asarray(scalify(multiply, scales="static")(*operands))


def test_an_outlier_beyond_the_format_is_shared_out():
    """1500, above 448, is 375 in each of 16 mixed channels: rounded to E4M3's four
    digits, and not clipped."""
    x, w = jnp.zeros((16, 32)).at[0, 3].set(1500), jnp.ones((32, 16))
    assert np.all(product(policy("scalify_fp8"), x, w, 1, 1)[0] == 448)
    mixed = product(policy("scalify_fp8", hadamard=16), x, w, 1, 1)
    np.testing.assert_allclose(mixed[0], 1500, rtol=2 * 2.0**-4)


@pytest.mark.parametrize(("form", "expected"), [("e3m2", 2.0), ("e3m2t", 1.75)])
def test_a_simulated_product_truncates_where_its_format_says_so(form, expected):
    """1.9 lies between 1.75 and 2. Times 2^-12 it is below all numbers of E3M2, which a
    scale of 2^-12 makes up for."""
    simulated = policy("sim", forward=form, backward="e5m2")
    x, w = jnp.ones((1, 1)), jnp.full((1, 1), 1.9)
    assert product(simulated, x, w)[0, 0] == expected
    assert product(simulated, x, w * 2.0**-12)[0, 0] == 0
    assert product(simulated, x, w, 1, 2.0**-12)[0, 0] == expected * 2.0**-12
