"""Packed trees, norms, and what other libraries store of trees."""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from beside_plain import F32, HALF
from jax import export
from numpy.testing import assert_allclose, assert_array_equal

from scalify_core import ScaledArray, asarray, scalify
from scalify_core.array.tree import (
    Packed,
    global_norm,
    pack,
    register_flax,
    unpack,
)


def test_a_packed_tree_comes_back_as_it_was():
    scaled = lambda n, scale: ScaledArray(jnp.full(3, n, HALF), scale)
    tree = {
        "b": [scaled(1, F32(2.0)), jnp.arange(2)],
        "a": scaled(2, F32(0.5)),
        "static": scaled(3, 4.0),
        "layers": ScaledArray(jnp.ones((2, 3)), jnp.asarray([1.0, 2.0])),
    }
    packed = pack(tree)
    assert isinstance(packed, Packed)
    assert packed.scales.tolist() == [0.5, 2.0]  # in the order of the leaves
    through = jax.jit(lambda t: pack(unpack(t)))(packed)
    assert jax.tree.structure(through) == jax.tree.structure(packed)
    back = unpack(through)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
        assert x.dtype == y.dtype
        assert (x == y).all()


def test_a_tree_without_scales_of_run_time_is_not_packed():
    tree = {"static": ScaledArray(jnp.ones(3), 4.0), "plain": jnp.ones(2)}
    assert pack(tree) is tree
    assert unpack(tree) is tree


@pytest.mark.parametrize("size", [2.0**-100, 300.0])
def test_the_norm_of_a_tree_is_finite_whatever_its_formats_are(size):
    half = ScaledArray(jnp.full(100, 1.5, HALF), F32(2.0 ** np.round(np.log2(size))))
    tree = {
        "scaled": half,
        "plain": jnp.full(4, size, F32),
        "count": jnp.int32(7),
    }
    expected = np.linalg.norm([*np.asarray(half, np.float64), *np.full(4, size)])
    assert_allclose(np.float64(jax.jit(global_norm)(tree)), expected, rtol=1e-6)


def test_the_norm_of_narrow_leaves_is_that_of_optax_in_float32():
    leaves = [jnp.full(100, 300.0, HALF), jnp.zeros(0), jnp.ones(3)]
    assert jnp.isinf(optax.global_norm(leaves))
    assert_allclose(
        global_norm(leaves), optax.global_norm([x.astype(F32) for x in leaves])
    )
    assert global_norm({}) == 0
    assert jnp.isinf(global_norm([jnp.array([jnp.inf])]))
    assert jnp.isnan(global_norm([jnp.array([jnp.nan, 1.0])]))


@pytest.mark.parametrize("scale", [4.0, F32(4), F32([4, 2])])
def test_flax_stores_scaled_arrays(scale):
    register_flax()
    x = {"w": ScaledArray(jnp.arange(6, dtype=HALF).reshape(2, 3), scale)}
    like = jax.tree.map(jnp.zeros_like, x)
    actual = flax.serialization.from_bytes(like, flax.serialization.to_bytes(x))["w"]
    assert actual.is_static == x["w"].is_static
    assert actual.dtype == HALF
    assert_array_equal(asarray(actual), asarray(x["w"]))


@pytest.mark.parametrize("scale", [4.0, F32(4)])
def test_an_exported_program_takes_scaled_arrays(scale):
    pytest.importorskip("flatbuffers", reason="jax.export writes with it")
    x = ScaledArray(jnp.arange(6, dtype=HALF), scale)
    fun = jax.jit(scalify(lambda x: x * 3))
    program = export.deserialize(export.export(fun)(x).serialize())
    assert_array_equal(asarray(program.call(x)), asarray(fun(x)))
