"""The arguments of a function that are static (not arrays), kept apart from those that are traced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from inspect import Parameter
from typing import Any

import jax


class Arguments:
    """How the arguments of one function are split into static ones and trees of arrays."""

    def __init__(self, fun: Callable, argnums: int | Sequence[int], argnames: str | Sequence[str]) -> None:
        """`argnums`, `argnames`: of the static arguments, as for `jax.jit`; either names both ways to give one.

        Raises ValueError for those that `fun` does not have.
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
                raise ValueError(f"static_argnames: {name!r} is none of the parameters of {fun}: {list(parameters)}")
        self.positions = {self.positional.index(name) for name in self.names if name in self.positional}
        for number in (argnums,) if isinstance(argnums, int) else argnums:
            if number < -count or (number >= count and Parameter.VAR_POSITIONAL not in kinds):
                raise ValueError(f"static_argnums: {number} is outside of the {count} positional parameters of {fun}")
            self.positions.add(number + count if number < 0 else number)
        self.names |= {self.positional[i] for i in self.positions if i < count}

    def split(self, args: tuple, kwargs: dict) -> tuple[dict[int | str, Any], tuple]:
        """`(statics, (args, kwargs))`: what is static, by position or name, and the others, with None in its place."""
        statics: dict[int | str, Any] = {i: x for i, x in enumerate(args) if i in self.positions}
        statics |= {name: x for name, x in kwargs.items() if name in self.names}
        return statics, (
            tuple(None if i in self.positions else x for i, x in enumerate(args)),
            {name: x for name, x in kwargs.items() if name not in self.names},
        )

    def joined(self, statics: dict[int | str, Any], args: tuple, kwargs: dict) -> tuple[list, dict]:
        """The inverse of `split`."""
        by_name = {key: x for key, x in statics.items() if isinstance(key, str)}
        return [statics.get(i, x) for i, x in enumerate(args)], {**kwargs, **by_name}

    def check(self, arrays: tuple, leaves: Sequence[Any]) -> None:
        """Raise TypeError, naming the argument, where one of the leaves of `arrays` is neither array nor number."""
        if all(hasattr(x, "dtype") or isinstance(x, jax.typing.ArrayLike) for x in leaves):
            return
        for path, x in jax.tree.leaves_with_path(arrays):
            if not (hasattr(x, "dtype") or isinstance(x, jax.typing.ArrayLike)):
                name = self._name_at(path)
                raise TypeError(
                    f"scalify: argument {name} of {self.fun} is {x!r}, expected an array or a number; if it is a "
                    f"constant of the program, name it in static_argnames"
                )

    def leaf_names(self, tree: Any) -> list[str]:
        """Of the leaves of a tree of arguments, as `check` has it: `params['w']`."""
        numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
        return [self._name_at(path) for path, _ in jax.tree.leaves_with_path(numbered)]

    def _name_at(self, path: tuple) -> str:
        place, key, *rest = path
        return self._name(key.idx if place.idx == 0 else key.key) + jax.tree_util.keystr(tuple(rest))

    def _name(self, key: int | str) -> str:
        if isinstance(key, str):
            return key
        return self.positional[key] if key < len(self.positional) else f"number {key}"
