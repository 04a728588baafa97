"""Random programs: scaled in FP32 data, a program is bitwise the plain one."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from scalify_core.array.scaled_array import ScaledArray
from scalify_core.interpreter.transform import scalify
from scalify_core.numerics.formats import pow2_round

SHAPE = (3, 3)


def turn(c, row):
    """One function, which is compiled once and not for each program."""
    return c + row, c * 0.5


# All keep the shape (3, 3). Scales only move binary points, so none of them may change
# a bit. (A factor that is no power of two may be applied at another place of a product,
# which costs a rounding; so constants here are powers.)
OPERATIONS = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / (1 + jnp.abs(y)),
    "max": jnp.maximum,
    "matmul": lambda x, y: jnp.dot(x, y, precision="highest"),
    "mask": lambda x, y: jnp.where(x > y, x, 0.0),
    "rsqrt": lambda x, y: jax.lax.rsqrt(1 + jnp.square(x)),
    "exp": lambda x, y: jnp.exp(-jnp.abs(x)),
    "times constant": lambda x, y: x * -0.25,
    "cumsum": lambda x, y: jnp.cumsum(x, 0),
    "gather": lambda x, y: x[np.array([2, 0, 2])],
    "scan": lambda x, y: jax.lax.scan(turn, x[0], y)[1],
    "cond": lambda x, y: jax.lax.cond(x[0, 0] > y[0, 0], lambda: x, lambda: y),
}
arrays = st.integers(0, 99).map(
    lambda seed: np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32)
)
programs = st.lists(
    st.tuples(
        st.sampled_from(sorted(OPERATIONS)), st.integers(0, 9), st.integers(0, 9)
    ),
    min_size=1,
    max_size=8,
)
exponents = st.integers(-12, 12)


def run(program, x, y):
    """The values of all steps; each takes two of the values before it."""
    values = [x, y]
    for name, i, j in program:
        values.append(
            OPERATIONS[name](values[i % len(values)], values[j % len(values)])
        )
    return values


def within_range(values):
    """Neither overflow nor, anywhere, a number so small that the plain program loses
    bits of it."""
    sizes = np.abs(np.concatenate([np.ravel(v) for v in values]))
    return bool(np.all((sizes == 0) | ((sizes > 2.0**-90) & (sizes < 2.0**90))))


@settings(deadline=None, derandomize=True, max_examples=24)
@given(programs, arrays, arrays, exponents, exponents, st.booleans())
def test_a_random_program_in_fp32_data_is_bitwise_the_plain_one(
    program, x, y, ex, ey, dynamic
):
    plain = run(program, jnp.asarray(x) * 2.0**ex, jnp.asarray(y) * 2.0**ey)
    assume(within_range(plain))
    scales = [jnp.float32(2.0**e) if dynamic else 2.0**e for e in (ex, ey)]
    actual = scalify(lambda x, y: run(program, x, y))(
        ScaledArray(jnp.asarray(x), scales[0]), ScaledArray(jnp.asarray(y), scales[1])
    )
    for step, (a, b) in enumerate(zip(actual, plain, strict=True)):
        assert a.dtype == jnp.float32
        assert all(
            pow2_round(s) == s for s in np.ravel(np.asarray(a.scale, np.float32))
        )
        assert_array_equal(np.asarray(a), b, err_msg=f"step {step - 2}")
