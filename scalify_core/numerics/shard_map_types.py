"""Types inside shard_map: JAX tracks the mesh axes that each array varies over.

The plain program is consistent. Scale propagation may not be: a measured scale varies
where the scale before did not, and a constant known while tracing has lost its type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax


def axes_of(x: Any) -> frozenset:
    """Return the mesh axes that an array varies over.

    There are none outside shard_map, nor where shard_map does not check.
    """
    return _axes_of_type(jax.typeof(x))


def varying(x: Any, axes: frozenset) -> Any:
    """Return `x`, varying over these axes too."""
    missing = axes - axes_of(x)
    if missing:
        return lax.pcast(x, tuple(sorted(missing)), to="varying")
    return x


def as_traced(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Return operands that vary over the axes that they varied over when traced."""
    if not any(map(_axes_of_type, (var.aval for var in eqn.invars))):
        return operands
    rest = operands[len(eqn.invars) :]
    return [
        *(
            varying(x, _axes_of_type(var.aval))
            for x, var in zip(operands, eqn.invars, strict=False)
        ),
        *rest,
    ]


def _axes_of_type(aval: Any) -> frozenset:
    manual = getattr(aval, "mat", None)
    if manual is None:
        return frozenset()
    return manual.varying


def vary(tree: Any, axes: Sequence[frozenset]) -> Any:
    """Return a tree whose arrays vary over these axes too, array by array."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, list(map(varying, leaves, axes)))


def union(*trees: Any) -> list[frozenset]:
    """Return, for each position, the axes that its array varies over in any tree."""
    leaves = [jax.tree.leaves(tree) for tree in trees]
    return [
        frozenset().union(*map(axes_of, alike)) for alike in zip(*leaves, strict=True)
    ]


def any_varies(*trees: Any) -> bool:
    """Return whether any array of the trees varies over an axis."""
    return any(map(axes_of, jax.tree.leaves(trees)))


def agreeing(branches: Sequence[Callable], *operands: Any) -> Sequence[Callable]:
    """Return branches whose results vary over the same axes."""
    if _manual():
        outs = [jax.eval_shape(branch, *operands) for branch in branches]
    else:
        outs = []
    if not any_varies(outs):
        return branches
    axes = union(*outs)
    return [lambda *xs, branch=branch: vary(branch(*xs), axes) for branch in branches]


def agreeing_carry(step: Callable, carry: Any) -> tuple[Callable, Any]:
    """Return a function that types the next carry of a loop, and the initial carry.

    Each part then varies over the same axes before and after `step(carry)`.
    """
    if not _manual():
        return lambda new: new, carry
    axes, grown_axes = None, union(carry)
    while grown_axes != axes:
        axes, carry = grown_axes, vary(carry, grown_axes)
        grown_axes = union(carry, jax.eval_shape(step, carry))
    return lambda new: vary(new, grown_axes), carry


def _manual() -> bool:
    """Return whether the current trace is inside shard_map."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)
