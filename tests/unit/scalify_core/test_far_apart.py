"""Parts of a product's operands that are many octaves apart, where the format holds
less: rows, groups, experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import draw_normal
from families import quick
from jax import lax

from scalify_core import as_scaled_array, asarray, explain, scalify
from scalify_core.interpreter.measured.products import reads_in
from scalify_core.numerics import amax
from scalify_core.numerics.formats import FP16

HALF = jnp.float16


def normal(seed, *shape):
    return draw_normal(seed, shape)


def far(n, octaves=80):
    return 2.0 ** jnp.round(jnp.linspace(-octaves / 2, octaves / 2, n))


def like(x, table):
    """A table in the dtype of `x`, which as FP32 would make FP32 of it."""
    return table.astype(x.dtype)


def error(actual, expected, axis=0):
    """Of the worst index along an axis, relative to its norm; of the worst result."""
    errors = []
    for x, y in zip(
        jax.tree.leaves(asarray(actual)), jax.tree.leaves(expected), strict=True
    ):
        x, y = (
            np.moveaxis(np.asarray(a, np.float64), axis, 0).reshape(a.shape[axis], -1)
            for a in (x, y)
        )
        errors.append(np.max(np.linalg.norm(x - y, axis=1) / np.linalg.norm(y, axis=1)))
    return max(errors)


def both(fun, *args, dtype=HALF):
    scaled = as_scaled_array(args, dtype=dtype)
    return jax.jit(scalify(fun))(*scaled), jax.jit(fun)(*asarray(scaled))


def conv(x, k, **params):
    return lax.conv_general_dilated(
        x, k, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), **params
    )


def conv_elsewhere(x, k, **params):
    """The same, its axes in another order."""
    numbers = ("CWN", "OWI", "CWN")
    out = lax.conv_general_dilated(
        x.T, k.transpose(2, 0, 1), (1,), "SAME", dimension_numbers=numbers, **params
    )
    return out.T


ENTRIES = far(6)
SHARED = {
    "rows": lambda x, w, s: ((x[0] * s[:, None]) @ w[0]) / s[:, None],
    "columns": lambda x, w, s: ((w[0].T @ (x[0] * s[:, None]).T) / s[None]).T,
    "vmap of vectors": lambda x, w, s: jax.vmap(lambda x, s: ((x * s) @ w[0]) / s)(
        x[0], s
    ),
    "vmap of matrices": lambda x, w, s: jax.vmap(lambda x, s: ((x * s) @ w[0]) / s)(
        x, s
    ),
    "vmap of weights": lambda x, w, s: jax.vmap(lambda w, s: (x[0] @ (w * s)) / s)(
        w, s
    ),
    "jit of a product": lambda x, w, s: (
        jax.jit(jnp.matmul)(x[0] * s[:, None], w[0]) / s[:, None]
    ),
    "scan of products": lambda x, w, s: (
        lax.scan(lambda h, w: (h @ w, None), x[0] * s[:, None], w)[0] / s[:, None]
    ),
}


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize("dtype", quick([HALF, jnp.float8_e5m2], HALF))
def test_entries_of_one_operand_are_as_right_as_each_by_itself(kind, dtype):
    actual, expected = both(
        lambda x, w: SHARED[kind](x, w, like(x, ENTRIES)),
        normal(0, 6, 6, 8),
        normal(1, 6, 8, 8),
        dtype=dtype,
    )
    assert error(actual, expected) <= 8 * FP16.epsilon


LAST, GROUPS = far(8)[None, None], jnp.repeat(far(4), 2)[None, None]
CONVOLUTIONS = {
    "batch": lambda conv, x, k: (
        conv(x * like(x, far(8))[:, None, None], k) / like(x, far(8))[:, None, None]
    ),
    "features": lambda conv, x, k: conv(x, k * like(x, LAST)) / like(x, LAST),
    "vmap of both": lambda conv, x, k: jax.vmap(
        lambda x, k, s: conv(x[None] * s, k / s)[0]
    )(x, jnp.stack([k] * 8), like(x, far(8))),
    "vmap of inputs": lambda conv, x, k: jax.vmap(
        lambda x, s: conv(x[None] * s, k)[0] / s
    )(x, like(x, far(8))),
    "vmap of kernels": lambda conv, x, k: jax.vmap(lambda k, s: conv(x, k * s) / s)(
        jnp.stack([k] * 8), like(x, far(8))
    ),
    "groups of the input": lambda conv, x, k: (
        conv(x * like(x, GROUPS), k[:, :2], feature_group_count=4) / like(x, GROUPS)
    ),
    "groups of both": lambda conv, x, k: conv(
        x * like(x, GROUPS), k[:, :2] / like(x, GROUPS), feature_group_count=4
    ),
    "depthwise": lambda conv, x, k: conv(
        x * like(x, LAST), k[:, :1] / like(x, LAST), feature_group_count=8
    ),
    "groups of the batch": lambda conv, x, k: conv(
        x * like(x, GROUPS).T, k / like(x, GROUPS), batch_group_count=4
    ),
}


def of_each(kind, actual):
    """Along which axis of a result the factors are."""
    return {
        "batch": 0,
        "vmap of both": 0,
        "vmap of inputs": 0,
        "vmap of kernels": 0,
    }.get(kind, actual.ndim - 1)


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("conv", quick([conv, conv_elsewhere], conv_elsewhere))
def test_groups_and_batches_of_convolutions_are_as_right_as_each_by_itself(kind, conv):
    actual, expected = both(
        functools.partial(CONVOLUTIONS[kind], conv),
        normal(0, 8, 7, 8),
        normal(1, 3, 8, 8),
    )
    assert error(actual, expected, of_each(kind, expected)) <= 4 * FP16.epsilon


GROUPED = ("vmap of both", "groups of both", "depthwise")


@pytest.mark.parametrize("kind", GROUPED)
def test_gradients_of_grouped_convolutions_are_too(kind):
    def gradient(x, k):
        return jax.grad(
            lambda x, k: jnp.sum(
                CONVOLUTIONS[kind](conv, x, k) * like(x, normal(2, 8, 7, 8))
            ),
            (0, 1),
        )(x, k)

    actual, expected = both(gradient, normal(0, 8, 7, 8), normal(1, 3, 8, 8))
    assert error(actual[0], expected[0], of_each(kind, expected[0])) <= 4 * FP16.epsilon


def test_experts_and_rows_of_a_ragged_product_are_as_right_as_each_by_itself():
    sizes, experts = jnp.array([3, 0, 5, 2]), far(4)
    of_rows = jnp.repeat(experts, np.array([3, 0, 5, 2]), total_repeat_length=10)[
        :, None
    ]

    def fun(x, w):
        weights = lax.ragged_dot(x, w * like(x, experts)[:, None, None], sizes) / like(
            x, of_rows
        )
        return (
            weights,
            lax.ragged_dot(x * like(x, far(10))[:, None], w, sizes)
            / like(x, far(10))[:, None],
        )

    actual, expected = both(fun, normal(0, 10, 8), normal(1, 4, 8, 8))
    assert error(actual, expected) <= 4 * FP16.epsilon


# Plain FP32 beside narrow data.

TIMES = 19000 + jnp.arange(24.0) / 24
PLAIN = {
    "argument": lambda w, t: jnp.stack([t, jnp.ones(24)], 1) @ w,
    "on the right": lambda w, t: (w.T @ jnp.stack([t, jnp.ones(24)])).T,
    "computed": lambda w, t: jnp.stack([jnp.sqrt(t * t), jnp.ones(24)], 1) @ w,
    "of integers": lambda w, t: (
        jnp.stack([jnp.round(t * 24).astype(jnp.int32), jnp.full(24, 24)], 1) @ w
    ),
    "in a loop": lambda w, t: lax.map(lambda t: jnp.stack([t, jnp.ones(())]) @ w, t),
}


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("dtype", quick([HALF, jnp.bfloat16], HALF))
def test_a_plain_operand_keeps_all_its_digits_in_a_product(kind, dtype):
    w = as_scaled_array(
        jnp.array([[1.0, -1.0], [-19000.0, 19000.0]]) / 8, dtype=HALF
    ).astype(dtype)
    actual, expected = (
        f(w, TIMES)
        for f in (
            jax.jit(scalify(PLAIN[kind])),
            lambda w, t: PLAIN[kind](asarray(w), t),
        )
    )
    # As JAX promotes it: an FP32 operand makes FP32, integers do not.
    assert actual.dtype == PLAIN[kind](asarray(w).astype(dtype), TIMES).dtype
    epsilon = 2.0**-22 if actual.dtype == jnp.float32 else jnp.finfo(dtype).eps
    np.testing.assert_allclose(
        asarray(actual), expected, atol=epsilon * float(jnp.abs(expected).max())
    )


NARROW = {
    "one-hot": lambda w, i: jax.nn.one_hot(i, 8, dtype=w.dtype) @ w,
    "mask": lambda w, i: (i[:, None] > jnp.arange(8)[None]).astype(w.dtype) @ w,
    "ones": lambda w, i: jnp.ones((8, 8), w.dtype) @ w,
    "int8": lambda w, i: (
        jnp.broadcast_to(i.astype(jnp.int8), (8, 8)).astype(w.dtype) @ w
    ),
    "fp16": lambda w, i: (0.3 * jnp.ones((8, 8))).astype(HALF) @ w,
}


@pytest.mark.parametrize("kind", NARROW)
def test_a_plain_operand_that_the_format_holds_is_read_in_it(kind):
    args = as_scaled_array(normal(0, 8, 8), dtype=HALF), jnp.arange(8)
    text = str(jax.make_jaxpr(scalify(NARROW[kind]))(*args))
    assert "f16[8,8] = " in text
    (actual,) = [line for line in text.splitlines() if "dot_general" in line]
    assert "preferred_element_type=float32" in text[text.index(actual) :][:400]
    expected = NARROW[kind](asarray(args[0]), args[1])
    assert (
        error(jax.jit(scalify(NARROW[kind]))(*args)[1:], expected[1:])
        <= 2 * FP16.epsilon
    )


# How it is measured.


@pytest.mark.parametrize(
    "parts",
    [(1, 1, 1), (4, 1, 1), (1, 6, 8), (2, 1, 8), (1, 3, 4), (4, 2, 1), (1, 1, 2)],
)
def test_a_scale_for_each_part_is_that_of_its_largest_magnitude(parts):
    x = normal(0, 4, 6, 8) * far(4)[:, None, None] * far(6)[None, :, None]
    actual = np.broadcast_to(amax.unit_of(x, 14, parts), x.shape)
    cut = [
        n
        for part, size in zip(parts, x.shape, strict=True)
        for n in (part, size // part)
    ]
    blocks = np.abs(np.asarray(x)).reshape(cut).max((1, 3, 5), keepdims=True)
    expected = 2.0 ** (np.floor(np.log2(blocks)) - 14)
    np.testing.assert_array_equal(
        actual, np.broadcast_to(expected, cut).reshape(x.shape)
    )


def test_what_several_products_read_has_the_scales_that_all_can_do_with():
    def parts(fun):
        jaxpr = jax.make_jaxpr(fun)(normal(0, 8, 6)).jaxpr
        return reads_in(jaxpr)[jaxpr.invars[0]].may

    w, v = normal(1, 6, 3), normal(2, 8, 3)
    assert parts(lambda x: x @ w) == (8, 1)
    assert parts(lambda x: (x @ w, jnp.tanh(x) @ w, (x + 0) @ w)) == (8, 1)
    assert parts(lambda x: v.T @ x) == (1, 6)
    assert parts(lambda x: (x @ w, v.T @ x)) == (1, 1)
    assert parts(lambda x: (jax.jit(lambda x: x @ w)(x), x.T.T @ w)) == (8, 1)
    assert parts(lambda x: jax.vmap(lambda a: a @ w)(x)) == (8, 1)
    assert parts(lambda x: lax.scan(lambda c, a: (c, a @ w), 0, x)[1]) == (8, 1)


def test_explain_names_what_is_lost_in_a_convolution():
    def fun(x, k):
        return conv(x * like(x, LAST), k / like(k, far(8))[None, :, None])

    args = as_scaled_array((normal(0, 4, 7, 8), normal(1, 3, 8, 8)), dtype=HALF)
    assert "conv_general_dilated" in explain(fun, *args).first_loss
