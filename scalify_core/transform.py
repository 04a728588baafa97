"""`scalify`: trace a function once, then evaluate its jaxpr with scales.

How that is done is `measured` (scales="auto") or `interpreter` (scales="static"). Here is the border: pytrees, caches,
and the gradient of a scalified function.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

import scalify_core.rules  # noqa: F401  (fills the table)
from scalify_core import interpreter, measured, pullbacks
from scalify_core.arguments import Arguments
from scalify_core.array import (
    as_scaled_array,
    asarray,
    gradients_like,
    is_scaled_array,
    is_unreadable,
    read,
    say_unreadable,
    trusted,
)
from scalify_core.measured.residuals import Logical, Residuals
from scalify_core.plain import (
    Narrow,
    Plain,
    aval_of,
    logical,
    narrow_trace,
    opened,
    opened_plain,
    say_promoted,
    trace_of,
    traced_in_float32,
)
from scalify_core.watch import Reporter

Scales = Literal["auto", "static"]
# (jaxpr, arguments, residuals, dtypes of the results in plain code) -> results
Evaluator = Callable[[Any, Sequence[Any], Residuals | None, Sequence[np.dtype | None]], list[Any]]
Pulled = Callable[[Any], Callable]  # the structure of residuals and gradients -> the backward pass, of their leaves


def scalify(
    fun: Callable,
    *,
    scales: Scales = "auto",
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    check: bool = False,
) -> Callable:
    """`fun` with scale propagation: the same function, on `ScaledArray`s.

    Args:
        fun: any JAX function; pytrees in and out. Where it is given a ScaledArray it sees a float32 array, whatever
            the dtype of the data.
        scales: where scales come from. "auto": between stores the arithmetic is FP32, on logical values; a value that
            is stored in a narrow format, as the operand of a product or as a result, gets the power of two that its
            largest magnitude calls for, measured there (`scalify_core.measured`). Right for any function, without
            being told. "static": rules propagate what is expected of independent numbers, and nothing is measured
            but where `dynamic_rescale_*` stands: no operation more than the plain program has, for those who place
            the rescales themselves. There a plain array has scale 1 beside scaled ones, constants have any, and
            state that is carried round a loop wants a rescale in each turn.
        static_argnums: positions of arguments that are not arrays, as for `jax.jit`.
        static_argnames: their names.
        check: whether the program warns while it runs (`PrecisionWarning`, once per place and call) where a cast to a
            narrow format flushes to zero more than 1% of a tensor's norm, or saturates a finite number. The norm is
            what an error is measured by: however many small elements vanish beside large ones (a fifth of what GELU
            gives, in E4M3), the tensor is what it was while their share of it is small, and once that is not, its
            scale is astray. With measured scales, the rows and columns of a product of which more than 1% is lost are
            named, too, however small they are, as are products that plain code has in FP32 by promotion, and a
            program of which it is not known what it asks to have in FP32. A mask's constant (-1e9) may saturate. The
            program has callbacks then (`jax.debug.callback`), and is slower; without `check` it has not an operation
            more.

    Returns:
        A function of the same arguments. Arrays in them may be ScaledArrays. Every floating-point result that
        depends on a ScaledArray is one. Its data has the format of the data it was computed from, which plain arrays
        do not influence. With measured scales it is that of plain code where the program says so: what it casts back
        is narrow (8 bits count as FP16), what it asks to have in FP32 is so, and with it what plain code has in FP32
        and is a scalar, or has the shape of a plain FP32 array among the arguments. Every other result is what `fun`
        returns. Complex numbers have no scale: they are plain, and so is what is computed from them
        (`irfft(rfft(x))`). ScaledArrays that `fun` itself makes are plain numbers to it and to what it returns;
        `set_scaling` says what scale a result is to have.

        Called outside of `jit`, `fun` runs at each call, as any JAX function does: what it reads besides its arguments
        is what is there now. So a step is put under `jax.jit`, which traces it once.

        It can be jitted, vmapped, sharded and differentiated (reverse mode). A gradient with respect to a
        ScaledArray is the ScaledArray of the logical gradient: with a dynamic scale it has its own scale, with a
        static one that of the argument, where FP16 loses what is 2^24 times as small: the program has a callback that
        warns when it happens (`PrecisionWarning`). Where an argument is used more than once, gradients of static
        scales and of data in FP32 or BF16 add up right; those of narrower data with a dynamic scale become NaN. Use
        `scalify(jax.grad(fun))` around all uses, which is the better choice in any case.

    Raises:
        ValueError: another `scales`; positional and named static arguments that the function does not have.
        TypeError, when called: an argument that is not static, and no array and no number.
    """
    arguments = Arguments(fun, static_argnums, static_argnames)
    reporter = Reporter() if check else None
    how = _evaluator(scales, reporter)

    @functools.wraps(fun)
    def scalified(*args: Any, **kwargs: Any) -> Any:
        statics, arrays = arguments.split(args, kwargs)
        leaves, tree = jax.tree.flatten(arrays, is_leaf=is_scaled_array)
        arguments.check(arrays, leaves)
        if reporter is None:
            say_unreadable("argument", leaves, lambda: arguments.leaf_names(tree))
        else:
            named = zip(arguments.leaf_names(tree), leaves, strict=True)
            reporter.entered({name: is_unreadable(x) for name, x in named if is_scaled_array(x) and not x.is_static})
        places = _places(leaves)
        leaves = [leaves[places.index(i)] for i in range(1 + max(places, default=-1))]

        def flat(*different: Any) -> Any:
            args, kwargs = arguments.joined(statics, *jax.tree.unflatten(tree, [different[i] for i in places]))
            return asarray(fun(*args, **kwargs))

        if not any(map(is_scaled_array, leaves)):
            return flat(*leaves)  # plain code, which a surrounding `scalify` sees as such
        flat.__name__ = getattr(fun, "__name__", "scalified")
        name = lambda i: arguments.leaf_names(tree)[places.index(i)]
        plain = Plain(flat, check=check) if scales == "auto" else None
        try:
            out = _differentiable(flat, how, reporter, name, plain=plain)(*leaves)
        except _ClosesOverTracers:
            closed_over, of_all = opened(traced_in_float32(flat, leaves))
            plain = plain and opened_plain(plain, leaves, closed_over)
            names = ["a closed-over array"] * len(closed_over) + [name(i) for i in range(len(leaves))]
            out = _differentiable(of_all, how, reporter, names.__getitem__, plain=plain)(*closed_over, *leaves)
        return jax.tree.map(_returned, out, is_leaf=_is_leaf)

    return scalified


def _returned(x: Any) -> Any:
    """A result as it leaves: what is stored nowhere in FP32, at scale 1."""
    return as_scaled_array(x.value, jnp.float32(1)) if type(x) is Logical else trusted(x)


def _places(leaves: Sequence[Any]) -> tuple[int, ...]:
    """The number of each leaf among those that differ: a traced ScaledArray that is given twice is one argument.

    Its gradients are added inside, where they are numbers; outside, JAX would add their data and their scales.
    """
    numbers: dict[Any, int] = {}
    return tuple(numbers.setdefault(_identity(i, x), len(numbers)) for i, x in enumerate(leaves))


def _identity(number: int, x: Any) -> Any:
    if is_scaled_array(x) and not x.is_static and isinstance(x.data, jax.core.Tracer):
        return id(x.data), id(x._leaf)
    return number


class _ClosesOverTracers(Exception):
    """`fun` uses values of a surrounding transformation that are not its arguments."""


def _evaluator(scales: Scales, reporter: Reporter | None) -> Evaluator:
    """How a jaxpr is evaluated on arrays and ScaledArrays."""
    if scales == "auto":
        return functools.partial(measured.evaluated, reporter=reporter)
    if scales != "static":
        raise ValueError(
            f'scalify: scales={scales!r}, expected "auto" (measured where stored) or "static" (propagated)'
        )
    if reporter is None:
        return lambda jaxpr, leaves, *_: interpreter.propagated(jaxpr, leaves)
    return lambda jaxpr, leaves, *_: interpreter.propagated_and_checked(jaxpr, leaves, reporter=reporter)


def _evaluated(
    fun: Callable, leaves: Sequence[Any], how: Evaluator, *, plain: Plain | None, pulled: Pulled | None, own: int
) -> Any:
    """Trace `fun` of the leaves in float32, and evaluate it with their scales.

    `plain`: how it is traced as plain code, None where what that has in FP32 does not matter. `pulled`: of a function
    that gives a pair, of which the second is of residuals for this backward pass; `own`: how many leaves are residuals,
    so that their scales need not be read (`cotangents`).
    """
    with _collector_paused():
        traced = traced_in_float32(fun, leaves)
        if len(traced.jaxpr.invars) > len(leaves):
            raise _ClosesOverTracers
        out = traced.out_info
        narrow = narrow_trace(plain, leaves)
        residuals = None if pulled is None else _residuals(traced, pulled, narrow)
        arguments = [*map(trusted, leaves[:own]), *map(read, leaves[own:])]
        jaxpr = traced.jaxpr if narrow is None else narrow.in_full(traced.jaxpr)
        count = len(jaxpr.outvars) if residuals is None else residuals.first
        if plain is not None and plain.check and narrow is not None:
            say_promoted(fun, jaxpr, narrow, leaves)
        dtypes = (None,) * count if narrow is None else narrow.dtypes(count, leaves)
        results = [x if _is_leaf(x) else jnp.asarray(x) for x in how(jaxpr, arguments, residuals, dtypes)]
        return jax.tree.unflatten(jax.tree.structure(out), results)


def _residuals(traced: Any, pulled: Pulled, narrow: Narrow | None) -> Residuals:
    """The residuals of a traced function that gives its results and its pullback."""

    def backward() -> Any:
        fun, avals = _pullback_of(traced, pulled)
        jaxpr = trace_of(fun, avals).jaxpr
        plain = None if narrow is None else _plain_pullback(narrow, pulled).traced(())
        return jaxpr if plain is None else plain.in_full(jaxpr)

    return Residuals(_count_of_results(traced), backward)


def _count_of_results(traced: Any) -> int:
    results, _ = traced.out_info
    return len(jax.tree.leaves(results))


def _pullback_of(traced: Any, pulled: Pulled) -> tuple[Callable, tuple[Any, ...]]:
    """The backward pass of a traced function that gives its results and its pullback, and the avals of its leaves."""
    (results, pullback), first = traced.out_info, _count_of_results(traced)
    avals = [aval.update(weak_type=False) if hasattr(aval, "weak_type") else aval for aval in traced.jaxpr.out_avals]
    leaves = (*avals[first:], *map(_aval_of_gradient, avals[:first]))
    return pulled(jax.tree.structure((pullback, results))), leaves


def _plain_pullback(narrow: Narrow, pulled: Pulled) -> Plain:
    """How the backward pass of a function that gives its results and its pullback is traced as plain code."""
    fun, avals = _pullback_of(narrow.traced, pulled)
    given, first = narrow.of_results(), _count_of_results(narrow.traced)
    return Plain(fun, avals, (*given[first:], *given[:first]))


def _aval_of_gradient(aval: Any) -> Any:
    return aval if jnp.issubdtype(aval.dtype, jnp.inexact) else aval.to_tangent_aval()


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


def _differentiable(
    fun: Callable,
    how: Evaluator,
    reporter: Reporter | None,
    name: Callable[[int], str] = "operand {}".format,
    *,
    plain: Plain | None = None,
    pulled: Pulled | None = None,
    own: int = 0,
) -> Callable:
    """The scaled evaluation of a function of leaves, whose gradient is the scaled evaluation of the gradient.

    `name`: of a leaf, by its number; `plain`, `pulled`, `own`: see `_evaluated`.
    """

    @jax.custom_vjp
    def scaled(*leaves: Any) -> Any:
        return _evaluated(fun, leaves, how, plain=plain, pulled=pulled, own=own)

    @functools.cache
    def with_pullback(wanted: tuple[int, ...]) -> tuple[Callable, Callable]:
        of_wanted = functools.cache(functools.partial(_with_pullback, wanted=wanted))
        both, plain_both = of_wanted(fun), None if plain is None else plain.of(of_wanted)
        evaluated = _differentiable(both, how, reporter, plain=plain_both, pulled=backward, own=own)

        def plain_pullback(leaves: Sequence[Any]) -> Plain | None:
            if plain_both is None:
                return None
            narrow = narrow_trace(plain_both, leaves)
            return None if narrow is None else _plain_pullback(narrow, backward)

        return evaluated, plain_pullback

    @functools.cache
    def backward(tree: Any) -> Callable:
        def pulled(*leaves: Any) -> Any:
            (pullback, _), cotangent = jax.tree.unflatten(tree, leaves)
            return pullback(cotangent)

        return pulled

    @functools.cache
    def pull(tree: Any, own: int, plain: Plain | None) -> Callable:
        return _differentiable(backward(tree), how, reporter, plain=plain, own=own)

    def fwd(*primals: Any) -> tuple[Any, Any]:
        leaves = jax.tree.map(lambda x: x.value, primals, is_leaf=_is_primal)
        wanted = tuple(i for i, x in enumerate(leaves) if _is_float(x) and _is_perturbed(primals[i]))
        both, plain_pullback = with_pullback(wanted)
        out, pullback = both(*leaves)
        if pulled is not None:
            # The residuals among the results are kept as where this is not differentiated.
            out = jax.tree.unflatten(jax.tree.structure(out, _is_leaf), jax.tree.leaves(scaled(*leaves), _is_leaf))
        return out, (pullback, leaves, _Known(wanted), _Known(plain_pullback(leaves)))

    def bwd(residuals: Any, cotangent: Any) -> Any:
        pullback, primals, wanted, plain_pullback = residuals
        pullbacks.refuse(pullback[1].of, [_is_known_zero(x) for x in jax.tree.leaves(cotangent, is_leaf=_is_leaf)])
        cotangent = jax.tree.map(_instantiated, cotangent, is_leaf=_is_symbolic_zero)
        leaves, tree = jax.tree.flatten((pullback, cotangent), is_leaf=_is_leaf)
        residual = len(jax.tree.leaves(pullback, is_leaf=_is_leaf))
        gradients = [logical(trusted(x)) for x in pull(tree, residual, plain_pullback.of)(*leaves)]
        of = [primals[i] for i in wanted.of]
        found = gradients_like([logical(x) for x in of], gradients, [name(i) for i in wanted.of])
        found = [Logical(g, x.dtype) if type(x) is Logical else g for x, g in zip(of, found, strict=True)]
        if reporter is not None:
            reporter.call_is_done(found)
        by_leaf = dict(zip(wanted.of, found, strict=True))
        return tuple(by_leaf.get(i) for i in range(len(primals)))

    # Which arguments are differentiated: of the others, no gradient is computed, nor is it said that it is lost.
    scaled.defvjp(fwd, bwd, symbolic_zeros=True)
    return scaled


def _with_pullback(fun: Callable, wanted: tuple[int, ...]) -> Callable:
    """The function that gives the results of `fun` and its pullback for these leaves."""

    def fun_and_pullback(*leaves: Any) -> Any:
        def of_wanted(*xs: Any) -> Any:
            given = dict(zip(wanted, xs, strict=True))
            return fun(*(given.get(i, x) for i, x in enumerate(leaves)))

        out, pullback, constants = pullbacks.vjp(of_wanted, *(leaves[i] for i in wanted))
        return out, (pullback, _Known(constants))

    return fun_and_pullback


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Known:
    """What is known of a function: the numbers of leaves, or how its pullback is traced as plain code."""

    of: Any


def _is_leaf(x: Any) -> bool:
    return is_scaled_array(x) or type(x) is Logical


def _is_primal(x: Any) -> bool:
    return isinstance(x, CustomVJPPrimal)


def _is_perturbed(primal: Any) -> bool:
    """Whether the gradient of a leaf is asked for, which is one array or those of a ScaledArray."""
    return any(x.perturbed for x in jax.tree.leaves(primal, is_leaf=_is_primal))


def _is_symbolic_zero(x: Any) -> bool:
    return isinstance(x, SymbolicZero)


def _is_known_zero(x: Any) -> bool:
    return all(map(_is_symbolic_zero, jax.tree.leaves(x, is_leaf=_is_symbolic_zero)))


def _instantiated(x: Any) -> Any:
    """A cotangent as an array, where it is only known to be zero."""
    if not _is_symbolic_zero(x):
        return x
    return np.zeros(x.shape, x.dtype) if x.dtype == jax.dtypes.float0 else jnp.zeros(x.shape, x.dtype)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(aval_of(x).dtype, jnp.floating)
