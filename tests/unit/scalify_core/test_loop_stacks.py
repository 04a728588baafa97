"""Stacks of a loop: they are as narrow as in plain code, and each layer may have its
scale."""

import jax
import jax.numpy as jnp
import numpy as np
import propagated
import pytest
from beside_plain import HALF
from draws import draw_normal
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose

from scalify_core import ScaledArray, as_scaled_array, asarray, scalify

L, N = 6, 32
W = np.random.default_rng(0).normal(0, 0.2, (L, N, N)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(8, N)).astype(np.float32)


def forward(w, x):
    def layer(x, w):
        return x + jax.nn.gelu(x @ w, approximate=False), None

    return jax.lax.scan(layer, x, w)[0].sum()


def stacked_bytes(fun, *args) -> int:
    """The bytes of all stacks of the first scan of a program."""
    pending = [jax.make_jaxpr(fun)(*args).jaxpr]
    while pending:
        for eqn in pending.pop(0).eqns:
            if eqn.primitive.name == "scan":
                carry = len(eqn.params["ft_in"].update(eqn.invars).unpack()[1])
                return sum(
                    var.aval.size * var.aval.dtype.itemsize
                    for var in eqn.outvars[carry:]
                )
            pending += jaxprs_in_params(eqn.params)
    raise AssertionError("no scan")


@pytest.mark.parametrize(
    ("call", "dtype"), [(lambda f: f, jnp.bfloat16), (jax.jit, jnp.float16)]
)
def test_stacks_are_narrow(call, dtype):
    w, x = as_scaled_array((W.astype(dtype), X.astype(dtype)))
    plain = stacked_bytes(jax.grad(call(forward)), W.astype(dtype), X.astype(dtype))
    scaled = stacked_bytes(scalify(jax.grad(call(forward))), w, x)
    # FP32 scales for rows of 32 elements, and for whole slices.
    assert scaled <= (1 + 2 * 4 / (2 * N)) * plain


def test_stacks_that_are_computed_with_keep_their_digits():
    """Near 1000 the numbers of FP16 are 0.5 apart."""

    def loss(x):
        chunks = jax.lax.map(lambda row: 1000 + row @ row / N, x)
        return (chunks - 1000).sum()

    (x,) = as_scaled_array((X.astype(np.float16),))
    assert_allclose(asarray(scalify(loss)(x)), loss(asarray(x)), rtol=2.0**-9)


DATA = draw_normal(0, (4, 6, 8)).astype(jnp.float16)
STACK = ScaledArray(DATA, 2.0 ** jnp.asarray([-30.0, 0.0, -12.0, 20.0]))
NEAR = ScaledArray(DATA, jnp.asarray([2.0, 1.0, 4.0, 0.5]))  # FP16 holds all at 4


@pytest.mark.parametrize(
    "fun",
    [
        lambda w: lax.scan(lambda c, x: (c, 3 * x), 0, w)[1],
        lambda w: jax.vmap(lambda w: w * w * 2)(w),
    ],
)
def test_layers_of_a_loop_keep_their_scale(fun):
    actual = jax.jit(propagated.scalify(fun))(STACK)
    assert_allclose(asarray(actual), fun(asarray(STACK)), rtol=2.0**-10)


@pytest.mark.parametrize(
    "fun",
    [
        lambda w, x: w[0],
        lambda w, x: w.swapaxes(1, 2)[1:3],
        lambda w, x: lax.dynamic_update_slice(w, x[None], (2, 0, 0)),
        lambda w, x: jnp.pad(w, ((1, 1), (0, 0), (0, 0))),
    ],
)
def test_elements_that_are_moved_out_of_or_into_a_stack_have_its_largest_scale(fun):
    row = ScaledArray(draw_normal(1, (6, 8)).astype(HALF), jnp.float32(2.0**-5))
    actual = jax.jit(propagated.scalify(fun))(NEAR, row)
    assert actual.scale == 4
    # One rounding at that scale, and that of a sum: numbers below 64 there.
    expected = fun(*asarray((NEAR, row)))
    assert_allclose(asarray(actual), expected, rtol=2.0**-10, atol=2.0**-22)


def test_stack_in_shard_map_is_split_with_its_scales():
    spec = P(("d", "e"))
    mesh = jax.make_mesh((2, 2), ("d", "e"), axis_types=(AxisType.Auto,) * 2)
    fun = jax.shard_map(lambda w: w * 3, mesh=mesh, in_specs=spec, out_specs=spec)
    actual = asarray(jax.jit(propagated.scalify(fun))(NEAR))
    assert_allclose(actual, 3 * asarray(NEAR), rtol=2.0**-10, atol=2.0**-22)


def test_a_gradient_below_the_format_is_zero_though_its_loop_takes_roots():
    """As the smallest number of the format it would be a step of Adam."""

    def layer(h, w):
        h = h * w
        return h / jnp.sqrt(1 + jnp.mean(h**2)), None

    def loss(w):
        return jnp.sum(lax.scan(layer, jnp.asarray([1, 1, 1, 1e-16]), w)[0])

    gradient = scalify(jax.grad(loss))(as_scaled_array(jnp.ones((3, 4)), dtype=HALF))
    assert (asarray(gradient)[:, 3] == 0).all()
    assert (asarray(gradient)[:, :3] != 0).all()
