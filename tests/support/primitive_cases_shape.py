"""Cases of primitives that move elements, index, sort and reduce them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from primitive_cases import MULTIPLIES, Case, Plain, distinct, normal, positive

ROWS = np.array([2, 0, 2], np.int32)

SHAPE = [
    Case("broadcast_in_dim", lambda x: jnp.broadcast_to(x, (2, 3, 4)), (normal(3, 4),), grad=True, reduction=2),
    Case("reshape", lambda x: x.reshape(2, 6), (normal(3, 4),), grad=True),
    Case("transpose", lambda x: x.transpose(2, 0, 1), (normal(2, 3, 4),), grad=True),
    Case("rev", lambda x: lax.rev(x, (0, 1)), (normal(3, 4),)),
    Case("slice", lambda x: x[1:, ::2], (normal(3, 4),), grad=True),
    Case("squeeze", lambda x: x.squeeze(), (normal(1, 3, 1),)),
    Case("pad", lambda x: jnp.pad(x, ((1, 2), (0, 1))), (normal(3, 4),), grad=True),
    Case("pad", lambda x: lax.pad(x, -jnp.inf, ((1, 0, 1),)), (normal(3),), label="inf"),
    Case("pad", lambda x: lax.pad(x, 1.5, ((0, 2, 1),)), (normal(3),), (-3, 0, 3), label="constant"),
    Case("pad", lambda x, y: lax.pad(x, y, ((1, -1, 2),)), (normal(3), normal(),), label="value"),
    Case("concatenate", lambda x, y: jnp.concatenate([x, y], 1), (normal(2, 3), normal(2, 1)), grad=True),
    Case("concatenate", lambda x: jnp.concatenate([x, jnp.zeros((1, 3))]), (normal(2, 3),), label="zeros"),
    Case("concatenate", lambda x: jnp.concatenate([x, jnp.full((1, 3), -jnp.inf)]), (normal(2, 3),), label="-inf"),
    Case("concatenate", lambda x, y: jnp.concatenate([x, y]), (normal(3), Plain(normal(2))), (-20, 0, 20)),
    Case("split", lambda x: jnp.split(x, [1, 3], 1), (normal(2, 4),), grad=True),
    Case("stack", lambda x, y: jnp.stack([x, y]), (normal(3), normal(3, salt="b"))),
    Case("stack", lambda x, y: lax.stack_p.bind(x, y, axis=0), (normal(3), normal(3, salt="b")), label="primitive"),
    Case("unstack", lambda x: jnp.unstack(x, axis=1), (normal(3, 2),)),
    Case("tile", lambda x: jnp.tile(x, (2, 3)), (normal(1, 2),)),
    Case("sort", lambda x: lax.sort(x, dimension=0), (normal(4, 3),)),
    Case("sort", lambda x, i: lax.sort((x, i), num_keys=1), (distinct(5), np.arange(5, dtype=np.int32)),
         label="integers"),
    Case("top_k", lambda x: lax.top_k(x, 2), (distinct(3, 5),), grad=True),
    Case("approx_top_k", lambda x: lax.approx_max_k(x, 2, recall_target=1.0), (distinct(3, 8),), narrow=(0,)),
    Case("argmax", lambda x: jnp.argmax(x, 1), (distinct(3, 4),)),
    Case("argmin", lambda x: jnp.argmin(x), (distinct(3, 4),)),
]  # fmt: skip

INDEXING = [
    Case("gather", lambda x: x[ROWS], (normal(3, 4),), grad=True, reduction=2),
    Case("gather", lambda x, i: jnp.take_along_axis(x, i[:, None], 1), (normal(3, 4), ROWS)),
    Case("gather", lambda x: jnp.take(x, np.array([1, 7]), 0, mode="fill"), (normal(3, 4),), label="fill"),
    Case("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i[0], 0), (2, 2)), (normal(3, 4), ROWS)),
    Case("dynamic_update_slice", lambda x, y, i: lax.dynamic_update_slice(x, y, (i[0], 1)),
         (normal(3, 4), normal(1, 2), ROWS)),
    Case("dynamic_update_slice", lambda y: lax.dynamic_update_slice(jnp.zeros((3, 4)), y, (1, 1)), (normal(1, 2),),
         label="into zeros"),
    Case("scatter", lambda x, y: x.at[np.array([2, 0])].set(y), (normal(3, 4), normal(2, 4))),
    Case("scatter", lambda x: x.at[0].set(0.0), (normal(3, 4),), label="zero"),
    Case("scatter-add", lambda x, y: x.at[ROWS].add(y), (normal(3, 4), normal(3, 4, salt="b")), reduction=3, grad=True),
    Case("scatter-add", lambda y: jnp.zeros((4, 2)).at[ROWS].add(y), (normal(3, 2),), reduction=2, label="into zeros"),
    Case("scatter-sub", lambda x, y: x.at[ROWS].subtract(y), (normal(3, 4), normal(3, 4, salt="b")), reduction=3),
    Case("scatter-mul", lambda x, y: x.at[np.array([2, 0])].multiply(y), (normal(3, 4), normal(2, 4)), MULTIPLIES,
         narrow=(0,)),
    Case("scatter-min", lambda x, y: x.at[ROWS].min(y), (normal(3, 4), normal(3, 4, salt="b"))),
    Case("scatter-max", lambda x, y: x.at[ROWS].max(y), (normal(3, 4), normal(3, 4, salt="b"))),
    Case("select_and_scatter_add", jax.grad(lambda x: jnp.sum(pooled(x) * np.arange(1.0, 3.0, dtype=np.float32))),
         (distinct(4),), special=False),
    Case("select_and_gather_add",
         lambda x, t: jax.jvp(lambda x: pooled(x), (x,), (t,))[1], (distinct(4), normal(4)), special=False),
    Case("select_and_scatter", lambda x, y: lax.select_and_scatter_p.bind(
        x, y, jnp.float32(0), select_jaxpr=jax.make_jaxpr(lax.ge)(0.0, 0.0).jaxpr, select_consts=(),
        scatter_jaxpr=jax.make_jaxpr(lax.add)(0.0, 0.0).jaxpr, scatter_consts=(), window_dimensions=(2,),
        window_strides=(2,), padding=((0, 0),)), (distinct(4), normal(2)), special=False, narrow=(0,)),
]  # fmt: skip


def pooled(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (2,), (2,), "VALID")


def windowed(x, init, operation):
    return lax.reduce_window(x, init, operation, (1, 2), (1, 1), "SAME")


def folded(x, init, operation):
    return lax.reduce(x, np.float32(init), operation, (1,))


REDUCTIONS = [
    Case("reduce_sum", lambda x: jnp.mean(x, 0), (normal(64, 3),), reduction=64, grad=True),
    Case("reduce_sum", lambda x: jnp.linalg.norm(x), (normal(64),), (-50, 0, 50), reduction=64),
    Case("reduce_sum", lambda x: jnp.var(x), (normal(64),), MULTIPLIES, reduction=64),
    Case("reduce_max", lambda x: x.max(0), (normal(3, 4),), grad=True),
    Case("reduce_min", lambda x: x.min(), (normal(3, 4),)),
    Case("reduce_prod", lambda x: x.prod(1), (positive(3, 4),), (-20, 0, 20), reduction=4, narrow=(0,)),
    Case("reduce_and", lambda x: jnp.all(x > 0, 1), (normal(3, 4),)),
    Case("reduce_or", lambda x: jnp.any(x > 0), (normal(3, 4),)),
    Case("reduce_xor", lambda x: lax.reduce(x > 0, False, lax.bitwise_xor, (0,)), (normal(3, 4),)),
    Case("reduce", lambda x: folded(x, 0.0, lambda a, b: a + b * 1.0), (normal(3, 4),), reduction=4, narrow=(0,)),
    Case("reduce", lambda x: folded(x, 1.0, lambda a, b: jnp.maximum(a, b) * 1.0), (normal(3, 4),), (-3, 0, 3),
         narrow=(0,)),
    Case("cumsum", lambda x: jnp.cumsum(x, 1), (normal(3, 4),), reduction=4, grad=True),
    Case("cumprod", lambda x: jnp.cumprod(x), (positive(4),), (-20, 0, 20), reduction=4, narrow=(0,)),
    Case("cummax", lambda x: lax.cummax(x, 1), (normal(3, 4),)),
    Case("cummin", lambda x: lax.cummin(x, 0), (normal(3, 4),)),
    Case("cumlogsumexp", lambda x: lax.cumlogsumexp(x), (normal(4),), (-20, 0, 4), narrow=(0,), reduction=4),
    Case("reduce_window_sum", lambda x: windowed(x, 0.0, lax.add), (normal(3, 4),), reduction=2),
    Case("reduce_window_max", lambda x: windowed(x, -jnp.inf, lax.max), (normal(3, 4),)),
    Case("reduce_window_min", lambda x: windowed(x, jnp.inf, lax.min), (normal(3, 4),)),
    Case("reduce_window", lambda x: windowed(x, 1.0, lax.mul), (positive(3, 4),), MULTIPLIES, narrow=(0,)),
]  # fmt: skip

CASES = [*SHAPE, *INDEXING, *REDUCTIONS]
