"""Cases of primitives that move elements, index, sort and reduce them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from primitive_cases import MULTIPLIES, Case, Plain, normal, positive

X, Y, ROW = normal(3, 4), normal(3, 4, salt="b"), normal(3)
ROWS = np.array([2, 0, 2], np.int32)

SHAPE = [
    Case("broadcast_in_dim", lambda x: jnp.broadcast_to(x, (2, 3, 4)), (X,), grad=True, reduction=2),
    Case("reshape", lambda x: x.reshape(2, 6), (X,), grad=True),
    Case("transpose", lambda x: x.transpose(2, 0, 1), (normal(2, 3, 4),), grad=True),
    Case("rev", lambda x: lax.rev(x, (0, 1)), (X,)),
    Case("slice", lambda x: x[1:, ::2], (X,), grad=True),
    Case("squeeze", lambda x: x.squeeze(), (normal(1, 3, 1),)),
    Case("pad", lambda x: jnp.pad(x, ((1, 2), (0, 1))), (X,), grad=True),
    Case("pad", lambda x: lax.pad(x, 1.5, ((0, 2, 1),)), (ROW,), (-3, 0, 3)),
    Case("concatenate", lambda x, y: jnp.concatenate([x, y], 1), (normal(2, 3), normal(2, 1)), grad=True),
    Case("concatenate", lambda x: jnp.concatenate([x, jnp.full((1, 3), -jnp.inf)]), (normal(2, 3),)),
    Case("concatenate", lambda x, y: jnp.concatenate([x, y]), (ROW, Plain(normal(2))), (-20, 0, 20)),
    Case("split", lambda x: jnp.split(x, [1, 3], 1), (normal(2, 4),), grad=True),
    Case("stack", lambda x, y: jnp.stack([x, y]), (ROW, normal(3, salt="b"))),
    Case("unstack", lambda x: jnp.unstack(x, axis=1), (normal(3, 2),)),
    Case("tile", lambda x: jnp.tile(x, (2, 3)), (normal(1, 2),)),
    Case("sort", lambda x, i: lax.sort((x, i), num_keys=1), (normal(5), np.arange(5, dtype=np.int32))),
    Case("top_k", lambda x: lax.top_k(x, 2), (normal(3, 5),), grad=True),
    Case("argmax", lambda x: jnp.argmax(x, 1), (normal(3, 4),)),
    Case("argmin", lambda x: jnp.argmin(x), (normal(3, 4),)),
]  # fmt: skip

INDEXING = [
    Case("gather", lambda x: x[ROWS], (X,), grad=True, reduction=2),
    Case("gather", lambda x: jnp.take(x, np.array([1, 7]), 0, mode="fill"), (X,)),
    Case("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i[0], 0), (2, 2)), (X, ROWS)),
    Case("dynamic_update_slice", lambda x, y, i: lax.dynamic_update_slice(x, y, (i[0], 1)),
         (X, normal(1, 2), ROWS)),
    Case("scatter", lambda x, y: x.at[np.array([2, 0])].set(y), (X, normal(2, 4))),
    Case("scatter-add", lambda x, y: x.at[ROWS].add(y), (X, Y), reduction=3, grad=True),
    Case("scatter-sub", lambda x, y: x.at[ROWS].subtract(y), (X, Y), reduction=3),
    Case("scatter-mul", lambda x, y: x.at[np.array([2, 0])].multiply(y), (X, normal(2, 4)), MULTIPLIES,
         narrow=(0,)),
    Case("scatter-min", lambda x, y: x.at[ROWS].min(y), (X, Y)),
    Case("scatter-max", lambda x, y: x.at[ROWS].max(y), (X, Y)),
    Case("select_and_scatter_add", jax.grad(lambda x: jnp.sum(pooled(x) * np.arange(1.0, 3.0, dtype=np.float32))),
         (normal(4),), special=False),
    Case("select_and_gather_add",
         lambda x, t: jax.jvp(lambda x: pooled(x), (x,), (t,))[1], (normal(4), normal(4)), special=False),
]  # fmt: skip


def pooled(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (2,), (2,), "VALID")


def windowed(x, init, operation):
    return lax.reduce_window(x, init, operation, (1, 2), (1, 1), "SAME")


def folded(x, init, operation):
    return lax.reduce(x, np.float32(init), operation, (1,))


REDUCTIONS = [
    Case("reduce_sum", lambda x: jnp.mean(x, 0), (normal(64, 3),), reduction=64, grad=True),
    Case("reduce_sum", lambda x: jnp.var(x), (normal(64),), MULTIPLIES, reduction=64),
    Case("reduce_max", lambda x: x.max(0), (X,), grad=True),
    Case("reduce_min", lambda x: x.min(), (X,)),
    Case("reduce_and", lambda x: jnp.all(x > 0, 1), (X,)),
    Case("reduce_or", lambda x: jnp.any(x > 0), (X,)),
    Case("reduce_xor", lambda x: lax.reduce(x > 0, False, lax.bitwise_xor, (0,)), (X,)),
    Case("reduce", lambda x: folded(x, 0.0, lambda a, b: a + b * 1.0), (X,), reduction=4, narrow=(0,)),
    Case("cumsum", lambda x: jnp.cumsum(x, 1), (X,), reduction=4, grad=True),
    Case("cummax", lambda x: lax.cummax(x, 1), (X,)),
    Case("cummin", lambda x: lax.cummin(x, 0), (X,)),
    Case("reduce_window_sum", lambda x: windowed(x, 0.0, lax.add), (X,), reduction=2),
    Case("reduce_window_max", lambda x: windowed(x, -jnp.inf, lax.max), (X,)),
    Case("reduce_window_min", lambda x: windowed(x, jnp.inf, lax.min), (X,)),
    Case("reduce_window", lambda x: windowed(x, 1.0, lax.mul), (positive(3, 4),), MULTIPLIES, narrow=(0,)),
]  # fmt: skip

CASES = [*SHAPE, *INDEXING, *REDUCTIONS]
