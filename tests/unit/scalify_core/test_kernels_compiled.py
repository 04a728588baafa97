"""Programs compiled for an H200 on a machine without a GPU: which kernels multiply,
what they write and hold, and the barriers that lead the compiler there."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from for_h200 import (
    AS_TRAINED,
    FP8_GEMM,
    MATRIX,
    assert_all_fp8,
    compiled_for_a_gpu,
    compiled_text,
    gemms,
    program_for,
    with_gradients,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from propagated import scalify

from scalify_core import ScaledArray, asarray
from scalify_core.array.scaled_array import is_scaled_array
from scalify_core.numerics import compiler_hints
from scalify_core.numerics.formats import E4M3, E5M2, FP16
from scalify_core.ops.functional import attention, embedding, layer_norm, materialized
from scalify_core.ops.matmul import Fp8DotGeneral, fp8_dot_general
from scalify_core.optim import Stored, scaled_state
from scalify_core.optim.weights import apply_updates
from scalify_core.static import set_scaling
from trainer.step.packing import pack, unpack


def written(text):
    """Return the types that each fusion of the program writes."""
    return re.findall(r" = (\(.*?\)|\S+) fusion\(", text[text.index("ENTRY ") :])


def on_data(step):
    """The step on data at scale 1, returning the data of its results."""

    def run(*arrays):
        out = scalify(step)(*(ScaledArray(a, 1.0) for a in arrays))
        return [y.data for y in jax.tree.leaves(out, is_leaf=is_scaled_array)]

    return run


def product(x, w):
    return fp8_dot_general(x, w, MATRIX)


def weight_gradient_of_norm(x, gain, bias, w, gradient):
    fun = lambda x, gain, bias, w: product(layer_norm(x, gain, bias), w)
    out, pull = jax.vjp(fun, x, gain, bias, w)
    return out, pull(gradient)[3]


def kept_weight(x, w, gradient):
    dot = Fp8DotGeneral(keep_rhs=True)
    out, pull = jax.vjp(lambda x, w: dot(x, w, MATRIX), x, w)
    return out, pull(gradient)


# The shapes, the products of the backward pass, and the array of E4M3 that is written
# in both orders.
WRITTEN = {
    weight_gradient_of_norm: (
        ((8192, 768), (768,), (768,), (768, 768), (8192, 768)),
        1,
        (8192, 768),
    ),
    kept_weight: (((8192, 768), (768, 2304), (8192, 2304)), 2, (768, 2304)),
}


@pytest.mark.parametrize("step", WRITTEN)
def test_an_operand_is_written_in_fp8_and_then_transposed(h200, step):
    """A kernel that writes both orders takes longer than two, on an H100."""
    shapes, backward, (rows, columns) = WRITTEN[step]
    text = compiled_text(h200, on_data(step), *shapes, **AS_TRAINED)
    assert_all_fp8(text, forward=1, backward=backward)
    orders = [f"f8e4m3fn[{rows},{columns}]", f"f8e4m3fn[{columns},{rows}]"]
    actual = [[order for order in orders if order in out] for out in written(text)]
    assert sorted(filter(None, actual)) == sorted([order] for order in orders)


def test_the_gradients_of_a_layer_norm_read_its_statistics(h200):
    """No array of products is stored in FP32 to be added up, and both sums are made by
    one kernel, cut in two steps."""

    def step(x, weight, bias, gradient):
        y, pull = jax.vjp(layer_norm, x, weight, bias)
        return y, pull(jnp.sin(y) * gradient)

    text = compiled_text(
        h200, step, (8192, 768), (768,), (768,), (8192, 768), **AS_TRAINED
    )
    assert not [out for out in written(text) if "f32[8192,768]" in out]
    sums = [out for out in written(text) if re.search(r"f32\[\d+,768\]", out)]
    assert len(sums) == 1, written(text)


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("run", [scalify, lambda f: f])
def test_a_loop_over_layers_calls_each_attention_once_in_each_pass(run, segments):
    """The statistics of the forward kernel are stacked for the backward loop."""
    ids = jnp.zeros((2, 256), jnp.int32) if segments else None

    def loss(x, layers):
        def layer(x, scale):
            x = set_scaling(x * scale, 1.0)
            return attention(x, x, x, segments=ids), None

        return jnp.sum(jax.lax.scan(layer, x, layers)[0].astype(jnp.float32))

    def step(x, layers):
        if run is scalify:
            x = ScaledArray(x, 1.0)
        return asarray(run(jax.grad(loss))(x, layers))

    shapes = [((2, 256, 4, 64), jnp.float16), ((3,), jnp.float16)]
    p = program_for("h200", step, *shapes, **AS_TRAINED)
    calls = [(a.backward, a.times) for a in p.attentions]
    assert sorted(calls) == [(False, 3), (True, 3)]


def test_forward_and_both_gradients_of_a_plain_program_are_fp8_gemms(h200):
    dot = Fp8DotGeneral(current_scaling=True)
    fun = with_gradients(lambda x, w: dot(x, w, MATRIX))
    text = compiled_text(h200, fun, (256, 128), (128, 512))
    assert_all_fp8(text, forward=1, backward=2)


def test_a_static_scale_is_the_alpha_of_the_gemm(h200):
    text = compiled_text(h200, on_data(product), (256, 64), (64, 512))
    assert_all_fp8(text, forward=1, backward=0)
    assert '"alpha_real":0.125' in text  # 1 / sqrt(64)


def constants_of_products(text):
    """The constants by which the GEMMs multiply their operands; XLA may swap these."""
    constants = dict(re.findall(r"%(\S+) = f32\[\](?:\{\})? constant\((\S+)\)", text))
    calls = re.findall(
        rf'custom-call\(([^)]*)\).*custom_call_target="{re.escape(FP8_GEMM)}"', text
    )
    products = set()
    for operands in calls:
        names = operands.replace("%", "").split(", ")
        products.add(math.prod(float(constants[x]) for x in names if x in constants))
    return products


def compiled_as_trained(shardings, fun, *shapes):
    """Optimised HLO of a program whose FP8 products take their constants."""
    with compiler_hints.scales_in_products(True):
        return compiled_text(shardings, fun, *shapes, **compiler_hints.PRODUCT_OPTIONS)


def test_equal_products_take_equal_constants_as_the_scales_of_their_operands(h200):
    """Before their results are rounded; an FP16 one that still lacks it would
    overflow."""
    equal = jax.jit(product)
    fun = on_data(with_gradients(lambda x, v, w: equal(equal(equal(x, v), w), w)))
    text = compiled_as_trained(h200, fun, (512, 64), (64, 64), (64, 64))
    # The precision that is not the highest accumulates fast.
    precisions = re.findall(r'"operand_precision":\["(\w+)"', text)
    assert sorted(precisions) == 3 * ["DEFAULT"] + 6 * ["HIGHEST"]
    assert [kernel for kernel, _, _ in gemms(text)] == [FP8_GEMM] * 9
    # of 64 terms, and of rows
    assert constants_of_products(text) == {2.0**-3, 2.0**-4}
    assert set(re.findall(r'"alpha_real":([^,}]*)', text)) == {"1"}


def test_sharded_products_take_their_constants(h200s):
    """Data parallel, and the weight sharded too."""
    mesh = jax.sharding.Mesh(
        np.array(h200s).reshape(4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2
    )
    specs = P(("data", "fsdp")), P("fsdp", None)
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    dims = (((2,), (0,)), ((), ()))
    fun = on_data(with_gradients(lambda x, w: fp8_dot_general(x, w, dims)))
    text = compiled_as_trained(shardings, fun, (8, 256, 256), (256, 512))
    assert "all-reduce" in text or "reduce-scatter" in text
    assert [kernel for kernel, _, _ in gemms(text)] == [FP8_GEMM] * 3
    assert max(constants_of_products(text)) < 1
    assert set(re.findall(r'"alpha_real":([^,}]*)', text)) == {"1"}


STORAGE: dict[str, dict] = {
    "fp16": {"fields": {"mu": Stored(FP16), "nu": Stored(FP16, sqrt=True)}},
    "fp8": {"mu": E4M3, "nu": E5M2},
}


# In FP32 tensors of one parameter. FP8: none, only partial sums and maxima. FP16 with
# stochastic rounding: what the compiler keeps between the two kernels into which it
# splits the work on one parameter.
@pytest.mark.parametrize(("storage", "tensors"), [("fp8", 0.01), ("fp16", 3)])
def test_on_a_gpu_the_step_holds_fp32_values_of_one_parameter_at_most(storage, tensors):
    # of a shape that the compiler would hold FP32 moments for, were it not told
    like = jax.ShapeDtypeStruct((50304, 768), jnp.float16)
    grads = [like, like]
    params = [ScaledArray(x, 2.0**-4) for x in grads]
    tx = scaled_state(
        optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(0.9, 0.95)),
        **STORAGE[storage],
        seed=0,
    )

    def step(params, state, grads, number):
        updates, state = tx.update(grads, unpack(state), params)
        updates = jax.tree.map(lambda u: -1e-3 * u, updates)
        how = {"rounding": "stochastic", "seed": 0, "step": number}
        return apply_updates(params, updates, **how), pack(state)

    state = jax.eval_shape(lambda p: pack(tx.init(p)), params)
    compiled = compiled_for_a_gpu(
        jax.jit(step, donate_argnums=(0, 1)),
        (params, state, grads, jax.ShapeDtypeStruct((), jnp.int32)),
    )
    held = compiled.memory_analysis().temp_size_in_bytes
    assert held < tensors * 4 * like.size


def test_the_first_moments_are_computed_when_the_program_runs():
    """The compiler rounded every element of constant zeros itself: minutes at 124M."""
    tx = scaled_state(optax.adam(1e-3), mu=FP16, nu=FP16, seed=0)
    text = jax.jit(tx.init).lower({"w": jnp.ones((64, 48))}).compile().as_text()
    assert " sqrt(" in text, text  # of the second moment, which is zero


X = jnp.asarray(np.random.default_rng(0).normal(size=(32, 16)), jnp.float16)


def table(x):
    return jax.grad(lambda t: jnp.sum(embedding(t, jnp.arange(8)) ** 2))(x)


PROGRAMS = {
    "materialized": materialized,
    "materialized at a scale": lambda x: (
        scalify(lambda x: materialized(x + x))(ScaledArray(x, 1.0)).data
    ),
    "separate_buffers": lambda x: compiler_hints.separate_buffers(x[:, 0]),
    "materialize_once": lambda x: compiler_hints.materialize_once(x, x + 1),
    "late_zeros": table,
}


def marks(fun, platform):
    text = jax.jit(fun).trace(X).lower(lowering_platforms=(platform,)).as_text()
    return text.count("optimization_barrier") + text.count("LayoutConstraint")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_case_is_in_the_program_of_its_platform_only(name):
    platform, other = "cuda", "cpu"
    if name == "materialize_once":
        platform, other = other, platform
    assert marks(PROGRAMS[name], platform) > 0
    assert marks(PROGRAMS[name], other) == 0
