"""Calls, branches, meshes, and bodies of loops: the rules of inner equations apply.

Structure, names and donation are preserved. A value enters a traced function as a
pytree whose static scale, expected RMS and format are part of its structure. So JAX's
own transformations carry them, and static scales stay static inside.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import partial_eval

from scalify_core.interpreter.registry import control
from scalify_core.interpreter.rules.carries import common_form, to_form, wide_form
from scalify_core.interpreter.rules.collectives import equal_scale
from scalify_core.interpreter.value import (
    Constant,
    Value,
    narrow,
    pack,
    typed_as,
    unpack,
)
from scalify_core.numerics.formats import materialize
from scalify_core.numerics.jaxprs import INLINED, agreeing, inner_jaxpr, per_jaxpr


@control(*INLINED, wide=True)
def _inline(eqn: Any, *operands: Any, evaluate: Any) -> Any:
    """Evaluate the jaxpr of a call that only carries rules of transformations.

    Transformations happen before evaluation, so these rules are not needed.
    """
    return evaluate(inner_jaxpr(eqn), operands)


@control("jit", wide=True)
def _jit(eqn: Any, *operands: Any, evaluate: Any) -> Any:
    params = eqn.params
    # A step's program is to reuse the buffers of its state, and profiles are to show
    # its names, as without `scalify`.
    donated = tuple(i for i, d in enumerate(params["donated_invars"]) if d)
    shardings = tuple(params["in_shardings"]), tuple(params["out_shardings"])
    flags = params["name"], donated, params["inline"], params["keep_unused"]
    # Constants enter as structure: as arrays they would count as scale 1 inside.
    packed = pack(operands, _made_floats(params["jaxpr"]))
    out = unpack(_jitted(params["jaxpr"], evaluate, *flags, shardings)(*packed))
    return [operands[x.number] if isinstance(x, _Argument) else x for x in out]


@per_jaxpr
def _made_floats(jaxpr: Any) -> frozenset[int]:
    """Return the positions of arguments that become floats inside.

    A Python integer among them is a constant, as the 0 of `jnp.where(mask, x, 0)`.
    Others, such as indices, are arrays: a constant is one trace for each number.
    """
    made = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "jit":
            made |= {id(eqn.invars[i]) for i in _made_floats(eqn.params["jaxpr"])}
        elif eqn.primitive.name == "convert_element_type" and jnp.issubdtype(
            eqn.params["new_dtype"], jnp.floating
        ):
            made.add(id(eqn.invars[0]))
    return frozenset(i for i, x in enumerate(jaxpr.invars) if id(x) in made)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Argument:
    """A result of a call that is an argument of it, of this number."""

    number: int


@per_jaxpr
def _jitted(
    jaxpr: Any,
    evaluate: Any,
    name: str,
    donated: tuple,
    inline: bool,
    keep_unused: bool,
    shardings: tuple,
) -> Callable:
    """Return the jitted function of an inner jaxpr, one for each jaxpr.

    A jaxpr that is called often is then traced once.
    """
    jaxpr_ref = weakref.ref(jaxpr)  # freed with its program

    def fun(*operands: Any) -> list[Any]:
        args = list(map(_constrain, unpack(operands), shardings[0]))
        # An argument that comes back is that argument: no copy, and no new scale. A
        # donated one of an eager call is deleted.
        numbers = {id(x): i for i, x in enumerate(args) if i not in donated}
        out = map(_constrain, evaluate(jaxpr_ref(), args), shardings[1])
        return [
            _Argument(numbers[id(x)]) if id(x) in numbers else y
            for x, y in ((x, *pack([x])) for x in out)
        ]

    # The name of a call in profiles and in the HLO is the user's.
    fun.__name__ = name
    return jax.jit(fun, donate_argnums=donated, inline=inline, keep_unused=keep_unused)


def _constrain(x: Any, sharding: Any) -> Any:
    if not isinstance(sharding, jax.sharding.Sharding):
        return x
    if isinstance(x, Value):
        # The data is split as the logical array was. A scale has other axes, or none.
        return dataclasses.replace(x, data=_constrain(x.data, sharding))
    return lax.with_sharding_constraint(x, sharding)


@control("remat2")
def _remat(eqn: Any, *operands: Any, evaluate: Any) -> Any:
    # `explain` and debuggers want values, which a traced block has not.
    if jax.config.jax_disable_jit:
        return run(eqn.params["jaxpr"], evaluate, operands)
    packed = pack(operands)
    traced = traced_body(eqn.params["jaxpr"], evaluate, packed)
    # Bound, not called through jax.checkpoint: a differentiated body keeps its barrier
    # against common subexpressions.
    # The primitive takes a jaxpr without constants: they become its first operands.
    jaxpr = partial_eval.convert_constvars_jaxpr(traced.jaxpr)
    out = eqn.primitive.bind(
        *traced.jaxpr.consts, *jax.tree.leaves(packed), **{**eqn.params, "jaxpr": jaxpr}
    )
    return unpack(jax.tree.unflatten(jax.tree.structure(traced.out_info), out))


@control("cond")
def _cond(eqn: Any, index: Any, *operands: Any, evaluate: Any) -> Any:
    branches = [
        functools.partial(run, branch, evaluate) for branch in eqn.params["branches"]
    ]
    # A branch does not know the scales of the others, so all are looked at before any
    # is built.
    outs = [shape_of(branch, operands) for branch in branches]
    common: Callable = common_form
    if evaluate.measures:
        common = wide_form
    forms = [common(alternatives) for alternatives in zip(*outs, strict=True)]

    def formed(branch: Callable) -> Callable:
        return lambda *xs: pack(
            typed_as(to_form(x, form), var.aval)
            for x, form, var in zip(branch(unpack(xs)), forms, eqn.outvars, strict=True)
        )

    return unpack(
        lax.switch(
            index,
            agreeing([formed(x) for x in branches], *pack(operands)),
            *pack(operands),
        )
    )


@control("shard_map")
def _shard_map(eqn: Any, *operands: Any, evaluate: Any) -> Any:
    params = eqn.params
    axes = tuple(params["newly_manual_axes"])
    packed = pack(map(_without_copies, operands))
    specs = [
        _specs(x, spec) for x, spec in zip(packed, params["in_specs"], strict=True)
    ]
    # Only the axes that this call made manual: by default shard_map takes all axes of
    # the mesh.
    mapped = functools.partial(
        jax.shard_map,
        mesh=params["mesh"],
        in_specs=tuple(specs),
        axis_names=set(axes),
        check_vma=params["check_vma"],
    )
    shapes: list[Any] = []

    def result(x: Any) -> Any:
        if isinstance(x, Value):
            # Behind shard_map a result is one array with one scale, whatever each
            # device has measured.
            return equal_scale(_without_copies(x), axes)
        # A constant has a device's shape here. Only as an array does it get the shape
        # of all devices together.
        return jnp.asarray(materialize(x))

    def body(*xs: Any) -> list:
        return pack(map(result, run(params["jaxpr"], evaluate, unpack(xs))))

    def look(*xs: Any) -> list:
        # A value is more arrays or fewer as its scale is of run time or static: specs
        # need one for each, and only a look at the body tells.
        shapes[:] = jax.eval_shape(body, *xs)
        return []

    jax.eval_shape(mapped(look, out_specs=[]), *packed)
    out_specs = [
        _specs(x, spec) for x, spec in zip(shapes, params["out_specs"], strict=True)
    ]
    return unpack(mapped(body, out_specs=out_specs)(*packed))


def _without_copies(x: Any) -> Any:
    """Return a value without copies, whose scales would need specs.

    Each device stores its own part.
    """
    if isinstance(x, Value):
        return dataclasses.replace(x, copies={})
    return x


def _specs(x: Any, spec: Any) -> Any:
    """Return the partition specs of a value's arrays.

    The data is split as the logical array was. So is its scale, along the axes that it
    differs along.
    """
    if isinstance(x, Value):
        dynamic, correction = jax.tree.map(
            lambda scale: _spec_of_scale(scale, spec), (x.dynamic, x.rms_correction)
        )
        return dataclasses.replace(
            x, data=spec, dynamic=dynamic, rms_correction=correction
        )
    if isinstance(x, Constant):
        return x
    return spec


def _spec_of_scale(scale: Any, spec: Any) -> Any:
    # A spec may be shorter than the rank; a scale has the rank of the data, or none.
    entries = (*spec, *(None,) * (scale.ndim - len(spec)))[: scale.ndim]
    return jax.sharding.PartitionSpec(
        *(e if n > 1 else None for e, n in zip(entries, scale.shape, strict=True))
    )


# The bodies of loops, branches and recomputed blocks.
# They are inner jaxprs that are evaluated once, however often a rule inspects them. To
# know the scales of its results, a rule evaluates a body before it builds the
# operation. Evaluating it anew each time would cost two to the power of the nesting
# depth.


def run(jaxpr: Any, evaluate: Any, operands: Any, carry_count: int = 0) -> list[Any]:
    """Return the results of a body, with their scales and rounded to their formats.

    Fill values and the first `carry_count` results are not rounded.
    """
    packed = pack(operands)
    # A debugger and `explain` read the body equation by equation.
    if jax.config.jax_disable_jit:
        return unpack(_packed_results(jaxpr, evaluate, carry_count, packed))
    traced = traced_body(jaxpr, evaluate, packed, carry_count)
    # Inlined: a call in a loop's body would be one more function of the lowered
    # program.
    out = jax.core.eval_jaxpr(
        traced.jaxpr, traced.jaxpr.consts, *jax.tree.leaves(packed)
    )
    return unpack(jax.tree.unflatten(jax.tree.structure(traced.out_info), out))


def traced_body(jaxpr: Any, evaluate: Any, packed: Any, carry_count: int = 0) -> Any:
    """Return the trace of an evaluated body on packed operands, to packed results."""
    return _evaluated(jaxpr, evaluate, carry_count).trace(*packed)


@per_jaxpr
def _evaluated(jaxpr: Any, evaluate: Any, carry_count: int) -> Any:
    """Return the jitted function of a body, one for each body.

    `jit` keeps its traces, one for each structure of the operands.
    """
    jaxpr_ref = weakref.ref(jaxpr)  # freed with its program

    def evaluated(*operands: Any) -> list[Any]:
        return _packed_results(jaxpr_ref(), evaluate, carry_count, operands)

    return jax.jit(evaluated)


def _packed_results(
    jaxpr: Any, evaluate: Any, carry_count: int, packed: Any
) -> list[Any]:
    out = evaluate(jaxpr, unpack(packed))
    # With measured scales all that is to be narrow is stored already.
    if not evaluate.measures:
        out = [_result(x, i < carry_count) for i, x in enumerate(out)]
    return pack(out)


def _result(x: Any, wide: bool) -> Any:
    if not isinstance(x, Value):
        return x
    if not wide and not x.is_fill_value:
        x = narrow(x)
    # A correction would be one more array of the carry, in some iterations only.
    return dataclasses.replace(x, rms_correction=None)


def shape_of(fun: Callable, operands: Any) -> list[Any]:
    """Return the results of `fun` without data; static scales are known."""
    return unpack(jax.eval_shape(lambda xs: pack(fun(unpack(xs))), pack(operands)))
