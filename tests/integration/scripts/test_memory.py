"""What is counted: buffers of a state, files of its checkpoint, what the backward pass
needs."""

import jax
import jax.numpy as jnp

from scripts.bench import memory


def test_what_the_gradient_reads_of_the_losses_computation_is_counted_by_format():
    @jax.jit
    def program(x):  # x: 4 floats
        a = jnp.sin(x)  # read after the loss
        b = jnp.cos(a).astype(jnp.float16)  # read after it too
        loss = jnp.sum(b)
        return loss, a * b.astype(jnp.float32) * loss

    assert memory.alive_at_the_loss(jax.make_jaxpr(program)(jnp.ones(4)).jaxpr) == {
        "float32": 16 + 4,  # the FP32 sum behind the FP16 loss
        "float16": 8,
    }
