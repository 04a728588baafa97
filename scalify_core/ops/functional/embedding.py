"""Table look-up whose gradient is summed in FP32 and, on every platform, in one order.

Shape legend: `...` the shape of the ids, N their number, V rows of the table, D width.
"""

import math

import jax
import jax.numpy as jnp

from scalify_core.numerics import compiler_hints
from scalify_core.ops.composite import composite


@composite
def embedding(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Return the rows `table[ids]`.

    Args:
        table: [V, D], any float dtype.
        ids: [...], integers in [-V, V); a negative one counts from the end, as in
            NumPy. Any other gives a row of NaN, so that it cannot go unnoticed, and has
            no part in the gradient.

    Returns:
        [..., D] in the dtype of the table. The gradient of the table adds up in FP32,
        always in the same order. (By default a GPU's scatter-add is atomic, and not
        deterministic.)
    """
    # JAX's default takes the last row for an id that is too large.
    return table.at[ids].get(mode="fill", fill_value=jnp.nan)


def _embedding_bwd(residuals: tuple, gradient: jax.Array) -> tuple:
    table, ids = residuals
    zeros = jnp.zeros(table.shape, jnp.float32)
    return (
        zeros.at[ids]
        .add(gradient.astype(jnp.float32), mode="drop")
        .astype(table.dtype),
        None,
    )


def _embedding_bwd_cuda(residuals: tuple, gradient: jax.Array) -> tuple:
    """Return the gradient of the table without atomics.

    Ids are sorted, a segmented scan adds up each run of equal ids, and each sum is
    written once.
    """
    table, ids = residuals
    (size, width), count = table.shape, math.prod(ids.shape)
    # Each id writes a sum of its own, so a row must have one id, and the outside of the
    # table one. In 32 bits, since bytes could not count the places past the table.
    ids = ids.reshape(count).astype(jnp.int32)
    ids = jnp.where(ids < 0, ids + size, ids)
    ids = jnp.where(ids < 0, size, jnp.minimum(ids, size))
    # Stable: equal ids keep the order of their positions, and their sum its bits.
    order = jnp.argsort(ids, stable=True)
    sorted_ids = ids[order]
    rows = gradient.astype(jnp.float32).reshape(count, width)[order]
    starts = jnp.concatenate([jnp.ones((1,), bool), sorted_ids[1:] != sorted_ids[:-1]])

    def add(left: tuple, right: tuple) -> tuple:
        (sum_l, start_l), (sum_r, start_r) = left, right
        return jnp.where(start_r, sum_r, sum_l + sum_r), start_l | start_r

    sums, _ = jax.lax.associative_scan(add, (rows, starts[:, None]))
    ends = jnp.concatenate([starts[1:], jnp.ones((1,), bool)])
    # Rows that do not end a run go to distinct places past the table, and are dropped.
    past = size + jnp.arange(count, dtype=jnp.int32)
    target = jnp.where(ends & (sorted_ids < size), sorted_ids, past)
    # The zeros are made after the sums: XLA would allocate them at the start of the
    # program, and hold them.
    zero, sums = compiler_hints.barrier((jnp.float32(0), sums))
    zeros = jnp.full(table.shape, zero)
    return (
        zeros.at[target]
        .set(sums, mode="drop", unique_indices=True)
        .astype(table.dtype),
        None,
    )


embedding.defvjp(None, _embedding_bwd, cuda=(None, None, _embedding_bwd_cuda))


# Rotary positions: the rotation of pairs of channels by angles that the caller gives.
# Shape legend: B batch, T positions, H heads, K head dim.


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
    # `_rope_bwd` gives the tables no gradient; without this a second derivative would
    # have one all the same.
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
    # The transpose of a rotation is the rotation back: the tables are all that is kept,
    # and not `x`.
    return _rope.fun(gradient, cos, -sin), None, None


_rope.defvjp(lambda x, cos, sin: (_rope.fun(x, cos, sin), (cos, sin)), _rope_bwd)


@composite
def materialized(x: jax.Array) -> jax.Array:
    """Return `x`; on CUDA, it is written once, in its own format, and read from memory.

    A compiler may otherwise fuse the last operation of an array, a rounding from FP32,
    into each of several readers, and store the FP32 array. Use it for arrays that are
    stored in any case: the residual stream.
    """
    return compiler_hints.kept_narrow(x)


materialized.defvjp(
    lambda x: (compiler_hints.kept_narrow(x), None), lambda _, gradient: (gradient,)
)
