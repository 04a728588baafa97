"""What docs/numerics.md says of parameters in a loop of one's own."""

import jax
import jax.numpy as jnp
import optax
import pytest

from scalify_core import as_scaled_array, scalify


@pytest.mark.parametrize(
    ("scales", "cast"), [("auto", False), ("static", False), ("static", True)]
)
def test_fp16_parameters_under_an_fp32_state_stay_fp16_with_measured_scales_or_a_cast(
    scales, cast
):
    params, tx = {"w": jnp.ones((8, 8))}, optax.adam(1e-2)
    state = as_scaled_array(tx.init(params))

    def step(params, state, x):
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (
            jax.tree.map(lambda p: p.astype(jnp.float16), params) if cast else params
        ), state

    params, x = as_scaled_array((params, jnp.ones((4, 8))), dtype=jnp.float16)
    params, _ = jax.jit(scalify(step, scales=scales))(params, state, x)
    assert params["w"].data.dtype == (
        jnp.float32 if scales == "static" and not cast else jnp.float16
    )
