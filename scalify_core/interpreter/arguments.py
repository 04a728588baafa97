"""A call of a function, as a function of the arrays among its arguments."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from scalify_core.array.scaled_array import (
    asarray,
    is_array,
    is_scaled_array,
    paths,
)


class FlatCall(NamedTuple):
    """One call of a function.

    Attributes:
        leaves: the arrays and ScaledArrays among its arguments.
        fun: of such leaves to the arrays of the result.
        unflatten: gives the result with these arrays, once `fun` has been called.
        names: gives the paths of the leaves: `[0]['w']`.
    """

    leaves: list[Any]
    fun: Callable[..., list[Any]]
    unflatten: Callable[[Sequence[Any]], Any]
    names: Callable[[], list[str]]


def call_of(fun: Callable, args: tuple, kwargs: dict[str, Any]) -> FlatCall:
    """Return a call as that of a function of arrays alone.

    Leaves of arguments and results that are not traced (`is_array`), as the functions
    in an Equinox module, pass through as they are.
    """
    every, tree = jax.tree.flatten((args, kwargs), is_leaf=is_scaled_array)
    places = [i for i, x in enumerate(every) if is_array(x)]
    # the leaves of the result, and its tree; arrays have been taken out
    results: list[Any] = []

    def flat(*leaves: Any) -> list[Any]:
        all_leaves = list(every)
        for i, x in zip(places, leaves, strict=True):
            all_leaves[i] = x
        args, kwargs = jax.tree.unflatten(tree, all_leaves)
        out, structure = jax.tree.flatten(asarray(fun(*args, **kwargs)))
        results[:] = [
            [None if is_array(x) else _without_trace(x) for x in out],
            structure,
        ]
        return [x for x in out if is_array(x)]

    def unflatten(arrays_out: Sequence[Any]) -> Any:
        arrays, (rest, structure) = iter(arrays_out), results
        return structure.unflatten([next(arrays) if x is None else x for x in rest])

    def names() -> list[str]:
        named = paths((args, kwargs))
        return [named[i].partition("]")[2] for i in places]

    flat.__name__ = getattr(fun, "__name__", "scalified")
    return FlatCall([every[i] for i in places], flat, unflatten, names)


def _without_trace(x: Any) -> Any:
    """Return a leaf that is not traced; JAX may trace the gradient of integers."""
    if getattr(x, "dtype", None) == jax.dtypes.float0:
        return np.zeros(x.shape, x.dtype)
    return x
