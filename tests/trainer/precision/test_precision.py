"""Every precision preset as users run it: its step compiled, its state stored, saved, restored and converted."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from scalify_core import Fp8DotGeneral, as_scaled_array, scalify
from scalify_core.array import asarray, is_scaled_array
from scalify_core.tree import map_arrays, unpack
from scalify_core.weights import scaled_params, wide
from trainer.assembly.objects import build_policy
from trainer.config.composition import compose_config
from trainer.data import Batch
from trainer.errors import UserError
from trainer.models.gpt2_block import SmoothSwigluMLP, SwigluMLP
from trainer.models.layers import Factory
from trainer.models.spec import GPT2Spec
from trainer.models.stress import align
from trainer.parallel.mesh import abstract_batch, make_mesh, place_batch
from trainer.precision.arrays import abstract_weights
from trainer.precision.dots import ClippedDot
from trainer.report.messages import describe_idle, describe_precision
from trainer.run.checkpoint import Checkpointer
from trainer.step.moments import moment_settings
from trainer.step.optimizer import make_optimizer
from trainer.step.state import from_stored, to_stored
from trainer.step.step import Hyper
from trainer.workload import (
    Model,
    Task,
    abstract_state,
    compile_step,
    convert_state,
    first_state,
    lower_step,
    make_rescale,
)

SPEC = GPT2Spec(vocab_size=64, context=16, n_layer=1, n_head=2, d_model=32)
ADAMW = {"b1": 0.9, "b2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0}
PRESETS = (
    "fp32", "bf16", "bf16_pure", "fp16_loss_scaled", "scalify_fp16", "scalify_fp8", "scalify_fp8_fp16",
    "scalify_fp8_fp8", "fp8_delayed", "fp8_current", "sim",
)  # fmt: skip
E4M3, E5M2 = "f8E4M3FN", "f8E5M2"


def of(preset, *values):
    """A case for the worker that has compiled this preset's step."""
    return pytest.param(*(values or (preset,)), marks=pytest.mark.xdist_group(preset), id="-".join(values or (preset,)))


every_preset = pytest.mark.parametrize("preset", [of(preset) for preset in PRESETS])
flagship = pytest.mark.xdist_group("scalify_fp8_fp16")


def policy(preset, **changes):
    config = compose_config([f"precision={preset}", "precision.amax_history=16"])
    return dataclasses.replace(build_policy(config.precision), **changes)


@functools.cache
def workload(preset, devices=1, spec=SPEC, name="adamw", **changes):
    """On several devices the state is split: FP8 kernels are gathered as such."""
    settings = ADAMW if name == "adamw" else {"b1": 0.9, "b2": 0.99, "weight_decay": 0.1, "clip_norm": 1.0}
    model = Model.make(spec, policy(preset, **changes))
    return Task(model, name, make_optimizer(name, **settings), make_mesh(1, devices))


def abstract(w, accum=1):
    return abstract_batch(accum, 16, SPEC.context, document_mask=False, mesh=w.mesh)


@functools.cache
def lowered(preset, devices=1, accum=1):
    w = workload(preset, devices)
    state = from_stored(to_stored(first_state(w, seed=0)))  # as a run has it
    return w, state, lower_step(w, abstract(w, accum), state)


@functools.cache
def compiled(preset, devices=1, accum=1):
    """The step of a preset and its first state; who takes steps copies the state, because it is donated."""
    w, state, step = lowered(preset, devices, accum)
    return w, state, step.compile()


def batch(w, step=0, accum=1):
    tokens = np.random.default_rng(step).integers(0, 64, (16, SPEC.context + 1), dtype=np.int32)
    return place_batch(Batch(tokens, None), accum=accum, mesh=w.mesh)


def hyper(step, lr, seed=0):
    return Hyper(np.float32(lr), np.int32(step), np.uint32(seed))


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


def take(preset, steps, start=0, state=None, devices=1, accum=1, lr=1e-2):
    w, first, step = compiled(preset, devices, accum)
    state = copied(first if state is None else state)
    for n in range(start, start + steps):
        state, metrics = step(state, batch(w, n, accum), hyper(n, lr))
    return state, metrics


def moments(state, name):
    return optax.tree_utils.tree_get(unpack(state.opt_state), name)


def bits(tree):
    raw = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(tree)]
    return [np.asarray(x).tobytes() for x in raw]


def operands(text):
    """The formats of the two operands of every matmul in a lowered program."""
    found = re.findall(r"dot_general.*: \(tensor<[0-9x]*x(\w+)>, tensor<[0-9x]*x(\w+)>\)", text)
    return {tuple(pair) for pair in found}


@every_preset
def test_every_preset_learns(preset):
    w, state, step = compiled(preset)
    state, tokens, losses = copied(state), batch(w, 0), []
    for n in range(12):
        state, metrics = step(state, tokens, hyper(n, 1e-2))
        assert metrics["finite"], n
        losses.append(metrics["loss"])
    np.testing.assert_allclose(losses[0], np.log(64), rtol=0.02)  # what knows nothing gets log 64
    assert losses[-1] < losses[0] - 0.3  # the batch is learnt by heart: sooner or later, to zero


@pytest.mark.parametrize("preset", [of("fp8_delayed"), of("scalify_fp8_fp8")])
def test_validation_has_the_loss_of_the_step(preset):
    w, state, step = compiled(preset)
    tokens = batch(w, 0)
    loss = jax.jit(w.model.eval_loss)(state, tokens.tokens_AxBxT1[0], None)
    np.testing.assert_allclose(loss, step(copied(state), tokens, hyper(0, 1e-2))[1]["loss"], rtol=2**-10)


def gradient(preset):
    """The first gradient, from the first moment after the step."""
    state, metrics = take(preset, 1)
    assert metrics["grad_norm"] < ADAMW["clip_norm"]
    exact = convert_state(workload("fp32"), to_stored(state), workload(preset).model.policy, seed=0)
    return jax.tree.map(lambda x: x / (1 - ADAMW["b1"]), moments(exact, "mu"))


@every_preset
def test_the_first_gradient_is_that_of_fp32_up_to_the_formats(preset):
    grads, right = gradient(preset), gradient("fp32")
    norm, error = optax.global_norm(right), optax.global_norm(jax.tree.map(jnp.subtract, grads, right))
    # A rounding to m mantissa bits is off by at most 2^-m / sqrt(12) in RMS. A gradient at the bottom of the layer has
    # passed four chosen matmuls, each with an E4M3 and an E5M2 operand: sqrt(4 (0.036^2 + 0.072^2)) = 0.16, and a store
    # in E5M2: 0.18. Stochastic roundings of moments in FP8 add 2^-3 / sqrt(6) and, to the root that the first one is
    # relative to, 2^-2 / sqrt(6): 0.22. 16-bit formats: some thirty roundings with m = 10 or 7.
    limit = {"fp32": 0, "fp16_loss_scaled": 2**-9, "scalify_fp16": 2**-9, "bf16": 2**-6, "bf16_pure": 2**-6}
    assert error / norm <= limit.get(preset, 0.22 if preset == "scalify_fp8_fp8" else 0.18)
    if preset != "fp32":
        assert error > 0


# What each state holds: master weights, m, v; and the bytes for each parameter that this makes.
STATE = {
    "fp32": ("float32", "float32", "float32", 12),
    "bf16": ("float32", "float32", "float32", 12),
    "bf16_pure": ("bfloat16", "bfloat16", "bfloat16", 6),
    "fp16_loss_scaled": ("float32", "float32", "float32", 12),
    "scalify_fp16": ("float16", "float32", "float32", 10),
    "scalify_fp8": ("float16", "float32", "float32", 10),
    "scalify_fp8_fp16": ("float16", "float16", "float16", 6),
    "scalify_fp8_fp8": ("float16", "float8_e4m3fn", "float8_e5m2", 4),
    "fp8_delayed": ("float32", "float32", "float32", 12),
    "fp8_current": ("float32", "float32", "float32", 12),
    "sim": ("float32", "float32", "float32", 12),
}


@every_preset
def test_the_state_is_stored_as_the_preset_says(preset):
    state, _ = take(preset, 1)
    data = lambda tree: {str(x.dtype) for x in jax.tree.leaves(tree) if x.ndim}
    mu, nu = (moments(state, name) for name in ("mu", "nu"))
    weights, m, v, each = STATE[preset]
    assert (data(state.params), data(mu), data(nu)) == ({weights}, {m}, {v})
    count = sum(x.size for x in jax.tree.leaves(state.params) if x.ndim)
    total = sum(x.nbytes for x in jax.tree.leaves((state.params, mu, nu)) if x.ndim)
    assert total == each * count


@every_preset
def test_the_program_multiplies_in_the_formats_of_the_preset(preset):
    text = lowered(preset)[2].as_text()
    casts = {name: len(re.findall(rf"stablehlo.convert.*-> tensor<[0-9x]+x{name}>", text)) for name in (E4M3, E5M2)}
    fp8 = preset in ("scalify_fp8", "scalify_fp8_fp16", "scalify_fp8_fp8", "fp8_current", "fp8_delayed")
    assert all(casts.values()) == any(casts.values()) == fp8
    compute = "f32" if preset in ("fp32", "sim") else "bf16" if preset.startswith(("bf16", "fp8")) else "f16"
    assert (compute, compute) in operands(text)  # the head


@every_preset
def test_a_saved_state_goes_on_bit_for_bit(preset, tmp_path):
    w, _, _ = compiled(preset)
    whole, _ = take(preset, 4)
    half, _ = take(preset, 2)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, to_stored(half), {})
        checkpointer.wait()
        restored = from_stored(checkpointer.restore(abstract_state(w)).state)
    assert jax.tree.structure(restored) == jax.tree.structure(half)
    resumed, _ = take(preset, 2, start=2, state=restored)
    assert bits(resumed) == bits(whole)


MANY = ["scalify_fp8_fp16", "scalify_fp8_fp8", "fp8_delayed", "fp16_loss_scaled"]


@pytest.mark.parametrize("preset", [of(preset) for preset in MANY])
def test_micro_batches_make_the_same_step_up_to_the_formats(preset):
    w, _, _ = compiled(preset)
    one, a = take(preset, 1)
    four, b = take(preset, 1, accum=4)
    # FP16 losses of micro-batches, each rounded; the rest is the same forward pass.
    np.testing.assert_allclose(a["loss"], b["loss"], rtol=2**-10)
    # Both norms are off by the errors of their gradients, of which only what points along the gradient counts: the
    # mean of at least 1,000 roundings to E5M2, none off by more than 2^-3.
    np.testing.assert_allclose(a["grad_norm"], b["grad_norm"], rtol=2**-3 / np.sqrt(1000) * 4)
    if preset == "fp8_delayed":  # the largest magnitude of all micro-batches is that of the batch
        histories = [[x for x in jax.tree.leaves(state.scaling) if x.shape == (16,)] for state in (one, four)]
        assert len(histories[0]) == 3 * len(w.model.narrow)
        assert all(a[0] > 0 and b[0] > 0 for a, b in zip(*histories, strict=True))
        inputs = lambda state: np.asarray(state.scaling["h"][0]["attn"]["c_attn"]["dot_general"]["lhs_amax_history"])
        np.testing.assert_allclose(inputs(one)[0], inputs(four)[0], rtol=2**-7)


@flagship
def test_several_devices_compute_what_one_does():
    _, a = take("scalify_fp8_fp16", 3)
    _, b = take("scalify_fp8_fp16", 3, devices=8)
    # Each device rounds its gradients to FP16 before they are added, so one in 2^8 (the FP16 steps in one of E5M2) is
    # rounded to the other neighbour, 2^-2 away: 2^-10 of what the steps did to the loss, which fell by less than 1.
    np.testing.assert_allclose(a["loss"], b["loss"], atol=2**-10)


@pytest.mark.parametrize("preset", [of("scalify_fp8_fp8"), of("fp8_delayed"), of("bf16_pure")])
def test_a_step_that_is_not_finite_changes_nothing(preset):
    w, state, step = compiled(preset)
    state = copied(state)
    gain = state.params["ln_f"]["scale"]
    nan = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), gain)
    state.params["ln_f"]["scale"] = nan
    before = bits(state)
    after, metrics = step(state, batch(w), hyper(0, 1e-2))
    assert not metrics["finite"]
    assert bits(after) == before


@pytest.mark.xdist_group("fp16_loss_scaled")
def test_the_loss_scale_falls_with_a_step_that_is_not_finite_and_the_rest_stays():
    w, state, step = compiled("fp16_loss_scaled")
    state = copied(dataclasses.replace(state, scaling=state.scaling._replace(value=jnp.float32(2.0**24))))
    before = bits((state.params, state.opt_state))
    after, metrics = step(state, batch(w), hyper(0, 1e-2))
    assert not metrics["finite"]
    assert after.scaling.value == 2.0**23
    assert bits((after.params, after.opt_state)) == before


@flagship
def test_stochastic_rounding_of_weights_depends_on_seed_and_step_alone():
    one, _ = take("scalify_fp8_fp16", 2)
    again, _ = take("scalify_fp8_fp16", 2)
    assert bits(one) == bits(again)
    w, first, step = compiled("scalify_fp8_fp16")
    other = step(copied(first), batch(w), hyper(0, 1e-2, seed=1))[0]
    assert bits(other.params) != bits(take("scalify_fp8_fp16", 1)[0].params)


@flagship
def test_the_optimiser_itself_can_be_propagated_in_fp16_data():
    """The paper's route: the second moment is kept as it is, in FP16, where the other one keeps its root."""
    plain = {"update": "propagate", "moments_rounding": "nearest", "weights_rounding": "nearest"}
    w = workload("scalify_fp8_fp16", **plain)
    state = first_state(w, seed=0)
    step, tokens, losses = compile_step(w, abstract(w), state), batch(w), []
    for n in range(12):
        state, metrics = step(state, tokens, hyper(n, 1e-2))
        losses.append(float(metrics["loss"]))
        if n == 0:
            propagated = copied(moments(state, "nu"))
    assert losses[-1] < losses[0] - 0.3
    data = {str(x.data.dtype) for x in jax.tree.leaves(propagated, is_leaf=is_scaled_array)}
    assert data == {"float16"}
    stored = moments(take("scalify_fp8_fp16", 1)[0], "nu")
    for v, root in zip(jax.tree.leaves(asarray(propagated)), jax.tree.leaves(asarray(stored)), strict=True):
        # FP16: three roundings to nearest of the square, and a stochastic one of the root, squared. What is small in
        # the square leaves the format: its scale is the RMS, below the largest.
        np.testing.assert_allclose(v, root**2, rtol=2**-8, atol=2**-23 * v.max())


@pytest.mark.parametrize(
    ("source", "target"), [of("scalify_fp8_fp8", "scalify_fp8_fp8", "fp32"), of("fp32", "fp32", "scalify_fp8_fp16")]
)
def test_a_state_is_converted_to_another_precision(source, target):
    state = to_stored(take(source, 5)[0])
    w = workload(target)
    converted = convert_state(w, state, workload(source).model.policy, seed=0)
    assert jax.tree.structure(to_stored(converted)) == jax.tree.structure(abstract_state(w))
    # FP8 moments are widened exactly; weights are rounded to FP16 at most.
    for a, b in zip(jax.tree.leaves(wide(converted.params)), jax.tree.leaves(wide(state.params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2**-11, atol=2**-24)
    converted = from_stored(converted)
    compile_step(w, abstract(w), converted)(copied(converted), batch(w), hyper(5, 1e-3))
    assert to_stored(converted).opt_state.step == state.opt_state.step


@flagship
def test_weights_that_left_their_place_get_a_new_scale_and_a_new_program():
    w, state, _ = compiled("scalify_fp8_fp16")
    rescale = make_rescale(w, abstract(w))
    assert rescale(state) is None
    state = copied(state)
    kernel = state.params["h"][0]["mlp"]["c_fc"]["kernel"]
    state.params["h"][0]["mlp"]["c_fc"]["kernel"] = type(kernel)(kernel.data * jnp.float16(64), kernel.scale)
    new, step, text = rescale(state)
    assert "1 weights" in text
    assert "c_fc" in text
    assert new.params["h"][0]["mlp"]["c_fc"]["kernel"].scale == 64 * kernel.scale
    np.testing.assert_array_equal(*(wide(s.params["h"][0]["mlp"]["c_fc"]["kernel"]) for s in (new, state)))
    assert step(new, batch(w), hyper(0, 1e-3))[1]["finite"]


@pytest.mark.parametrize("scan", [False, True])
def test_kept_layers_are_not_fp8(scan):
    spec = dataclasses.replace(SPEC, n_layer=2, scan_layers=scan)
    model = Model.make(spec, policy("scalify_fp8", keep=("h.*.mlp.*",)))
    assert all(".attn." in path for path in model.narrow)
    assert len(model.narrow) == (2 if scan else 4)
    assert sum(map(model.is_narrow, jax.tree.leaves(model.roles))) == len(model.narrow)


def test_layers_that_are_not_fp8_are_named_with_the_reason():
    spec = dataclasses.replace(SPEC, d_mlp=40)
    w = workload("scalify_fp8", spec=spec)
    assert w.model.narrow == ["h.0.attn.c_attn", "h.0.attn.c_proj"]
    said = describe_precision(w.model)
    assert "2 of 4 linear layers in e4m3/e5m2" in said
    assert "(h.0.mlp.c_fc: 32 x 40 are not multiples of 16)" in said
    text = lower_step(w, abstract(w)).as_text()  # with warnings as errors: nothing is skipped while it is traced
    shapes = re.findall(r"convert.*-> tensor<(\d+)x(\d+)xf8E4M3FN>", text)
    assert shapes
    assert not any("40" in shape for shape in shapes)
    kept = Model.make(SPEC, policy("scalify_fp8", matmuls=("h.*",), keep=("h.0.attn.*",)))
    assert kept.skipped == {"h.0.attn.c_attn": "in precision.keep", "h.0.attn.c_proj": "in precision.keep"}


def test_scanned_layers_train_in_the_flagship_precision():
    w = workload("scalify_fp8_fp16", spec=dataclasses.replace(SPEC, n_layer=2, scan_layers=True))
    state = first_state(w, seed=0)
    step = compile_step(w, abstract(w), state)
    for n in range(3):
        state, metrics = step(state, batch(w, n), hyper(n, 1e-2))
        assert metrics["finite"]


def gradient_of_values(preset, gain, **changes):
    """All gradients of a first step whose values are multiplied by `gain`; of the values' part of `c_attn`, FP32."""
    w = workload(preset, spec=dataclasses.replace(SPEC, value_gain=gain), **changes)
    state, tokens = first_state(w, seed=0), batch(w).tokens_AxBxT1[0]
    value_and_grad = w.model.differentiate().value_and_grad
    grads = jax.jit(lambda s: wide(value_and_grad(s.params, s.scaling, tokens, None, s.key)[1]))(state)
    return grads, grads["h"][0]["attn"]["c_attn"]["kernel"][:, 64:]


@pytest.mark.parametrize("preset", ["fp32", "scalify_fp8_fp16"])
def test_gradients_are_the_same_for_every_value_gain(preset):
    # Powers of two, which static scales take up: no bit differs.
    up, down = (bits(gradient_of_values(preset, gain)) for gain in (2.0**12, 2.0**-12))
    assert up == down == bits(gradient_of_values(preset, 1.0))


def test_fp16_leaves_its_range_with_the_values():
    of_values = lambda *args, **changes: gradient_of_values(*args, **changes)[1]
    exact = of_values("fp32", 1.0)
    off = of_values("fp16_loss_scaled", 2.0**12, scaling="none") - exact
    assert optax.global_norm(off) > 0.1 * optax.global_norm(exact)  # underflow; of gradients in range it is 2^-11
    assert not jnp.isfinite(of_values("fp16_loss_scaled", 2.0**-12)).all()  # at the first loss scale


def test_smooth_swiglu_is_swiglu():
    tokens = batch(workload("fp32")).tokens_AxBxT1[0]
    models = [Model.make(dataclasses.replace(SPEC, mlp=mlp), policy("fp32")) for mlp in ("swiglu", "smooth_swiglu")]
    params = models[0].training.init(jax.random.key(0))
    (a, ga), (b, gb) = (jax.jit(jax.value_and_grad(m.loss))(params, tokens, None, None) for m in models)
    assert a == b  # powers of two
    error = optax.global_norm(jax.tree.map(jnp.subtract, ga, gb)) / optax.global_norm(ga)
    assert error < 1e-6


@pytest.mark.parametrize("size", [2.0**-15, 2.0**-20, 2.0**-24])
def test_channels_that_are_nearly_dead_are_smoothed_in_fp16_too(size):
    """The inverse of their own power of two would be beyond FP16."""
    w = workload("fp16_loss_scaled", spec=dataclasses.replace(SPEC, mlp="smooth_swiglu"))
    state = first_state(w, seed=0)
    kernel = state.params["h"][0]["mlp"]["c_fc"]["kernel"]
    state.params["h"][0]["mlp"]["c_fc"]["kernel"] = kernel.at[:, ::2].multiply(size)
    value_and_grad = w.model.differentiate().value_and_grad
    tokens = batch(w).tokens_AxBxT1[0]
    loss, grads, *_ = jax.jit(lambda s: value_and_grad(s.params, s.scaling, tokens, None, s.key))(state)
    assert jnp.isfinite(loss)
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_smoothing_is_folded_away_where_text_is_generated():
    spec = dataclasses.replace(SPEC, mlp="smooth_swiglu")
    smooth, plain = (Model.make(s, policy("fp16_loss_scaled")) for s in (spec, dataclasses.replace(SPEC, mlp="swiglu")))
    params = smooth.training.init(jax.random.key(0))

    def decode(m):
        model = m.sampling.bind(params)
        return model.decode(jnp.arange(4)[None], model.init_cache(1), 0)

    (a, _), (b, _) = decode(smooth), decode(plain)
    assert (a == b).all()
    assert type(smooth.training.bind(params).h[0].mlp) is SmoothSwigluMLP
    assert type(smooth.sampling.bind(params).h[0].mlp) is SwigluMLP


def test_smooth_swiglu_keeps_the_aligned_channels_that_saturate_in_swiglu():
    spec = GPT2Spec(vocab_size=64, d_model=128, n_head=4, d_mlp=352, mlp="swiglu", align_channels=4, align_gain=256.0)
    x = jax.random.normal(jax.random.key(1), (256, 128))

    def output(cls, dot=None):
        module = cls(spec, Factory("h.0", nnx.Rngs(params=0), jnp.float32, jnp.float32, dot, (), None), 0.004)
        align(module.c_gate, module.c_fc, spec.align_channels, spec.align_gain)
        graphdef, params = nnx.split(module)
        params = nnx.to_pure_dict(params)
        apply = lambda params, x: nnx.merge(graphdef, params)(x, lambda x: x)
        if dot is None:
            return apply(params, x)
        scaled = jax.jit(scalify(apply, scales="static"))
        return wide(scaled(scaled_params(params, jnp.float16), as_scaled_array(x, 1.0, dtype=jnp.float16)))

    def error(cls):
        exact = output(SwigluMLP)
        return jnp.linalg.norm(output(cls, Fp8DotGeneral) - exact) / jnp.linalg.norm(exact)

    # Roundings to E4M3 are off by 0.036 in RMS, see above: two operands for each branch, two for the last product.
    assert error(SmoothSwigluMLP) < np.sqrt(6) * 0.036
    assert error(SwigluMLP) > 0.4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"forward": "e9m9"}, r"precision\.forward=e9m9"),
        ({"forward": "e3m4", "backward": "e5m2"}, "simulate=true"),
        ({"forward": "e4m3"}, "give both"),
        ({"clip_outliers": 6.0}, "no matmul is"),
        ({"scaling": "delayed"}, "scales FP8 matmuls"),
        ({"weights": "fp16"}, "needs precision.scaling=propagate"),
        ({"scaling": "propagate", "compute": "fp16"}, "weight_grad=fp32"),
        ({"simulate": True, "compute": "bf16"}, "it needs compute=fp32"),
        ({"update": "propagate"}, "needs precision.scaling=propagate"),
        ({"rescale_grads": ("head",)}, "'head' is not a place"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(changes, said):
    with pytest.raises(UserError, match=said):
        policy("fp32", **changes)


@pytest.mark.parametrize(
    ("preset", "changes", "found", "valid"),
    [
        ("fp32", {"weight_grad": "bf16"}, "bf16, but no matmul is narrower than precision.compute=fp32", "fp32"),
        (
            "bf16",
            {"weight_grad": "e5m2"},
            "e5m2, but no matmul is narrower than precision.compute=bf16",
            "fp32 or bf16",
        ),
        ("bf16", {"weights": "bf16"}, "fp32, but precision.weights=bf16", "bf16"),
        ("fp32", {"weights": "bf16"}, "fp32, but precision.weights=bf16", "bf16"),
        ("bf16_pure", {"weight_grad": "fp32"}, "fp32, but precision.weights=bf16", "bf16"),
        (
            "scalify_fp16",
            {"weight_grad": "e5m2"},
            "e5m2, but gradients are propagated in precision.compute=fp16",
            "fp16",
        ),
        (
            "scalify_fp16",
            {"weight_grad": "bf16"},
            "bf16, but gradients are propagated in precision.compute=fp16",
            "fp16",
        ),
        ("scalify_fp8", {"weight_grad": "fp32"}, "fp32, but gradients are propagated", "fp16 or bf16 or e4m3 or e5m2"),
        ("fp8_current", {"weight_grad": "e5m2"}, "e5m2, but without precision.scaling=propagate", "fp32 or bf16"),
        ("fp8_delayed", {"weight_grad": "fp16"}, "fp16, but without precision.scaling=propagate", "fp32 or bf16"),
        ("sim", {"weight_grad": "e4m3"}, "e4m3, but without precision.scaling=propagate", "fp32 or bf16"),
        ("sim", {"weights": "bf16"}, "fp32, but precision.weights=bf16", "bf16"),
        ("fp8_current", {"weights": "bf16"}, "fp32, but precision.weights=bf16", "bf16"),
    ],
)
def test_weight_gradients_that_nothing_would_compute_are_refused(preset, changes, found, valid):
    said = f"precision.weight_grad={found}"
    with pytest.raises(UserError, match=f"{re.escape(said)}.*; set precision.weight_grad={valid}$"):
        policy(preset, **changes)


def test_what_a_refusal_of_weight_gradients_recommends_is_accepted():
    assert policy("bf16", weight_grad="bf16").weight_gradients == "bf16"
    assert policy("fp32", weights="bf16", weight_grad="bf16").weight_gradients == "bf16"
    assert policy("scalify_fp8", weight_grad="bf16").weight_gradients == "bf16"
    assert policy("fp8_delayed", weight_grad="bf16").weight_gradients == "bf16"
    assert policy("fp8_current").weight_gradients == "fp32"


def test_the_start_up_line_says_that_delayed_scaling_rounds_weight_gradients():
    said = describe_precision(workload("fp8_delayed").model)
    assert "weight gradients rounded to bf16 by Flax's product, kept in fp32, moments" in said


def test_clipped_operands_keep_their_amax_histories():
    model = Model.make(SPEC, policy("fp8_delayed", clip_outliers=2.0))
    histories = jax.eval_shape(model.training.init_histories)  # three tensors of a product: what is seen, and a scale
    assert len(jax.tree.leaves(histories)) == 6 * len(model.narrow) == 24


def test_operands_are_clipped_to_a_multiple_of_their_rms():
    x = jnp.float32([[1.0, 1.0, 1.0, 5.0]])  # RMS sqrt(7)
    out = ClippedDot(lambda lhs, rhs, dims: lhs, 1.5)(x, x, (((1,), (1,)), ((), ())))
    np.testing.assert_allclose(out, [[1.0, 1.0, 1.0, 1.5 * 7**0.5]], rtol=2**-22)


def test_a_kernel_whose_rows_are_smoothed_is_sent_as_it_is_smoothed():
    """On one device the factor of a channel comes before the rounding to E4M3, so on several it has to as well."""

    def sent(preset, mlp):
        model = Model.make(dataclasses.replace(SPEC, mlp=mlp), policy(preset))
        params = abstract_weights(jax.eval_shape(model.training.init, jax.random.key(0)), model.policy, 1.0)
        send = lambda p: map_arrays(lambda x, role: model.in_transit(role, x), p, model.roles)
        mlp = jax.eval_shape(send, params)["h"][0]["mlp"]
        return [str(getattr(mlp[name]["kernel"], "data", mlp[name]["kernel"]).dtype) for name in ("c_fc", "c_proj")]

    assert sent("scalify_fp8", "smooth_swiglu") == ["float8_e4m3fn", "float16"]
    assert sent("scalify_fp8", "swiglu") == ["float8_e4m3fn", "float8_e4m3fn"]
    assert sent("fp8_current", "smooth_swiglu") == ["float32", "float32"]


@pytest.mark.parametrize(("preset", "key"), [("scalify_fp8", "matmuls"), ("scalify_fp8", "keep"), ("bf16", "keep")])
def test_a_pattern_without_a_match_is_refused(preset, key):
    said = rf"precision\.{key}: no matmul matches 'layer\.\*'; there are h\.0\.attn\.c_attn"
    with pytest.raises(UserError, match=said):
        Model.make(SPEC, policy(preset, **{key: ("layer.*",)}))


def test_an_override_that_changes_nothing_is_said():
    given = [
        "precision=bf16",
        "precision.amax_history=3",
        "precision.keep=[h.0.*]",
        "precision.weights_rounding=nearest",
    ]
    assert describe_idle(policy("bf16"), given) == [
        "precision.keep has no effect here: no matmul is narrower than precision.compute=bf16",
        "precision.weights_rounding has no effect here: precision.weights=fp32",
        "precision.amax_history has no effect here: precision.scaling=none, not delayed",
    ]
    assert describe_idle(policy("fp8_delayed"), given[1:3]) == []
    assert describe_idle(policy("scalify_fp8_fp16"), ["precision.rescale_grads=[]", *given[2:]]) == []


def test_rows_that_fp8_does_not_take_leave_nothing_narrow():
    w = workload("scalify_fp8_fp16")
    w = w._replace(model=Model.make(dataclasses.replace(SPEC, context=24), w.model.policy, rows=24))
    assert w.model.narrow == []
    assert w.in_precision(w.model.policy).model.narrow == []
    said = describe_precision(w.model)
    assert "0 of 4 linear layers in e4m3/e5m2, 0% of the FLOPs" in said
    assert "(all: micro-batches of 24 tokens a device, not a multiple of 16)" in said
    assert "weight gradients fp16" in said
    tokens = abstract_batch(1, 1, 24, document_mask=False, mesh=w.mesh)
    text = lower_step(w, tokens, abstract_state(w)).as_text()  # with warnings as errors: nothing tries to be FP8
    assert "f8E" not in text
    others = [policy("fp8_delayed"), policy("sim", forward="e4m3", backward="e5m2")]
    assert [len(Model.make(SPEC, other, rows=24).narrow) for other in others] == [4, 4]
    said = describe_precision(workload("fp8_delayed", keep=("h.*",)).model)
    assert "weight gradients fp32" in said


def test_a_moment_that_the_optimiser_does_not_have_is_refused():
    with pytest.raises(UserError, match=r"precision\.nu=fp16, but optimizer=lion has no such moment"):
        moment_settings("lion", policy("scalify_fp8_fp16"))


def test_an_update_in_fp16_has_moments_that_are_not_wider():
    with pytest.raises(UserError, match=r"precision\.mu=fp32, but precision\.update=propagate computes in fp16"):
        moment_settings("adamw", policy("scalify_fp8", update="propagate"))


def test_scaled_arrays_appear_only_where_scales_propagate():
    for preset in PRESETS:
        params = first_state(workload(preset), seed=0).params
        found = any(is_scaled_array(x) for x in jax.tree.leaves(params, is_leaf=is_scaled_array))
        assert found == preset.startswith("scalify")
