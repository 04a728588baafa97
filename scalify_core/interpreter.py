"""`scalify`: trace a function once, then evaluate its jaxpr with scales.

The whole idea is `evaluate`: where no operand of an equation has a scale, the equation runs as it is; else the rule
of its primitive computes data and scale of the results. Everything else here is about the border: pytrees, the
caches, and the gradient of a scalified function.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

import scalify_core.rules  # noqa: F401  (fills the table)
from scalify_core import registry
from scalify_core.array import ScaledArray, asarray, is_scaled_array
from scalify_core.value import Value, materialise, narrow, settle, value


def evaluate(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr on operands that are `Value`s or plain (see `registry`)."""
    env = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
    stored = _stored(jaxpr)

    def read(atom: Any) -> Any:
        return atom.val if type(atom) is Literal else env[atom]

    for eqn in jaxpr.eqns:
        operands = list(map(read, eqn.invars))
        if Value not in map(type, operands):
            out = registry.plain(eqn, *operands)
        else:
            rule = registry.rules.get(eqn.primitive.name, _DEFAULT)
            if not rule.wide:
                operands = [narrow(x) if type(x) is Value else x for x in operands]
            elif not rule.lazy:
                operands = [settle(x) if type(x) is Value else x for x in operands]
            out = rule.fun(eqn, *operands, evaluate=evaluate) if rule.control else rule.fun(eqn, *operands)
        for var, x in zip(eqn.outvars, out if eqn.primitive.multiple_results else (out,), strict=True):
            env[var] = narrow(x) if var in stored and type(x) is Value and x.shape else x
    return list(map(read, jaxpr.outvars))


_DEFAULT = registry.Rule(registry.default, "default", lazy=True)


def _stored(jaxpr: Any) -> set[Any]:
    """The variables that are rounded once, for all who read them, because they are stored in any case.

    Those that several equations read and not all of them elementwise. What only elementwise equations read stays
    in FP32: rounding an optimiser's second moment before its root is taken would flush it to zero.
    """
    readers: Counter = Counter()
    narrow_readers = set()
    for eqn in reversed(jaxpr.eqns):
        if (names := registry.passed(eqn)) is not None:  # who reads the new name reads the variable
            variable, new = names
            readers[variable] += readers[new]
            if new in narrow_readers:
                narrow_readers.add(variable)
            continue
        variables = {atom for atom in eqn.invars if not isinstance(atom, Literal)}
        readers.update(variables)
        if not registry.takes_wide(eqn):
            narrow_readers |= variables
    return {var for var in narrow_readers if readers[var] > 1}


def scalify(
    fun: Callable, *, static_argnums: int | Sequence[int] = (), static_argnames: str | Sequence[str] = ()
) -> Callable:
    """`fun` with scale propagation: the same function, on `ScaledArray`s.

    Args:
        fun: any JAX function; pytrees in and out. Where it is given a ScaledArray it sees a float32 array, whatever
            the dtype of the data.
        static_argnums: positions of arguments that are not arrays (hashable), as for `jax.jit`.
        static_argnames: their names.

    Returns:
        A function of the same arguments. Arrays in them may be ScaledArrays. Every floating-point result that
        depends on a ScaledArray is one, its data in the format of the data it was computed from; every other result
        is what `fun` returns. A plain array has scale 1 beside scaled ones, and does not influence their format.
        Static scales (see ScaledArray) are propagated while tracing.

        It can be jitted, vmapped, sharded and differentiated (reverse mode). A gradient with respect to a
        ScaledArray is the ScaledArray of the logical gradient: with a dynamic scale it has its own scale, with a
        static one that of the argument. Such gradients must not be added outside of `scalify` (use one scalified
        function of the parameters, or `scalify(jax.grad(fun))`, which is the better choice in any case).

    Raises:
        ValueError: positional and named static arguments that the function does not have.
    """
    signature = inspect.signature(fun)
    names = list(signature.parameters)
    static_names = {static_argnames} if isinstance(static_argnames, str) else set(static_argnames)
    numbers = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    for number in numbers:
        if not -len(names) <= number < len(names):
            raise ValueError(f"static_argnums: {number} is outside of the {len(names)} parameters of {fun}")
    static_positions = {number % max(len(names), 1) for number in numbers} | {
        names.index(name) for name in static_names if name in names
    }

    @functools.cache
    def on_leaves(tree: Any, statics: tuple, keywords: tuple) -> Callable:
        """One function of the leaves per structure of the arguments, so that its traces are cached."""

        def flat(*leaves: Any) -> Any:
            args, kwargs = jax.tree.unflatten(tree, leaves)
            args = list(args)
            for position, argument in statics:
                args.insert(position, argument)
            return fun(*args, **kwargs, **dict(keywords))

        flat.__name__ = getattr(fun, "__name__", "scalified")
        return _differentiable(flat)

    @functools.wraps(fun)
    def scalified(*args: Any, **kwargs: Any) -> Any:
        statics = tuple((i, a) for i, a in enumerate(args) if i in static_positions)
        keywords = tuple(sorted((k, a) for k, a in kwargs.items() if k in static_names))
        args = tuple(a for i, a in enumerate(args) if i not in static_positions)
        kwargs = {k: a for k, a in kwargs.items() if k not in static_names}
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_scaled_array)
        return on_leaves(tree, statics, keywords)(*leaves)

    return scalified


def _evaluated(fun: Callable, leaves: Sequence[Any]) -> Any:
    """Trace `fun` of the leaves in float32, and evaluate it with their scales."""
    with _collector_paused():
        jaxpr, shapes = jax.make_jaxpr(fun, return_shape=True)(*(_aval(x) for x in leaves))
        out = evaluate(jaxpr, [_entering(x) for x in leaves])
        return jax.tree.unflatten(jax.tree.structure(shapes), [_leaving(x) for x in out])


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Objects by the hundred thousand are made, nearly all to stay: looking for cycles is a fifth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _differentiable(fun: Callable) -> Callable:
    """The scaled evaluation of a function of leaves, whose gradient is the scaled evaluation of the gradient."""

    @jax.custom_vjp
    def scaled(*leaves: Any) -> Any:
        return _evaluated(fun, leaves)

    def fwd(*leaves: Any) -> tuple[Any, Any]:
        floats = [jnp.issubdtype(_aval(x).dtype, jnp.floating) for x in leaves]

        def fun_and_pullback(*leaves: Any) -> Any:
            def of_floats(*xs: Any) -> Any:
                rest = iter(xs)
                return fun(*(next(rest) if f else x for f, x in zip(floats, leaves, strict=True)))

            return jax.vjp(of_floats, *(x for f, x in zip(floats, leaves, strict=True) if f))

        out, pullback = _evaluated(fun_and_pullback, leaves)
        return out, (pullback, leaves)

    def bwd(residuals: Any, cotangent: Any) -> Any:
        pullback, primals = residuals
        leaves, tree = jax.tree.flatten((pullback, cotangent), is_leaf=is_scaled_array)

        def pull(*leaves: Any) -> Any:
            pullback, cotangent = jax.tree.unflatten(tree, leaves)
            return pullback(cotangent)

        gradients = iter(_evaluated(pull, leaves))
        return tuple(
            _gradient_of(x, next(gradients)) if jnp.issubdtype(_aval(x).dtype, jnp.floating) else None for x in primals
        )

    scaled.defvjp(fwd, bwd)
    return scaled


def _aval(x: Any) -> Any:
    """What the traced function sees."""
    if is_scaled_array(x):
        return jax.typeof(x.data).update(dtype=np.dtype(np.float32), weak_type=False)
    return x if isinstance(x, jax.typing.ArrayLike) and not hasattr(x, "dtype") else jax.typeof(x)


def _entering(x: Any) -> Any:
    if not is_scaled_array(x):
        return x if isinstance(x, jax.Array) else jnp.asarray(x)
    scale = x.scale
    if not x.is_static:
        scale = jnp.asarray(scale, jnp.float32)
        if scale.size == 1:
            scale = scale.reshape(())
        elif scale.ndim < x.ndim:  # of leading axes
            scale = scale.reshape(scale.shape + (1,) * (x.ndim - scale.ndim))
    return value(x.data if isinstance(x.data, jax.Array) else jnp.asarray(x.data), scale)


def _leaving(x: Any) -> Any:
    return ScaledArray(narrow(x).data, x.scale) if isinstance(x, Value) else materialise(x)


def _gradient_of(primal: Any, gradient: Any) -> Any:
    """The gradient as its primal's kind: plain, with the primal's static scale, or with a dynamic one of its own."""
    if not is_scaled_array(primal):
        return asarray(gradient, jnp.result_type(primal)) if is_scaled_array(gradient) else gradient
    gradient = gradient if is_scaled_array(gradient) else ScaledArray(gradient, 1.0)
    if primal.is_static:
        return gradient.rescale(primal.scale).astype(primal.dtype)
    scale = jnp.asarray(gradient.scale, jnp.float32)
    return ScaledArray(gradient.astype(primal.dtype).data, jnp.broadcast_to(scale, jnp.shape(primal.scale)))
