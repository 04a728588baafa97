"""What a product with a mask or a one-hot vector selects is the number that it is selected from."""

import jax
import jax.numpy as jnp
import pytest
from jax import nn
from measured_and_plain import HALF, ROUNDINGS, error, normal

from scalify_core import as_scaled_array, asarray, scalify

LABELS = jnp.arange(32) % 10


def picked(mask, s):
    return jnp.einsum("bc,bc->b", mask, s)


def hardest_wrong(w, x):
    s = x @ w
    right = picked(nn.one_hot(LABELS, 10, dtype=s.dtype), s)
    wrong = jnp.max(jnp.where(s < right[:, None], s, -1e4), -1)
    return jnp.mean(jnp.where(wrong > -1e4, nn.relu(1 + wrong - right), 0))


def accuracy(w, x):
    s = x @ w
    return jnp.mean((picked(nn.one_hot(jnp.argmax(s, -1), 10, dtype=s.dtype), s) == s.max(-1)).astype(jnp.float32))


def of_the_diagonal(w, x):
    s = jnp.tanh(x @ w) @ jnp.tanh(x @ w).T
    own = picked(jnp.eye(32, dtype=bool).astype(s.dtype), s)
    return jnp.mean(jnp.max(jnp.where(s == own[:, None], -10.0, s), -1))


def margin(w, x):
    z = jnp.tanh(x @ w)
    mask = jnp.where(jnp.argmax(z, -1)[:, None] == jnp.arange(10)[None], 1.0, 0.0)
    top = picked(mask, z)
    return jnp.mean(nn.relu(0.5 - top + jnp.max(jnp.where(z >= top[:, None], -1e4, z), -1)))


@pytest.mark.parametrize("loss", [hardest_wrong, accuracy, of_the_diagonal, margin])
@pytest.mark.parametrize("seed", [0, 1])
def test_it_compares_as_it_does_in_the_plain_program(loss, seed):
    w, x = as_scaled_array((normal(seed + 9, 16, 10), normal(seed, 32, 16)), dtype=HALF)
    both = jax.value_and_grad(loss)
    expected = both(*asarray((w, x)))
    outside = jax.value_and_grad(lambda w, x: asarray(scalify(loss)(w, x)))(w, x)
    for found in (jax.jit(scalify(both))(w, x), outside, scalify(both, check=True)(w, x)):
        assert error(found, expected) < ROUNDINGS[HALF]


def test_only_what_reads_each_element_once_is_in_float32():
    s, mask = as_scaled_array(normal(0, 8, 8), dtype=HALF), jnp.eye(8, dtype=bool)

    def product(fun):
        text = jax.jit(scalify(fun)).lower(s).as_text()
        (line,) = (line for line in text.splitlines() if "dot_general" in line)
        return line

    matrix = product(lambda s: mask.astype(s.dtype) @ jnp.tanh(s))
    assert "f16>, tensor" in matrix
    assert "HIGHEST" not in matrix
    chosen = product(lambda s: picked(mask.astype(s.dtype), jnp.tanh(s)))
    assert "f32>, tensor" in chosen
    assert "HIGHEST" in chosen
    asked = product(lambda s: jnp.einsum("bc,bc->b", mask.astype(s.dtype), jnp.tanh(s), precision="high"))
    assert "HIGHEST" not in asked
