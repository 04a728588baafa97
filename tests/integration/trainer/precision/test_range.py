"""Values that leave a format's range: gains, aligned and smoothed channels, clipped
operands."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from precisions import SPEC, batch, policy, workload
from small_models import initial

from scalify_core import as_scaled_array, scalify
from scalify_core.array.tree import map_arrays
from scalify_core.ops.matmul import Fp8DotGeneral
from scalify_core.optim.weights import scaled_params, wide
from trainer.models.gpt2.block import SwigluMLP
from trainer.models.gpt2.spec import GPT2Spec
from trainer.models.layers import Factory
from trainer.precision.arrays import abstract_weights
from trainer.precision.dots import ClippedDot
from trainer.workload import (
    Model,
    first_state,
)


def test_smooth_swiglu_is_swiglu():
    tokens = batch(workload("fp32")).tokens_AxBxT1[0]
    smooth, plain = (
        Model.make(dataclasses.replace(SPEC, mlp=mlp), policy("fp32"))
        for mlp in ("smooth_swiglu", "swiglu")
    )
    params = initial(plain.training)
    (a, ga), (b, gb) = (
        jax.jit(jax.value_and_grad(m.loss))(params, tokens, None, None)
        for m in (smooth, plain)
    )
    assert a == b  # powers of two
    norm = jax.jit(optax.global_norm)
    assert norm(jax.tree.map(np.subtract, *jax.device_get((ga, gb)))) < 1e-6 * norm(gb)

    # It is folded away where text is generated.
    def logits(m):
        def decoded(params):
            model = m.sampling.bind(params)
            return model.decode(np.arange(4)[None], model.init_cache(1), 0)[0]

        return np.asarray(jax.jit(decoded)(params))

    assert (logits(smooth) == logits(plain)).all()
    assert smooth.training.bind(params).h[0].mlp.smooth
    assert not smooth.sampling.bind(params).h[0].mlp.smooth


def test_channels_that_are_nearly_dead_are_smoothed_in_fp16_too():
    """The inverse of their own power of two would be beyond FP16."""
    w = workload(
        "fp16_loss_scaled", spec=dataclasses.replace(SPEC, mlp="smooth_swiglu")
    )
    state = first_state(w, seed=0)
    kernel = state.params["h"][0]["mlp"]["c_fc"]["kernel"]
    value_and_grad = w.model.differentiate().value_and_grad
    tokens = batch(w).tokens_AxBxT1[0]
    compiled = jax.jit(
        lambda s: value_and_grad(s.params, s.scaling, tokens, None, s.key)
    )
    for size in (2.0**-15, 2.0**-20, 2.0**-24):
        state.params["h"][0]["mlp"]["c_fc"]["kernel"] = kernel.at[:, ::2].multiply(size)
        loss, grads, *_ = compiled(state)
        assert jnp.isfinite(loss), size
        assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(grads)), size


def test_smooth_swiglu_keeps_the_aligned_channels_that_saturate_in_swiglu():
    spec = GPT2Spec(
        vocab_size=64,
        d_model=128,
        n_head=4,
        d_mlp=352,
        mlp="swiglu",
        align_channels=4,
        align_gain=256.0,
    )
    x = jax.random.normal(jax.random.key(1), (256, 128))

    def output(mlp, dot=None):
        factory = Factory("h.0", nnx.Rngs(params=0), dot_general_for=dot)
        module = SwigluMLP(dataclasses.replace(spec, mlp=mlp), factory)
        graphdef, params = nnx.split(module)
        params = nnx.to_pure_dict(params)
        apply = lambda params, x: nnx.merge(graphdef, params)(x, lambda x: x)
        if dot is None:
            return apply(params, x)
        scaled = as_scaled_array(x, 1.0, dtype=jnp.float16)
        params = scaled_params(params, jnp.float16)
        return wide(jax.jit(scalify(apply, scales="static"))(params, scaled))

    exact = output("swiglu")

    def error(mlp):
        difference = output(mlp, Fp8DotGeneral) - exact
        return jnp.linalg.norm(difference) / jnp.linalg.norm(exact)

    # Roundings to E4M3 are off by 0.036 in RMS, see above: two operands for each
    # branch, two for the last product.
    assert error("smooth_swiglu") < np.sqrt(6) * 0.036
    assert error("swiglu") > 0.4


def test_operands_are_clipped_to_a_multiple_of_their_rms():
    x = jnp.float32([[1.0, 1.0, 1.0, 5.0]])  # RMS sqrt(7)
    out = ClippedDot(lambda lhs, rhs, dims: lhs, 1.5)(x, x, (((1,), (1,)), ((), ())))
    np.testing.assert_allclose(out, [[1.0, 1.0, 1.0, 1.5 * 7**0.5]], rtol=2**-22)


def test_a_kernel_whose_rows_are_smoothed_is_sent_as_it_is_smoothed():
    """On one device the factor of a channel comes before the rounding to E4M3, so on
    several it has to as well."""

    def sent(preset, mlp):
        model = Model.make(dataclasses.replace(SPEC, mlp=mlp), policy(preset))
        params = abstract_weights(model.training.shapes, model.policy, 1.0)
        send = lambda p: map_arrays(
            lambda x, role: model.cast_for_all_gather(role, x), p, model.roles
        )
        mlp = jax.eval_shape(send, params)["h"][0]["mlp"]
        return [
            str(getattr(mlp[name]["kernel"], "data", mlp[name]["kernel"]).dtype)
            for name in ("c_fc", "c_proj")
        ]

    assert sent("scalify_fp8", "smooth_swiglu") == ["float8_e4m3fn", "float16"]
    assert sent("scalify_fp8", "swiglu") == ["float8_e4m3fn", "float8_e4m3fn"]
    assert sent("fp8_current", "smooth_swiglu") == ["float32", "float32"]
