"""The gradient over eight devices, what moves and in which format, and where the state
lives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import precisions
import pytest
from precisions import bits

from scalify_core.optim.weights import wide
from trainer.assembly.build import check_split
from trainer.compiled.hlo import Program
from trainer.data import Batch
from trainer.errors import UserError
from trainer.models.gpt2.spec import GPT2Spec
from trainer.parallel.distribute import (
    GradReduceConfig,
    all_gather_tree,
    amax_over,
    gradient_over,
    reduce_tree,
    squared_norms_over,
)
from trainer.parallel.mesh import make_mesh, place_batch
from trainer.parallel.sharding import (
    array_specs,
    param_specs,
)
from trainer.step.step import sequence_keys
from trainer.workload import (
    first_state,
)

SPEC = GPT2Spec(
    vocab_size=256, context=32, n_layer=1, n_head=4, d_model=64, dropout=0.1
)
DEVICES = 8


def bytes_per_device(tree):
    """Of the device that holds the most."""
    held = {}
    for leaf in jax.tree.leaves(tree):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values())


@functools.cache
def workload(preset, sizes, spec=SPEC):
    return precisions.workload(preset, spec=spec)._replace(mesh=make_mesh(*sizes))


@functools.cache
def state_of(preset, sizes):
    return first_state(workload(preset, sizes), seed=0)


def gradient(sizes, accum):
    """The loss of 16 sequences and the gradient, as one device would have it."""
    w = workload("fp32", sizes)
    random = np.random.default_rng(0)
    tokens = random.integers(0, 256, (16, SPEC.context + 1), dtype=np.int32)
    batch = place_batch(Batch(tokens, None), accum=accum, mesh=w.mesh)
    value_and_grad = w.model.on(w.mesh).differentiate().value_and_grad

    @jax.jit
    def of(params, batch, key):
        keys = sequence_keys(key, batch)
        mean_gradient = gradient_over(w.mesh, w.comm)
        return mean_gradient(value_and_grad, params, (), batch, keys)[:2]

    state = first_state(w, seed=0)
    return jax.device_get(of(state.params, batch, state.key))


def test_heads_channels_rows_and_state_split_at_once_give_the_gradient_of_one_device():
    """With dropout; those of a Llama: unit/trainer/models/test_llama.py."""
    loss, grads = gradient((1,), accum=1)
    split_loss, split_grads = gradient((2, 2, 2), accum=2)
    # FP32 sums of some thousand terms in another order.
    eps = 1e3 * np.finfo(np.float32).eps
    np.testing.assert_allclose(split_loss, loss, rtol=eps)
    for a, b in zip(jax.tree.leaves(split_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=eps * np.abs(b).max())


def test_the_flagship_keeps_an_eighth_and_moves_bytes():
    w = workload("scalify_fp8_fp16", (1, DEVICES))._replace(
        reduce=GradReduceConfig("fp8")
    )
    state = state_of("scalify_fp8_fp16", (1, DEVICES))
    assert bytes_per_device(state) == pytest.approx(
        sum(map(len, bits(state))) / DEVICES, rel=0.05
    )

    specs, comm = param_specs(state.params, w.mesh, w.model.roles), w.comm

    def there_and_back(params):
        """Gathered weights, as if they were gradients."""
        return reduce_tree(
            wide(all_gather_tree(params, specs, comm)), specs, comm, jnp.uint32(7)
        )

    in_specs = (array_specs(state.params, w.mesh, w.model.roles),)
    mapped = jax.shard_map(
        there_and_back, mesh=w.mesh, in_specs=in_specs, out_specs=specs, check_vma=False
    )
    compiled = jax.jit(mapped).lower(state.params).compile()
    sent: dict = {}
    for c in Program(compiled.as_text()).collectives:
        sent[c.op, c.dtype] = sent.get((c.op, c.dtype), 0) + c.sent(DEVICES)

    leaves = jax.tree.leaves(wide(state.params))
    roles = jax.tree.leaves(w.model.roles)
    narrow = [w.model.is_narrow(role) for role in roles]
    assert sum(narrow) == 4
    sizes = np.array([leaf.size for leaf in leaves])
    kernels, others = sizes[narrow].sum(), sizes[np.invert(narrow)].sum()
    share = (DEVICES - 1) / DEVICES
    # One byte an element each way, FP16 for the rest, and for each gradient a scale of
    # four bytes.
    assert sent == {
        ("all-gather", "u8"): kernels * share,
        ("all-to-all", "u8"): kernels * share,
        ("all-gather", "u16"): 2 * others * share,
        ("all-to-all", "u16"): 2 * others * share,
        ("all-reduce", "f32"): 4 * len(leaves) * 2 * share,
    }
    for stored, gathered in zip(
        leaves, jax.tree.leaves(compiled(state.params)), strict=True
    ):
        # Two roundings to E4M3, one of them stochastic, by less than a step of an
        # eighth and half of one.
        atol = 2**-9 * np.abs(stored).max()
        np.testing.assert_allclose(gathered, stored, rtol=0.2, atol=atol)


def test_the_first_state_does_not_depend_on_the_devices():
    one, many = (state_of("scalify_fp8_fp16", sizes) for sizes in ((1,), (1, DEVICES)))
    assert jax.tree.structure(one) == jax.tree.structure(many)
    assert bits(one) == bits(many)


def test_squares_and_the_largest_of_split_arrays_are_those_of_the_whole():
    sizes = (2, 2, 2)
    mesh, roles = make_mesh(*sizes), workload("fp32", sizes).model.roles
    params = state_of("fp32", sizes).params
    arrays = jax.tree.leaves(jax.device_get(params))
    squares = jax.jit(squared_norms_over(mesh, roles))(params)
    # FP32 sums of some thousand squares in another order.
    rtol = 1e2 * np.finfo(np.float32).eps
    np.testing.assert_allclose(squares, [np.sum(x**2) for x in arrays], rtol=rtol)
    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(params), strict=True)
    largest = jax.jit(
        lambda *xs: amax_over(mesh, roles)([[x, -2 * x] for x in xs], paths)
    )(*leaves)
    expected = [times * np.abs(x).max() for x in arrays for times in (1, 2)]
    assert largest.tolist() == expected


@pytest.mark.parametrize(
    ("sizes", "preset", "changes", "words"),
    [
        ((1, 1, 8), "fp32", {}, ["parallel.tensor=8", "model.n_head=4"]),
        (
            (1, 8),
            "fp32",
            {"n_head": 3, "d_model": 36},
            ["parallel.fsdp=8", "model.d_model=36"],
        ),
        (
            (1, 1, 4),
            "scalify_fp8_fp16",
            {"d_model": 32},
            ["parallel.tensor=4", "multiples of 16"],
        ),
        (
            (1, 1, 2),
            "fp32",
            {"value_gain": 2.0},
            ["model.value_gain=2.0", "parallel.tensor"],
        ),
    ],
)
def test_what_a_model_cannot_be_split_into_is_a_line(sizes, preset, changes, words):
    w = workload(preset, sizes, spec=dataclasses.replace(SPEC, **changes))
    with pytest.raises(UserError) as error:
        check_split(w.model, w.mesh)
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)
