"""Calls and control flow: the rules of the inner equations apply; structure, names and donation are kept.

A value crosses into a traced function as a pytree whose static scale, expected RMS and format are part of its
structure, so JAX's own transformations carry them, and static scales stay static on the other side.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import partial_eval

from scalify_core import numbering, storage
from scalify_core import scales as sc
from scalify_core import value as v
from scalify_core.formats import pow2_round
from scalify_core.registry import control, is_numbered
from scalify_core.rules.collectives import equal_scale
from scalify_core.rules.elementwise import constant_at
from scalify_core.value import Constant, Value, narrow, pack, unpack


@control("custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "closed_call", "core_call", "composite", wide=True)
def _inline(eqn: Any, *operands: Any, evaluate: Callable) -> Any:
    """What such a call carries for transformations is of no use here: they happen before evaluation."""
    return evaluate(next(eqn.params[name] for name in ("call_jaxpr", "jaxpr", "call") if name in eqn.params), operands)


@control("jit", wide=True)
def _jit(eqn: Any, *operands: Any, evaluate: Callable) -> Any:
    params = eqn.params
    donated = tuple(i for i, d in enumerate(params["donated_invars"]) if d)
    shardings = tuple(params["in_shardings"]), tuple(params["out_shardings"])
    jaxpr, first = params["jaxpr"], numbering.drawn()
    kept = params["name"], donated, params["inline"], params["keep_unused"]
    fun = _jitted(jaxpr, first if is_numbered(jaxpr) else None, evaluate, *kept, shardings)
    return unpack(numbering.take(fun(*pack(operands)), first))


@functools.lru_cache(maxsize=1024)
def _jitted(
    jaxpr: Any,
    first: int | None,
    evaluate: Callable,
    name: str,
    donated: tuple,
    inline: bool,
    keep_unused: bool,
    shardings: tuple,
) -> Callable:
    """One jitted function per inner jaxpr, so that what is called often is traced once.

    Where it draws numbers, one per jaxpr and `first` number: the products of each call have constants of their own,
    and the same in each trace of a program.
    """

    def fun(*operands: Any) -> list[Any]:
        constrained = map(_constrain, unpack(operands), shardings[0])
        return pack(map(_constrain, evaluate(jaxpr, list(constrained)), shardings[1]))

    fun.__name__ = name
    return jax.jit(numbering.counting(fun), donate_argnums=donated, inline=inline, keep_unused=keep_unused)


def _constrain(x: Any, sharding: Any) -> Any:
    if not isinstance(sharding, jax.sharding.Sharding):
        return x
    if isinstance(x, Value):
        return dataclasses.replace(x, data=lax.with_sharding_constraint(x.data, sharding))
    return lax.with_sharding_constraint(x, sharding)


@control("remat2")
def _remat(eqn: Any, *operands: Any, evaluate: Callable) -> Any:
    packed, first = pack(operands), numbering.drawn()
    traced = _inner(eqn.params["jaxpr"], first if is_numbered(eqn.params["jaxpr"]) else None, evaluate).trace(*packed)
    # Bound, not called through jax.checkpoint: a differentiated body keeps its barrier against common subexpressions.
    jaxpr = partial_eval.convert_constvars_jaxpr(traced.jaxpr)
    out = eqn.primitive.bind(*traced.jaxpr.consts, *jax.tree.leaves(packed), **{**eqn.params, "jaxpr": jaxpr})
    return unpack(numbering.take(jax.tree.unflatten(jax.tree.structure(traced.out_info), out), first))


@functools.lru_cache(maxsize=1024)
def _inner(jaxpr: Any, first: int | None, evaluate: Callable) -> Any:
    """As `_jitted`."""
    return jax.jit(numbering.counting(lambda *operands: pack(_run(jaxpr, evaluate, unpack(operands)))))


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
        return _shape_of(lambda c: step(c, jax.tree.map(_first, sliced))[: len(init)], carry)

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

    with numbering.numbers_returned():
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
    with numbering.numbers_returned():
        return unpack(jax.eval_shape(lambda xs: pack(fun(unpack(xs))), pack(operands)))


@dataclasses.dataclass(frozen=True)
class _Form:
    """What the alternatives of a branch, or the turns of a loop, have in common; scale None: dynamic."""

    scale: float | None
    rho: float
    dtype: Any


def _form(x: Any) -> _Form | None:
    """The form of a Value; None for what is plain."""
    return _Form(x.scale if sc.is_static(x.scale) else None, x.rho, x.dtype) if isinstance(x, Value) else None


def _common_form(alternatives: tuple) -> _Form | None:
    """For the branches of a cond. Zeros take any scale, other constants have their own, other plain arrays scale 1.

    Where the scales are far apart, each branch brings its own: at the largest, the others' data would underflow.
    """
    values = [x for x in alternatives if isinstance(x, Value)]
    if not values:
        return None
    dtype = v.result_dtype(*values)
    values += [v.lift(x, dtype) for x in alternatives if not isinstance(x, Value) and not _is_any_scale(x)]
    if not sc.near([x.scale for x in values]):
        return _Form(None, 1.0, dtype)
    return _Form(max(x.scale for x in values), max(x.rho for x in values), dtype)


def _is_any_scale(x: Any) -> bool:
    constant = v.uniform(x)
    return constant is not None and (constant == 0 or not math.isfinite(constant))


def _to_form(x: Any, form: _Form | None) -> Any:
    """`x` at the scale and in the format of a form; with a dynamic scale, the one it has."""
    if form is None:
        return jnp.asarray(storage.materialise(x))
    if not isinstance(x, Value):
        if v.uniform(x) is not None and form.scale is not None:
            return v.value(constant_at(x, form.scale, form.dtype, True), form.scale, form.rho, form.dtype)
        x = v.lift(x, form.dtype)
    x = v.scalar_scale(x)
    if form.scale is None:
        scale = np.float32(x.scale) if sc.is_static(x.scale) else x.scale
        return v.value(storage.saturating_cast(x.data, form.dtype), jnp.asarray(scale), form.rho, form.dtype)
    data = x.data if sc.same_scale(x.scale, form.scale) else v.wide_at(x, form.scale)
    return v.value(storage.saturating_cast(data, form.dtype), form.scale, form.rho, form.dtype)


def _next_carry(x: Any, form: _Form | None) -> Any:
    """A carry at the end of a turn. A run-time scale is measured: what the rules expect would multiply up."""
    if form is not None and form.scale is None and isinstance(x, Value):
        x = v.rescaled_by_rms(x)
    return _to_form(x, form)


def _carry_forms(turn: Callable, init: Any, length: int | None) -> list[_Form | None]:
    """The loop-invariant forms of a carry; `turn` gives the shapes of the carry after one turn of the loop.

    Two turns tell how each part of the carry grows; more are taken while parts become scaled, or scales dynamic, where
    one part is handed on to the next.
    """
    history = [list(init)]
    while True:
        before, out = history[-1], turn(history[-1])
        history.append(list(map(_after, before, out)))
        changed = any(_kind(x) != _kind(y) for x, y in zip(before, history[-1], strict=True))
        settled = all(_size(x) == _size(y) for x, y in zip(before, history[-1], strict=True))
        if not changed and (settled or len(history) > 2):
            return [_loop_form(part, length) for part in zip(*history, strict=True)]


def _after(x: Any, y: Any) -> Any:
    """A part of the carry that goes into the next turn: `y`, but what is plain stays, and a dynamic scale, too."""
    return x if not isinstance(y, Value) or _kind(x) == "dynamic" else y


def _kind(x: Any) -> str:
    if not isinstance(x, Value):
        return "plain"
    return "static" if sc.is_static(x.scale) else "dynamic"


def _size(x: Any) -> float:
    """The expected RMS that is known while tracing; 0 where there is none: of zeros, and beside a dynamic scale."""
    if isinstance(x, Value):
        return x.size if sc.is_static(x.scale) and x.scale >= sc.OF_ZEROS else 0.0
    return 0.0 if _is_any_scale(x) else abs(v.uniform(x) or 1.0)


def _loop_form(part: Sequence[Any], length: int | None) -> _Form | None:
    """The form of a part of the carry, of which `part` is what it was before, and after each of the first turns.

    A static scale in the middle of its way, if its data then stays within [1/16, 16]; else the scale is carried along.
    """
    first, last = next((x for x in part if isinstance(x, Value)), None), part[-1]
    if first is None:
        return None
    if not sc.is_static(last.scale):
        return _Form(None, last.rho if last is part[0] else 1.0, first.dtype)
    sizes = [_size(x) for x in part]
    if not any(sizes):
        return _Form(last.scale, last.rho, first.dtype)
    reached = [*filter(None, sizes), _final_size(sizes, length)]
    if max(reached) > 256 * min(reached):
        return _Form(None, 1.0, first.dtype)
    middle = math.sqrt(max(reached)) * math.sqrt(min(reached))
    scale = first.scale if sc.is_static(first.scale) and 1 / 2 <= middle / first.scale <= 2 else pow2_round(middle)
    return _Form(scale, middle / scale, first.dtype)


def _final_size(sizes: Sequence[float], length: int | None) -> float:
    """The expected RMS after all turns of a loop; `length` None: after any number of turns.

    Of the mean square, a turn keeps a share `a` and adds a constant, so its differences grow by the factor `a`: 1 where
    equal terms are added up, less where they decay, the square of the factor where the carry is multiplied.
    """
    *_, x, y, z = (0.0, *(size**2 for size in sizes))
    rest = math.inf if length is None else length - len(sizes) + 1
    if rest <= 0 or abs(z - y) <= 1e-6 * z:
        return sizes[-1]
    a = (z - y) / (y - x) if abs(y - x) > 1e-6 * y else 1.0
    if a <= 0:
        return sizes[-1]
    if abs(a - 1) < 1e-6:
        turns: float = rest
    elif a < 1:
        turns = a * (1 - a**rest) / (1 - a)
    else:
        turns = a * math.expm1(min(rest * math.log(a), 600.0)) / (a - 1)
    return math.sqrt(max(z + (z - y) * turns, 0.0))


def _slices(x: Any) -> tuple[Any, Any]:
    """A scanned operand as what is cut along the leading axis (data, scales that run along it), and the whole."""
    if not isinstance(x, Value):
        return (storage.materialise(x), None), None
    if sc.is_static(x.scale) or x.scale.ndim == 0:
        return (x.data, None), x
    if x.scale.shape[0] == 1:
        scale = x.scale[0]
        return (x.data, None), v.value(x.data, scale.reshape(()) if scale.size == 1 else scale, x.rho, x.dtype)
    return (x.data, x.scale), x


def _first(x: Any) -> Any:
    """The first slice; of an empty array, what would be one."""
    return x[0] if len(x) else lax.full_like(x, 0, shape=x.shape[1:])


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
    if isinstance(y, Value) and not sc.is_static(y.scale):
        ones = (1,) * (y.data.ndim - 1)
        scale = y.scale.reshape((length, *ones)) if y.scale.ndim == 1 else y.scale
        return dataclasses.replace(y, dynamic=scale)
    return y
