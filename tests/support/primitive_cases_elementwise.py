"""Cases of the elementwise primitives."""

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

SIGNED, POSITIVE, SMALL = normal(3, 4), positive(3, 4), unit(3, 4)
OTHER, OTHER_POSITIVE = normal(3, 4, salt="b"), positive(3, 4, salt="b")


def logical(primitive, fun, *args, exponents=LOGICAL, **options):
    """A function that is computed on the logical value: in FP16 only at the scale where
    its results are FP16."""
    return Case(primitive, fun, args, exponents, narrow=(0,), **options)


BY_SIZE = (lax.neg, lax.abs, lax.sign, lax.is_finite, lax.stop_gradient)
OF_THE_VALUE = (
    *(lax.exp, lax.expm1, lax.tanh, lax.erf, lax.sin, lax.tan, lax.atan, lax.asinh),
    *(lax.sinh, lax.floor, lax.ceil),
)
COMPARISONS = (lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge)

UNARY = [
    *(Case(f.__name__, f, (SIGNED,)) for f in BY_SIZE),
    *(logical(f.__name__, f, SIGNED) for f in OF_THE_VALUE),
    logical("log1p", lax.log1p, POSITIVE),
    *(
        logical(f.__name__, f, SMALL, exponents=(-100, -10, 0))
        for f in (lax.asin, lax.atanh, lax.erf_inv)
    ),
    # Odd exponents and ones that no degree divides.
    Case("sqrt", lax.sqrt, (POSITIVE,), (-100, 3, 77)),
    Case("rsqrt", lax.rsqrt, (POSITIVE,), (-51, 0, 100)),
    # XLA may make a power of a cube root, exp(log(x) / 3), so not far from 1.
    Case("cbrt", lax.cbrt, (POSITIVE,), (-13, 0, 11)),
    logical("round", lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN), SIGNED),
    Case("square", lax.square, (SIGNED,), MULTIPLIES),
    Case("integer_pow", lambda x: lax.integer_pow(x, 3), (SIGNED,), (-40, 0, 40)),
    Case("integer_pow", lambda x: lax.integer_pow(x, -2), (POSITIVE,), MULTIPLIES),
    Case("copy", lax.copy_p.bind, (SIGNED,)),
    Case("name", lambda x: checkpoint_name(x, "here"), (SIGNED,)),
    Case("optimization_barrier", lax.optimization_barrier, (SIGNED,)),
    logical("reduce_precision", lambda x: lax.reduce_precision(x, 8, 5), SIGNED, exponents=FREE),
    Case("convert_element_type", lambda x: x.astype(jnp.float16), (SIGNED,), (-2, 0, 2)),
    logical("convert_element_type", lambda x: x.astype(jnp.int32), SIGNED, special=False),
    logical("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.int32), SIGNED, exponents=FREE,
            special=False),
    Case("real", lambda x: lax.real(lax.conj(lax.complex(x, x))), (SIGNED,)),
]  # fmt: skip

BINARY = [
    Case("add", lax.add, (SIGNED, OTHER), grad=True),
    Case("sub", lax.sub, (SIGNED, OTHER)),
    Case("mul", lax.mul, (SIGNED, OTHER), MULTIPLIES, grad=True),
    Case("div", lax.div, (POSITIVE, OTHER_POSITIVE), MULTIPLIES),
    Case("div", lax.div, (POSITIVE, OTHER_POSITIVE), (-30, 0, 30), grad=True),
    Case("max", lax.max, (SIGNED, OTHER)),
    Case("min", lax.min, (SIGNED, OTHER)),
    logical("pow", lax.pow, POSITIVE, OTHER_POSITIVE, exponents=(-10, 0, 2), roundings=16),
    logical("nextafter", lax.nextafter, SIGNED, OTHER, exponents=FREE),
    *(Case(f.__name__, f, (SIGNED, OTHER)) for f in COMPARISONS),
    *(Case(f.name, f.bind, (SIGNED, OTHER)) for f in (lax.eq_to_p, lax.le_to_p, lax.lt_to_p)),
    Case("add_any", lambda x, y: jax.grad(lambda z: jnp.sum(jnp.sin(z) * x + z * y))(y), (SIGNED, OTHER), (-10, 0, 2),
         reduction=2, narrow=(0,)),
]  # fmt: skip

MASK = np.arange(12).reshape(3, 4) % 3 > 0

CONSTANTS_AND_MASKS = [
    Case("select_n", lambda m, x, y: lax.select(m, x, y), (MASK, SIGNED, OTHER)),
    Case("select_n", lambda x: jnp.where(MASK, x, -1e9), (SIGNED,), (-20, 0, 20), narrow=()),
    Case("select_n", lambda x: jnp.where(MASK, x, -jnp.inf), (SIGNED,), grad=True),
    Case("select_n", lambda x, y: jnp.where(MASK, x, y), (SIGNED, Plain(OTHER)), (-20, 0, 20)),
    Case("max", lambda x: jnp.maximum(x, 0.0), (SIGNED,), grad=True),
    Case("clamp", lambda a, x, b: lax.clamp(-a, x, b), (POSITIVE, SIGNED, OTHER_POSITIVE), special=False),
    Case("add", lambda x: x + 1e-8, (POSITIVE,), (-60, -25, 0, 60)),
    Case("sub", lambda x: 1.0 - x, (SMALL,), (-100, -10, 0, 10, 100), reduction=2),
    Case("sub", lambda x: 0.0 - x, (SIGNED,)),
    Case("mul", lambda x: x * 0.0, (SIGNED,)),
    Case("mul", lambda x: x * -3e-5, (SIGNED,)),
    Case("div", lambda x: x / 3e4, (SIGNED,)),
    Case("div", lambda x: 1.0 / x, (POSITIVE,)),
    Case("pow", lambda x: 0.95**x, (positive(3),), (-10, 0, 7), narrow=(0,)),
    Case("ge", lambda x: x >= 0.25, (SIGNED,)),
]  # fmt: skip

CASES = [*UNARY, *BINARY, *CONSTANTS_AND_MASKS]
