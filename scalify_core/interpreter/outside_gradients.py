"""The gradient of a scalified function with respect to its plain arguments.

It is taken outside, `jax.grad(scalify(f))`. The backward pass is one program, the
scalified vjp, so it has the precision of `scalify(jax.grad(f))`. Outside, JAX adds up
plain arrays, or data at scale 1 that has the range of FP32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from scalify_core.array.scaled_array import (
    asarray,
    has_range_of_float32,
    is_scaled_array,
    undifferentiated,
    with_scale,
)
from scalify_core.interpreter.program import Program, is_float

_SECOND = (
    "scalify: a second derivative from outside; take it inside, "
    "scalify(jax.hessian(f)) or scalify(jax.grad(lambda x: ... jax.grad(f) ...))"
)
_NARROW = (
    "scalify: the gradient through a result in {} would lose what that format does not "
    "hold; return it in FP32, x.astype(jnp.float32), or take the gradient inside, "
    "scalify(jax.grad(f))"
)
Evaluate = Callable[[Program, Sequence[Any]], list[Any]]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Numbers:
    """The arguments that are differentiated, by position."""

    positions: tuple[int, ...]


def differentiable(program: Program, evaluate: Evaluate) -> Callable[..., list[Any]]:
    """Return the evaluation of a program, with a gradient for its plain arguments.

    Args:
        program: of arrays, and ScaledArrays that are known not to be differentiated.
        evaluate: gives the results of a program of such leaves.
    """

    @jax.custom_vjp
    def scaled(*leaves: Any) -> list[Any]:
        return evaluate(program, leaves)

    def forward(*primals: Any) -> tuple[list[Any], Any]:
        leaves = jax.tree.map(lambda x: x.value, primals, is_leaf=_is_primal)
        wanted = tuple(
            i
            for i, x in enumerate(primals)
            if _is_primal(x) and x.perturbed and is_float(x.value)
        )
        out = scaled(*leaves)
        scales = [x.scale if is_scaled_array(x) else None for x in out]
        return out, (leaves, scales, _Numbers(wanted))

    def backward(residuals: Any, cotangents: Any) -> tuple[Any, ...]:
        leaves, scales, wanted = undifferentiated(residuals, _SECOND)
        numbers, given = [], []
        for i, (cotangent, scale) in enumerate(zip(cotangents, scales, strict=True)):
            value = _logical(cotangent, scale)
            if value is not None:
                numbers.append(i)
                given.append(undifferentiated(value, _SECOND))
        if not given:
            return (None,) * len(leaves)
        computed = evaluate(program.vjp(wanted.positions, numbers), [*leaves, *given])
        gradients: list[Any] = [None] * len(leaves)
        for i, gradient in zip(wanted.positions, computed, strict=True):
            gradients[i] = asarray(gradient, jnp.result_type(leaves[i]))
        return tuple(gradients)

    scaled.defvjp(forward, backward, symbolic_zeros=True)

    def with_constant_scales(*leaves: Any) -> list[Any]:
        return list(map(_with_constant_scale, scaled(*leaves)))

    return with_constant_scales


def _logical(cotangent: Any, scale: Any) -> Any:
    """Return the cotangent of a result's value; None where it is known to be zero."""
    data = cotangent.data if is_scaled_array(cotangent) else cotangent
    if isinstance(data, SymbolicZero) or data.dtype == jax.dtypes.float0:
        return None
    if scale is None:
        return data
    if not has_range_of_float32(data.dtype):
        raise TypeError(_NARROW.format(data.dtype))
    return jnp.asarray(data, jnp.float32) / scale


def _with_constant_scale(x: Any) -> Any:
    """Return a result whose scale has no tangent, so that `asarray` can differentiate
    it.
    """
    if not is_scaled_array(x) or x.is_static:
        return x
    return with_scale(x.data, lax.stop_gradient(x.scale))


def _is_primal(x: Any) -> bool:
    return isinstance(x, CustomVJPPrimal)
