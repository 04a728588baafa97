"""Steps of narrow optimisers, compiled: bytes of the state, what is held meanwhile, the
number of kernels."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from for_h200 import compiled_for_a_gpu

from scalify_core import ScaledArray, tree
from scalify_core.numerics.formats import E4M3, E5M2, FP16
from scalify_core.optim import scaled_state
from scalify_core.optim.weights import apply_updates

FORMATS = {"fp16": {"mu": FP16, "nu": FP16}, "fp8": {"mu": E4M3, "nu": E5M2}}


# of a shape that the compiler would hold FP32 moments for, were it not told
SHAPE, LEAVES = (50304, 768), 2


def adam_step(formats):
    """Donated step and the shapes of its arguments: narrow Adam state, FP16 gradients
    (clipped) and master weights."""
    return step_of(
        optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(0.9, 0.95)),
        formats,
        [SHAPE] * LEAVES,
    )


def step_of(tx, formats, shapes):
    """As `adam_step`, of any optimiser and parameters; the state is packed."""
    tx = scaled_state(tx, **FORMATS[formats], rounding="stochastic", seed=0)

    def step(params, state, grads, number):
        updates, state = tx.update(grads, tree.unpack(state), params)
        updates = jax.tree.map(lambda u: -1e-3 * u, updates)
        return apply_updates(
            params, updates, rounding="stochastic", seed=0, step=number
        ), tree.pack(state)

    grads = {
        f"w{i}": jax.ShapeDtypeStruct(shape, jnp.float16)
        for i, shape in enumerate(shapes)
    }
    params = jax.tree.map(lambda x: ScaledArray(x, 2.0**-4), grads)
    state = jax.eval_shape(lambda p: tree.pack(tx.init(p)), params)
    return jax.jit(step, donate_argnums=(0, 1)), (
        params,
        state,
        grads,
        jax.ShapeDtypeStruct((), jnp.int32),
    )


@pytest.mark.parametrize(("formats", "bytes_per_parameter"), [("fp16", 4), ("fp8", 2)])
def test_state_has_four_or_two_bytes_a_parameter_beside_scales_and_counts(
    formats, bytes_per_parameter
):
    params = {f"w{i}": jnp.zeros((16, 8)) for i in range(8)}
    tx = scaled_state(optax.scale_by_adam(0.9, 0.95), **FORMATS[formats], seed=0)
    total = sum(x.nbytes for x in jax.tree.leaves(tx.init(params)))
    assert total == bytes_per_parameter * 8 * 16 * 8 + 2 * 8 * 4 + 2 * 4


def test_the_compiled_step_takes_and_gives_narrow_moments():
    step, args = adam_step("fp8")
    signature = step.lower(*args).compile().as_text().splitlines()[0]
    dtypes = collections.Counter(re.findall(r"(\w+)\[50304,768\]", signature))
    # In and out: both moments and the parameter of each leaf; in: its gradient.
    expected = {"f16": 2 * 1 + 1, "f8e4m3fn": 2, "f8e5m2": 2}
    assert dtypes == {dtype: n * LEAVES for dtype, n in expected.items()}


# In FP32 tensors of one parameter. FP8: none, only partial sums and maxima. FP16 with
# stochastic rounding: what the compiler keeps between the two kernels into which it
# splits the work on one parameter.
@pytest.mark.parametrize(("formats", "tensors"), [("fp8", 0.01), ("fp16", 3)])
def test_on_a_gpu_the_step_holds_fp32_values_of_one_parameter_at_most(formats, tensors):
    compiled = compiled_for_a_gpu(*adam_step(formats))
    assert (
        compiled.memory_analysis().temp_size_in_bytes
        < tensors * 4 * SHAPE[0] * SHAPE[1]
    )


def kernels(step, args):
    """What the entry of the program calls; no parameter is copied."""
    program = compiled_for_a_gpu(step, args).as_text()
    entry = program[program.index("\nENTRY") :]
    assert "f16[768]{0} copy(" not in entry
    return len(re.findall(r" (?:fusion|copy)\(", entry))


@pytest.mark.slow  # test_stacks.py has fewer vectors, compiled for the same GPU
def test_on_a_gpu_the_kernels_for_vectors_are_few_and_none_is_a_copy():
    """Beside those that any step has, such as the words and the scales of its large
    arrays put apart."""
    few, many = (
        kernels(*step_of(optax.scale_by_adam(), "fp16", [(256, 256)] + n * [(768,)]))
        for n in (6, 48)
    )
    assert many - few < (48 - 6) / 4


def test_the_first_moments_are_computed_when_the_program_runs():
    """Of zeros as constants the compiler rounded every element itself: at 124M that
    took minutes."""
    tx = scaled_state(optax.adam(1e-3), mu=FP16, nu=FP16, seed=0)
    text = jax.jit(tx.init).lower({"w": jnp.ones((64, 48))}).compile().as_text()
    assert " sqrt(" in text, text  # of the second moment, which is zero


def test_state_can_be_donated_and_every_scale_is_a_buffer_of_its_own():
    params = {f"w{i}": jnp.zeros(64) for i in range(4)}
    tx = scaled_state(optax.adam(1e-2), mu=FP16, nu=FP16, seed=0)
    state = tx.init(params)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers)
    step = jax.jit(lambda state, grads: tx.update(grads, state)[1], donate_argnums=0)
    old = state
    for _ in range(2):
        state = step(state, params)
    assert all(x.is_deleted() for x in jax.tree.leaves(old))
    assert all(
        np.all(np.isfinite(np.asarray(x, np.float32))) for x in jax.tree.leaves(state)
    )
