"""Cases of products, linear algebra, control flow, randomness and collectives."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from primitive_cases import MULTIPLIES, Case, Plain, normal, positive, spd

KEY = jax.random.key(0)
MASK = np.arange(3) > 0


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


def conv(x, kernel, k, **options):
    numbers = ("NHWC", "HWIO", "NHWC")
    fun = lambda x, kernel: lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=numbers, **options
    )
    return Case("conv_general_dilated", fun, (normal(*x), normal(*kernel)), MULTIPLIES, reduction=k, grad=True,
                special=False)  # fmt: skip


PRODUCTS = [
    dot((3, 4), (4, 5), (((1,), (0,)), ((), ())), 4, grad=True),
    dot((4,), (4,), (((0,), (0,)), ((), ())), 4),
    dot((2, 3, 4), (2, 4, 5), (((2,), (1,)), ((0,), (0,))), 4),
    dot((2, 3, 4), (3, 2, 2), (((0, 1), (1, 0)), ((), ())), 6),
    dot((3,), (2,), (((), ()), ((), ())), 1),
    dot((2, 256), (256, 2), (((1,), (0,)), ((), ())), 256),
    Case("dot_general", lambda x, w: x @ w, (normal(3, 4), Plain(normal(4, 5))), (-60, 0, 60), reduction=4),
    Case("dot_general", lambda x: x @ jnp.eye(4), (normal(3, 4),), reduction=4, label="constant"),
    Case("dot_general", lambda q, k: jnp.einsum("bthk,bshk->bhts", q, k), (normal(1, 3, 2, 4), normal(1, 5, 2, 4)),
         MULTIPLIES, reduction=4),
    Case("ragged_dot_general", lambda x, w: lax.ragged_dot(x, w, np.array([1, 2], np.int32)),
         (normal(3, 4), normal(2, 4, 5)), MULTIPLIES, reduction=4),
    conv((1, 4, 4, 2), (3, 3, 2, 3), 18),
    conv((1, 4, 4, 4), (2, 2, 2, 4), 8, feature_group_count=2),
]  # fmt: skip


def linalg(primitive, fun, *args, exponents=(-40, 0, 40), narrow=(-4, 0, 4)):
    """A factorisation: not defined for infinities; in FP16 where its results, at scale
    1, are FP16 numbers."""
    return Case(
        primitive, fun, args, exponents, reduction=16, special=False, narrow=narrow
    )


LINALG = [
    linalg("cholesky", jnp.linalg.cholesky, spd(3)),
    linalg("triangular_solve", lambda a, b: jax.scipy.linalg.solve_triangular(a, b, lower=True), spd(3), normal(3, 2),
           exponents=(-30, 0, 30), narrow=(0,)),
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


def counted(x, body):
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, body(s[1])), (0, x))[
        1
    ]


CONTROL = [
    Case("jit", lambda x, y: jax.jit(lambda x, y: x * 2 + y)(x, y), (normal(3), normal(3, salt="b")), grad=True),
    Case("remat2", lambda x: jax.checkpoint(lambda x: x * jnp.float32(3))(x), (normal(3),), grad=True),
    Case("custom_jvp_call", custom, (normal(3, 4),), grad=True),
    Case("custom_vjp_call", doubled_gradient, (normal(3),), grad=True),
    Case("cond", lambda p, x, y: lax.cond(p[1], lambda x, y: x * 4, lambda x, y: x + y, x, y),
         (MASK, normal(3), normal(3, salt="b"))),
    Case("cond", lambda i, x: lax.switch(i, [lambda x: x, lambda x: x * 8, lambda x: jnp.zeros_like(x)], x),
         (np.int32(1), normal(3)), label="switch", grad=True),
    Case("while", lambda x: counted(x, lambda x: x * 2), (normal(3),), label="times two"),
    Case("while", lambda x: lax.while_loop(lambda s: jnp.sum(s) < 100, lambda s: s * 2, x), (positive(3),),
         (-5, 0, 5), label="on a value", special=False),
    Case("scan", lambda x: lax.scan(lambda c, y: (c + y, c), jnp.zeros(4), x), (normal(5, 4),), reduction=5, grad=True),
    Case("scan", lambda c, w: lax.scan(lambda c, w: (jnp.tanh(c @ w), jnp.sum(c)), c, w),
         (normal(2, 3), normal(4, 3, 3)), (-2, 0), reduction=64, label="layers", grad=True, narrow=(0,), special=False),
]  # fmt: skip

RANDOM = [
    Case("random_bits", lambda x: x * jax.random.bernoulli(KEY, 0.5, x.shape) / 0.5, (normal(3, 4),), label="dropout",
         grad=True, special=False),
    Case("random_bits", lambda x: x + jax.random.normal(KEY, x.shape), (normal(3, 4),), (-10, 0, 10), label="noise",
         reduction=2),
    Case("iota", lambda x: x * jnp.arange(3), (normal(3),)),
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
    collective("psum_invariant", lambda x: lax.pmean(jnp.sum(x), "i"), out=REPLICATED, reduction=32, label="pmean"),
    collective("pvary", lambda x: lax.psum(x * 2, "i") + x, label="sum and term", reduction=4, grad=True),
    collective("pmax", lambda x: lax.pmax(x, "i"), out=REPLICATED),
    collective("pmin", lambda x: lax.pmin(x, "i"), out=REPLICATED),
    collective("ppermute", lambda x: lax.ppermute(x, "i", [(j, (j + 1) % 4) for j in range(4)]), grad=True),
    collective("all_gather", lambda x: lax.all_gather(x, "i", tiled=True)[::4]),
    collective("reduce_scatter", lambda x: lax.psum_scatter(x.T, "i", tiled=True), reduction=4),
    collective("all_to_all", lambda x: lax.all_to_all(x, "i", 1, 0, tiled=True)),
    collective("axis_index", lambda x: x * lax.axis_index("i"), label="axis_index"),
    collective("shard_map", lambda x, w: x @ w.T, normal(8, 4, salt="w"), exponents=MULTIPLIES, reduction=4),
    Case("sharding_constraint",
         lambda x: lax.with_sharding_constraint(x, jax.NamedSharding(MESH, SHARDED)) * 2, (normal(8, 4),)),
    Case("device_put", lambda x: jax.device_put(x, jax.devices()[0]) * 2, (normal(3),)),
]  # fmt: skip

CASES = [*PRODUCTS, *LINALG, *CONTROL, *RANDOM, *COLLECTIVES]
