"""Types inside shard_map: JAX tells apart what varies over an axis of the mesh and what
does not.

The plain program agrees with itself. What propagation adds does not: a scale that is
measured varies where the one before it did not, and a constant that is known while
tracing has forgotten that it was to vary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax


def axes_of(x: Any) -> frozenset:
    """The mesh axes that an array varies over; none outside shard_map, and where that
    does not check.
    """
    return _axes_of_type(jax.typeof(x))


def varying(x: Any, axes: frozenset) -> Any:
    """`x`, varying over these axes too."""
    missing = axes - axes_of(x)
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def as_traced(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Operands that vary over the axes that those of the equation did when it was
    traced.
    """
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
    return frozenset() if manual is None else manual.varying


def vary(tree: Any, axes: Sequence[frozenset]) -> Any:
    """The arrays of a tree, each varying over its axes too."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, list(map(varying, leaves, axes)))


def union(*trees: Any) -> list[frozenset]:
    """The axes that the arrays at one place vary over in any of the trees, place by
    place.
    """
    leaves = [jax.tree.leaves(tree) for tree in trees]
    return [
        frozenset().union(*map(axes_of, alike)) for alike in zip(*leaves, strict=True)
    ]


def any_varies(*trees: Any) -> bool:
    """Whether any array of the trees varies over an axis."""
    return any(map(axes_of, jax.tree.leaves(trees)))


def agreeing(branches: Sequence[Callable], *operands: Any) -> Sequence[Callable]:
    """Branches of which each result varies over the same axes."""
    outs = (
        [jax.eval_shape(branch, *operands) for branch in branches] if _manual() else []
    )
    if not any_varies(outs):
        return branches
    axes = union(*outs)
    return [lambda *xs, branch=branch: vary(branch(*xs), axes) for branch in branches]


def agreeing_carry(step: Callable, carry: Any) -> tuple[Callable, Any]:
    """The step of a loop, and its carry, of which each part varies over the same axes
    before and after.

    `step(carry)` gives the next carry.
    """
    if not _manual():
        return lambda new: new, carry
    axes, found = None, union(carry)
    while found != axes:
        axes, carry = found, vary(carry, found)
        found = union(carry, jax.eval_shape(step, carry))
    return lambda new: vary(new, found), carry


def _manual() -> bool:
    """Whether this is traced inside shard_map."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)
