"""`scalify`: trace a function once, then evaluate its jaxpr with scales.

`evaluator` evaluates the jaxpr. Here is the border: pytrees, traces, and the gradient
of a scalified function.
"""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from scalify_core.array.scaled_array import (
    ScaledArray,
    asarray,
    is_array,
    is_scaled_array,
    not_differentiable,
    paths,
    with_scale,
    with_valid_scales,
)
from scalify_core.interpreter.evaluator import Evaluator
from scalify_core.interpreter.reference_trace import Program, traced
from scalify_core.numerics.formats import has_range_of_float32, is_float

ScalePolicy = Literal["auto", "static"]
_OUTSIDE = (
    "scalify: a gradient with respect to a ScaledArray is taken inside, "
    "scalify(jax.grad(f)), not outside, jax.grad(scalify(f)), where JAX would add data "
    "to data and scale to scale"
)


def scalify(
    fun: Callable,
    *,
    scales: ScalePolicy = "auto",
) -> Callable:
    """Return `fun` with scale propagation: the same function, on `ScaledArray`s.

    Args:
        fun: any JAX function of pytrees; leaves that are not arrays, such as numbers
            of Python, pass through. A ScaledArray appears as a float32 array, whatever
            the dtype of the data.
        scales: the policy of scales. "auto" suits any function. The arithmetic is FP32,
            on logical values. A value that is stored in a narrow format, as the operand
            of a product or as a result, gets a measured power of two: that of its
            largest magnitude (`scalify_core.interpreter.measured`). "static" is for
            users who place the rescales themselves. Rules propagate the sizes expected
            of independent numbers. Scales are measured in `dynamic_rescale_*`, in FP8
            attention, and in each iteration of a loop for whose carry no static scale
            serves. A plain array has scale 1 beside scaled ones, a constant its own.

    Returns:
        A function of the same arguments, which may contain ScaledArrays. A
        floating-point result that depends on a ScaledArray is a ScaledArray; an FP32
        scalar is a plain array.

        With measured scales, products and results have the dtypes of plain code whose
        arrays have the formats of the data (FP16 for those of 8 bits). So they are FP32
        by a cast or by promotion. These dtypes come from a second trace; if it fails or
        has other products, a `PrecisionWarning` says so. With static scales results
        have the format of the data, but the gradient of `gelu`'s bias, which is FP32.
        Complex numbers have no scale: they are plain, and so are the results computed
        from them (`irfft(rfft(x))`). ScaledArrays that `fun` itself makes are plain
        numbers inside it and in its results; `x.rescale(scale)` chooses the scale of a
        result.

        Called outside `jit`, `fun` runs at each call and reads the current value of its
        globals, like any JAX function. Put a training step under `jax.jit`, which
        traces it once.

        The function can be jitted, vmapped and sharded. Take gradients inside,
        `scalify(jax.grad(fun))`. Outside, `jax.grad(scalify(fun))` supports plain
        arguments, the first derivative, and results that are plain or have the range of
        FP32.

    Raises:
        ValueError: `scales` is unknown.
        TypeError: differentiated with respect to a ScaledArray.
    """
    measures = measures_scales(scales)
    evaluate = Evaluator(measures).arrays

    @functools.wraps(fun)
    def scalified(*args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree.leaves((args, kwargs), is_leaf=is_scaled_array)
        if any(map(is_scaled_array, leaves)):
            return scaled(args, kwargs)
        # Without a trace of its own: a `scalify` around it sees it as its own code.
        return asarray(fun(*args, **kwargs))

    @_collector_paused()  # until the traces of `fun` are freed
    def scaled(args: tuple, kwargs: dict[str, Any]) -> Any:
        call = call_of(fun, args, kwargs)
        # Outside of `jit` a wrong scale is named here, by its argument's path; under
        # `jit` the data reads as NaN.
        leaves = _checked(call.leaves, call.names)
        program, closed_over = traced(call.fun, leaves, narrow=measures)
        program.warn()
        leaves = [*closed_over, *leaves]
        # Only plain floats can be differentiated from outside: without them the
        # program has no custom_vjp.
        if any(is_float(x) for x in leaves if not is_scaled_array(x)):
            results = differentiable(program, evaluate)(*leaves)
        else:
            results = evaluate(program, leaves)
        return call.unflatten(results)

    return scalified


def measures_scales(scales: ScalePolicy) -> bool:
    """Return whether scales are measured; ValueError: there is no such policy."""
    if scales not in get_args(ScalePolicy):
        raise ValueError(
            f'scales={scales!r}, expected "auto" (measured where stored) or "static"'
            " (propagated)"
        )
    return scales == "auto"


def _checked(leaves: Sequence[Any], names: Callable[[], Sequence[str]]) -> list[Any]:
    """Return the arguments; scaled ones can no longer be differentiated."""
    out: list[Any] = with_valid_scales("argument", leaves, names)
    traced_leaves = {
        i: x for i, x in enumerate(out) if is_scaled_array(x) and _is_traced(x)
    }
    # Numbers at hand are not differentiated, and each refusal is an equation in the
    # program.
    if traced_leaves:
        for i, x in not_differentiable(traced_leaves, _OUTSIDE).items():
            out[i] = x
    return out


def _is_traced(x: ScaledArray) -> bool:
    return any(isinstance(y, jax.core.Tracer) for y in (x.data, x.scale))


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the garbage collector.

    Tracing makes hundreds of thousands of objects, nearly all long-lived. The search
    for cycles among them takes a fifth of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Off inside of another scalify, which turns it on again.
        if enabled:
            gc.enable()
            gc.collect(1)  # one search of the new objects, where two would follow


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
    # One leaf, since its data means nothing without its scale.
    every, tree = jax.tree.flatten((args, kwargs), is_leaf=is_scaled_array)
    # Traced, the numbers of an Equinox module would be parameters with gradients: a
    # dropout's rate, which a weight decay moves, or an axis, which no longer serves as
    # one.
    places = [i for i, x in enumerate(every) if is_array(x)]
    # A traced function returns arrays alone: what else the user's function returns, and
    # its tree, leave the trace here.
    results: list[Any] = []

    def flat(*leaves: Any) -> list[Any]:
        all_leaves = list(every)
        for i, x in zip(places, leaves, strict=True):
            all_leaves[i] = x
        args, kwargs = jax.tree.unflatten(tree, all_leaves)
        # A ScaledArray that the function made is no pair of leaves to give scales to.
        out, structure = jax.tree.flatten(asarray(fun(*args, **kwargs)))
        # Results are the first trace's arrays. The second trace may have another
        # structure: a VJP that is a result knows the dtypes of its trace.
        if not results:
            # None stands for an array: trees have no None among their leaves.
            rest = [None if is_array(x) else _without_trace(x) for x in out]
            results.extend((rest, structure))
        return [x for x in out if is_array(x)]

    def unflatten(arrays_out: Sequence[Any]) -> Any:
        arrays, (rest, structure) = iter(arrays_out), results
        return structure.unflatten([next(arrays) if x is None else x for x in rest])

    def names() -> list[str]:
        # Only for a warning. The first key is that of the pair of args and kwargs.
        named = paths((args, kwargs))
        return [named[i].partition("]")[2] for i in places]

    # For warnings and jaxprs; a partial has no name.
    flat.__name__ = getattr(fun, "__name__", "scalified")
    return FlatCall([every[i] for i in places], flat, unflatten, names)


def _without_trace(x: Any) -> Any:
    """Return a leaf that is not traced; JAX may trace the gradient of integers."""
    # `jax.grad(f, allow_int=True)` has such gradients, in a dtype that no equation
    # takes.
    if getattr(x, "dtype", None) == jax.dtypes.float0:
        return np.zeros(x.shape, x.dtype)
    return x


# The gradient of a scalified function with respect to its plain arguments.
# It is taken outside, `jax.grad(scalify(f))`. The backward pass is one program, the
# scalified vjp, so it has the precision of `scalify(jax.grad(f))`. Outside, JAX adds up
# plain arrays, or data at scale 1 that has the range of FP32.

_SECOND = (
    "scalify: a second derivative from outside; take it inside, "
    "scalify(jax.hessian(f)) or scalify(jax.grad(lambda x: ... jax.grad(f) ...))"
)
_NARROW = (
    "scalify: the gradient through a result in {} would lose what that format does not "
    "hold; return it in FP32, x.astype(jnp.float32), or take the gradient inside, "
    "scalify(jax.grad(f))"
)
Evaluate = Callable[[Program, Sequence[Any]], list[Any]]


def differentiable(program: Program, evaluate: Evaluate) -> Callable[..., list[Any]]:
    """Return the evaluation of a program, with a gradient for its plain arguments.

    Args:
        program: of arrays, and ScaledArrays that are known not to be differentiated.
        evaluate: gives the results of a program of such leaves.
    """

    # JAX's own gradient of the evaluated program would go through its measurements and
    # its roundings, in the formats of the forward pass.
    @jax.custom_vjp
    def scaled(*leaves: Any) -> list[Any]:
        return evaluate(program, leaves)

    def forward(*primals: Any) -> tuple[list[Any], Any]:
        leaves = jax.tree.map(lambda x: x.value, primals, is_leaf=_is_primal)
        # The arguments to differentiate are keys: residuals are arrays, but for the
        # structure of their tree.
        wanted = {
            i: None
            for i, x in enumerate(primals)
            if _is_primal(x) and x.perturbed and is_float(x.value)
        }
        # Only arguments are kept, since the backward program has the forward pass in
        # it: what it needs stands in that program's own formats.
        out = scaled(*leaves)
        return out, (leaves, [getattr(x, "scale", None) for x in out], wanted)

    def backward(residuals: Any, cotangents: Any) -> tuple[Any, ...]:
        leaves, scales, wanted = not_differentiable(residuals, _SECOND)
        given = {}
        for i, (cotangent, scale) in enumerate(zip(cotangents, scales, strict=True)):
            # A zero cotangent is left out and not computed with: a loop of unknown
            # length has no gradient.
            value = _logical(cotangent, scale)
            if value is not None:
                given[i] = not_differentiable(value, _SECOND)
        # None is a zero cotangent for custom_vjp, of any leaf: of a ScaledArray too.
        gradients: list[Any] = [None] * len(leaves)
        if given:
            vjp = program.vjp(tuple(wanted), tuple(given))
            computed = evaluate(vjp, [*leaves, *given.values()])
            for i, gradient in zip(wanted, computed, strict=True):
                # JAX wants the dtype of the argument, whatever format the backward pass
                # has.
                gradients[i] = asarray(gradient, jnp.result_type(leaves[i]))
        return tuple(gradients)

    # Symbolic zeros tell which arguments are differentiated: others have no backward
    # pass.
    scaled.defvjp(forward, backward, symbolic_zeros=True)

    def with_constant_scales(*leaves: Any) -> list[Any]:
        return list(map(_with_constant_scale, scaled(*leaves)))

    return with_constant_scales


def _logical(cotangent: Any, scale: Any) -> Any:
    """Return the cotangent of a result's value; None where it is known to be zero."""
    data = cotangent
    if is_scaled_array(cotangent):
        data = cotangent.data
    if isinstance(data, SymbolicZero) or data.dtype == jax.dtypes.float0:
        return None
    if scale is None:
        return data
    if not has_range_of_float32(data.dtype):
        raise TypeError(_NARROW.format(data.dtype))
    # The result is data * scale, so a cotangent of the data is `scale` times that of
    # the value.
    return jnp.asarray(data, jnp.float32) / scale


def _with_constant_scale(x: Any) -> Any:
    """Return a result whose scale has no tangent, so that `asarray` can differentiate
    it.
    """
    # A static scale is structure, which has no tangent.
    if not is_scaled_array(x) or x.is_static:
        return x
    return with_scale(x.data, lax.stop_gradient(x.scale))


def _is_primal(x: Any) -> bool:
    return isinstance(x, CustomVJPPrimal)
