"""Facts about jaxprs and equations: name scopes, calls, types on a mesh, caches."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax._src.util import weakref_lru_cache
from jax.interpreters import partial_eval
from jax.sharding import AxisType


def scope_of(eqn: Any) -> tuple[Any, Any]:
    """Return an equation's named scopes, and its context.

    The context is None unless it holds metadata for the compiler, or a mesh, of which
    `jax.sharding.auto_axes` changes the axes.
    """
    ctx = eqn.ctx
    if not (ctx.xla_metadata or ctx.compute_type or ctx.cur_abstract_mesh.axis_types):
        ctx = None
    return eqn.source_info.name_stack, ctx


@contextlib.contextmanager
def within(scopes: Any, ctx: Any) -> Iterator[None]:
    """Trace inside these named scopes, and in this compiler context unless None."""
    with contextlib.ExitStack() as stack:
        if name := str(scopes):
            stack.enter_context(jax.named_scope(name))
        if ctx is not None:
            stack.enter_context(ctx.manager)
        yield


# A jaxpr holds the arrays that a program closes over, such as parameters: it must be
# freed with its program. So cached results must not hold the jaxpr itself, except by a
# weak reference. They may hold equations, which do not hold their jaxpr.
per_jaxpr = functools.partial(
    weakref_lru_cache, maxsize=4096, trace_context_in_key=False
)


@per_jaxpr
def needed(jaxpr: Any) -> Any:
    """Return a jaxpr without equations that its results do not depend on, here or in
    inner jaxprs, but with those that have effects.
    """
    # JAX leaves the unread half of a gradient's forward pass in its jaxpr. As readers
    # of a value they would have a say in its scales, and `explain` would report them.
    return partial_eval.dce_jaxpr(jaxpr, True, instantiate=True)[0]


# Calls of which the body alone is evaluated. Transformations, for whose rules some of
# them exist, are done. ("composite" is JAX's own, not `ops.composite`.)
INLINED = frozenset(
    {
        "closed_call",
        "core_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vmap_call",
        "composite",
    }
)
# Primitives whose one inner jaxpr takes their operands and gives their results.
CALLS = INLINED | {"jit", "remat2", "shard_map"}
CONTROL = CALLS | {"scan", "while", "cond"}
PRODUCTS = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated"})
# The precision that marks FP32 products in a jaxpr: at the default precision GPUs read
# FP32 operands in TF32.
IN_FULL = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)


def inner_jaxpr(eqn: Any) -> Any:
    """Return the jaxpr of a call, or the body of a scan."""
    keys = ("call_jaxpr", "jaxpr", "call")
    return next(eqn.params[key] for key in keys if key in eqn.params)


def axes_of(x: Any) -> frozenset:
    """Return the mesh axes that an array varies over.

    There are none outside shard_map, nor where shard_map does not check.
    """
    return _axes_of_type(jax.typeof(x))


def varying(x: Any, axes: frozenset) -> Any:
    """Return `x`, varying over these axes too."""
    missing = axes - axes_of(x)
    if missing:
        return lax.pcast(x, tuple(sorted(missing)), to="varying")
    return x


# Types on a mesh: inside shard_map JAX tracks the axes that each array varies over, and
# elsewhere how explicit axes split it. The plain program is consistent. Scale
# propagation may not be: a measured scale varies where the scale before did not, and a
# constant known while tracing has no type.
def as_traced(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Return operands that vary, and are split, as they were when traced."""
    explicit = _has_explicit_axes()
    if not explicit and not any(_axes_of_type(var.aval) for var in eqn.invars):
        return operands
    rest = operands[len(eqn.invars) :]
    typed = [typed_as(x, y.aval) for x, y in zip(operands, eqn.invars, strict=False)]
    return [*typed, *rest]


def typed_as(x: Any, aval: Any) -> Any:
    """Return an array that varies, and is split over explicit axes, as an aval."""
    x = varying(x, _axes_of_type(aval))
    sharding = getattr(aval, "sharding", None)
    if sharding is None or not _has_explicit_axes() or np.ndim(x) != aval.ndim:
        return x
    if jax.typeof(x).sharding.spec == sharding.spec:
        return x
    return jax.sharding.reshard(x, sharding)


def _has_explicit_axes() -> bool:
    """Return whether JAX tracks in types how arrays are split over a mesh."""
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def _axes_of_type(aval: Any) -> frozenset:
    manual = getattr(aval, "mat", None)
    if manual is None:
        return frozenset()
    return manual.varying


def vary(tree: Any, axes: Sequence[frozenset]) -> Any:
    """Return a tree whose arrays vary over these axes too, array by array."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, list(map(varying, leaves, axes)))


def union(*trees: Any) -> list[frozenset]:
    """Return, for each position, the axes that its array varies over in any tree."""
    leaves = [jax.tree.leaves(tree) for tree in trees]
    return [
        frozenset().union(*map(axes_of, alike)) for alike in zip(*leaves, strict=True)
    ]


def agreeing(branches: Sequence[Callable], *operands: Any) -> Sequence[Callable]:
    """Return branches whose results vary over the same axes."""
    if not _manual():
        return branches
    axes = union(*(jax.eval_shape(branch, *operands) for branch in branches))
    return [lambda *xs, branch=branch: vary(branch(*xs), axes) for branch in branches]


def agreeing_carry(step: Callable, carry: Any) -> tuple[Callable, Any]:
    """Return a function that types the next carry of a loop, and the initial carry.

    Each part then varies over the same axes before and after `step(carry)`.
    """
    if not _manual():
        return lambda new: new, carry
    axes, grown_axes = None, union(carry)
    while grown_axes != axes:
        axes, carry = grown_axes, vary(carry, grown_axes)
        grown_axes = union(carry, jax.eval_shape(step, carry))
    return lambda new: vary(new, grown_axes), carry


def _manual() -> bool:
    """Return whether the current trace is inside shard_map."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)
