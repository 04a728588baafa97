"""What a scan leaves for its backward pass takes the memory that plain code takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from numpy.testing import assert_allclose

from scalify_core import as_scaled_array, asarray, scalify

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


def test_gradients_are_as_good_as_with_fp32_stacks():
    w, x = as_scaled_array((W.astype(np.float16), X.astype(np.float16)))
    got = asarray(scalify(jax.grad(forward))(w, x))
    exact = jax.grad(forward)(*map(asarray, (w, x)))
    error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    assert error < 2 * 2.0**-11


def test_stacks_that_are_returned_or_computed_with_keep_their_digits():
    """Losses of each chunk: 1000 + 0.01 would be 1000 in FP16."""

    def loss(x):
        chunks = jax.lax.map(lambda row: 1000 + row.mean(), x)
        return (chunks - 1000).sum()

    (x,) = as_scaled_array((X.astype(np.float16),))
    assert_allclose(
        asarray(scalify(loss)(x)), loss(asarray(x)), rtol=2.0**-9, atol=1e-4
    )


def test_masks_in_a_stack_do_not_set_its_scale():
    def loss(w, x):
        def layer(x, w):
            x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
            logits = jnp.where(np.tri(8, dtype=bool), x @ w @ x.T, -1e9)
            return x + jax.nn.softmax(logits) @ x, None

        return jax.lax.scan(layer, x, w)[0].sum()

    w, x = as_scaled_array((W.astype(np.float16), X.astype(np.float16)))
    got = asarray(scalify(jax.grad(loss))(w, x))
    exact = jax.grad(loss)(*map(asarray, (w, x)))
    assert np.linalg.norm(got - exact) / np.linalg.norm(exact) < 0.01
