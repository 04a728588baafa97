"""Packed trees."""

import jax
import jax.numpy as jnp

from scalify_core import ScaledArray
from scalify_core.tree import Packed, pack, unpack


def test_a_packed_tree_comes_back_as_it_was():
    scaled = lambda n, scale: ScaledArray(jnp.full(3, n, jnp.float16), scale)
    tree = {
        "b": [scaled(1, jnp.float32(2.0)), jnp.arange(2)],
        "a": scaled(2, jnp.float32(0.5)),
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
