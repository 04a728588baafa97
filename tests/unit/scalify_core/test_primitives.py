"""Every lax primitive that carries floats, through the one checker, over shapes, scales, zeros and infinities."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import primitive_cases_elementwise
import primitive_cases_program
import primitive_cases_shape
import pytest
from primitive_cases import Plain

from scalify_core import registry
from scalify_core.array import ScaledArray
from scalify_core.coverage import NO_FLOATS, PLAIN_RESULTS, lines, primitives_of_jax
from scalify_core.testing import WAYS, check_scalify

CASES = [*primitive_cases_elementwise.CASES, *primitive_cases_shape.CASES, *primitive_cases_program.CASES]

BY_DEFAULT = {
    "approx_top_k", "complex", "conj", "imag", "reduce", "reduce_window", "select_and_scatter",
}  # fmt: skip


def cases(wanted=lambda case: True):
    """A sample has one of each primitive."""
    return [pytest.param(c, marks=pytest.mark.kind(case=c.primitive), id=str(c)) for c in CASES if wanted(c)]


def primitives_in(jaxpr):
    names = set()
    for eqn in jaxpr.eqns:
        names.add(eqn.primitive.name)
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                names |= primitives_in(inner)
    return names


def scaled(case, exponents, replace=()):
    """The operands of a case with these scales; the first elements of each replaced."""
    args = []
    for i, (x, exponent) in enumerate(zip(case.args, exponents, strict=True)):
        if isinstance(x, Plain) or not np.issubdtype(x.dtype, np.floating):
            args.append(jnp.asarray(x.array if isinstance(x, Plain) else x))
            continue
        x = np.array(x)
        # Another order in every operand, so that each meets each.
        for j, value in enumerate(np.roll(replace, i)[: x.size]):
            x.flat[j] = value
        args.append(ScaledArray(jnp.asarray(x), 2.0**exponent))
    return args


def check(case, exponents, dtype, ways, replace=()):
    """By the rules in each of these ways, and with measured scales."""
    for scales, run in (("static", ways), ("auto", ("dynamic",))):
        check_scalify(
            case.fun,
            *scaled(case, exponents, replace),
            dtype=dtype,
            roundings=case.wide_roundings or case.roundings if dtype == jnp.float32 else case.roundings,
            reduction=case.reduction,
            grad=case.grad and not replace,
            ways=run,
            scales=scales,
        )


def test_every_primitive_is_covered_or_carries_no_floats():
    """A new JAX may bring a new primitive: give it a case, and a rule or a place in `registry`'s default."""
    exempt = {name for names in NO_FLOATS.values() for name in names}
    covered = {case.primitive for case in CASES}
    assert primitives_of_jax() - exempt - covered == set()
    assert exempt & covered == set()
    assert exempt <= primitives_of_jax()


@pytest.mark.parametrize("case", cases())
def test_the_case_is_one_of_its_primitive(case):
    args = [jnp.asarray(x.array if isinstance(x, Plain) else x) for x in case.args]
    assert case.primitive in primitives_in(jax.make_jaxpr(case.fun)(*args).jaxpr)


@pytest.mark.parametrize("case", cases())
def test_scaled_in_fp32_data_equals_plain(case):
    *others, last = case.scales(case.exponents)
    check(case, last, jnp.float32, WAYS)
    for exponents in others:
        check(case, exponents, jnp.float32, ("eager", "dynamic"))


@pytest.mark.parametrize("case", cases(lambda c: not c.of_scalars))
def test_scaled_in_fp16_data_equals_plain_within_fp16(case):
    narrow = case.exponents if case.narrow is None else case.narrow
    for exponents in case.scales(narrow) if narrow else ():
        check(case, exponents, jnp.float16, ("eager", "dynamic"))


@pytest.mark.parametrize("case", cases(lambda c: c.special and not c.of_scalars))
def test_zeros_infinities_and_nan_come_out_as_in_the_plain_function(case):
    middle = sorted(case.exponents)[len(case.exponents) // 2]
    for replace in ((0.0,) * 64, (0.0, np.inf, -np.inf, np.nan)):
        check(case, (middle,) * len(case.args), jnp.float32, ("eager", "dynamic"), replace)


def test_most_primitives_have_rules():
    """The default serves what nobody uses in training; the list is short, and on purpose."""
    assert {case.primitive for case in CASES} - set(registry.rules) == BY_DEFAULT | set(PLAIN_RESULTS)


def test_the_coverage_table_is_that_of_the_rules():
    found = (pathlib.Path(__file__).parents[3] / "docs" / "coverage.md").read_text()
    assert found == "\n".join(lines()) + "\n", "stale: python -m scalify_core.coverage > docs/coverage.md"
