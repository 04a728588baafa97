"""The arguments of a function that are static (not arrays), kept apart from those that
are traced.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from inspect import Parameter
from typing import Any, NamedTuple

import jax

from scalify_core.array.scaled_array import asarray, is_scaled_array


class Call(NamedTuple):
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


class Arguments:
    """The split of one function's arguments into static ones and trees of arrays."""

    def __init__(
        self, fun: Callable, argnums: int | Sequence[int], argnames: str | Sequence[str]
    ) -> None:
        """Read the static arguments.

        Args:
            fun: the function.
            argnums: positions of static arguments, as for `jax.jit`.
            argnames: their names. A position or a name covers both ways to pass an
                argument.

        Raises:
            ValueError: `fun` does not have such an argument.
        """
        self.fun = fun
        parameters = inspect.signature(fun).parameters
        kinds = {p.kind for p in parameters.values()}
        self.positional = [
            name
            for name, p in parameters.items()
            if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        ]
        count = len(self.positional)
        self.names = {argnames} if isinstance(argnames, str) else set(argnames)
        for name in self.names - set(parameters):
            if Parameter.VAR_KEYWORD not in kinds:
                raise ValueError(
                    f"static_argnames: {name!r} is none of the parameters of {fun}:"
                    f" {list(parameters)}"
                )
        self.positions = {
            self.positional.index(name)
            for name in self.names
            if name in self.positional
        }
        for number in (argnums,) if isinstance(argnums, int) else argnums:
            if number < -count or (
                number >= count and Parameter.VAR_POSITIONAL not in kinds
            ):
                raise ValueError(
                    f"static_argnums: {number} is outside of the {count} positional"
                    f" parameters of {fun}"
                )
            self.positions.add(number + count if number < 0 else number)
        self.names |= {self.positional[i] for i in self.positions if i < count}

    def split(self, args: tuple, kwargs: dict) -> tuple[dict[int | str, Any], tuple]:
        """Return `(statics, (args, kwargs))`.

        `statics` holds the static arguments by position or name. In the others, None
        takes the place of a static positional argument.
        """
        statics: dict[int | str, Any] = {
            i: x for i, x in enumerate(args) if i in self.positions
        }
        statics |= {name: x for name, x in kwargs.items() if name in self.names}
        return statics, (
            tuple(None if i in self.positions else x for i, x in enumerate(args)),
            {name: x for name, x in kwargs.items() if name not in self.names},
        )

    def joined(
        self, statics: dict[int | str, Any], args: tuple, kwargs: dict
    ) -> tuple[list, dict]:
        """Return the arguments that `split` split."""
        by_name = {key: x for key, x in statics.items() if isinstance(key, str)}
        return [statics.get(i, x) for i, x in enumerate(args)], {**kwargs, **by_name}

    def call(self, args: tuple, kwargs: dict) -> Call:
        """Return a call of the function as a function of arrays alone.

        Leaves of arguments and results that are no arrays and no numbers, as the
        functions in an Equinox module, pass through as they are.
        """
        statics, arrays = self.split(args, kwargs)
        every, tree = jax.tree.flatten(arrays, is_leaf=is_scaled_array)
        places = [i for i, x in enumerate(every) if is_array(x)]
        # the leaves of the result, and its tree; arrays have been taken out
        results: list[Any] = []

        def flat(*leaves: Any) -> list[Any]:
            all_leaves = list(every)
            for i, x in zip(places, leaves, strict=True):
                all_leaves[i] = x
            args, kwargs = self.joined(statics, *jax.tree.unflatten(tree, all_leaves))
            out, structure = jax.tree.flatten(asarray(self.fun(*args, **kwargs)))
            results[:] = [[None if is_array(x) else x for x in out], structure]
            return [x for x in out if is_array(x)]

        def unflatten(arrays_out: Sequence[Any]) -> Any:
            arrays, (rest, structure) = iter(arrays_out), results
            return structure.unflatten([next(arrays) if x is None else x for x in rest])

        def names() -> list[str]:
            named = self.leaf_names(tree)
            return [named[i] for i in places]

        flat.__name__ = getattr(self.fun, "__name__", "scalified")
        return Call([every[i] for i in places], flat, unflatten, names)

    def leaf_names(self, tree: Any) -> list[str]:
        """Return the names of the leaves of a tree of arguments, as `params['w']`."""
        numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
        return [self._name_at(path) for path, _ in jax.tree.leaves_with_path(numbered)]

    def _name_at(self, path: tuple) -> str:
        place, key, *rest = path
        return self._name(
            key.idx if place.idx == 0 else key.key
        ) + jax.tree_util.keystr(tuple(rest))

    def _name(self, key: int | str) -> str:
        if isinstance(key, str):
            return key
        if key < len(self.positional):
            return self.positional[key]
        return f"number {key}"
