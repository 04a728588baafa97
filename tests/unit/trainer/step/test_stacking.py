"""Small arrays as rows of stacks: the same bits as one by one, and programs that do not
grow with their number."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import slow
from for_h200 import compiled_for_a_gpu
from numpy.testing import assert_array_equal

from scalify_core import ScaledArray, tree
from scalify_core.numerics.formats import E4M3, E5M2, FP16
from scalify_core.optim import scaled_state
from scalify_core.optim.weights import LARGE, apply_updates, wide
from trainer.step.stacking import NONE, Stacks

SHAPES = {
    "a": (12,),
    "b": (5, 12),
    "c": (12,),
    "d": (7,),
    "e": (12,),
    "f": (7,),
    "g": (LARGE,),
}


def arrays(seed, dtype=jnp.float16):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=shape), dtype)
        for name, shape in SHAPES.items()
    }


def weights(seed=0):
    return {
        name: ScaledArray(x, 2.0 ** (i - 6))
        for i, (name, x) in enumerate(arrays(seed).items())
    }


def stacks_of(params):
    return Stacks.of(params, dict.fromkeys(params, 0))


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def test_vectors_of_a_shape_and_a_kind_are_put_together():
    params = weights()
    gathered = stacks_of(params).stack(params)
    assert {name: None if x is None else x.shape for name, x in gathered.items()} == {
        "a": (3, 12),
        "b": (5, 12),
        "c": None,
        "d": (2, 7),
        "e": None,
        "f": None,
        "g": (LARGE,),
    }
    kinds = dict.fromkeys(params, 0) | {"c": 1}
    assert Stacks.of(params, kinds).stack(params)["a"].shape == (2, 12)


def test_what_is_gathered_can_be_scattered_and_nothing_has_changed():
    params = weights()
    state = scaled_state(optax.adamw(1e-3), mu=E4M3, nu=E5M2, seed=0).init(params)
    stacks = stacks_of(params)
    for whole in (params, state, arrays(1)):
        gathered = stacks.stack(whole)
        assert len(jax.tree.leaves(gathered)) < len(jax.tree.leaves(whole))
        equal(stacks.unstack(gathered, whole), whole)
    assert NONE.stack(params).keys() == params.keys()
    assert NONE.leaf_indices(params) is None


@pytest.mark.parametrize("accept", [None, False])
def test_a_step_on_stacks_is_bitwise_the_step_on_each_array(accept):
    params, stacks = weights(), stacks_of(weights())
    accept = None if accept is None else jnp.asarray(accept)
    tx = scaled_state(
        optax.chain(optax.scale_by_adam(0.9, 0.95), optax.scale(-1e-3)),
        mu=E4M3,
        nu=E5M2,
        seed=3,
    )

    one_by_one, together = (
        jax.jit(lambda *args, s=s: step_on(s, tx, *args, accept=accept))
        for s in (NONE, stacks)
    )
    actual = expected = params, tx.init(params)
    for i in range(3):
        gradients = {
            name: ScaledArray(x, jnp.float32(2.0**-i))
            for name, x in arrays(10 + i).items()
        }
        expected, actual = (
            one_by_one(*expected, gradients),
            together(*actual, gradients),
        )
        equal(actual, expected)
    moved = any((actual[0][name].data != params[name].data).any() for name in params)
    assert moved == (accept is None or bool(accept))


def step_on(stacks, tx, params, state, gradients, number=None, accept=None):
    """Parameters and state after an update of them in stacks."""
    old, inner = stacks.stack(params), stacks.leaf_indices(state.inner_state)
    given = stacks.stack(gradients), stacks.stack(state)
    updates, new = tx.update(*given, old, accept=accept, leaf_indices=inner)
    new_params = apply_updates(
        old,
        updates,
        rounding="stochastic",
        seed=3,
        step=state.step if number is None else number,
        accept=accept,
        leaf_indices=stacks.leaf_indices(params),
    )
    return stacks.unstack(new_params, params), stacks.unstack(new, state)


def test_numbers_of_the_leaves_are_in_their_order():
    params, stacks = weights(), stacks_of(weights())
    sizes = lambda xs: jnp.array(
        [x.size for x in jax.tree.leaves(wide(xs))], jnp.float32
    )
    for of in (stacks, NONE):
        actual = of.each(
            of.stack(params), sizes, lambda x: jnp.full(len(x), x[0].size, jnp.float32)
        )
        assert_array_equal(actual, [x.size for x in params.values()])


def gpu_step(vectors, matrices):
    """A donated update, compiled for an H200: its entry's kernels, and how many of them
    are different."""
    shapes = {f"v{i:03}": (768,) for i in range(vectors)} | {
        f"w{i:02}": (256, 512) for i in range(matrices)
    }
    data = {
        name: jax.ShapeDtypeStruct(shape, jnp.float16) for name, shape in shapes.items()
    }
    params = {name: ScaledArray(x, 2.0**-4) for name, x in data.items()}
    tx, stacks = (
        scaled_state(optax.scale_by_adam(), mu=FP16, nu=FP16, seed=0),
        stacks_of(params),
    )
    state = jax.eval_shape(lambda p: tree.pack(tx.init(p)), params)

    def step(params, packed, *rest):
        params, new = step_on(stacks, tx, params, tree.unpack(packed), *rest)
        return params, tree.pack(new)

    scalars = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_)
    text = compiled_for_a_gpu(
        jax.jit(step, donate_argnums=(0, 1)), (params, state, data, *scalars)
    ).as_text()
    called = re.findall(r"fusion\(.*?calls=%([\w.-]+)", text[text.index("\nENTRY") :])
    bodies = {
        name: re.search(rf"^%{re.escape(name)} \(.*?\n(.*?)^}}", text, re.M | re.S)[1]
        for name in called
    }
    plain = {
        name: re.sub(r"%[\w.-]+|, metadata=\{[^}]*\}", "", body)
        for name, body in bodies.items()
    }
    assert not re.search(r"f16\S* copy\(", text[text.index("\nENTRY") :])
    return called, [body for body in plain.values() if body.count("\n") > 150]


@pytest.mark.parametrize(("vectors", "matrices"), [(70, 0), slow(130, 1)])
def test_on_a_gpu_the_vectors_of_a_deep_model_are_a_few_kernels_and_none_is_a_copy(
    vectors, matrices
):
    """Each row was one: 3 x 70. One stack of 130 rows was put together of two: 421."""
    called, _ = gpu_step(vectors, matrices)
    assert len(called) < (40 if matrices else 20)


def test_on_a_gpu_equal_matrices_are_updated_by_the_same_program():
    """Of each, the numbers that it is computed with were constants' places in one
    array."""
    _, large = gpu_step(vectors=0, matrices=4)
    assert len(large) >= 4
    assert len(set(large)) < len(large) / 2
