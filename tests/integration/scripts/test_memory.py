"""What is counted: buffers of a state, files of its checkpoint, what the backward pass
needs."""

import jax
import jax.numpy as jnp
import pytest

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


@pytest.mark.slow  # bytes by format: test_precision.py
def test_a_state_weighs_what_its_formats_say():
    tiny = "model.n_layer=2+model.n_head=1+model.d_model=32+model.context=16+train.batch_tokens=64"
    actual = memory.measure(
        memory.Arguments(vocab=64, model="gpt2_nano", batch=4),
        f"scalify_fp8_fp16+{tiny}",
    )
    # scales and counters of a tiny model
    assert actual["state_bytes_per_parameter"] == pytest.approx(6, rel=0.05)
    assert actual["disk_bytes_per_parameter"] >= 6
    assert "float8_e4m3fn" in actual["saved_bytes"]
