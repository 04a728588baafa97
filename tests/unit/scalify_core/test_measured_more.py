"""Measured scales at the edges: sizes near the ends of FP32, dtypes that the user
chose, constants of masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import quick
from jax import lax
from measured_and_plain import HALF, ROUNDINGS, both, error, normal

import scalify_core as sc
from scalify_core import ScaledArray, as_scaled_array, asarray, scalify


@pytest.mark.parametrize(
    "sizes", [(-55, -55), (-60, -45), (-100, -5), (-90, 80), (90, 30)]
)
def test_products_of_what_is_computed_reach_to_the_ends_of_fp32(sizes):
    def fun(x, w):
        return (jnp.tanh(x) * 2.0 ** sizes[0]) @ (jnp.tanh(w) * 2.0 ** sizes[1])

    actual, expected = both(fun, normal(0, 8, 16), normal(1, 16, 16))
    assert error(actual, expected) <= ROUNDINGS[HALF]


@pytest.mark.parametrize("dtype", [HALF, jnp.bfloat16])
def test_rows_of_zeros_stay_zeros_beside_products_beyond_fp32(dtype):
    x = (normal(0, 8, 16) * 2.0**70).at[:4].set(0)
    actual, expected = both(
        lambda x, w: (x @ w)[:4], x, normal(1, 16, 16) * 2.0**80, dtype=dtype
    )
    np.testing.assert_array_equal(expected, 0)
    np.testing.assert_array_equal(asarray(actual), 0)


def halved(b):
    return b * jnp.asarray(0.5, b.dtype) + jnp.ones(3, b.dtype)


NARROW = {
    "scan": lambda x, w, b: lax.scan(
        lambda c, _: ((jnp.tanh(c[0] @ w), halved(c[1])), c[1]), (x, b), None, 3
    ),
    "while": lambda x, w, b: lax.while_loop(
        lambda c: c[0] < 3,
        lambda c: (c[0] + 1, jnp.tanh(c[1] @ w), halved(c[2])),
        (0, x, b),
    ),
    "cond": lambda x, w, b: lax.cond(
        x[0, 0] > 9,
        lambda x: ((x @ w).astype(b.dtype), b),
        lambda x: (jnp.ones(x.shape, b.dtype), halved(b)),
        x,
    ),
}


@pytest.mark.parametrize("kind", NARROW)
@pytest.mark.parametrize("dtype", quick([jnp.bfloat16, HALF], HALF))
def test_numbers_of_a_narrow_dtype_that_no_scale_has_pass_control_flow(kind, dtype):
    def fun(x, w):
        out = NARROW[kind](x, w, jnp.zeros(3, dtype))
        return jax.tree.map(lambda y: halved(y) if y.shape == (3,) else y, out)

    actual, expected = both(fun, normal(0, 8, 16), normal(1, 16, 16) / 4)
    assert error(actual, expected) <= ROUNDINGS[HALF]
    explained = sc.explain(
        fun, *as_scaled_array((normal(0, 8, 16), normal(1, 16, 16) / 4), dtype=HALF)
    )
    assert explained.first_loss is None


CONSTANTS = {
    "clipped": lambda x: jnp.clip(1e7 * x**3, -1e6, 1e6),
    "clipped outlier": lambda x: jnp.clip(x.at[0, 0].set(3e8), -1e5, 1e5),
    "filled": lambda x: jnp.where(x > 0, x, 1e6),
    "filled far": lambda x: jnp.where(x > 0, x, -3e7),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_large_constants_among_results_are_kept_where_the_format_holds_both(name):
    actual, expected = both(CONSTANTS[name], normal(0, 16, 16))
    assert error(actual, expected) <= ROUNDINGS[HALF]
    near = np.abs(np.asarray(expected)) < 100
    assert (
        error(jnp.where(near, asarray(actual), 0), jnp.where(near, expected, 0))
        <= ROUNDINGS[HALF]
    )


def test_a_result_that_can_hold_no_large_constant_is_stored_as_all_others_are():
    def masked(x, w):
        return jax.nn.softmax(jnp.where(x > 0, x @ w, -1e30), axis=-1) @ w

    gradient = jax.grad(lambda x, w: jnp.sum(masked(x, w) ** 2), argnums=1)
    args = as_scaled_array((normal(0, 16, 16), normal(1, 16, 16)), dtype=HALF)
    assert "_masked" not in str(jax.make_jaxpr(scalify(gradient))(*args))
    assert "_masked" in str(
        jax.make_jaxpr(scalify(lambda x, w: jnp.where(x > 0, x @ w, -1e30)))(*args)
    )


@pytest.mark.parametrize(
    "mask", quick([-1e9, -1e30, float(jnp.finfo(jnp.float32).min)], -1e9)
)
@pytest.mark.parametrize(
    "size", quick([1e-30, 1e-8, 1e-5, 1e-3, 1.0, 30.0, 1e4], 1e-30, 1.0)
)
def test_large_constants_that_the_format_cannot_hold_beside_the_rest_saturate_as_masks(
    mask, size
):
    actual, expected = both(
        lambda x: jnp.where(x > 0, size * x, mask), normal(0, 16, 16)
    )
    masked = np.asarray(expected) < 0
    assert error(asarray(actual)[~masked], expected[~masked]) <= ROUNDINGS[HALF]
    # Logits of up to 4 sizes move by half a rounding of them, or less. Beside the
    # smallest, FP16 has no mask but -inf.
    np.testing.assert_allclose(
        jax.nn.softmax(asarray(actual)),
        jax.nn.softmax(expected),
        atol=4e-3 * min(size, 10),
    )
    assert np.isinf(np.asarray(asarray(actual))[masked]).all() == (size < 1e-6)
    explained = sc.explain(
        lambda x: jnp.where(x > 0, size * x, mask),
        as_scaled_array(normal(0, 16, 16), dtype=HALF),
    )
    masks = np.asarray(asarray(actual))[masked]
    saturates = bool((np.isinf(masks) | (masks > mask * 0.99)).any())
    assert saturates == ("saturate in float16" in str(explained.first_loss))
    assert saturates or explained.first_loss is None


NUMBERS = {
    "a gradient": (
        jax.grad(lambda x: jnp.where(x > 0.1, 1e6 * x, x * x / 2).sum()),
        [1e-6, 2e-6, 3e-6, 0.5],
    ),
    "a large gradient": (
        jax.grad(lambda x: jnp.where(x > 5, 1e8 * x, x * x).sum()),
        [0.1, 0.5, 1, 8],
    ),
    "a smallest of two": (
        lambda x: jnp.minimum(jnp.exp(x**3), 1e10),
        [0.1, 1, 10, 100],
    ),
    "a clip": (lambda x: jnp.clip(jnp.exp(x), 0, 1e7), [-12, -5, -2, 30]),
    "a fill": (lambda x: jnp.where(x < 0.5, 1e9, 1 / x), [0.1, 1, 10, 100]),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_large_constant_that_is_no_mask_is_a_number_as_all_others_are(name):
    fun, numbers = NUMBERS[name]
    actual, expected = both(fun, jnp.asarray(numbers))
    largest = np.argmax(np.abs(expected))
    np.testing.assert_allclose(asarray(actual)[largest], expected[largest], rtol=2**-9)


AFTER = {
    "a temperature": lambda m: m / 0.7,
    "a factor": lambda m: 2 * m,
    "another mask": lambda m: m + jnp.where(m > 1, 0.0, -1e9),
    "a penalty": lambda m: jnp.where(m > 0, m / 1.2, m * 1.2),
    "a mean over heads": lambda m: jnp.mean(m[None] * jnp.ones((4, 1, 1)), axis=0),
}


@pytest.mark.parametrize("name", AFTER)
@pytest.mark.parametrize("mask", [-1e9, float(jnp.finfo(jnp.float32).min) / 8])
def test_a_mask_is_one_after_arithmetic_with_numbers_of_the_program(name, mask):
    def logits(x):
        return AFTER[name](jnp.where(x > 0, x, mask))

    actual, expected = both(logits, normal(0, 16, 16))
    masked = np.asarray(expected) < -1e6
    assert error(asarray(actual)[~masked], expected[~masked]) <= ROUNDINGS[HALF]
    assert (np.asarray(asarray(actual))[masked] < -1000).all()


def test_masks_in_results_are_explained_as_scalify_returns_them():
    def scores(x):
        return jnp.where(x > 0, 100 * x, -1e6)

    args = as_scaled_array(normal(0, 16, 16), dtype=HALF)
    assert sc.explain(scores, args).errors[0] == pytest.approx(
        error(scalify(scores)(args), scores(asarray(args)))
    )


@pytest.mark.parametrize("axis", quick([0, 1, 2], 1))
@pytest.mark.parametrize("operand", quick([0, 1], 0))
def test_fp8_products_under_vmap_keep_residuals_with_the_batch_in_front(axis, operand):
    stack, other = jnp.moveaxis(normal(0, 16, 16, 16), 0, axis), normal(1, 16, 16)
    axes = [None, None]
    axes[operand] = axis

    def loss(*args, dot_general):
        product = lambda x, w: dot_general(x, w, (((1,), (0,)), ((), ())))
        return jnp.sum(jax.vmap(product, in_axes=tuple(axes))(*args) ** 2)

    args = (stack, other) if operand == 0 else (other, stack)
    actual, _ = both(
        jax.grad(lambda *xs: loss(*xs, dot_general=sc.fp8_dot_general), (0, 1)), *args
    )
    expected = jax.grad(lambda *xs: loss(*xs, dot_general=lax.dot_general), (0, 1))(
        *args
    )
    assert error(actual, expected) <= sc.numerics.formats.E5M2.epsilon / 2


def test_a_carry_that_becomes_float64_in_a_loop_is_scaled():
    def fun(x, w):
        turn = lambda c, _: ((jnp.tanh(c[0] @ w), c[1] * 0.5 + jnp.sum(c[0])), None)
        return lax.scan(turn, (x, jnp.zeros((), jnp.float64)), None, 3)[0][1]

    with jax.enable_x64(True):
        actual = scalify(fun)(
            *as_scaled_array((normal(0, 4, 4), normal(1, 4, 4)), dtype=HALF)
        )
    assert isinstance(actual, ScaledArray)
    assert actual.dtype == jnp.float64


def test_a_batch_of_while_loops_is_explained_as_a_whole():
    w = normal(1, 4, 4) + 2 * jnp.eye(4)
    grown = jax.vmap(
        lambda x: lax.while_loop(lambda c: jnp.sum(c * c) < 50.0, lambda c: c @ w, x)
    )
    explanation = sc.explain(grown, as_scaled_array(normal(0, 3, 4), dtype=HALF))
    assert explanation.first_loss is None
    assert (
        max(row.figures.error for row in explanation.rows if row.figures is not None)
        < 0.01
    )


@pytest.mark.parametrize("gain", [2.0**-5, 2.0**5])
@pytest.mark.parametrize(
    "through", [lambda f: f, jax.checkpoint, jax.jit], ids=["plain", "remat", "jit"]
)
def test_layers_that_a_scan_stacks_may_grow_or_shrink_from_one_to_the_next(
    gain, through
):
    def gradient(ws, x):
        return jax.grad(
            lambda ws, x: jnp.sum(
                lax.scan(through(lambda h, w: (h @ w, None)), x, ws)[0]
            )
        )(ws, x)

    args = gain * normal(0, 12, 16, 16) / 4, normal(1, 8, 16)
    actual, expected = both(gradient, *args)
    for layer in range(12):
        assert error(asarray(actual)[layer], expected[layer]) <= 2 * ROUNDINGS[HALF]


def test_a_stack_of_a_scan_is_read_whole_by_a_product_too():
    def fun(ws, x):
        stack = lax.scan(lambda h, w: (h @ w, h), x, ws)[1]
        total = lax.scan(lambda t, h: (t + h @ ws[0], None), 0 * x, stack)[0]
        return jnp.einsum("lij,kj->lik", stack, x), total, stack

    actual, expected = both(fun, 4 * normal(0, 4, 8, 8), normal(1, 8, 8))
    assert error(actual, expected) <= ROUNDINGS[HALF]


def local_sum(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def sum_of_all(w, x):
    return lax.psum(local_sum(w, x), "d")


@pytest.mark.parametrize("loss", [local_sum, sum_of_all])
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_inside_a_shard_map_are_those_of_the_plain_program_there(
    loss, check_vma
):
    mesh = jax.make_mesh((2,), ("d",), (jax.sharding.AxisType.Auto,))
    w, x = as_scaled_array((normal(0, 8, 8), normal(1, 8, 8)), dtype=HALF)
    gradient = scalify(jax.grad(loss))

    def on_devices(fun, scaled):
        specs = [
            ScaledArray.tree_unflatten(None, (s, jax.P())) if scaled else s
            for s in (jax.P(), jax.P("d"))
        ]
        # Each device's own: without check_vma, JAX sums no gradients of what devices
        # have in common.
        body = lambda w, x: asarray(fun(w, x))[None]
        mapped = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=tuple(specs),
            out_specs=jax.P("d"),
            check_vma=check_vma,
        )
        return jax.jit(mapped)

    expected = on_devices(jax.grad(loss), False)(*asarray((w, x)))
    assert error(on_devices(gradient, True)(w, x), expected) <= ROUNDINGS[HALF]
