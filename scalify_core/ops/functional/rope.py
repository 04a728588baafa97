"""Rotary positions: the rotation of pairs of channels by angles that the caller gives.

Shape legend: B batch, T positions, H heads, K head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from scalify_core.ops.composite import composite


def rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Return `x` with channels k and k + K/2 of each head rotated by the angle k of
    their position, in FP32.

    Frequencies, and their changes for longer contexts, are in the tables alone.

    Args:
        x: [B, T, H, K], K even.
        cos: [T, K/2], the cosines of the angles; a constant, which gets no gradient.
        sin: [T, K/2], their sines, likewise.

    Returns:
        Array of the shape and dtype of `x`.

    Raises:
        ValueError: tables of another shape.

    References:
        Su et al., RoFormer, 2021 (https://arxiv.org/abs/2104.09864); which channels are
        a pair is as in Hugging Face's Llama.
    """
    expected = (x.shape[1], x.shape[3] / 2)
    if cos.shape != expected or sin.shape != expected:
        raise ValueError(
            f"rope: tables {cos.shape} and {sin.shape} for x {x.shape}: expected"
            f" {expected} each"
        )
    return _rope(x, jax.lax.stop_gradient(cos), jax.lax.stop_gradient(sin))


@composite(name="rope")
def _rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = (table.astype(jnp.float32)[None, :, None] for table in (cos, sin))
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(
        x.dtype
    )


def _rope_bwd(residuals: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple:
    cos, sin = residuals
    return _rope.fun(gradient, cos, -sin), None, None


_rope.defvjp(lambda x, cos, sin: (_rope.fun(x, cos, sin), (cos, sin)), _rope_bwd)
