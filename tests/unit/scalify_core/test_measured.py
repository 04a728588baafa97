"""Measured scales on programs that scale propagation by rules gets wrong, kind by kind;
calls in them, and the formats of stored values.

Each program is an ordinary function of float32 arrays, and is held to its plain FP32
result: of FP16 data within a few roundings of the result's norm, whatever the sizes of
its values.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from beside_plain import (
    F32,
    HALF,
    ROUNDINGS,
    SIZES,
    assert_near,
    both,
    case,
    check,
    error,
    normal,
    scaled,
)
from jax import lax
from numpy.testing import assert_allclose, assert_array_equal

import scalify_core as sc
from scalify_core import ScaledArray, as_scaled_array, asarray, scalify
from scalify_core.array.scaled_array import is_scaled_array
from scalify_core.interpreter.measured import quantize
from scalify_core.interpreter.measured.products import reads_in
from scalify_core.interpreter.value import logical
from scalify_core.numerics.formats import BF16, E4M3, FP16
from scalify_core.ops.functional import attention

X, SQUARE, STACK = normal(0, 16, 8), normal(1, 16, 16), normal(2, 6, 16, 16) / 4

# Results of operations that have no scale of their own.
UNSCALED = {
    "exp of large": lambda x: jnp.exp(8 + jnp.tanh(x)),
    "logsumexp of large": lambda x: jax.nn.logsumexp(1e5 * x, -1),
}


def chain(p, v):
    """Correlated sums: neither sqrt(N) nor any other power of a length is right."""
    for _ in range(8):
        v = jax.nn.softmax(p) @ v
    return v


def mean_over_many_tokens(w, h):
    labels = jax.random.randint(jax.random.key(2), (512,), 0, 64)
    losses = optax.softmax_cross_entropy_with_integer_labels(h @ w, labels)
    return losses.sum() / 2**24


def normalised(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def layers(ws, x):
    layer = lambda h, w: (h + jnp.tanh(normalised(h) @ w), jnp.sum(h))
    out, sums = lax.scan(jax.checkpoint(layer), x, ws)
    return jnp.mean(out**2) + 1e-3 * jnp.sum(sums)


def grown(ws, x):
    """Layers that grow or shrink from one to the next."""
    return jnp.sum(lax.scan(lambda h, w: (h @ w, None), x, ws)[0])


PROGRAMS = {
    # A table in FP32 would make FP32 of it.
    **{
        name: case(lambda x, fun=fun: fun(x).astype(x.dtype), X)
        for name, fun in UNSCALED.items()
    },
    "static scales": case(UNSCALED["exp of large"], X, static=True),
    "stochastic products": case(
        chain, normal(0, 64, 64), jnp.full(64, 2.0**60), roundings=16
    ),
    **{
        f"products of 2^{a} and 2^{b}": case(
            lambda x, w, a=a, b=b: (jnp.tanh(x) * 2.0**a) @ (jnp.tanh(w) * 2.0**b),
            normal(0, 8, 16),
            SQUARE,
        )
        for a, b in ((-55, -55), (-60, 115))
    },
    "many tokens": case(
        jax.grad(mean_over_many_tokens, (0, 1)), normal(0, 16, 64), normal(1, 512, 16)
    ),
    "gradient of scan of remat": case(
        jax.grad(layers, (0, 1)), STACK, normal(1, 8, 16), roundings=8
    ),
    **{
        f"layers that grow by {gain}": case(
            jax.grad(grown), gain * STACK, normal(1, 8, 16), axis=0, roundings=8
        )
        for gain in (2.0**5, 2.0**-5)
    },
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_as_right_as_in_float32(name):
    PROGRAMS[name]()


def test_infinities_and_nan_pass_products_and_have_no_part_in_scales():
    x = SQUARE.at[3, 5].set(jnp.inf).at[7, 2].set(jnp.nan)
    w = jnp.abs(normal(0, 16, 16))
    halves = ScaledArray(x.astype(HALF), F32(1))
    actual = asarray(jax.jit(scalify(jnp.matmul))(halves, *scaled(w)))
    expected = x @ w
    assert_array_equal(np.isnan(actual), np.isnan(expected))
    assert_array_equal(np.isinf(actual), np.isinf(expected))
    finite = np.isfinite(expected)
    assert_near(actual[finite], expected[finite], 8 * FP16.epsilon)


@pytest.mark.parametrize("dtype", [HALF, jnp.bfloat16])
def test_rows_of_zeros_stay_zeros_beside_products_beyond_fp32(dtype):
    x = (normal(0, 8, 16) * 2.0**70).at[:4].set(0)
    actual, _ = both(lambda x, w: (x @ w)[:4], x, SQUARE * 2.0**80, dtype=dtype)
    assert_array_equal(asarray(actual), 0)


def test_fp32_data_is_as_plain_at_every_scale():
    def normed(x):
        unit = x / jnp.max(jnp.abs(x))
        norms = jnp.sqrt(jnp.sum(unit * unit, -1, keepdims=True))
        return unit / norms, x - jnp.mean(x), x * 2 + 1e-30 * x

    actual = jax.jit(scalify(normed))
    for exponent in (-120, 20, 120):
        x = ScaledArray(X, F32(2.0**exponent))
        assert error(actual(x), normed(asarray(x))) <= 1e-6, exponent


def test_nested_branches_are_looked_at_once():
    reads_in.cache_clear()

    def nested(x, depth):
        if depth == 0:
            return x @ x
        return lax.cond(
            x[0, 0] > depth, lambda x: nested(x, depth - 1), lambda x: x + depth, x
        )

    check(lambda x: nested(x, 12), normal(0, 4, 4) + 20)
    assert reads_in.cache_info().misses <= 3 * 12 + 3


def test_equations_that_nobody_needs_are_left_out():
    gradient = scalify(jax.grad(lambda x: jnp.sum(jnp.sin(x))))
    actual = jax.make_jaxpr(gradient)(*scaled(normal(0, 4)))
    assert "sin " not in str(actual).replace("cos", "")


def test_other_scales_are_refused_in_one_line():
    with pytest.raises(ValueError, match="scales='dynamic', expected \"auto\""):
        scalify(jnp.sin, scales="dynamic")


def traced(fun, *args):
    return jax.jit(scalify(fun)).trace(*args).jaxpr


def test_a_product_and_its_scales_are_two_equations():
    def equations(count):
        def products(x, w):
            for _ in range(count):
                x = jnp.tanh(x @ w)
            return x

        return len(traced(products, *scaled(SQUARE, SQUARE)).eqns)

    # besides what stores the operand, and the hyperbolic tangent
    assert equations(3) - equations(2) == 4


def test_a_call_that_calls_twice_is_not_evaluated_twice():
    def nested(depth):
        if depth == 0:
            return lambda x, w: jnp.tanh(x @ w)
        inner = nested(depth - 1)
        return jax.jit(lambda x, w: inner(inner(x, w), w))

    x, w = scaled(normal(0, 4, 8), normal(1, 8, 8))
    # A jaxpr that is called twice is printed once.
    sizes = [len(str(traced(nested(depth), x, w))) for depth in (4, 8)]
    assert sizes[1] < 1.5 * 2 * sizes[0]


def test_an_argument_that_calls_hand_through_is_returned_as_it_came():
    inner = jax.jit(lambda x, w: (w, x @ w, x))
    outer = jax.jit(lambda x, w: inner(x, w)[::-1])
    x, w = (ScaledArray(a.data, 0.5) for a in scaled(normal(0, 4, 8), normal(1, 8, 8)))
    same_x, product, same_w = scalify(outer)(x, w)
    assert (same_x.scale, same_w.scale) == (0.5, 0.5)
    assert same_x.data is x.data
    assert same_w.data is w.data
    assert product.dtype == HALF


def test_attention_reads_the_format_at_any_scale():
    segments, exponents = jnp.repeat(jnp.arange(4), 8)[None], (20, -20, 30)

    def attend(*operands):
        moved = [x * 2.0**-n for x, n in zip(operands, exponents, strict=True)]
        return attention(*moved, segments=segments)

    gradients = jax.grad(lambda *x: jnp.sum(jnp.sin(attend(*x))), (0, 1, 2))
    args = scaled(*(normal(i, 1, 32, 4, 16) * 2.0**n for i, n in enumerate(exponents)))
    batch = jax.tree.map(lambda x: x[None], args, is_leaf=is_scaled_array)
    assert "f16[1,4,32,32]" in str(traced(attend, *args))
    for fun, given in ((attend, args), (jax.vmap(gradients), batch)):
        assert error(scalify(fun)(*given), fun(*asarray(given))) < 2.0**-10


@pytest.mark.parametrize("fmt", [FP16, BF16, E4M3], ids=str)
def test_stored_data_fills_its_format_without_saturating(fmt):
    store = jax.jit(lambda x: quantize.quantized(x, fmt.dtype))
    for size in SIZES:
        x = normal(0, 256) * size
        actual = store(x)
        limit = 2 * fmt.epsilon * float(jnp.abs(x).max())
        assert_allclose(logical(actual), x, atol=limit)
        if fmt is not BF16:
            peak = float(jnp.abs(actual.data.astype(jnp.float32)).max())
            top = 2.0**fmt.top
            assert top <= peak <= 2 * top <= fmt.max
    assert_array_equal(logical(quantize.quantized(jnp.zeros(4), fmt.dtype)), 0)
    assert quantize.quantized(jnp.zeros((0, 3)), fmt.dtype).shape == (0, 3)


def test_products_read_the_format_and_weights_are_not_measured_again():
    w = as_scaled_array(normal(1, 16, 16), dtype=HALF)
    jaxpr = jax.make_jaxpr(scalify(lambda x, w: jnp.tanh(x @ w) @ w.T))(
        as_scaled_array(normal(0, 16, 16), dtype=HALF), w
    )
    assert str(jaxpr).count(" reduce[") == len({"tanh", "result"})
    inner = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert all(x.aval.dtype == HALF for e in inner for x in e.invars)
    assert len(inner) == 2


def test_a_result_that_goes_round_a_loop_of_calls_compiles_once_and_keeps_its_format():
    step = jax.jit(
        scalify(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w))
    )
    w, x = as_scaled_array((normal(0, 8, 8), normal(1, 32, 8)), dtype=HALF)
    for _ in range(3):
        w = step(w, x)
        assert w.dtype == HALF
    assert step._cache_size() == 1


# What acts on scales.


def test_rescales_are_the_identity_and_simulated_formats_round_the_data():
    def fun(x):
        return (
            sc.static.dynamic_rescale_rms(x * 1e-6),
            sc.static.set_scaling(x, 2.0**-3),
            sc.static.rebalance(x, 4.0),
            sc.static.cast_on_forward(x * 2.0**-60, E4M3),
        )

    x = as_scaled_array(normal(0, 64), dtype=HALF)
    rescaled, *same, rounded = jax.jit(scalify(fun))(x)
    assert error(rescaled, asarray(x) * 1e-6) <= ROUNDINGS[HALF]
    for y in same:
        assert_array_equal(asarray(y), asarray(x))
    small = asarray(x) * 2.0**-60
    assert_allclose(asarray(rounded), small, rtol=E4M3.epsilon, atol=2.0**-69)
    assert not np.array_equal(asarray(rounded), small)
