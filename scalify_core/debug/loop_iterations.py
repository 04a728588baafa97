"""The FP32 references of control flow: the operands of each iteration, and the results.

A tensor is any dataclass with a field `reference`, the array of the plain program. The
scaled program decides the iterations: call `operands(jaxpr)` before it evaluates an
inner jaxpr, and `done(jaxpr, out)` with the results.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp


class Scan:
    """The reference tensors of a scan: operands of each iteration, and results."""

    def __init__(self, eqn: Any, operands: list[Any]) -> None:
        parts = eqn.params["ft_in"].update(operands).unpack()
        self.consts, self.carry, self.xs = (list(part) for part in parts)
        self.length, self.reverse = eqn.params["length"], eqn.params["reverse"]
        self.ys: list[list[Any]] = []

    def operands(self, jaxpr: Any) -> list[Any]:
        del jaxpr
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


class While:
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
        if jaxpr is not self.condition:
            self.carry = out

    def results(self) -> list[Any] | None:
        return self.carry


class Cond:
    """The reference tensors of the branch that is taken."""

    def __init__(self, eqn: Any, operands: list[Any]) -> None:
        del eqn
        self.inputs = operands[1:]
        self.out: list[Any] | None = None

    def operands(self, jaxpr: Any) -> list[Any]:
        del jaxpr
        return self.inputs

    def done(self, jaxpr: Any, out: list[Any]) -> None:
        del jaxpr
        self.out = out

    def results(self) -> list[Any] | None:
        return self.out


TURNS: dict[str, Any] = {"scan": Scan, "while": While, "cond": Cond}
