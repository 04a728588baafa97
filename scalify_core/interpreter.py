"""Evaluating a jaxpr by rules that propagate scales: `scalify(fun, scales="static")`.

The whole idea is `evaluate`: where no operand of an equation has a scale, the equation
runs as it is; else the rule of its primitive computes data and scale of the results.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

import scalify_core.rules  # noqa: F401  (fills the table)
from scalify_core import registry
from scalify_core.array import is_scaled_array, with_scale
from scalify_core.scales import as_numbers
from scalify_core.scopes import scope_of, within
from scalify_core.storage import materialise
from scalify_core.value import Value, in_format, narrow, value
from scalify_core.watch import Reporter


def evaluate(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr on operands that are `Value`s or plain (see
    `registry`).
    """
    return _each(jaxpr, args, functools.partial(results, evaluate=evaluate))


def _each(jaxpr: Any, args: Sequence[Any], results: Callable) -> list[Any]:
    """As `evaluate`; the results of an equation are those of
    `results(eqn, operands, stored)`.
    """
    env = dict(zip(jaxpr.constvars, map(registry.known, jaxpr.consts), strict=True))
    env |= dict(zip(jaxpr.invars, args, strict=True))
    stored = stored_variables(jaxpr)

    def read(atom: Any) -> Any:
        return atom.val if type(atom) is Literal else env[atom]

    for scope, eqns in itertools.groupby(jaxpr.eqns, scope_of):
        with within(*scope):
            for eqn in eqns:
                env |= zip(
                    eqn.outvars,
                    results(eqn, list(map(read, eqn.invars)), stored),
                    strict=True,
                )
    return list(map(read, jaxpr.outvars))


def results(
    eqn: Any, operands: list[Any], stored: set[Any], *, evaluate: Callable
) -> list[Any]:
    """The results of one equation; `stored`: see `stored_variables`, `evaluate`: of
    inner jaxprs.
    """
    if Value not in map(type, operands):
        out = registry.plain(eqn, *operands)
    else:
        rule = registry.rule_of(eqn)
        operands = [rule.bring(x) if type(x) is Value else x for x in operands]
        out = (
            rule.fun(eqn, *operands, evaluate=evaluate)
            if rule.control
            else rule.fun(eqn, *operands)
        )
    return [
        (
            in_format(x)
            if var in stored and type(x) is Value and x.shape and not x.guard
            else x
        )
        for var, x in zip(
            eqn.outvars, out if eqn.primitive.multiple_results else (out,), strict=True
        )
    ]


def _evaluate_checked(reporter: Reporter, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """As `evaluate`, with callbacks in the program that tell the reporter what is
    lost.
    """

    def checked(eqn: Any, operands: list[Any], stored: set[Any]) -> list[Any]:
        # Another evaluator for each equation: what is traced inside belongs to its
        # place, and is for no other.
        inner = functools.partial(_evaluate_checked, reporter)
        with reporter.at(eqn):
            return results(eqn, operands, stored, evaluate=inner)

    return _each(jaxpr, args, checked)


def _rounded_where_made(reporter: Reporter, jaxpr: Any, var: Any, x: Any) -> Any:
    """A result in its format; what that loses is reported at the equation that makes
    it, inside calls of jit.
    """
    makers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    if not isinstance(x, Value) or type(var) is Literal or var not in makers:
        return x
    eqn = makers[var]
    with reporter.at(eqn):
        if eqn.primitive.name == "jit":
            inner = eqn.params["jaxpr"]
            x = _rounded_where_made(
                reporter, inner, inner.outvars[eqn.outvars.index(var)], x
            )
        return narrow(x)


def stored_variables(jaxpr: Any) -> set[Any]:
    """The variables that are rounded once, for all who read them, because they are
    stored in any case.

    Those that several equations read and not all of them elementwise. What only
    elementwise equations read stays in FP32: rounding an optimiser's second moment
    before its root is taken would flush it to zero. So do guards: a divisor's 1e-12
    would become a zero.
    """
    readers: Counter = Counter()
    narrow_readers = set()
    for eqn in reversed(jaxpr.eqns):
        rule = registry.rule_of(eqn)
        if rule.passes is not None:  # who reads the new name reads the variable
            variable, new = eqn.invars[rule.passes[0]], eqn.outvars[rule.passes[1]]
            readers[variable] += readers[new]
            if new in narrow_readers:
                narrow_readers.add(variable)
            continue
        variables = {atom for atom in eqn.invars if not isinstance(atom, Literal)}
        readers.update(variables)
        if not rule.wide:
            narrow_readers |= variables
    return {var for var in narrow_readers if readers[var] > 1}


def entering(x: Any) -> Any:
    """An argument as an operand: a ScaledArray as a `Value`."""
    if not is_scaled_array(x):
        return x if isinstance(x, jax.Array) else jnp.asarray(x)
    scale = x.scale
    if not x.is_static:
        scale = jnp.asarray(scale, jnp.float32)
        if scale.size == 1:
            scale = scale.reshape(())
        elif scale.ndim < x.ndim:  # of leading axes
            scale = scale.reshape(scale.shape + (1,) * (x.ndim - scale.ndim))
    return value(
        x.data if isinstance(x.data, jax.Array) else jnp.asarray(x.data), scale
    )


def propagated(jaxpr: Any, leaves: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr, of arrays and ScaledArrays, as such."""
    return _leaving(evaluate(jaxpr, list(map(entering, leaves))))


def propagated_and_checked(
    jaxpr: Any, leaves: Sequence[Any], reporter: Reporter
) -> list[Any]:
    """As `propagated`; the program tells `reporter` what is lost."""
    out = _evaluate_checked(reporter, jaxpr, list(map(entering, leaves)))
    made = zip(jaxpr.outvars, out, strict=True)
    left = _leaving([_rounded_where_made(reporter, jaxpr, var, x) for var, x in made])
    reporter.call_is_done(left)
    return left


def _leaving(out: Sequence[Any]) -> list[Any]:
    scales = iter(as_numbers([x.multiple for x in out if isinstance(x, Value)]))
    return [
        (
            with_scale(narrow(x).data, next(scales))
            if isinstance(x, Value)
            else materialise(x)
        )
        for x in out
    ]
