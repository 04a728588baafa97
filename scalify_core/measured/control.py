"""Calls and control flow inside which something is stored. What passes through a loop
is in FP32.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jax.interpreters import partial_eval

from scalify_core import storage, watch
from scalify_core.array import ScaledArray, with_scale
from scalify_core.caches import per_jaxpr
from scalify_core.measured import product_reads, store
from scalify_core.measured.evaluate import Operands, kind, run
from scalify_core.measured.plan import (
    Format,
    Plan,
    Step,
    inner_jaxpr,
    inner_plan,
    plan_of,
    scan_parts,
    while_carry,
    while_parts,
)


@kind("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")
def _call(step: Step, env: Operands) -> Sequence[Any]:
    resized = (
        tuple(map(env.is_resized, step.eqn.outvars)) if watch.is_watched() else None
    )
    return run(
        inner_jaxpr(step.eqn),
        inner_plan(step),
        Operands(inner_jaxpr(step.eqn), operands_of(step, env), resized),
    )


@kind("jit")
def _jit(step: Step, env: Operands) -> Sequence[Any]:
    """A call, and one function for all calls of the same program: so layers are traced
    and lowered once.

    In check mode each is evaluated by itself: what it loses is reported at the place
    that calls it.
    """
    if watch.is_watched():
        return _call(step, env)
    params = step.eqn.params
    shardings = tuple(params["in_shardings"]), tuple(params["out_shardings"])
    donated = tuple(i for i, given in enumerate(params["donated_invars"]) if given)
    kept = params["name"], donated, params["inline"], params["keep_unused"]
    out = _jitted(params["jaxpr"], step.formats, shardings, *kept)(
        *map(_whole, operands_of(step, env))
    )
    # donated: gone, if eager
    returned = [
        None if i in donated else i for i in _arguments_returned(params["jaxpr"])
    ]
    return [
        y if i is None else env.read(step.eqn.invars[i])
        for i, y in zip(returned, out, strict=True)
    ]


@per_jaxpr
def _jitted(
    jaxpr: Any,
    formats: tuple[Format, ...],
    shardings: tuple[Sequence[Any], Sequence[Any]],
    name: str,
    donated: tuple[int, ...],
    inline: Any,
    keep_unused: bool,
) -> Callable:
    """The evaluation of a jaxpr, jitted. It is forgotten with the jaxpr, which it must
    not keep.
    """
    found, plan = weakref.ref(jaxpr), plan_of(jaxpr, formats)

    def fun(*operands: Any) -> list[Any]:
        out = run(found(), plan, list(map(_constrained, operands, shardings[0])))
        return list(map(_constrained, out, shardings[1]))

    fun.__name__ = name
    return jax.jit(fun, donate_argnums=donated, inline=inline, keep_unused=keep_unused)


def _constrained(x: Any, sharding: Any) -> Any:
    """An operand or a result of a call, its elements where the call has them."""
    if not isinstance(sharding, jax.sharding.Sharding):
        return x
    if type(x) is ScaledArray:
        return with_scale(lax.with_sharding_constraint(x.data, sharding), x.scale)
    return lax.with_sharding_constraint(x, sharding)


@per_jaxpr
def _arguments_returned(jaxpr: Any) -> tuple[int | None, ...]:
    """For each result of a jaxpr, which argument it is, as it came; None: it is another
    value.
    """
    origins: dict[Any, int | None] = {var: i for i, var in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "jit":
            for var, i in zip(
                eqn.outvars, _arguments_returned(eqn.params["jaxpr"]), strict=True
            ):
                atom = None if i is None else eqn.invars[i]
                origins[var] = (
                    None if atom is None or type(atom) is Literal else origins.get(atom)
                )
    return tuple(
        None if type(atom) is Literal else origins.get(atom) for atom in jaxpr.outvars
    )


def operands_of(step: Step, env: Operands) -> list[Any]:
    """As the inner jaxpr reads them: what its products alone read is stored once, out
    here.
    """
    alone = product_reads.reads_for_products(step)
    return [
        env.passed_on(*operand)
        for operand in zip(step.eqn.invars, step.wants, alone, strict=True)
    ]


@kind("remat2")
def _remat(step: Step, env: Operands) -> Sequence[Any]:
    eqn, inner = step.eqn, step.eqn.params["jaxpr"]
    operands = list(map(_whole, operands_of(step, env)))
    if watch.is_watched():
        plan = inner_plan(step)
        evaluation = jax.jit(lambda *xs: run(inner, plan, xs))
    else:
        nowhere = (None,) * len(inner.invars), (None,) * len(inner.outvars)
        evaluation = _jitted(inner, step.formats, nowhere, "remat", (), False, True)
    traced = evaluation.trace(*operands)
    # Bound, not called through jax.checkpoint: a differentiated body keeps its barrier
    # against common subexpressions.
    jaxpr = _with_constants_as_arguments(traced.jaxpr)
    out = eqn.primitive.bind(
        *traced.jaxpr.consts,
        *jax.tree.leaves(operands),
        **{**eqn.params, "jaxpr": jaxpr},
    )
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), out)


def _whole(x: Any) -> Any:
    return x if type(x) is ScaledArray else jnp.asarray(x)


def _with_constants_as_arguments(jaxpr: Any) -> Any:
    return partial_eval.convert_constvars_jaxpr(jaxpr)


@kind("cond")
def _cond(step: Step, env: Operands) -> Sequence[Any]:
    index, *operands = map(env.read, step.eqn.invars)
    formats = step.formats[1:]

    def branch(jaxpr: Any) -> Any:
        plan = plan_of(jaxpr, formats)
        return lambda *xs: list(map(carried, run(jaxpr, plan, xs), step.out_formats))

    return lax.switch(
        index,
        [branch(jaxpr) for jaxpr in step.eqn.params["branches"]],
        *map(_whole, operands),
    )


@kind("scan")
def _scan(step: Step, env: Operands) -> Sequence[Any]:
    eqn, plan = step.eqn, inner_plan(step)
    consts, init, xs = scan_parts(eqn, operands_of(step, env))
    slices = [sliced(x) for x in xs]

    def turn(carry: list[Any], parts: list[Any]) -> tuple[list[Any], list[Any]]:
        operands = [
            *consts,
            *carry,
            *(of_slice(part, x) for part, x in zip(parts, xs, strict=True)),
        ]
        out = run(eqn.params["jaxpr"], plan, operands)
        return list(map(carried, out[: len(carry)], formats)), list(
            map(_whole, out[len(carry) :])
        )

    params, formats = eqn.params, step.out_formats[: len(init)]
    carry, ys = lax.scan(
        turn,
        list(map(carried, init, formats)),
        slices,
        params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def carried(x: Any, fmt: Format) -> Any:
    """A part of a carry, or a branch's result: the logical value, in FP32 unless it is
    plain (its format is None).

    It may be what no narrow format holds beside others (-1e38). What is plain has the
    dtype that it was traced with.
    """
    x = jnp.asarray(store.wide(x))
    if fmt is None:
        return x
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return storage.as_float32(x) if narrow else x


def sliced(x: Any) -> Any:
    """What is cut along the leading axis: an array, or data and scale, or data of which
    all slices have one scale.
    """
    if type(x) is not ScaledArray:
        return jnp.asarray(x)
    if x.is_static or jnp.ndim(x.scale) == 0:
        return x.data
    return (x.data, x.scale) if jnp.shape(x.scale)[0] == len(x) else store.wide(x)


def of_slice(part: Any, whole: Any) -> Any:
    if isinstance(part, (tuple, list)):
        data, scale = part
        return with_scale(data, scale.reshape(()) if scale.size == 1 else scale)
    if type(whole) is ScaledArray and (whole.is_static or jnp.ndim(whole.scale) == 0):
        return with_scale(part, whole.scale)
    return part


@kind("while")
def _while(step: Step, env: Operands) -> Sequence[Any]:
    """Bound with a new condition and body, as JAX's own batching leaves conditions that
    are arrays.
    """
    eqn, params = step.eqn, step.eqn.params
    carry_formats, body_plan = while_carry(eqn, step.formats)
    cond_consts, body_consts, init = while_parts(eqn, list(map(env.read, eqn.invars)))
    cond_formats, _, _ = while_parts(eqn, step.formats)
    cond_plan = plan_of(params["cond_jaxpr"], (*cond_formats, *carry_formats))
    init = [
        lax.convert_element_type(x, x.dtype) for x in map(carried, init, carry_formats)
    ]  # strong types, as the body's results have

    def traced(
        jaxpr: Any, plan: Plan, consts: Sequence[Any], formats: Sequence[Format]
    ) -> tuple[list[Any], Any]:
        consts = list(map(_whole, consts))

        def fun(consts: Sequence[Any], carry: Sequence[Any]) -> list[Any]:
            return list(map(carried, run(jaxpr, plan, [*consts, *carry]), formats))

        found = jax.jit(fun).trace(consts, init).jaxpr
        return [*found.consts, *jax.tree.leaves(consts)], _with_constants_as_arguments(
            found
        )

    body_consts, body = traced(
        params["body_jaxpr"], body_plan, body_consts, carry_formats
    )
    cond_consts, cond = traced(params["cond_jaxpr"], cond_plan, cond_consts, [None])
    return eqn.primitive.bind(
        *cond_consts,
        *body_consts,
        *init,
        cond_jaxpr=cond,
        body_jaxpr=body,
        cond_nconsts=len(cond_consts),
        body_nconsts=len(body_consts),
    )


@kind("shard_map")
def _shard_map(step: Step, env: Operands) -> Sequence[Any]:
    plan, params = inner_plan(step), step.eqn.params
    operands = list(map(_whole, operands_of(step, env)))
    specs = list(map(_spec, operands, params["in_specs"]))

    def body(*xs: Any) -> list[Any]:
        return [jnp.asarray(store.wide(x)) for x in run(params["jaxpr"], plan, xs)]

    return jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=tuple(specs),
        out_specs=list(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )(*operands)


def _spec(x: Any, spec: Any) -> Any:
    """How an operand is split over devices that is split so as an array: a scale along
    the axes that it has.
    """
    if type(x) is not ScaledArray:
        return spec
    if x.is_static:
        return ScaledArray.tree_unflatten(x.scale, (spec,))
    parts = (*spec, *[None] * (jnp.ndim(x.scale) - len(spec)))
    scale = jax.P(
        *(
            part if n > 1 else None
            for part, n in zip(parts, jnp.shape(x.scale), strict=False)
        )
    )
    return ScaledArray.tree_unflatten(None, (spec, scale))
