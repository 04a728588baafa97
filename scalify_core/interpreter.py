"""`scalify`: trace a function once, then evaluate its jaxpr with scales.

The whole idea is `evaluate`: where no operand of an equation has a scale, the equation runs as it is; else the rule
of its primitive computes data and scale of the results. Everything else here is about the border: pytrees, the
caches, and the gradient of a scalified function.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

import scalify_core.rules  # noqa: F401  (fills the table)
from scalify_core import registry
from scalify_core.arguments import Arguments
from scalify_core.array import ScaledArray, asarray, gradient_like, is_scaled_array
from scalify_core.numbering import counting, drawn, numbered, take
from scalify_core.scales import as_numbers
from scalify_core.storage import materialise
from scalify_core.value import Value, in_format, narrow, settle, value


def evaluate(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr on operands that are `Value`s or plain (see `registry`)."""
    env = dict(zip(jaxpr.constvars, map(registry.known, jaxpr.consts), strict=True))
    env |= dict(zip(jaxpr.invars, args, strict=True))
    stored = _stored(jaxpr)

    def read(atom: Any) -> Any:
        return atom.val if type(atom) is Literal else env[atom]

    for place, eqns in itertools.groupby(jaxpr.eqns, _place):
        with _within(*place):
            for eqn in eqns:
                operands = list(map(read, eqn.invars))
                if Value not in map(type, operands):
                    out = registry.plain(eqn, *operands)
                else:
                    rule = registry.rules.get(eqn.primitive.name, _DEFAULT)
                    if not rule.wide:
                        operands = [_narrowed(x, rule) if type(x) is Value else x for x in operands]
                    elif not rule.lazy:
                        operands = [settle(x) if type(x) is Value else x for x in operands]
                    out = rule.fun(eqn, *operands, evaluate=evaluate) if rule.control else rule.fun(eqn, *operands)
                for var, x in zip(eqn.outvars, out if eqn.primitive.multiple_results else (out,), strict=True):
                    env[var] = in_format(x) if var in stored and type(x) is Value and x.shape and not x.guard else x
    return list(map(read, jaxpr.outvars))


def _narrowed(x: Value, rule: registry.Rule) -> Value:
    return settle(x) if x.guard and rule.guards else narrow(x)


_DEFAULT = registry.Rule(registry.default, "default", lazy=True)


def _place(eqn: Any) -> tuple[Any, Any]:
    """Where an equation stands: its named scopes, and its context where that says something to the compiler."""
    ctx = eqn.ctx
    return eqn.source_info.name_stack, ctx if ctx.xla_metadata or ctx.compute_type else None


@contextlib.contextmanager
def _within(scopes: Any, ctx: Any) -> Iterator[None]:
    name = str(scopes)
    with jax.named_scope(name) if name else contextlib.nullcontext(), ctx.manager if ctx else contextlib.nullcontext():
        yield


def _stored(jaxpr: Any) -> set[Any]:
    """The variables that are rounded once, for all who read them, because they are stored in any case.

    Those that several equations read and not all of them elementwise. What only elementwise equations read stays
    in FP32: rounding an optimiser's second moment before its root is taken would flush it to zero. So do guards: a
    divisor's 1e-12 would become a zero.
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
        is what `fun` returns. Complex numbers have no scale: they are plain, and so is what is computed from them
        (`irfft(rfft(x))`). A plain array has scale 1 beside scaled ones, and does not influence their format; zeros
        and other constants that are known while tracing have any scale. Static scales (see ScaledArray) are
        propagated while tracing. ScaledArrays that `fun` itself makes are plain numbers to it and to what it returns;
        `set_scaling` says what scale a result is to have.

        Scales are what the rules expect of independent numbers, so they drift over many steps: state that is carried
        round a loop of calls, or round `lax.scan`, wants a `dynamic_rescale_rms` in each turn.

        It can be jitted, vmapped, sharded and differentiated (reverse mode). A gradient with respect to a
        ScaledArray is the ScaledArray of the logical gradient: with a dynamic scale it has its own scale, with a
        static one that of the argument. Such gradients must not be added outside of `scalify` (use one scalified
        function of the parameters, or `scalify(jax.grad(fun))`, which is the better choice in any case).

    Raises:
        ValueError: positional and named static arguments that the function does not have.
        TypeError, when called: a static argument that is not hashable, or another that is no array and no number.
    """
    arguments = Arguments(fun, static_argnums, static_argnames)

    @functools.cache
    def on_leaves(tree: Any, statics: tuple) -> tuple[Callable, Callable]:
        """One function of the leaves per structure of the arguments, so that its traces are cached."""

        def flat(*leaves: Any) -> Any:
            args, kwargs = arguments.joined(statics, *jax.tree.unflatten(tree, leaves))
            return asarray(fun(*args, **kwargs))

        flat.__name__ = getattr(fun, "__name__", "scalified")
        return flat, _differentiable(flat)

    @functools.wraps(fun)
    def scalified(*args: Any, **kwargs: Any) -> Any:
        statics, arrays = arguments.split(args, kwargs)
        leaves, tree = jax.tree.flatten(arrays, is_leaf=is_scaled_array)
        arguments.check(arrays, leaves)
        flat, differentiable = on_leaves(tree, statics)
        try:
            return differentiable(*leaves)
        except _ClosesOverTracers:
            closed_over, opened = _opened(flat, leaves)
            return _differentiable(opened)(*closed_over, *leaves)

    return scalified


def _traced(fun: Callable, leaves: Sequence[Any]) -> Any:
    return jax.jit(fun).trace(*map(_aval, leaves))


class _ClosesOverTracers(Exception):
    """`fun` uses values of a surrounding transformation that are not its arguments."""


def _opened(fun: Callable, leaves: Sequence[Any]) -> tuple[list[Any], Callable]:
    """The values that `fun` closes over, and the function of them and the leaves: so they have gradients, too."""
    traced = _traced(fun, leaves)
    jaxpr, tree = traced.jaxpr, jax.tree.structure(traced.out_info)
    closed_over = traced.closure_convert()[0][len(jaxpr.consts) :]
    return closed_over, lambda *xs: jax.tree.unflatten(tree, jax.core.eval_jaxpr(jaxpr, jaxpr.consts, *xs))


def _evaluated(fun: Callable, leaves: Sequence[Any]) -> Any:
    """Trace `fun` (see `counting`) of the leaves in float32, and evaluate it with their scales."""
    with _collector_paused(), numbered():
        first = drawn()
        traced = _traced(fun, leaves)
        if len(traced.jaxpr.invars) > len(leaves):
            raise _ClosesOverTracers
        tree = jax.tree.structure(take(traced.out_info, first))
        out = evaluate(traced.jaxpr, [_entering(x) for x in leaves])
        return jax.tree.unflatten(tree, _leaving(out))


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
    """The scaled evaluation of a function of leaves, whose gradient is the scaled evaluation of the gradient.

    The function's trace is counted: it may call what is scalified, too.
    """
    counted = counting(fun)

    @jax.custom_vjp
    def scaled(*leaves: Any) -> Any:
        return _evaluated(counted, leaves)

    @functools.cache
    def with_pullback(*floats: bool) -> Callable:
        def fun_and_pullback(*leaves: Any) -> Any:
            def of_floats(*xs: Any) -> Any:
                rest = iter(xs)
                return fun(*(next(rest) if f else x for f, x in zip(floats, leaves, strict=True)))

            return jax.vjp(of_floats, *(x for f, x in zip(floats, leaves, strict=True) if f))

        return _differentiable(fun_and_pullback)

    @functools.cache
    def pull(tree: Any) -> Callable:
        def pulled(*leaves: Any) -> Any:
            pullback, cotangent = jax.tree.unflatten(tree, leaves)
            return pullback(cotangent)

        return _differentiable(pulled)

    def fwd(*leaves: Any) -> tuple[Any, Any]:
        out, pullback = with_pullback(*map(_is_float, leaves))(*leaves)
        return out, (pullback, leaves)

    def bwd(residuals: Any, cotangent: Any) -> Any:
        pullback, primals = residuals
        leaves, tree = jax.tree.flatten((pullback, cotangent), is_leaf=is_scaled_array)
        gradients = iter(pull(tree)(*leaves))
        return tuple(gradient_like(x, next(gradients)) if _is_float(x) else None for x in primals)

    scaled.defvjp(fwd, bwd)
    return scaled


def _aval(x: Any) -> Any:
    """What the traced function sees."""
    if is_scaled_array(x):
        return jax.typeof(x.data).update(dtype=np.dtype(np.float32), weak_type=False)
    return x if isinstance(x, jax.typing.ArrayLike) and not hasattr(x, "dtype") else jax.typeof(x)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(_aval(x).dtype, jnp.floating)


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


def _leaving(out: Sequence[Any]) -> list[Any]:
    scales = iter(as_numbers([x.multiple for x in out if isinstance(x, Value)]))
    return [ScaledArray(narrow(x).data, next(scales)) if isinstance(x, Value) else materialise(x) for x in out]
