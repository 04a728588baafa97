"""Calls and control flow: the rules of the inner equations apply; structure, names and donation are kept.

A value crosses into a traced function as a pytree whose static scale, expected RMS and format are part of its
structure, so JAX's own transformations carry them, and static scales stay static on the other side.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import partial_eval

from scalify_core import value as v
from scalify_core.formats import pow2_round
from scalify_core.registry import control
from scalify_core.rules.collectives import equal_scale
from scalify_core.rules.elementwise import constant_at
from scalify_core.value import Constant, Value, narrow, pack, unpack


@control("custom_jvp_call", "custom_vjp_call", "closed_call", "core_call", "composite", wide=True)
def _inline(eqn: Any, *operands: Any, evaluate: Callable) -> Any:
    """The derivatives that such a call carries are of no use here: differentiation happens before evaluation."""
    return evaluate(eqn.params["call_jaxpr" if "call_jaxpr" in eqn.params else "jaxpr"], operands)


@control("jit", wide=True)
def _jit(eqn: Any, *operands: Any, evaluate: Callable) -> Any:
    params = eqn.params
    donated = tuple(i for i, d in enumerate(params["donated_invars"]) if d)
    shardings = tuple(params["in_shardings"]), tuple(params["out_shardings"])
    fun = _jitted(
        params["jaxpr"], evaluate, params["name"], donated, params["inline"], params["keep_unused"], shardings
    )
    return unpack(fun(*pack(operands)))


@functools.lru_cache(maxsize=1024)
def _jitted(
    jaxpr: Any, evaluate: Callable, name: str, donated: tuple, inline: bool, keep_unused: bool, shardings: tuple
) -> Callable:
    """One jitted function per inner jaxpr, so that what is called often is traced once."""

    def fun(*operands: Any) -> list[Any]:
        constrained = map(_constrain, unpack(operands), shardings[0])
        return pack(map(_constrain, evaluate(jaxpr, list(constrained)), shardings[1]))

    fun.__name__ = name
    return jax.jit(fun, donate_argnums=donated, inline=inline, keep_unused=keep_unused)


def _constrain(x: Any, sharding: Any) -> Any:
    if not isinstance(sharding, jax.sharding.Sharding):
        return x
    if isinstance(x, Value):
        return dataclasses.replace(x, data=lax.with_sharding_constraint(x.data, sharding))
    return lax.with_sharding_constraint(x, sharding)


@control("remat2")
def _remat(eqn: Any, *operands: Any, evaluate: Callable) -> Any:
    packed = pack(operands)
    traced = _inner(eqn.params["jaxpr"], evaluate).trace(*packed)
    # Bound, not called through jax.checkpoint: a differentiated body keeps its barrier against common subexpressions.
    jaxpr = partial_eval.convert_constvars_jaxpr(traced.jaxpr)
    out = eqn.primitive.bind(*traced.jaxpr.consts, *jax.tree.leaves(packed), **{**eqn.params, "jaxpr": jaxpr})
    return unpack(jax.tree.unflatten(jax.tree.structure(traced.out_info), out))


@functools.lru_cache(maxsize=1024)
def _inner(jaxpr: Any, evaluate: Callable) -> Any:
    return jax.jit(lambda *operands: pack(_run(jaxpr, evaluate, unpack(operands))))


@control("cond")
def _cond(eqn: Any, index: Any, *operands: Any, evaluate: Callable) -> Any:
    branches = [functools.partial(_run, branch, evaluate) for branch in eqn.params["branches"]]
    outs = [_shape_of(branch, operands) for branch in branches]
    forms = [_common_form(alternatives) for alternatives in zip(*outs, strict=True)]

    def formed(branch: Callable) -> Callable:
        return lambda *xs: pack(map(_to_form, branch(unpack(xs)), forms))

    return unpack(lax.switch(index, [formed(branch) for branch in branches], *pack(operands)))


@control("scan")
def _scan(eqn: Any, *operands: Any, evaluate: Callable) -> Any:
    params = eqn.params
    length, body = params["length"], functools.partial(_run, params["jaxpr"], evaluate)
    consts, init, xs = (list(part) for part in params["ft_in"].update(operands).unpack())
    sliced, whole = zip(*map(_slices, xs), strict=True) if xs else ((), ())

    def step(carry: list, slices: Any) -> list:
        return body([*consts, *carry, *map(_of_slice, slices, whole)])

    def turn(carry: list) -> list:
        return _shape_of(lambda c: step(c, jax.tree.map(lambda x: x[0], sliced))[: len(init)], carry)

    forms = _carry_forms(turn, init, length)

    def formed(carry: Any, slices: Any) -> tuple[Any, Any]:
        out = step(unpack(carry), slices)
        return pack(map(_next_carry, out[: len(init)], forms)), pack(out[len(init) :])

    carry, ys = lax.scan(
        formed,
        pack(map(_to_form, init, forms)),
        sliced,
        length,
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*unpack(carry), *(_stacked(y, length) for y in ys)]


@control("while")
def _while(eqn: Any, *operands: Any, evaluate: Callable) -> Any:
    params = eqn.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts, init = operands[:n_cond], operands[n_cond : n_cond + n_body], operands[n_cond + n_body :]

    def body(carry: Any) -> list:
        return _run(params["body_jaxpr"], evaluate, [*body_consts, *carry])

    def keep_on(carry: Any) -> jax.Array:
        return _run(params["cond_jaxpr"], evaluate, [*cond_consts, *unpack(carry)])[0]

    forms = _carry_forms(lambda carry: _shape_of(body, carry), init, None)
    return unpack(
        lax.while_loop(
            keep_on,
            lambda carry: pack(map(_next_carry, body(unpack(carry)), forms)),
            pack(map(_to_form, init, forms)),
        )
    )


@control("shard_map")
def _shard_map(eqn: Any, *operands: Any, evaluate: Callable) -> Any:
    params = eqn.params
    axes = tuple(params["newly_manual_axes"])
    packed = pack(operands)
    specs = [_specs(x, spec) for x, spec in zip(packed, params["in_specs"], strict=True)]
    mapped = functools.partial(
        jax.shard_map,
        mesh=params["mesh"],
        in_specs=tuple(specs),
        axis_names=set(axes),
        check_vma=params["check_vma"],
    )
    shapes: list[Any] = []

    def body(*xs: Any) -> list:
        out = _run(params["jaxpr"], evaluate, unpack(xs))
        return pack(equal_scale(x, axes) if isinstance(x, Value) else x for x in out)

    def look(*xs: Any) -> list:
        shapes[:] = jax.eval_shape(body, *xs)
        return []

    jax.eval_shape(mapped(look, out_specs=[]), *packed)
    out_specs = [_specs(x, spec) for x, spec in zip(shapes, params["out_specs"], strict=True)]
    return unpack(mapped(body, out_specs=out_specs)(*packed))


def _specs(x: Any, spec: Any) -> Any:
    """The data is split as the logical array was; a scale with it, along the axes that it differs along."""
    if isinstance(x, Value):
        dynamic, excess = (None if s is None else _spec_of_scale(s, spec) for s in (x.dynamic, x.excess))
        return dataclasses.replace(x, data=spec, dynamic=dynamic, excess=excess)
    return x if isinstance(x, Constant) else spec


def _spec_of_scale(scale: Any, spec: Any) -> Any:
    entries = (*spec, *(None,) * (scale.ndim - len(spec)))[: scale.ndim]
    return jax.sharding.PartitionSpec(*(e if n > 1 else None for e, n in zip(entries, scale.shape, strict=True)))


def _run(jaxpr: Any, evaluate: Callable, operands: Any) -> list[Any]:
    """Evaluate, the results rounded to their formats, with data and scale alone."""
    out = evaluate(jaxpr, list(operands))
    return [dataclasses.replace(narrow(x), excess=None) if isinstance(x, Value) else x for x in out]


def _shape_of(fun: Callable, operands: Any) -> list[Any]:
    """The results of `fun` with their scales, of which the static ones are known, but without data."""
    return unpack(jax.eval_shape(lambda xs: pack(fun(unpack(xs))), pack(operands)))


@dataclasses.dataclass(frozen=True)
class _Form:
    """What the alternatives of a branch, or the turns of a loop, have in common; scale None: dynamic."""

    scale: float | None
    rho: float
    dtype: Any


def _form(x: Any) -> _Form | None:
    """The form of a Value; None for what is plain."""
    return _Form(x.scale if v.is_static(x.scale) else None, x.rho, x.dtype) if isinstance(x, Value) else None


def _common_form(alternatives: tuple) -> _Form | None:
    """For the branches of a cond. Zeros take any scale, other constants have their own, other plain arrays scale 1.

    Where the scales are far apart, each branch brings its own: at the largest, the others' data would underflow.
    """
    values = [x for x in alternatives if isinstance(x, Value)]
    if not values:
        return None
    dtype = v.result_dtype(*values)
    values += [v.lift(x, dtype) for x in alternatives if not isinstance(x, Value) and not _is_any_scale(x)]
    if not v.near([x.scale for x in values]):
        return _Form(None, 1.0, dtype)
    return _Form(max(x.scale for x in values), max(x.rho for x in values), dtype)


def _is_any_scale(x: Any) -> bool:
    constant = v.uniform(x)
    return constant is not None and (constant == 0 or not math.isfinite(constant))


def _to_form(x: Any, form: _Form | None) -> Any:
    """`x` at the scale and in the format of a form; with a dynamic scale, the one it has."""
    if form is None:
        return jnp.asarray(v.materialise(x))
    if not isinstance(x, Value):
        if v.uniform(x) is not None and form.scale is not None:
            return v.value(constant_at(x, form.scale, form.dtype, True), form.scale, form.rho, form.dtype)
        x = v.lift(x, form.dtype)
    x = v.scalar_scale(x)
    if form.scale is None:
        scale = np.float32(x.scale) if v.is_static(x.scale) else x.scale
        return v.value(v.saturating_cast(x.data, form.dtype), jnp.asarray(scale), form.rho, form.dtype)
    data = x.data if v.same_scale(x.scale, form.scale) else v.wide_at(x, form.scale)
    return v.value(v.saturating_cast(data, form.dtype), form.scale, form.rho, form.dtype)


def _next_carry(x: Any, form: _Form | None) -> Any:
    """A carry at the end of a turn. A run-time scale is measured: what the rules expect would multiply up."""
    if form is not None and form.scale is None and isinstance(x, Value):
        x = v.rescaled_by_rms(x)
    return _to_form(x, form)


def _carry_forms(turn: Callable, init: Any, length: int | None) -> list[_Form | None]:
    """The loop-invariant forms of a carry; `turn` gives the shapes of the carry after one turn of the loop.

    A carry that grows by adding up, by sqrt(length) in all, is given a scale in the middle of its way. Where the
    scale changes by an unknown amount, because the length is unknown or the change is dynamic, it is carried along.
    """
    forms = [_form(x) for x in init]
    out = turn(init)
    for i, (x, y) in enumerate(zip(init, out, strict=True)):
        if forms[i] is None and isinstance(y, Value):
            # Zeros have any scale; another plain array has its own, or 1.
            forms[i] = _form(y) if v.uniform(x) == 0 else _form(v.lift(x, y.dtype))
    if all(_settles(form, y) for form, y in zip(forms, out, strict=True)) and not any(
        isinstance(y, Value) and not isinstance(x, Value) for x, y in zip(init, out, strict=True)
    ):
        return forms
    out = turn(list(map(_to_form, init, forms)))
    return [form if _settles(form, y) else _widened(form, y, length) for form, y in zip(forms, out, strict=True)]


def _settles(form: _Form | None, y: Any) -> bool:
    """Whether a carry of this form comes out of a turn of the loop in the same form, and no larger."""
    if form is None or not isinstance(y, Value):
        return True
    if form.scale is None:
        return True
    return v.is_static(y.scale) and y.scale == form.scale and y.rho <= 1.1 * form.rho


def _widened(form: _Form | None, y: Value, length: int | None) -> _Form:
    assert form is not None, "the others settle"
    assert form.scale is not None, "the others settle"
    if length is None or not v.is_static(y.scale):
        return _Form(None, 1.0, form.dtype)
    scale = pow2_round(max(form.scale * form.rho, y.scale * y.rho) * max(length, 1) ** 0.25)
    return _Form(scale, 1.0, form.dtype)


def _slices(x: Any) -> tuple[Any, Any]:
    """A scanned operand as what is cut along the leading axis (data, scales that run along it), and the whole."""
    if not isinstance(x, Value):
        return (v.materialise(x), None), None
    if v.is_static(x.scale) or x.scale.ndim == 0:
        return (x.data, None), x
    if x.scale.shape[0] == 1:
        scale = x.scale[0]
        return (x.data, None), v.value(x.data, scale.reshape(()) if scale.size == 1 else scale, x.rho, x.dtype)
    return (x.data, x.scale), x


def _of_slice(pieces: Any, whole: Any) -> Any:
    data, scale = pieces
    if whole is None:
        return data
    if scale is None:
        scale = whole.scale
    elif scale.size == 1:
        scale = scale.reshape(())
    return v.value(data, scale, whole.rho, whole.dtype)


def _stacked(y: Any, length: int) -> Any:
    """A stacked result: a constant is repeated, a scale per turn stands along the leading axis."""
    if isinstance(y, Constant):
        (y,) = unpack([y])
        return np.broadcast_to(y[(0,) * y.ndim], (length, *y.shape))
    if isinstance(y, Value) and not v.is_static(y.scale):
        ones = (1,) * (y.data.ndim - 1)
        scale = y.scale.reshape((length, *ones)) if y.scale.ndim == 1 else y.scale
        return dataclasses.replace(y, dynamic=scale)
    return y
