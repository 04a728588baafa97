"""A product of matrices whose operands are rounded by a recipe of the caller's.

The caller's functions are homogeneous in powers of two: twice an operand gives twice
the product, bit for bit. So under `scalify` they act on the data, and the scales of the
operands are multiplied. That holds for block scales that are powers of two.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from scalify_core.ops.composite import composite


class Rounded(NamedTuple):
    """The functions of a product of [N, D] and [D, F].

    Attributes:
        forward: (lhs, rhs) -> (product, rounded lhs, rounded rhs), which are pytrees
            whose first array grows with the operand; the others do not.
        backward: (rounded lhs, rounded rhs, gradient) -> the gradients of lhs and rhs.
    """

    forward: Callable[..., tuple[jax.Array, Any, Any]]
    backward: Callable[..., tuple[jax.Array, jax.Array]]


def rounded_product(lhs: jax.Array, rhs: jax.Array, rounded: Rounded) -> jax.Array:
    """Return the product, whose gradients are those of `rounded.backward`."""
    sizes = len(lhs), rhs.shape[1], len(rhs)
    return _product(lhs, rhs, rounded=rounded, sizes=sizes)


# `sizes` is for the rule, which may see batches.


@composite(name="rounded_product")
def _product(
    lhs: jax.Array, rhs: jax.Array, *, rounded: Rounded, sizes: tuple[int, int, int]
) -> jax.Array:
    return rounded.forward(lhs, rhs)[0]


def _forward(
    lhs: jax.Array, rhs: jax.Array, *, rounded: Rounded, **_: Any
) -> tuple[jax.Array, tuple[Any, Any]]:
    out, *residuals = rounded.forward(lhs, rhs)
    return out, tuple(residuals)


def _backward(
    residuals: tuple[Any, Any], gradient: jax.Array, *, rounded: Rounded, **_: Any
) -> tuple[jax.Array, jax.Array]:
    return rounded.backward(*residuals, gradient)


_product.defvjp(_forward, _backward)
