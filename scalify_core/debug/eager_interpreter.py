"""A scaled program evaluated eagerly, beside the same program in plain FP32: what
`explain` is made of.
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


class Walk:
    """One evaluation of a program."""

    def __init__(self, tolerance: float, *, measures: bool) -> None:
        self.tolerance = tolerance
        self.evaluate = evaluator.Evaluator(measures)
        self.rows: dict[tuple, Row] = {}
        # where booleans or integers first differ from plain FP32
        self.turned: str | None = None
        self._count = 0

    def now(self) -> int:
        """The number of this evaluation of an equation."""
        self._count += 1
        return self._count

    def errors(
        self, jaxpr: Any, leaves: Sequence[Any], dtypes: Sequence[np.dtype | None] = ()
    ) -> list[float]:
        """The errors of the results of a jaxpr, of arrays and ScaledArrays; `dtypes`:
        of these in plain code.
        """
        entering = [
            Tensor(
                evaluator.entering(x),
                fp32_reference.of_its_own(asarray(x)),
                UNKNOWN,
                self.now(),
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
        return [x.error for x in out if is_float(x.shadow)]

    def returned(self, x: Tensor, made: Any) -> Tensor:
        """A result as it is stored; small elements that are lost beside others count.

        Beside what it was before, not beside plain FP32: of what cancels, as the
        gradient of a key's bias, roundings are left in both, and not the same ones.
        """
        if not is_scaled_array(made):
            return x
        out = dataclasses.replace(
            x, value=made, operand_error=max(x.operand_error, x.error)
        )
        if out.row is not None:
            out.row.dtype = str(made.dtype)
        self.look(out, out.row.primitive if out.row else "")
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
        """The results of a jaxpr; `place` and `path` are those of the equation that
        calls it.
        """
        constants = (
            Tensor(registry.known(x), fp32_reference.of_its_own(x), place, 0)
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
        """The results of one equation."""
        name = eqn.primitive.name
        if not any(isinstance(x.value, Value) for x in operands):
            return self.whole(eqn, operands, jaxpr, place, path)
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
        return self.whole(eqn, operands, jaxpr, place, path)

    def inlined(
        self, eqn: Any, operands: list[Tensor], place: Place, path: tuple
    ) -> list[Tensor]:
        """The results of a call."""
        out = self.run(
            eqn.params.get(_INLINED[eqn.primitive.name], eqn.params.get("jaxpr")),
            operands,
            place,
            path,
        )
        if eqn.primitive.name == "remat2" and not self.evaluate.measures:
            out = [self.stored(x, v.narrow) for x in out]
        return out

    def whole(
        self,
        eqn: Any,
        operands: list[Tensor],
        jaxpr: Any,
        place: Place,
        path: tuple,
        walk: Callable | None = None,
    ) -> list[Tensor]:
        """The results of an equation, and their rows; `walk` evaluates its inner jaxprs
        and knows the shadows.
        """
        casts = Casts()
        with precision_warnings.watching(casts.saw):
            values = [x.value for x in operands]
            if walk is None:
                found, exact = (
                    self.evaluate.results(eqn, values, jaxpr),
                    None,
                )
            else:
                found, exact = walk(values)
        if exact is None:
            exact = self.beside(eqn, operands, place)
        scaled = [isinstance(x, Value) for x in found]
        return self.seen(eqn, operands, found, exact, casts, place, path, scaled)

    def beside(
        self, eqn: Any, operands: Sequence[Tensor], place: Place
    ) -> list[Tensor]:
        """The results of an equation in plain FP32, with what its scales inherit,
        without values.
        """
        blame = inherited(eqn, operands)
        shadows = fp32_reference.in_float32(eqn, *(x.shadow for x in operands))
        return [Tensor(None, y, place, 0, blame=blame) for y in shadows]

    def seen(
        self,
        eqn: Any,
        operands: Sequence[Tensor],
        found: Sequence[Any],
        exact: Sequence[Tensor],
        casts: Casts,
        place: Place,
        path: tuple,
        scaled: Sequence[bool],
    ) -> list[Tensor]:
        """The results `found` beside the `exact` ones, measured; those that are scaled
        have rows.
        """
        when = self.now()
        error = max(
            [
                cancelled(eqn, operands, exact[0].shadow) if exact else 0.0,
                *(x.error for x in operands),
            ]
        )
        vanished = max((x.figures.vanished for x in operands if x.figures), default=0.0)
        out = []
        for i, (x, like, var) in enumerate(zip(found, exact, eqn.outvars, strict=True)):
            if self.turned is None and (share := differing(x, like.shadow)) > 0:
                self.turned = (
                    f"{place}, {name_of(eqn)}: {share:.1%} of its elements are not"
                    " those of plain FP32"
                )
            tensor = Tensor(
                x,
                like.shadow,
                place,
                when,
                None,
                error,
                vanished,
                like.blame,
                formats=casts.formats(),
            )
            if scaled[i]:
                is_wide = x.rho == v.UNKNOWN and not measuring.is_stored(x)
                dtype = "float32" if is_wide else str(x.dtype)
                shape = tuple(var.aval.shape)
                new = Row(place, name_of(eqn), shape, dtype, NOTHING)
                tensor.row = self.rows.setdefault((*path, i), new)
                tensor.row.turns += 1
            self.look(tensor, name_of(eqn), casts.lost())
            out.append(tensor)
        return out

    def look(
        self, x: Tensor, name: str, cast: tuple[float, float, float] = (0.0, 0.0, 0.0)
    ) -> None:
        """Measures a tensor; `name`: of its equation, `cast`: what casts in there lost,
        as `watch.losses` says it.
        """
        if not is_float(x.shadow):
            return
        figures, before = measured(x, cast), sum(x.blame.values())
        x.figures = figures._replace(
            drift=figures.astray - before if figures.due else 0.0
        )
        if isinstance(x.value, Value) and x.value.rho != v.UNKNOWN:
            # What takes back some of it takes it from all: a scale that is right has
            # nothing to blame.
            part = min(max(figures.astray / before, 0.0), 1.0) if before else 1.0
            x.blame = sum_of(
                [
                    (x.blame, part),
                    ({(x.place, name): figures.astray - part * before}, 1.0),
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
        """The tensor in its format; if that rounds it, its row has the figures of what
        is left.
        """
        if not isinstance(x.value, Value):
            return x
        # What is wrong already is not made so by rounding it.
        out = dataclasses.replace(
            x, value=bring(x.value), operand_error=max(x.operand_error, x.error)
        )
        # a mask's constant saturates, and is meant to
        if out.value is not x.value and not x.value.guard:
            self.look(out, x.row.primitive if x.row else "")
        return out

    def loop(
        self,
        eqn: Any,
        operands: list[Tensor],
        jaxpr: Any,
        place: Place,
        path: tuple,
    ) -> list[Tensor]:
        """The results of control flow, of which each turn is evaluated where it has
        concrete operands.
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
                    self.look(x, name_of(eqn))
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

        return self.whole(eqn, operands, jaxpr, place, path, walk)


NOTHING = Figures(1.0, 1.0, *(0.0,) * 9)


class Casts:
    """What the casts inside of one equation lose."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, Any]] = []

    def saw(self, before: Any, after: Any) -> None:
        with precision_warnings.watching(None):
            lost, dtype = precision_warnings.losses(before, after), str(after.dtype)
            # Under a vmap of the equation, what is lost is known when it is run.
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
    """Whether a loop can be walked turn by turn.

    A batch of `while` loops, each with its own end, is a whole.
    """
    condition = eqn.params.get("cond_jaxpr")
    return eqn.params.get("length") != 0 and (
        condition is None or condition.out_avals[0].shape == ()
    )


def _is_traced() -> bool:
    """Whether what is computed now is only looked at by a transformation of JAX."""
    return isinstance(lax.full((), 0), jax.core.Tracer)
