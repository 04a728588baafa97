"""Evaluate a scaled program eagerly, beside the same program in plain FP32.

`explain` is built on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from scalify_core.array.scaled_array import asarray, is_scaled_array
from scalify_core.debug import fp32_reference
from scalify_core.debug.explanation import Figures, Row, epsilon
from scalify_core.debug.figures import (
    Tensor,
    cancelled,
    differing,
    inherited,
    is_float,
    measured,
    sum_of,
)
from scalify_core.debug.loop_iterations import TURNS
from scalify_core.interpreter import evaluator, registry
from scalify_core.interpreter import value as v
from scalify_core.interpreter.measured import policy as measuring
from scalify_core.interpreter.value import Value
from scalify_core.numerics import precision_warnings
from scalify_core.numerics.source_location import UNKNOWN, Place, name_of, place_of

_INLINED = {
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
}


class EagerInterpreter:
    """One eager evaluation of a program."""

    def __init__(self, tolerance: float, *, measures: bool) -> None:
        self.tolerance = tolerance
        self.evaluate = evaluator.Evaluator(measures)
        self.rows: dict[tuple, Row] = {}
        # The place where booleans or integers first differ from plain FP32.
        self.first_difference: str | None = None
        self._count = 0

    def _next_number(self) -> int:
        """Return the number of this evaluation of an equation."""
        self._count += 1
        return self._count

    def errors(
        self, jaxpr: Any, leaves: Sequence[Any], dtypes: Sequence[np.dtype | None] = ()
    ) -> list[float]:
        """Return the errors of the results of a jaxpr.

        Args:
            jaxpr: the program.
            leaves: its arguments, arrays and ScaledArrays.
            dtypes: the dtypes of the results in plain code.
        """
        entering = [
            Tensor(
                evaluator.entering(x),
                fp32_reference.entering(asarray(x)),
                UNKNOWN,
                self._next_number(),
            )
            for x in leaves
        ]
        out = self.run(jaxpr, entering, UNKNOWN, ())
        if self.evaluate.measures:
            values = [x.value for x in out]
            made = measuring.leaving(jaxpr, [x.value for x in entering], values, dtypes)
            out = list(map(self.returned, out, made))
        else:
            out = [self.stored(x, v.narrow) for x in out]
        return [x.error for x in out if is_float(x.reference)]

    def returned(self, x: Tensor, made: Any) -> Tensor:
        """Return a result in storage form; lost small elements count as a loss.

        They are compared with the result before it is stored. Against plain FP32, a
        result of cancelling terms (the gradient of a key's bias) is left with other
        roundings.
        """
        if not is_scaled_array(made):
            return x
        out = dataclasses.replace(
            x, value=made, operand_error=max(x.operand_error, x.error)
        )
        if out.row is not None:
            out.row.dtype = str(made.dtype)
        self.measure(out, out.row.primitive if out.row else "")
        if (
            out.row is not None
            and out.figures is not None
            and precision_warnings.beside_lost(measuring.wide(x.value), asarray(made))
            > 0
        ):
            out.row.see(out.figures, out.blame, out.when, loses=True)
        return out

    def run(
        self, jaxpr: Any, operands: Sequence[Tensor], place: Place, path: tuple
    ) -> list[Tensor]:
        """Return the results of a jaxpr.

        Args:
            jaxpr: the program.
            operands: its operands.
            place: the place of the equation that calls it.
            path: the path of that equation.
        """
        constants = (
            Tensor(registry.known(x), fp32_reference.entering(x), place, 0)
            for x in jaxpr.consts
        )
        env = dict(
            zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *operands), strict=True)
        )

        def read(atom: Any) -> Tensor:
            return (
                Tensor(atom.val, atom.val, place, 0)
                if isinstance(atom, Literal)
                else env[atom]
            )

        for eqn in evaluator.needed(jaxpr):
            at, inside = place_of(eqn, place), (*path, id(eqn))
            env |= zip(
                eqn.outvars,
                self.equation(eqn, list(map(read, eqn.invars)), jaxpr, at, inside),
                strict=True,
            )
        return list(map(read, jaxpr.outvars))

    def equation(
        self,
        eqn: Any,
        operands: list[Tensor],
        jaxpr: Any,
        place: Place,
        path: tuple,
    ) -> list[Tensor]:
        """Return the results of one equation."""
        name = eqn.primitive.name
        if not any(isinstance(x.value, Value) for x in operands):
            return self.measured_results(eqn, operands, jaxpr, place, path)
        rule = registry.rule_of(eqn)
        if not rule.wide and not self.evaluate.measures:
            operands = [self.stored(x, rule.bring) for x in operands]
        if self.evaluate.measures:
            values = [x.value for x in operands]
            measuring.store_for_products(eqn, values, jaxpr)
        if name in _INLINED:
            return self.inlined(eqn, operands, place, path)
        if name in TURNS:
            return self.loop(eqn, operands, jaxpr, place, path)
        return self.measured_results(eqn, operands, jaxpr, place, path)

    def inlined(
        self, eqn: Any, operands: list[Tensor], place: Place, path: tuple
    ) -> list[Tensor]:
        """Return the results of a call."""
        out = self.run(
            eqn.params.get(_INLINED[eqn.primitive.name], eqn.params.get("jaxpr")),
            operands,
            place,
            path,
        )
        if eqn.primitive.name == "remat2" and not self.evaluate.measures:
            out = [self.stored(x, v.narrow) for x in out]
        return out

    def measured_results(
        self,
        eqn: Any,
        operands: list[Tensor],
        jaxpr: Any,
        place: Place,
        path: tuple,
        walk: Callable | None = None,
    ) -> list[Tensor]:
        """Return the results of an equation, and record their rows.

        `walk` evaluates its inner jaxprs and returns their reference results.
        """
        casts = Casts()
        with precision_warnings.watching(casts.record):
            values = [x.value for x in operands]
            if walk is None:
                results = self.evaluate.results(eqn, values, jaxpr)
                exact = None
            else:
                results, exact = walk(values)
        if exact is None:
            exact = self.reference_results(eqn, operands, place)
        scaled = [isinstance(x, Value) for x in results]
        return self.recorded(eqn, operands, results, exact, casts, place, path, scaled)

    def reference_results(
        self, eqn: Any, operands: Sequence[Tensor], place: Place
    ) -> list[Tensor]:
        """Return the results of an equation in plain FP32, without scaled values.

        They hold the blame that their scales inherit.
        """
        blame = inherited(eqn, operands)
        references = fp32_reference.in_float32(eqn, *(x.reference for x in operands))
        return [Tensor(None, y, place, 0, blame=blame) for y in references]

    def recorded(
        self,
        eqn: Any,
        operands: Sequence[Tensor],
        results: Sequence[Any],
        exact: Sequence[Tensor],
        casts: Casts,
        place: Place,
        path: tuple,
        scaled: Sequence[bool],
    ) -> list[Tensor]:
        """Return results measured against the `exact` ones; scaled results get rows."""
        when = self._next_number()
        error = max(
            [
                cancelled(eqn, operands, exact[0].reference) if exact else 0.0,
                *(x.error for x in operands),
            ]
        )
        vanished = max((x.figures.vanished for x in operands if x.figures), default=0.0)
        out = []
        for i, (x, like, var) in enumerate(
            zip(results, exact, eqn.outvars, strict=True)
        ):
            if (
                self.first_difference is None
                and (share := differing(x, like.reference)) > 0
            ):
                self.first_difference = (
                    f"{place}, {name_of(eqn)}: {share:.1%} of its elements are not"
                    " those of plain FP32"
                )
            tensor = Tensor(
                x,
                like.reference,
                place,
                when,
                None,
                error,
                vanished,
                like.blame,
                formats=casts.formats(),
            )
            if scaled[i]:
                is_wide = x.expected_rms == v.UNKNOWN and not measuring.is_stored(x)
                dtype = "float32" if is_wide else str(x.dtype)
                shape = tuple(var.aval.shape)
                new = Row(place, name_of(eqn), shape, dtype, NOTHING)
                tensor.row = self.rows.setdefault((*path, i), new)
                tensor.row.turns += 1
            self.measure(tensor, name_of(eqn), casts.lost())
            out.append(tensor)
        return out

    def measure(
        self, x: Tensor, name: str, cast: tuple[float, float, float] = (0.0, 0.0, 0.0)
    ) -> None:
        """Measure a tensor.

        Args:
            x: the tensor.
            name: the name of its equation.
            cast: the losses of casts in the equation, see `precision_warnings.losses`.
        """
        if not is_float(x.reference):
            return
        figures, inherited_octaves = measured(x, cast), sum(x.blame.values())
        x.figures = figures._replace(
            drift=figures.astray - inherited_octaves if figures.due else 0.0
        )
        if isinstance(x.value, Value) and x.value.expected_rms != v.UNKNOWN:
            # An equation that reduces the error reduces every share of the blame: a
            # correct scale has nothing to blame.
            part = (
                min(max(figures.astray / inherited_octaves, 0.0), 1.0)
                if inherited_octaves
                else 1.0
            )
            x.blame = sum_of(
                [
                    (x.blame, part),
                    ({(x.place, name): figures.astray - part * inherited_octaves}, 1.0),
                ]
            )
        if x.row is not None:
            data = x.value.data if isinstance(x.value, Value) else x.value
            least = float(jnp.finfo(data.dtype).tiny)
            loses = figures.loses(
                self.tolerance, epsilon(x.row.dtype, *x.formats), least
            )
            x.row.see(x.figures, x.blame, x.when, loses=loses)

    def stored(self, x: Tensor, bring: Callable) -> Tensor:
        """Return the tensor in its format.

        If that rounds the tensor, its row gets the figures after rounding.
        """
        if not isinstance(x.value, Value):
            return x
        # Rounding is not to blame for an error that the tensor already has.
        out = dataclasses.replace(
            x, value=bring(x.value), operand_error=max(x.operand_error, x.error)
        )
        # The constant of a mask saturates on purpose.
        if out.value is not x.value and not x.value.is_fill_value:
            self.measure(out, x.row.primitive if x.row else "")
        return out

    def loop(
        self,
        eqn: Any,
        operands: list[Tensor],
        jaxpr: Any,
        place: Place,
        path: tuple,
    ) -> list[Tensor]:
        """Return the results of control flow.

        Each iteration is evaluated by itself where its operands are concrete.
        """
        turns = TURNS[eqn.primitive.name](eqn, operands)

        def inner(body: Any, args: Sequence[Any]) -> list[Any]:
            if _is_traced():
                return self.evaluate(body, args)
            with jax.disable_jit(False), precision_warnings.watching(None):
                known = zip(args, turns.operands(body), strict=True)
                within = [
                    dataclasses.replace(y, value=x, place=place, row=None)
                    for x, y in known
                ]
                for x in within:
                    self.measure(x, name_of(eqn))
                out = self.run(body, within, place, path)
                if not self.evaluate.measures:
                    out = [self.stored(x, v.narrow) for x in out]
                turns.done(body, out)
            return [x.value for x in out]

        inner.measures = self.evaluate.measures  # type: ignore[attr-defined]

        def walk(values: list[Any]) -> tuple[list[Any], list[Tensor] | None]:
            if not _has_turns(eqn):
                return self.evaluate.results(eqn, values, jaxpr), None
            with jax.disable_jit():
                out = self.evaluate.results(eqn, values, jaxpr, inner)
            return out, turns.results()

        return self.measured_results(eqn, operands, jaxpr, place, path, walk)


NOTHING = Figures(1.0, 1.0, *(0.0,) * 9)


class Casts:
    """The losses of the casts inside one equation."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, Any]] = []

    def record(self, unrounded: Any, rounded_values: Any) -> None:
        with precision_warnings.watching(None):
            lost, dtype = (
                precision_warnings.losses(unrounded, rounded_values),
                str(rounded_values.dtype),
            )
            # Under a vmap of the equation, losses are known only when it runs.
            jax.debug.callback(
                lambda x: self._seen.append((dtype, np.asarray(x))), lost
            )

    def formats(self) -> tuple[str, ...]:
        return tuple(dtype for dtype, _ in self._seen)

    def lost(self) -> tuple[float, float, float]:
        norm, share, saturated = (
            np.max([x for _, x in self._seen], axis=0, initial=0.0)
            if self._seen
            else (0, 0, 0)
        )
        return float(norm), float(share), float(saturated)


def _has_turns(eqn: Any) -> bool:
    """Return whether a loop can be evaluated one iteration at a time.

    A batch of `while` loops, each with its own end, cannot.
    """
    condition = eqn.params.get("cond_jaxpr")
    return eqn.params.get("length") != 0 and (
        condition is None or condition.out_avals[0].shape == ()
    )


def _is_traced() -> bool:
    """Return whether a JAX transformation is tracing the current computation."""
    return isinstance(lax.full((), 0), jax.core.Tracer)
