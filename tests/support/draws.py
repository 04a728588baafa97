"""Random arrays for tests, without a program compiled for each shape."""

import functools

import jax
import numpy as np

SIZE = 2**14


@functools.cache
def _draws(seed: int) -> np.ndarray:
    with jax.ensure_compile_time_eval():  # the first to ask may be a trace
        return np.asarray(jax.random.normal(jax.random.key(seed), (SIZE,)))


def draw_normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """Return `jax.random.normal(jax.random.key(seed), shape)`, bit for bit.

    JAX draws each number from the key and the number's flat index alone, so all shapes
    are beginnings of one draw.
    """
    size = int(np.prod(shape))
    if size > SIZE:
        return jax.random.normal(jax.random.key(seed), shape)
    with jax.ensure_compile_time_eval():
        # `jnp.asarray` compiles a program for each shape
        return jax.device_put(_draws(seed)[:size].reshape(shape))
