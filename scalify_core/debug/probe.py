"""Figures of an array and its gradient inside a program, without changing its results.

A probe is the identity. The gradient of its second argument, `zeros(SLOT)`, holds
figures: one row for the array, one for the array's gradient. So figures come out of any
differentiated function as gradients do, through scan (stacked over its steps), remat
and `scalify`:

def loss(params, slot): h = probe(layer(params), slot) ... grads, figures =
jax.grad(loss, (0, 1))(params, jnp.zeros(SLOT))

Under `scalify` they are figures of the data, in its format, and of the scale. Use a
slot in one probe only: the figures of two would be added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from scalify_core.array.scaled_array import with_scale
from scalify_core.debug.stats import summarize
from scalify_core.interpreter import value as v
from scalify_core.interpreter.measured import quantize
from scalify_core.interpreter.measured.policy import composite_rule as measured_rule
from scalify_core.interpreter.measured.policy import like, wide
from scalify_core.interpreter.registry import composite_rule
from scalify_core.interpreter.value import Value
from scalify_core.numerics import storage
from scalify_core.numerics.formats import FloatFormat
from scalify_core.ops.composite import composite

FIGURES = ("exponent", "rms", "underflow", "saturated")  # of `stats.Summary`
SLOT = (2, len(FIGURES))  # of the array and of its gradient


def figures(
    x: Any, fmt: FloatFormat | None = None, exact: Any = None, *, zeros: bool = True
) -> jax.Array:
    """Return FIGURES of an array, or of a ScaledArray with one scale: FP32 [4].

    The other arguments are those of `summarize`.
    """
    summary = summarize(x, fmt=fmt, exact=exact, zeros=zeros)
    return jnp.stack([getattr(summary, name).astype(jnp.float32) for name in FIGURES])


def probe(
    x: jax.Array,
    slot: jax.Array,
    *,
    forward: FloatFormat | None = None,
    backward: FloatFormat | None = None,
) -> jax.Array:
    """Return `x`; the gradient of `slot` becomes the figures of `x` and its gradient.

    Args:
        x: float array; a ScaledArray under `scalify`.
        slot: FP32 zeros of the shape SLOT; they are not read.
        forward: the format that `x` is cast to next, or None; see `summarize`.
        backward: the same for the gradient of `x`.
    """
    return _probe(x, slot, forward=forward, backward=backward)


@composite(name="probe")
def _probe(
    x: jax.Array,
    slot: jax.Array,
    *,
    forward: FloatFormat | None,
    backward: FloatFormat | None,
) -> jax.Array:
    del slot, forward, backward
    return x


def fwd(
    x: Any, slot: Any, *, forward: FloatFormat | None, backward: FloatFormat | None
) -> tuple[Any, jax.Array]:
    """Return the array, and its figures as the residual."""
    del slot, backward
    return x, figures(x, forward)


def bwd(
    seen: jax.Array, gradient: Any, *, forward: Any, backward: FloatFormat | None
) -> tuple[Any, jax.Array]:
    """Return the gradient, and the slot's: figures of the array and of the gradient."""
    del forward
    return gradient, jnp.stack([seen, figures(gradient, backward)])


_probe.defvjp(fwd, bwd)


def _stored(x: Any) -> Any:
    """Return the array in storage form, rounded to its format.

    The program continues with the unrounded array.
    """
    if not isinstance(x, Value):
        return storage.materialise(x)
    x = v.scalar_scale(v.narrow(x))
    return with_scale(x.data, x.scale)


@composite_rule("probe", wide=True, lazy=True, passes=(0, 0))
def _(call: Any, x: Any, slot: Any) -> Any:
    return x


@composite_rule("probe.fwd", wide=True, lazy=True, passes=(0, 0))
def _(call: Any, x: Any, slot: Any) -> tuple[Any, jax.Array]:
    return x, fwd(_stored(x), slot, **dict(call.static))[1]


@composite_rule("probe.bwd", wide=True, lazy=True, passes=(1, 0))
def _(call: Any, seen: jax.Array, gradient: Any) -> tuple[Any, jax.Array]:
    return gradient, bwd(seen, _stored(gradient), **dict(call.static))[1]


@measured_rule("probe", "probe.fwd", "probe.bwd")
def _measured_probe(call: Any, eqn: Any, *operands: Any) -> Sequence[Any]:
    """Return the array unchanged; the figures are those of its storage form."""
    number = 1 if call.name == "probe.bwd" else 0
    x = operands[number]
    data = wide(x)
    if call.name == "probe":
        return [like(x, data)]
    seen = quantize.result(data, x.dtype) if type(x) is Value else data
    rest = [wide(y) for i, y in enumerate(operands) if i != number]
    static = dict(call.static)
    if call.name == "probe.fwd":
        return [like(x, data), fwd(seen, *rest, **static)[1]]
    (forward,) = rest
    return [like(x, data), bwd(forward, seen, **static)[1]]
