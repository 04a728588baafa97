"""Functions that are one equation for `scalify`, after transformations, too.

A composite is a plain JAX function with a name. It is *one* call in every jaxpr, also
in those of its derivatives. A rule registered under the name
(`registry.composite_rule`) can give the call scales. Without `scalify` the call is
compiled as the function's own equations.

    @composite
    def squared_relu(x):
        return jnp.square(jax.nn.relu(x))

    @composite_rule("squared_relu")             # optional: without it, FP32 and scale 1
    def _(call, x):
        return rules.composites.on_values(call, [(x.size**2, x.dtype)], x)

Differentiation (reverse mode; forward mode raises JAX's TypeError for custom_vjp) calls
`name.fwd` and `name.bwd`. By default the residuals are the arguments and the backward
is `jax.vjp` of the function; `defvjp` gives better ones.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import dispatch
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad, batching, mlir

from scalify_core.numerics.jaxprs import axes_of, per_jaxpr, varying

# A primitive: calls that are told by the names of `jax.jit` do not survive partial
# evaluation, which changes their arguments, and `jax.lax.composite` has no batching
# rule.
composite_p = Primitive("scalify_composite")
composite_p.multiple_results = True


@dataclasses.dataclass(frozen=True)
class CompositeCall:
    """The call of one `composite_p` equation, which is its parameter.

    It is the first argument of its rule.

    Attributes:
        name: the name of the rule: "gelu", "gelu.fwd" (returns `(out, residuals)`),
            "gelu.bwd" (takes `(residuals, gradient)`).
        fun: the function, of positional pytrees of arrays and static keyword arguments.
        static: the keyword arguments of this call.
        in_tree: the tree of the tuple of positional arguments; the equation's operands
            are its leaves.
        cuda: the function that is lowered for CUDA devices in place of `fun`, or None.
        in_axes: the axes of the operands, for each `vmap` around the call, innermost
            first.
    """

    name: str
    fun: Callable
    static: tuple[tuple[str, Any], ...]
    in_tree: Any
    cuda: Callable | None = None
    in_axes: tuple[tuple[int | None, ...], ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """Return the keyword arguments of this call by name."""
        return dict(self.static)

    def tree(self, *operands: jax.Array) -> Any:
        """Return the results of `fun` on flat operands, under the call's vmaps."""

        def fun(*operands: jax.Array) -> Any:
            args = jax.tree.unflatten(self.in_tree, operands)
            return self.fun(*args, **self.settings)

        for axes in self.in_axes:
            fun = jax.vmap(fun, in_axes=axes)
        return fun(*operands)

    def bind(self, *operands: Any) -> list[jax.Array]:
        """Bind one composite equation that makes this call.

        Rules call their own function on data with it.
        """
        # JAX caches the trace of a jitted function, so a layer's hundredth call is
        # looked up.
        jaxpr = _jitted_call(self).trace(*operands).jaxpr
        return composite_p.bind(*operands, jaxpr=jaxpr, call=self)

    def replace(self, **changes: Any) -> CompositeCall:
        """Return the same call with other fields; `static` may be a dict."""
        if isinstance(changes.get("static"), dict):
            # One order, so that equal settings are one key of the caches.
            changes["static"] = tuple(sorted(changes["static"].items()))
        return dataclasses.replace(self, **changes)


class Composite:
    """A function made by `composite`: call it with positional pytrees of arrays and
    static keyword arguments.
    """

    def __init__(self, fun: Callable, name: str) -> None:
        """Use `composite`."""
        functools.update_wrapper(self, fun)
        self.fun, self.name = fun, name
        self.cuda: Sequence[Callable | None] = (None, None, None)
        # A custom_vjp for each set of static arguments: a new one at each call would
        # miss all of JAX's caches.
        self._differentiable = functools.lru_cache(maxsize=512)(
            self._make_differentiable
        )

    def defvjp(
        self,
        fwd: Callable | None,
        bwd: Callable,
        *,
        cuda: Sequence[Callable | None] = (None, None, None),
    ) -> None:
        """Set `fwd(*args, **static) -> (out, residuals)` and
        `bwd(residuals, gradient, **static) -> gradients`.

        With `fwd` None the residuals are the arguments. The gradients are a tuple, one
        for each argument, None for arguments without one (integers). `cuda` has the
        function, `fwd` and `bwd` that are lowered where the program is compiled for
        CUDA devices, None where it does not differ; residuals must have the shapes and
        dtypes of the others. The choice is made by the platform the program is lowered
        for, never by the default backend.
        """
        if fwd is not None:
            self.fwd = fwd  # type: ignore[method-assign]
        self.bwd = bwd  # type: ignore[method-assign]
        self.cuda = cuda

    def fwd(self, *args: Any, **static: Any) -> tuple[Any, Any]:
        """Return the result and the residuals."""
        return self.fun(*args, **static), args

    def bwd(self, residuals: Any, gradient: Any, **static: Any) -> tuple:
        """Return the gradients of the arguments; None for integers."""
        _, pullback = jax.vjp(functools.partial(self.fun, **static), *residuals)
        # No equation has float0, JAX's dtype for the gradients of integers.
        return jax.tree.map(
            lambda x: None if x.dtype == jax.dtypes.float0 else x, pullback(gradient)
        )

    def __call__(self, *args: Any, **static: Any) -> Any:
        """Call the function."""
        # JAX's custom_vjp takes no object that only has `__jax_array__`.
        args = jax.tree.map(jnp.asarray, args)
        args = _equally_varying(args)
        return self._differentiable(tuple(sorted(static.items())))(*args)

    def _make_differentiable(self, static: tuple) -> Callable:
        call = functools.partial(_bind, static=static)

        @jax.custom_vjp
        def function(*args: Any) -> Any:
            return call(self.name, self.fun, self.cuda[0], args)

        def fwd(*args: Any) -> tuple[Any, Any]:
            return call(
                f"{self.name}.fwd", self.fwd, self.cuda[1], args, residuals=True
            )

        def bwd(residuals: Any, gradient: Any) -> Any:
            return call(
                f"{self.name}.bwd", self.bwd, self.cuda[2], (residuals, gradient)
            )

        function.defvjp(fwd, bwd)
        return function


def composite(
    fun: Callable | None = None,
    *,
    name: str | None = None,
) -> Any:
    """Make `fun` a composite (a decorator).

    Args:
        fun: function of positional pytrees of arrays and of keyword-only, hashable,
            static arguments.
        name: the name that its rules are registered under; default: the function's.
    """
    if fun is None:
        return functools.partial(composite, name=name)
    return Composite(fun, name or fun.__name__)


def _equally_varying(args: Any) -> Any:
    """Make all arguments vary over the same mesh axes, inside shard_map.

    AD then sums the gradients of arguments that did not vary.
    """
    axes = frozenset().union(*map(axes_of, jax.tree.leaves(args)))
    return jax.tree.map(lambda x: varying(x, axes), args)


def _bind(
    name: str,
    fun: Callable,
    cuda: Callable | None,
    args: tuple,
    static: tuple,
    *,
    residuals: bool = False,
) -> Any:
    leaves, in_tree = jax.tree.flatten(args)
    call = CompositeCall(name, fun, static, in_tree, cuda)
    traced = _jitted_call(call).trace(*leaves)
    out = composite_p.bind(*leaves, jaxpr=traced.jaxpr, call=call)
    if residuals:
        # One that is an argument stays that argument: no copy, and no new scale. A
        # result never does: the rule of a function that returns its argument may change
        # the scale.
        first = len(jax.tree.leaves(traced.out_info[0]))
        argument = dict(zip(traced.jaxpr.invars, leaves, strict=True))
        pairs = zip(traced.jaxpr.outvars[first:], out[first:], strict=True)
        out[first:] = [
            x if isinstance(var, Literal) else argument.get(var, x) for var, x in pairs
        ]
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), out)


@per_jaxpr
def _jitted(jaxpr: Any, name: str) -> Callable:
    # The jaxpr and not the call: it was traced in the contexts of `compiler_hints`, in
    # which it is not always lowered.
    jaxpr_ref = weakref.ref(jaxpr)

    def fun(*operands: jax.Array) -> Any:
        jaxpr: Any = jaxpr_ref()
        return jax.core.eval_jaxpr(jaxpr, jaxpr.consts, *operands)

    fun.__name__ = name
    return jax.jit(fun)


# By the call and not by the function: vmaps and static arguments change its trace.
@functools.lru_cache(maxsize=512)
def _jitted_call(call: CompositeCall) -> Any:
    """Return the jitted function of equal calls, so that traces are cached."""

    def fun(*operands: jax.Array) -> Any:
        return call.tree(*operands)

    # The name stands in profiles and in the compiled program.
    fun.__name__ = call.name
    return jax.jit(fun)


@composite_p.def_abstract_eval
def _abstract_eval(*_: Any, jaxpr: Any, call: CompositeCall) -> Sequence[Any]:
    # A number of Python as a result is an array like others. Weakly typed, it would
    # take the dtype of its neighbors, FP16 say.
    return [aval.strip_weak_type() for aval in jaxpr.out_avals]


def _lower(
    *operands: jax.Array, jaxpr: Any, call: CompositeCall
) -> Sequence[jax.Array]:
    return _jitted(jaxpr, call.name)(*operands)


def _lower_cuda(
    *operands: jax.Array, jaxpr: Any, call: CompositeCall
) -> Sequence[jax.Array]:
    if call.cuda is None:
        return _lower(*operands, jaxpr=jaxpr, call=call)
    return jax.tree.leaves(_jitted_call(call.replace(fun=call.cuda))(*operands))


def _jvp(
    primals: Sequence[jax.Array],
    tangents: Sequence[Any],
    *,
    jaxpr: Any,
    call: CompositeCall,
) -> tuple[Any, Any]:
    """Return second derivatives, those of the call's equations.

    The first are taken by custom_vjp, above this primitive.
    """
    # `jax.jvp` takes no symbolic zeros.
    tangents = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(
        lambda *xs: jax.core.eval_jaxpr(jaxpr, jaxpr.consts, *xs),
        tuple(primals),
        tuple(tangents),
    )


def _batch(
    operands: Sequence[jax.Array],
    axes: Sequence[int | None],
    *,
    jaxpr: Any,
    call: CompositeCall,
) -> tuple[Any, Any]:
    del jaxpr
    call = call.replace(in_axes=(*call.in_axes, tuple(axes)))
    # Bound again as one equation of the whole batch, whose rule may see the entries'
    # axes.
    out = call.bind(*operands)
    return out, [0] * len(out)


# Compiled, as any primitive outside of jit: its CUDA function is chosen there.
composite_p.def_impl(functools.partial(dispatch.apply_primitive, composite_p))
mlir.register_lowering(composite_p, mlir.lower_fun(_lower))
mlir.register_lowering(composite_p, mlir.lower_fun(_lower_cuda), platform="cuda")
# cuDNN's attention, which stands in a cuda lowering, asks for the devices it is
# compiled for. JAX hands them on only where a primitive is in this set, which is not
# public; without it every program with that attention fails to lower.
dispatch.prim_requires_devices_during_lowering.add(composite_p)
ad.primitive_jvps[composite_p] = _jvp
batching.primitive_batchers[composite_p] = _batch
