"""Loops: one form of the carry for all iterations (see `carries`).

The rules of the body's equations apply in each iteration.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scalify_core.interpreter import value as v
from scalify_core.interpreter.registry import control
from scalify_core.interpreter.rules.carries import (
    carry_forms,
    chosen,
    next_carry,
    to_form,
    wide_carry_forms,
    wide_form,
)
from scalify_core.interpreter.rules.control import run, shape_of
from scalify_core.interpreter.value import Constant, Value, pack, unpack
from scalify_core.numerics import formats, jaxprs
from scalify_core.numerics import scales as sc


@control("scan")
def _scan(eqn: Any, *operands: Any, evaluate: Any) -> Any:
    params = eqn.params
    length, jaxpr, backwards = params["length"], params["jaxpr"], params["reverse"]
    consts, init, xs = (
        list(part) for part in params["ft_in"].update(operands).unpack()
    )
    # Scales are multiplied out before the loop, not in every iteration.
    consts = unpack(pack(consts))
    sliced = list(map(_slices, xs))

    def step(carry: Sequence[Any], slices: Any) -> list:
        return run(
            jaxpr,
            evaluate,
            [*consts, *carry, *map(_of_slice, slices, xs)],
            len(init),
        )

    # For its shape and its type on a mesh alone: steps are looked at before the loop is
    # built.
    first = jax.tree.map(_first, sliced)

    def carry_after(carry: Sequence[Any]) -> list:
        return step(carry, first)[: len(init)]

    avals = jaxpr.out_avals[: len(init)]
    carry, forms = _initial_carry(carry_after, init, length, evaluate, avals)

    def packed_step(carry: Any, slices: Any) -> tuple[Any, Any]:
        out = step(unpack(carry), slices)
        # Stored inside the body: with residuals that leave it in FP32 llama_scan of the
        # zoo takes 3.02 times plain FP16's temporaries, with these 1.04.
        ys = evaluate.stacked(jaxpr, out[len(init) :])
        return _carried(map(next_carry, out[: len(init)], forms), avals), pack(ys)

    # A measured scale varies over a mesh where the scale before the loop did not.
    as_carry, carry = jaxprs.agreeing_carry(
        lambda carry: packed_step(carry, first)[0], carry
    )

    def body(carry: Any, slices: Any) -> tuple[Any, Any]:
        carry, ys = packed_step(carry, slices)
        return as_carry(carry), ys

    # JAX takes a symbolic length from the slices only.
    given = None if jax.tree.leaves(sliced) else length
    carry, ys = lax.scan(
        body, carry, sliced, given, reverse=backwards, unroll=params["unroll"]
    )
    return [*unpack(carry), *(_stacked(y, length) for y in ys)]


@control("while")
def _while(eqn: Any, *operands: Any, evaluate: Any) -> Any:
    """Evaluate a while loop.

    Where the predicate is a batch, elements for which it is false do not change, as in
    JAX.
    """
    params = eqn.params
    n_cond, n_body, jaxpr = (
        params["cond_nconsts"],
        params["body_nconsts"],
        jaxprs.needed(params["body_jaxpr"]),  # JAX looks into scans, not here
    )
    consts, init = (
        unpack(pack(operands[: n_cond + n_body])),
        list(operands[n_cond + n_body :]),
    )
    # JAX selects by the batch only where it lowers its own loop; this one is traced
    # anew, and takes one boolean.
    is_batch = bool(params["cond_jaxpr"].out_avals[0].shape)

    def predicate(carry: Sequence[Any]) -> Any:
        return run(params["cond_jaxpr"], evaluate, [*consts[:n_cond], *carry])[0]

    def carry_after(carry: Sequence[Any]) -> list:
        new = run(jaxpr, evaluate, [*consts[n_cond:], *carry], len(init))
        if not is_batch:
            return new
        which = predicate(carry)
        return [chosen(which, x, old) for x, old in zip(new, carry, strict=True)]

    carry, forms = _initial_carry(carry_after, init, None, evaluate, jaxpr.out_avals)

    def packed_step(carry: Any) -> Any:
        out = carry_after(unpack(carry))
        return _carried(map(next_carry, out, forms), jaxpr.out_avals)

    as_carry, carry = jaxprs.agreeing_carry(packed_step, carry)

    def condition(carry: Any) -> Any:
        goes_on = predicate(unpack(carry))
        if is_batch:
            return jnp.any(goes_on)
        return goes_on

    def body(carry: Any) -> Any:
        return as_carry(packed_step(carry))

    return unpack(lax.while_loop(condition, body, carry))


def _initial_carry(
    carry_after: Callable,
    init: Sequence[Any],
    length: int | None,
    evaluate: Any,
    avals: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """Return the packed carry before the first iteration, and its parts' forms."""
    if evaluate.measures:
        init = [to_form(x, wide_form([x])) for x in init]
        # FP32 at scale 1 in every iteration: a narrow carry would be measured and
        # rounded in each.
        forms = wide_carry_forms(lambda carry: shape_of(carry_after, carry), init)
    else:
        # By shapes alone: a look costs a trace of the body, and no operation in the
        # program.
        forms = carry_forms(lambda carry: shape_of(carry_after, carry), init, length)
    return _carried(map(to_form, init, forms), avals), forms


def _carried(parts: Iterable[Any], avals: Sequence[Any]) -> list[Any]:
    """Return a packed carry, split over a mesh as the plain program splits it."""
    return pack(map(v.typed_as, parts, avals))


def _slices(x: Any) -> tuple[Any, Any, dict]:
    """Return the arrays of a scanned operand that are sliced.

    They are the data of it and of its copies, and scales that differ along the leading
    axis.
    """
    if not isinstance(x, Value):
        # `lax.scan` wants arrays: a broadcast constant becomes one without its elements
        # in the program.
        return formats.materialize(x), None, {}
    # What was stored outside is sliced with it, so an iteration stores nothing anew.
    copies = {key: _slices(copy) for key, copy in x.copies.items()}
    scale = x.scale
    # One scale for all slices stays outside the loop, as any constant of the body.
    if sc.is_static(scale) or scale.shape[:1] in ((), (1,)):
        scale = None
    return x.data, scale, copies


def _first(x: Any) -> Any:
    """Return the first slice, or zeros for an empty array."""
    if x.shape[0] == 0:
        # A scan of length 0 has results, too, and their forms come from a look at its
        # body.
        return lax.full_like(x, 0, shape=x.shape[1:])
    return lax.index_in_dim(x, 0, keepdims=False)


def _of_slice(pieces: Any, stack: Any) -> Any:
    data, scale, copies = pieces
    if not isinstance(stack, Value):
        return data
    if scale is None:
        scale = stack.scale
        if np.size(scale) > 1:
            # Its leading axis, of size 1, is that of the slices.
            scale = scale[0]
    sliced = {
        (name, parts[1:]): _of_slice(copies[name, parts], copy)
        for (name, parts), copy in stack.copies.items()
    }
    out = stack.with_scale(data, _scalar(scale))
    return dataclasses.replace(out, copies=sliced)


def _scalar(scale: Any) -> Any:
    """Return a scale of one element as a scalar."""
    if isinstance(scale, float) or scale.size > 1:
        return scale
    # Rules read a scalar as the scale of all elements; of a larger scale they take the
    # maximum.
    return scale.reshape(())


def _stacked(y: Any, length: int) -> Any:
    """Return a stacked result.

    A constant is repeated; the scales of iterations stand along the leading axis.
    """
    if isinstance(y, Constant):
        (y,) = unpack([y])
        # The body's constant is known outside, too, so a stack of zeros sets no scale.
        return np.broadcast_to(y[(0,) * y.ndim], (length, *y.shape))
    if not isinstance(y, Value):
        return y
    copies = {
        (name, (length, *parts)): _stacked(copy, length)
        for (name, parts), copy in y.copies.items()
    }
    y = dataclasses.replace(y, copies=copies)
    if sc.is_static(y.scale) or y.scale.ndim > 1:
        return y
    # A layer of a stack keeps its own scale: gradients of layers may differ by more
    # than a format's range.
    scale = y.scale.reshape((length,) + (1,) * (y.data.ndim - 1))
    return dataclasses.replace(y, dynamic=scale)
