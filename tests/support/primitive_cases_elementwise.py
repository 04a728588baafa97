"""Cases of the elementwise primitives: each on a scalar and a matrix."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from primitive_cases import (
    FREE,
    LOGICAL,
    MULTIPLIES,
    Case,
    Plain,
    normal,
    positive,
    unit,
)

SHAPES = [(), (3, 4)]


def elementwise(primitive, fun, domain, count=1, **options):
    """The function on `count` operands, different ones, of each shape."""
    salts = "abcd"[:count]
    grad = options.pop("grad", False)
    return [
        Case(
            primitive,
            fun,
            tuple(domain(*s, salt=x) for x in salts),
            grad=grad and s == SHAPES[-1],
            **options,
        )
        for s in SHAPES
    ]


def logical(primitive, fun, domain=normal, count=1, exponents=LOGICAL, **options):
    """A function that is computed on the logical value: in FP16 only at the scale where
    its results are FP16."""
    return elementwise(
        primitive, fun, domain, count, exponents=exponents, narrow=(0,), **options
    )


BY_SIZE = (lax.neg, lax.abs, lax.sign, lax.is_finite, lax.stop_gradient)
OF_THE_VALUE = (
    *(lax.exp, lax.expm1, lax.tanh, lax.erf, lax.sin, lax.tan, lax.atan, lax.asinh),
    *(lax.sinh, lax.floor, lax.ceil, lax.logistic),
)
UNARY = [
    case
    for cases in (
        [elementwise(f.__name__, f, normal) for f in BY_SIZE],
        [logical(f.__name__, f) for f in OF_THE_VALUE],
        [logical(f.__name__, f, positive) for f in (lax.log, lax.log1p)],
        [
            logical(f.__name__, f, unit, exponents=(-100, -10, 0))
            for f in (lax.asin, lax.atanh, lax.erf_inv)
        ],
    )
    for group in cases
    for case in group
]

ROOTS = [
    case
    # Odd exponents and ones that no degree divides.
    for exponents in ((-100, 0, 100), (-51, 3, 77))
    # XLA may make a power of a cube root: exp(log(x) / 3), where a rounding of
    # log(2^100), 69, is one of 23 / 2 ulp.
    for f, wide in ((lax.sqrt, None), (lax.rsqrt, None), (lax.cbrt, 16))
    for case in elementwise(
        f.__name__, f, positive, exponents=exponents, wide_roundings=wide
    )[1:]
]

OTHER_UNARY = [
    *logical("round", lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)),
    *elementwise("square", lax.square, normal, exponents=MULTIPLIES),
    *elementwise("integer_pow", lambda x: lax.integer_pow(x, 3), normal, exponents=(-40, 0, 40)),
    *elementwise("integer_pow", lambda x: lax.integer_pow(x, -2), positive, exponents=MULTIPLIES),
    *elementwise("copy", lax.copy_p.bind, normal),
    *elementwise("name", lambda x: checkpoint_name(x, "here"), normal),
    *elementwise("optimization_barrier", lax.optimization_barrier, normal),
    *logical("reduce_precision", lambda x: lax.reduce_precision(x, 8, 5), exponents=FREE),
    *elementwise("convert_element_type", lambda x: x.astype(jnp.bfloat16), normal),
    *elementwise("convert_element_type", lambda x: x.astype(jnp.float16), normal, exponents=(-2, 0, 2)),
    *logical("convert_element_type", lambda x: x.astype(jnp.int32), special=False),
    *logical("convert_element_type", lambda x: x.astype(bool), exponents=FREE),
    *logical("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.int32), exponents=FREE, special=False),
    *elementwise("real", lambda x: lax.real(lax.complex(x, x)), normal),
    *elementwise("imag", lambda x: lax.imag(lax.complex(x, x)), normal),
    *elementwise("complex", lax.complex, normal, 2),
    *elementwise("conj", lambda x: lax.conj(lax.complex(x, x)), normal),
]  # fmt: skip

BINARY = [
    *elementwise("add", lax.add, normal, 2, grad=True),
    *elementwise("sub", lax.sub, normal, 2),
    *elementwise("mul", lax.mul, normal, 2, exponents=MULTIPLIES, grad=True),
    *elementwise("div", lax.div, positive, 2, exponents=MULTIPLIES),
    *elementwise("div", lax.div, positive, 2, exponents=(-30, 0, 30), grad=True, label="gradient")[1:],
    *elementwise("max", lax.max, normal, 2),
    *elementwise("min", lax.min, normal, 2),
    *logical("rem", lax.rem, positive, 2, exponents=(-10, 0, 10)),
    *logical("pow", lax.pow, positive, 2, exponents=(-10, 0, 2), roundings=16),
    *logical("nextafter", lax.nextafter, normal, 2, exponents=FREE),
    *(case for f in (lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge) for case in elementwise(f.__name__, f, normal, 2)),
    *(case for f in (lax.eq_to_p, lax.le_to_p, lax.lt_to_p) for case in elementwise(f.name, f.bind, normal, 2)),
    *elementwise("add_any", lambda x, y: jax.grad(lambda z: jnp.sum(jnp.sin(z) * x + z * y))(y), normal, 2, reduction=2,
                 exponents=(-10, 0, 2), narrow=(0,)),
]  # fmt: skip

MASK = np.arange(12).reshape(3, 4) % 3 > 0

CONSTANTS_AND_MASKS = [
    Case("select_n", lambda m, x, y: lax.select(m, x, y), (MASK, normal(3, 4, salt="a"), normal(3, 4, salt="b"))),
    Case("select_n", lambda i, x, y: lax.select_n(i, x, y, x), (MASK.astype(np.int32) * 2, normal(3, 4), unit(3, 4))),
    Case("select_n", lambda x: jnp.where(MASK, x, -1e9), (normal(3, 4),), exponents=(-20, 0, 20), label="-1e9",
         narrow=()),
    Case("select_n", lambda x: jnp.where(MASK, x, -jnp.inf), (normal(3, 4),), label="-inf", grad=True),
    Case("select_n", lambda x: jnp.where(MASK, 0.0, x), (normal(3, 4),), label="zero"),
    Case("select_n", lambda x: jnp.where(x > 0, x, 0.01 * x), (normal(3, 4),), label="leaky", grad=True),
    Case("select_n", lambda x, y: jnp.where(MASK, x, y), (normal(3, 4), Plain(normal(3, 4))), (-20, 0, 20),
         label="plain array"),
    Case("max", lambda x: jnp.maximum(x, 0.0), (normal(3, 4),), label="zero", grad=True),
    Case("min", lambda x: jnp.minimum(x, jnp.inf), (normal(3, 4),), label="inf"),
    Case("max", lambda x: jnp.maximum(x, jnp.finfo(jnp.float32).min), (normal(3, 4),), label="lowest"),
    Case("clamp", lambda x: lax.clamp(0.0, x, jnp.inf), (normal(3, 4),), label="zero, inf"),
    Case("min", lambda x: jnp.clip(x, -0.5, 0.5), (normal(3, 4),), (-3, 0, 3), label="clip"),
    Case("clamp", lambda x: lax.clamp(-0.5, x, 0.5), (normal(3, 4),), (-3, 0, 3), label="lax, constants"),
    Case("clamp", lambda a, x, b: lax.clamp(-a, x, b), (positive(3, 4), normal(3, 4), positive(3, 4, salt="b")),
         special=False),
    Case("add", lambda x: x + 0.0, (normal(3, 4),), label="zero"),
    Case("add", lambda x: x + 1e-8, (positive(3, 4),), (-60, -25, 0, 60), label="epsilon"),
    Case("add", lambda x, b: x + b, (normal(3, 4), normal(1, 4)), label="bias"),
    Case("add", lambda x, b: x + b, (normal(3, 4), Plain(normal(3, 4))), (-20, 0, 20), label="plain array"),
    Case("sub", lambda x: 1.0 - x, (unit(3, 4),), (-100, -10, 0, 10, 100), label="from one", reduction=2),
    Case("sub", lambda x: 0.0 - x, (normal(3, 4),), label="from zero"),
    Case("mul", lambda x: x * 0.0, (normal(3, 4),), label="zero"),
    Case("mul", lambda x: x * -3e-5, (normal(3, 4),), label="constant"),
    Case("mul", lambda x: x * 2.0**-7, (normal(3, 4),), label="power of two"),
    Case("mul", lambda x: x * MASK, (normal(3, 4),), label="mask"),
    Case("div", lambda x: x / 3e4, (normal(3, 4),), label="constant"),
    Case("div", lambda x: 1.0 / x, (positive(3, 4),), label="reciprocal"),
    Case("div", lambda x: x / 0.0, (normal(3, 4),), label="zero"),
    Case("pow", lambda x: 0.95**x, (positive(3),), (-10, 0, 7), label="base constant", narrow=(0,)),
    Case("pow", lambda x: x**2.5, (positive(3),), (-30, 0, 30), label="exponent constant", narrow=(0,), roundings=16),
    Case("gt", lambda x: x > 0, (normal(3, 4),), label="zero"),
    Case("lt", lambda x: x < jnp.inf, (normal(3, 4),), label="inf"),
    Case("ge", lambda x: x >= 0.25, (normal(3, 4),), label="constant"),
]  # fmt: skip

CASES = [*UNARY, *ROOTS, *OTHER_UNARY, *BINARY, *CONSTANTS_AND_MASKS]
