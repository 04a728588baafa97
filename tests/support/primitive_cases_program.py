"""Cases of products, linear algebra, control flow, randomness and collectives."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from primitive_cases import MULTIPLIES, Case, Plain, normal, positive, spd

KEY = jax.random.key(0)
X, ROW = normal(3, 4), normal(3)


def dot(lhs, rhs, dims, k, **options):
    fun = lambda x, y: lax.dot_general(x, y, dims)
    return Case(
        "dot_general",
        fun,
        (normal(*lhs, salt="a"), normal(*rhs, salt="b")),
        MULTIPLIES,
        reduction=k,
        **options,
    )


def conv(x, kernel):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=numbers
    )


PRODUCTS = [
    dot((3, 4), (4, 5), (((1,), (0,)), ((), ())), 4, grad=True),
    dot((2, 3, 4), (2, 4, 5), (((2,), (1,)), ((0,), (0,))), 4),
    dot((2, 3, 4), (3, 2, 2), (((0, 1), (1, 0)), ((), ())), 6),
    dot((2, 256), (256, 2), (((1,), (0,)), ((), ())), 256),
    Case("dot_general", lambda x, w: x @ w, (X, Plain(normal(4, 5))), (-60, 0, 60), reduction=4),
    Case("dot_general", lambda x: x @ jnp.eye(4), (X,), reduction=4),
    Case("ragged_dot_general", lambda x, w: lax.ragged_dot(x, w, np.array([1, 2], np.int32)),
         (X, normal(2, 4, 5)), MULTIPLIES, reduction=4),
    Case("conv_general_dilated", conv, (normal(1, 4, 4, 2), normal(3, 3, 2, 3)), MULTIPLIES, reduction=18, grad=True,
         special=False),
]  # fmt: skip


def linalg(primitive, fun, *args, exponents=(-40, 0, 40), narrow=(-4, 0, 4)):
    """A factorisation: not defined for infinities; in FP16 where its results, at scale
    1, are FP16 numbers."""
    return Case(
        primitive, fun, args, exponents, reduction=16, special=False, narrow=narrow
    )


LINALG = [
    linalg("cholesky", jnp.linalg.cholesky, spd(3)),
    linalg("custom_linear_solve", jnp.linalg.solve, spd(3), normal(3), exponents=(-20, 0, 20), narrow=(0,)),
    linalg("fft", lambda x: jnp.abs(jnp.fft.rfft(x)), normal(8)),
]  # fmt: skip


@jax.custom_jvp
def custom(x):
    return jnp.where(x > 0, x, 0)


custom.defjvp(
    lambda primals, tangents: (
        custom(*primals),
        jnp.where(primals[0] > 0, tangents[0], 0),
    )
)


@jax.custom_vjp
def doubled_gradient(x):
    return 3 * x


doubled_gradient.defvjp(lambda x: (3 * x, None), lambda _, g: (2 * g,))


CONTROL = [
    Case("jit", lambda x, y: jax.jit(lambda x, y: x * 2 + y)(x, y), (ROW, normal(3, salt="b")), grad=True),
    Case("remat2", lambda x: jax.checkpoint(lambda x: x * jnp.float32(3))(x), (ROW,), grad=True),
    Case("custom_jvp_call", custom, (X,), grad=True),
    Case("custom_vjp_call", doubled_gradient, (ROW,), grad=True),
    Case("cond", lambda i, x: lax.switch(i, [lambda x: x, lambda x: x * 8, lambda x: jnp.zeros_like(x)], x),
         (np.int32(1), normal(3)), grad=True),
    Case("while", lambda x: lax.while_loop(lambda s: jnp.sum(s) < 100, lambda s: s * 2, x), (positive(3),),
         (-5, 0, 5), special=False),
    Case("scan", lambda x: lax.scan(lambda c, y: (c + y, c), jnp.zeros(4), x), (normal(5, 4),), reduction=5, grad=True),
    Case("scan", lambda c, w: lax.scan(lambda c, w: (jnp.tanh(c @ w), jnp.sum(c)), c, w),
         (normal(2, 3), normal(4, 3, 3)), (-2, 0), reduction=64, grad=True, narrow=(0,), special=False),
]  # fmt: skip

RANDOM = [
    Case("random_bits", lambda x: x * jax.random.bernoulli(KEY, 0.5, x.shape) / 0.5, (X,),
         grad=True, special=False),
    Case("iota", lambda x: x * jnp.arange(3), (ROW,)),
]  # fmt: skip

MESH = jax.make_mesh(
    (4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4]
)
SHARDED, REPLICATED = jax.P("i"), jax.P()


def collective(primitive, fun, *more, out=SHARDED, check_vma=True, **options):
    fun = jax.shard_map(
        fun, mesh=MESH, in_specs=SHARDED, out_specs=out, check_vma=check_vma
    )
    return Case(primitive, fun, (normal(8, 4), *more), special=False, **options)


COLLECTIVES = [
    collective("psum", lambda x: lax.psum(x, "i"), out=REPLICATED, reduction=4, check_vma=False),
    collective("psum_invariant", lambda x: lax.psum(x, "i"), out=REPLICATED, reduction=4, grad=True),
    collective("pvary", lambda x: lax.psum(x * 2, "i") + x, reduction=4, grad=True),
    collective("pmax", lambda x: lax.pmax(x, "i"), out=REPLICATED),
    collective("pmin", lambda x: lax.pmin(x, "i"), out=REPLICATED),
    collective("ppermute", lambda x: lax.ppermute(x, "i", [(j, (j + 1) % 4) for j in range(4)]), grad=True),
    collective("all_gather", lambda x: lax.all_gather(x, "i", tiled=True)[::4]),
    collective("reduce_scatter", lambda x: lax.psum_scatter(x.T, "i", tiled=True), reduction=4),
    collective("all_to_all", lambda x: lax.all_to_all(x, "i", 1, 0, tiled=True)),
    collective("axis_index", lambda x: x * lax.axis_index("i")),
    collective("shard_map", lambda x, w: x @ w.T, normal(8, 4, salt="w"), exponents=MULTIPLIES, reduction=4),
    Case("sharding_constraint",
         lambda x: lax.with_sharding_constraint(x, jax.NamedSharding(MESH, SHARDED)) * 2, (normal(8, 4),)),
    Case("device_put", lambda x: jax.device_put(x, jax.devices()[0]) * 2, (ROW,)),
]  # fmt: skip

CASES = [*PRODUCTS, *LINALG, *CONTROL, *RANDOM, *COLLECTIVES]
