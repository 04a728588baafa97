"""A packed tree is that tree again, also through jit."""

import jax
import jax.numpy as jnp
from beside_plain import F32, HALF
from numpy.testing import assert_array_equal

from scalify_core import ScaledArray
from trainer.step.packing import pack, unpack


def test_a_packed_tree_comes_back_as_it_was():
    scaled = lambda n, scale: ScaledArray(jnp.full(3, n, HALF), scale)
    tree = {
        "b": [scaled(1, F32(2.0)), jnp.arange(2)],
        "a": scaled(2, F32(0.5)),
        "static": scaled(3, 4.0),
        "layers": ScaledArray(jnp.ones((2, 3)), jnp.asarray([1.0, 2.0])),
    }
    packed = pack(tree)
    assert packed.scales.tolist() == [0.5, 2.0]  # in the order of the leaves
    through = jax.jit(lambda t: pack(unpack(t)))(packed)
    assert jax.tree.structure(through) == jax.tree.structure(packed)
    back = unpack(through)
    jax.tree.map(assert_array_equal, back, tree)
    dtypes = lambda tree: [x.dtype for x in jax.tree.leaves(tree)]
    assert dtypes(back) == dtypes(tree)


def test_a_tree_without_scales_of_run_time_is_not_packed():
    tree = {"static": ScaledArray(jnp.ones(3), 4.0), "plain": jnp.ones(2)}
    assert pack(tree) is tree
    assert unpack(tree) is tree
