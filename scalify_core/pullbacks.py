"""The pullback of a function of which some results have no gradient, as those of a loop of unknown length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxprs_in_params

_LOOP = "while"


def vjp(fun: Callable, *primals: Any) -> tuple[Any, Any, tuple[int, ...]]:
    """As `jax.vjp`, and the numbers of the results that the pullback takes for constants.

    Those have no gradient, and are there for their values, as `aux` is; whether more is asked for is seen only when
    cotangents come. `jax.vjp` would refuse all results then, a cotangent that is zero being one. If no result has a
    gradient, none is taken for a constant: the pullback says why.
    """
    pullback: Any
    out, pullback = jax.vjp(fun, *primals)
    if not _has_loop(pullback.jaxpr) or _runs(pullback, out):
        return out, pullback, ()
    count = len(jax.tree.leaves(out))
    constants = tuple(i for i in range(count) if not _runs(*_of_results(fun, primals, {*range(count)} - {i})[::-1]))
    if len(constants) == count:
        return out, pullback, ()
    return *_of_results(fun, primals, set(constants)), constants


def refuse(constants: Sequence[int], is_zero: Sequence[bool]) -> None:
    """Raise a ValueError if there is a cotangent that is not known to be zero of a result that has no gradient."""
    asked = [i for i in constants if not is_zero[i]]
    if asked:
        raise ValueError(
            f"scalify: the gradient of results {asked} is asked for, which reverse mode does not have: they come out "
            f"of a lax.while_loop, or a lax.fori_loop with traced bounds. Use lax.scan, or lax.stop_gradient of them"
        )


def _of_results(fun: Callable, primals: Sequence[Any], constants: set[int]) -> tuple[Any, Any]:
    """The results and the pullback, some results being constants."""

    def stopped(*xs: Any) -> Any:
        leaves, tree = jax.tree.flatten(fun(*xs))
        return jax.tree.unflatten(tree, [lax.stop_gradient(x) if i in constants else x for i, x in enumerate(leaves)])

    out, pullback = jax.vjp(stopped, *primals)
    return out, pullback


def _has_loop(jaxpr: Any) -> bool:
    return any(eqn.primitive.name == _LOOP or any(map(_has_loop, jaxprs_in_params(eqn.params))) for eqn in jaxpr.eqns)


def _runs(pullback: Callable, out: Any) -> bool:
    """Whether a pullback can be traced. A loop that a linear solver does is no loop to it."""
    try:
        jax.eval_shape(pullback, jax.tree.map(_zero_of, out))
    except ValueError:
        return False
    return True


def _zero_of(x: Any) -> Any:
    aval = jax.typeof(x).to_tangent_aval()
    return np.zeros(aval.shape, aval.dtype) if aval.dtype == jax.dtypes.float0 else jnp.zeros_like(x)
