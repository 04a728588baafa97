import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from small_models import LLAMA as SPEC
from small_models import TOKENS, assert_close, compiled, initial

from scalify_core import as_scaled_array, asarray, scalify, tree
from scalify_core.array.scaled_array import is_scaled_array
from scalify_core.ops.functional import swiglu
from trainer.models.gated import smooth_swiglu
from trainer.models.llama.model import build_functions


def test_smoothing_divides_each_channel_by_the_nearest_power_of_two():
    keys, sizes = jax.random.split(jax.random.key(0)), 2.0 ** jnp.arange(8)[None]
    gate, linear = (jax.random.normal(key, (32, 8)) * sizes for key in keys)
    hidden, size = smooth_swiglu(gate, linear)
    np.testing.assert_array_equal(hidden * size[None], swiglu(gate, linear))
    np.testing.assert_array_equal(jnp.log2(size), jnp.log2(size).round())
    log_ratio = jnp.log2(jnp.abs(linear).max(axis=0) / size)
    np.testing.assert_allclose(log_ratio, 0, atol=0.5)
    larger, smaller = smooth_swiglu(gate, linear, target_amax=8.0)
    np.testing.assert_array_equal(larger, hidden * 8)
    np.testing.assert_array_equal(smaller, size / 8)


def test_heads_and_channels_split_over_devices_give_the_same_loss_and_gradients():
    """A device has all inputs, and its heads and hidden channels of the parameters."""
    params, plain, _ = compiled(SPEC)
    model = build_functions(SPEC, tensor_axis="tensor")
    axes = {"column": P(None, "tensor"), "row": P("tensor")}
    specs = jax.tree.map(lambda role: axes.get(role.kind, P()), model.roles)
    loss = lambda p: model.bind(p).loss(TOKENS[:, :-1], TOKENS[:, 1:])
    split = jax.shard_map(
        jax.value_and_grad(loss),
        mesh=jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,)),
        in_specs=(specs,),
        out_specs=(P(), specs),
        check_vma=False,
    )
    assert_close(jax.jit(split)(params), plain(params))


def test_scales_that_propagate_give_the_same_loss_and_gradients():
    """FP32 data: what is scaled is the plain function, whatever the sizes of its
    parameters."""
    spec = dataclasses.replace(SPEC, scan_layers=True)
    params, plain, _ = compiled(spec)
    bind = build_functions(spec, rescale_grads=("layer_norm", "qkv")).bind
    loss = jax.value_and_grad(lambda p: bind(p).loss(TOKENS[:, :-1], TOKENS[:, 1:]))
    scaled = tree.with_static_scales(as_scaled_array(params))
    actual = asarray(jax.jit(scalify(loss, scales="static"))(scaled))
    assert_close(actual, plain(params))


def test_data_of_all_gradients_is_near_one():
    """FP16, at initialisation, with the gain per layer that a width of 768 has."""
    std = 0.02 * math.sqrt(768 / 64)
    spec = dataclasses.replace(SPEC, d_model=64, context=64, init_std=std)
    model = build_functions(spec, rescale_grads=("layer_norm", "qkv"))
    tokens = np.random.default_rng(1).integers(0, 100, (4, 65))
    gradient = jax.grad(lambda p: model.bind(p).loss(tokens[:, :-1], tokens[:, 1:]))
    params = as_scaled_array(initial(model), dtype=jnp.float16)
    params = tree.with_static_scales(params)
    grads = jax.jit(scalify(gradient, scales="static"))(params)
    for grad in jax.tree.leaves(grads, is_leaf=is_scaled_array):
        assert grad.dtype == jnp.float16
        rms = np.sqrt(np.mean(np.square(np.float32(grad.data))))
        # Sums over tokens, which are not independent, exceed what the rules expect.
        assert 2.0**-4 <= rms <= 2.0**5
