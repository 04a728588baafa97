"""A call of a function, as a function of the arrays among its arguments."""

import inspect
from collections.abc import Callable, Sequence
from inspect import Parameter
from typing import Any, NamedTuple

import jax

from scalify_core.array.scaled_array import asarray, is_scaled_array


class FlatCall(NamedTuple):
    """One call of a function.

    Attributes:
        leaves: the arrays, ScaledArrays and numbers among its arguments.
        fun: of such leaves to the arrays of the result.
        unflatten: gives the result with these arrays, once `fun` has been called.
        names: of the leaves: `params['w']`.
    """

    leaves: list[Any]
    fun: Callable[..., list[Any]]
    unflatten: Callable[[Sequence[Any]], Any]
    names: Callable[[], list[str]]


def is_array(x: Any) -> bool:
    """Return whether a leaf is an array, a ScaledArray or a number."""
    return hasattr(x, "dtype") or isinstance(x, jax.typing.ArrayLike)


def call_of(fun: Callable, args: tuple, kwargs: dict[str, Any]) -> FlatCall:
    """Return a call as that of a function of arrays alone.

    Leaves of arguments and results that are no arrays and no numbers, as the functions
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
        results[:] = [[None if is_array(x) else x for x in out], structure]
        return [x for x in out if is_array(x)]

    def unflatten(arrays_out: Sequence[Any]) -> Any:
        arrays, (rest, structure) = iter(arrays_out), results
        return structure.unflatten([next(arrays) if x is None else x for x in rest])

    def names() -> list[str]:
        named = _leaf_names(fun, tree)
        return [named[i] for i in places]

    flat.__name__ = getattr(fun, "__name__", "scalified")
    return FlatCall([every[i] for i in places], flat, unflatten, names)


def _leaf_names(fun: Callable, tree: Any) -> list[str]:
    """Return the names of the leaves of a tree of arguments, as `params['w']`."""
    positional = [
        name
        for name, p in inspect.signature(fun).parameters.items()
        if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]

    def name_at(place: Any, key: Any, *rest: Any) -> str:
        if place.idx == 1:
            name = key.key
        elif key.idx < len(positional):
            name = positional[key.idx]
        else:
            name = f"number {key.idx}"
        return name + jax.tree_util.keystr(rest)

    numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
    return [name_at(*path) for path, _ in jax.tree.leaves_with_path(numbered)]
