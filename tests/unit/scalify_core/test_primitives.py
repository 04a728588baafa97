"""Every lax primitive that carries floats, through the one checker, over shapes,
scales, zeros and infinities."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import primitive_cases_elementwise
import primitive_cases_program
import primitive_cases_shape
import pytest
from jax import lax
from jax.extend.core import Primitive, jaxprs_in_params, primitives

from scalify_core.debug.testing import WAYS, check_scalify
from scalify_core.interpreter import registry

NO_FLOATS = {
    # integers, bits and booleans only
    "and", "or", "xor", "not", "clz", "population_count", "mulhi", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "threefry2x32",
    # tokens, which keep side effects in order
    "after_all", "create_token",
    # mutable references, which are read and written in place, and cannot be scaled
    "get", "swap", "empty2",
    # used by JAX while it transforms a program, not in the one that is run
    "custom_lin", "eval_jaxpr", "stage",
    # random numbers, and integers that go with them
    "rng_uniform", "random_fold_in", "random_seed", "random_split",
    "rng_bit_generator", "lu_pivots_to_permutation",
    # compiled for GPU and TPU only, while the test runs on a CPU
    "ragged_all_to_all", "ormqr",
}  # fmt: skip
PLAIN_RESULTS = {
    "axis_index", "iota", "random_bits", "reduce_and", "reduce_or", "reduce_xor"
}  # fmt: skip
CASES = [
    *primitive_cases_elementwise.CASES,
    *primitive_cases_shape.CASES,
    *primitive_cases_program.CASES,
]
COVERED = sorted({case.primitive for case in CASES})
# Without a rule: evaluated in FP32 by the same code. Some have cases,
BY_DEFAULT = {
    "bitcast_convert_type", "cholesky", "custom_linear_solve", "exp", "fft", "pow",
    "reduce", "reduce_window", "scatter-mul", "sign",
}  # fmt: skip
# and these have none.
WITHOUT_A_CASE = {
    "acos", "acosh", "approx_top_k", "atan2", "bessel_i0e", "bessel_i1e",
    "cholesky_update", "complex", "conj", "cos", "cosh", "cumlogsumexp", "cumprod",
    "digamma", "eig", "eigh", "erfc", "exp2", "hessenberg", "householder_product",
    "igamma", "igamma_grad_a", "igammac", "imag", "lgamma", "log", "log2", "logistic",
    "lu", "one_minus_square", "polygamma", "qr", "random_gamma", "reduce_prod",
    "regularized_incomplete_beta", "rem", "schur", "select_and_scatter", "svd",
    "symmetric_product", "triangular_solve", "tridiagonal", "tridiagonal_solve", "zeta",
}  # fmt: skip
FAR_APART = -1  # the trial with large scales beside small ones
ZEROS = (0.0,) * 64
SPECIAL = (0.0, np.inf, -np.inf, np.nan)


def primitives_of_jax() -> set[str]:
    """Return the names of all primitives that JAX exports."""
    modules = (primitives, lax, lax.linalg)
    return {
        x.name
        for module in modules
        for x in vars(module).values()
        if isinstance(x, Primitive)
    }


def primitives_in(jaxpr):
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    for eqn in jaxpr.eqns:
        for inner in jaxprs_in_params(eqn.params):
            names |= primitives_in(inner)
    return names


def evaluates_inside(primitive):
    """Tell whether a rule evaluates inner programs, or the operation on the data."""
    rule = registry.rules.get(primitive, registry.DEFAULT)
    return rule.control or rule.fun is registry.apply_to_data


class Program:
    """Cases of equal tolerances as one function, which is compiled once for all of
    them."""

    def __init__(self, cases):
        self.cases = {f"{i}: {case}": case for i, case in enumerate(cases)}
        self.first = cases[0]

    def __str__(self):
        return f"{self.first} and {len(self.cases) - 1} more"

    def __call__(self, args):
        return {name: case.fun(*args[name]) for name, case in self.cases.items()}

    def check(self, trial, dtype, ways, scales, replace=(), grad=False):
        """With the operands of each case at the scales of this trial."""
        args = {
            name: case.scaled(case.trial(trial, dtype), replace)
            for name, case in self.cases.items()
        }
        check_scalify(
            self,
            args,
            dtype=dtype,
            roundings=self.first.roundings,
            reduction=self.first.reduction,
            grad=grad and self.first.grad,
            ways=ways,
            scales=scales,
        )

    def check_scales(self, dtype, scales, trials=None):
        """All trials, or some, with run-time scales, for which nothing is compiled
        anew."""
        most = max(len(case.trials(dtype)) for case in self.cases.values())
        for trial in trials or range(most):
            self.check(trial, dtype, ("dynamic",), scales)

    def check_special(self, scales):
        for replace in (ZEROS, SPECIAL) if self.first.special else ():
            self.check(None, jnp.float32, ("dynamic",), scales, replace)


def programs(cases, way):
    """Group cases whose primitives are alike by `way`, a function of their names."""
    groups = collections.defaultdict(list)
    for case in cases:
        groups[way(case.primitive), *case.group].append(case)
    return [Program(group) for group in groups.values()]


def evaluated(primitive):
    """The code that evaluates a primitive; one device is apart from meshes."""
    rule = primitive in registry.rules
    return rule, evaluates_inside(primitive), primitive == "device_put"


def test_every_primitive_is_covered_or_carries_no_floats():
    """A new JAX may bring a new primitive: give it a case, and a rule or a place among
    those without one."""
    assert primitives_of_jax() - NO_FLOATS - set(COVERED) == WITHOUT_A_CASE
    assert WITHOUT_A_CASE & set(registry.rules) == set()
    assert NO_FLOATS & set(COVERED) == set()
    assert primitives_of_jax() >= NO_FLOATS


def test_a_case_is_one_of_its_primitive():
    traced = {
        str(case): primitives_in(jax.make_jaxpr(case.fun)(*case.plain).jaxpr)
        for case in CASES
    }
    assert [
        str(case) for case in CASES if case.primitive not in traced[str(case)]
    ] == []


@pytest.mark.parametrize("program", programs(CASES, evaluated), ids=str)
def test_scaled_primitives_equal_plain_ones(program):
    program.check_scales(
        jnp.float32, "static", (0, -3, FAR_APART)
    )  # small, large, mixed
    program.check_special("static")
    # A primitive without a rule shares its path with all others like it; measured
    # scales share it for most rules.
    primitive, has_narrow = program.first.primitive, program.first.narrow != ()
    if primitive in registry.rules and has_narrow:
        program.check(FAR_APART, jnp.float16, ("jit",), "static", grad=True)
    if evaluates_inside(primitive) and has_narrow:
        program.check(FAR_APART, jnp.float16, ("dynamic",), "auto", grad=True)


# The test above has fewer ways and scales. Primitives are apart, as some cannot be
# traced in FP16, which is told of a program that has products, too.
@pytest.mark.slow
@pytest.mark.parametrize("program", programs(CASES, str), ids=str)
def test_scaled_primitives_equal_plain_ones_in_all_ways(program):
    for scales, ways in (("static", WAYS), ("auto", ("dynamic",))):
        program.check(FAR_APART, jnp.float32, ways, scales, grad=True)
        program.check_scales(jnp.float32, scales)
        program.check_special(scales)
        if program.first.narrow != ():
            program.check(FAR_APART, jnp.float16, ways[-2:], scales, grad=True)
            program.check_scales(jnp.float16, scales)


def test_most_primitives_have_rules():
    assert set(COVERED) - set(registry.rules) == BY_DEFAULT | PLAIN_RESULTS
