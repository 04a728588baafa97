"""Equations in plain FP32, the reference that a scaled program is compared with.

`ScanReference`, `WhileReference` and `CallReference` hold the FP32 operands of an
equation's inner jaxprs, of the next iteration in a loop, and collect the results. The
scaled program decides the iterations: call `operands(jaxpr)` before it evaluates an
inner jaxpr, and `done(jaxpr, out)` with the results. A tensor is any dataclass with a
field `reference`, the array of the plain program.

Deliberate roundings are left out: casts to narrower floats, FP8 products and
`cast_on_forward` return their operands' values. So the reference holds the exact
numbers, not those of some narrower program.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from scalify_core.debug.source_location import name_of
from scalify_core.interpreter import registry
from scalify_core.interpreter.composite_calls import unused_scales
from scalify_core.numerics.formats import at_least_float32
from scalify_core.numerics.jaxprs import INLINED


def in_float32(eqn: Any, *operands: Any) -> list[Any]:
    """Return the results of an equation on plain operands.

    A narrower float dtype of the equation is replaced by FP32.
    """
    if not eqn.outvars:  # nothing to compare, and the scaled program has its effect
        return []
    # The plain functions of these round by themselves.
    exact = _EXACT.get(name_of(eqn))
    if exact is not None:
        call = eqn.params["call"].replace(fun=exact)
        return jax.tree.leaves(call.tree(*map(at_least_float32, operands)))
    return list(map(at_least_float32, registry.in_float32(eqn, *operands)))


def as_reference(x: Any) -> Any:
    """Return an argument of the plain program, in FP32.

    A reference is copied, since the scaled program writes to the original.
    """
    if isinstance(x, jax.Ref):
        return jax.new_ref(x[...])
    return at_least_float32(x)


def _dot(product: Any) -> Any:
    return functools.partial(
        lax.dot_general, dimension_numbers=product.dims, precision=lax.Precision.HIGHEST
    )


def _product(lhs: Any, rhs: Any, *, product: Any) -> Any:
    return _dot(product)(lhs, rhs)


def _product_fwd(lhs: Any, rhs: Any, *, product: Any) -> tuple[Any, tuple]:
    """Return the product, and residuals as those of the plain program."""
    # The backward pass is an equation of the program, with so many operands.
    return _dot(product)(lhs, rhs), (lhs, rhs, *unused_scales(product))


def _product_bwd(residuals: tuple, gradient: Any, *, product: Any) -> tuple[Any, Any]:
    lhs, rhs, *_ = residuals
    return jax.vjp(_dot(product), lhs, rhs)[1](gradient)


_EXACT = {
    "fp8_dot_general": _product,
    "fp8_dot_general.fwd": _product_fwd,
    "fp8_dot_general.bwd": _product_bwd,
    "cast_on_forward": lambda x, **_: x,
    "cast_on_forward.fwd": lambda x, **_: (x, None),
    "cast_on_backward.bwd": lambda _, gradient, **__: (gradient,),
}


class ScanReference:
    """The reference tensors of a scan: operands of each iteration, and results."""

    def __init__(self, eqn: Any, operands: list[Any]) -> None:
        parts = eqn.params["ft_in"].update(operands).unpack()
        self.consts, self.carry, self.xs = (list(part) for part in parts)
        self.length, self.reverse = eqn.params["length"], eqn.params["reverse"]
        self.ys: list[list[Any]] = []

    def operands(self, jaxpr: Any) -> list[Any]:
        del jaxpr
        # A reverse scan, as of a backward pass, begins at the last slice.
        turn = self.length - 1 - len(self.ys) if self.reverse else len(self.ys)
        return [
            *self.consts,
            *self.carry,
            *(dataclasses.replace(x, reference=x.reference[turn]) for x in self.xs),
        ]

    def done(self, jaxpr: Any, out: list[Any]) -> None:
        del jaxpr
        n = len(self.carry)
        self.carry = out[:n]
        self.ys.append(out[n:])

    def results(self) -> list[Any] | None:
        # A JAX transformation traced the body, and no iteration was seen: the loop is
        # one equation then.
        if len(self.ys) != self.length:
            return None
        columns = zip(*(self.ys[::-1] if self.reverse else self.ys), strict=True)
        return [
            *self.carry,
            *(
                dataclasses.replace(
                    c[-1], reference=jnp.stack([y.reference for y in c])
                )
                for c in columns
            ),
        ]


class WhileReference:
    """The reference tensors of a while loop.

    It runs as many iterations as the scaled program.
    """

    def __init__(self, eqn: Any, operands: list[Any]) -> None:
        n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        self.condition = eqn.params["cond_jaxpr"]
        self.cond_consts, self.body_consts, self.carry = (
            operands[:n],
            operands[n : n + m],
            operands[n + m :],
        )

    def operands(self, jaxpr: Any) -> list[Any]:
        return [
            *(self.cond_consts if jaxpr is self.condition else self.body_consts),
            *self.carry,
        ]

    def done(self, jaxpr: Any, out: list[Any]) -> None:
        # The condition's result is a boolean, and no carry.
        if jaxpr is not self.condition:
            self.carry = out

    def results(self) -> list[Any] | None:
        return self.carry


class CallReference:
    """The reference tensors of a call, whose body is evaluated once."""

    def __init__(self, operands: list[Any]) -> None:
        self.inputs = operands
        self.out: Any = None

    def operands(self, jaxpr: Any) -> list[Any]:
        del jaxpr
        return self.inputs

    def done(self, jaxpr: Any, out: list[Any]) -> None:
        del jaxpr
        self.out = out

    def results(self) -> list[Any] | None:
        return self.out


# Calls whose results the evaluator hands on as they are; under propagated scales it
# rounds those of other bodies.
INLINE = INLINED | {"jit"}
CALLS = INLINE | {"remat2"}
LOOPS: dict[str, Any] = {
    "scan": ScanReference,
    "while": WhileReference,
    # The index of the branch is the scaled program's: references follow it.
    "cond": lambda eqn, operands: CallReference(operands[1:]),
}
