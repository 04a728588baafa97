"""As `walk`, of a program whose scales are measured: FP32 between stores, a measured
power of two at each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from scalify_core import shadow, watch
from scalify_core.array import ScaledArray, asarray
from scalify_core.figures import Tensor, is_float
from scalify_core.measured import control, masks, roots, store
from scalify_core.measured.evaluate import (
    Operands,
    entering,
    formats_of_results,
    is_as_it_is,
    kinds,
)
from scalify_core.measured.plan import (
    Plan,
    Step,
    inner_jaxpr,
    inner_plan,
    plan_of,
    scan_parts,
    while_carry,
)
from scalify_core.places import UNKNOWN, Place, place_of
from scalify_core.turns import TURNS
from scalify_core.walk import Casts, Walk

_INLINED = {
    "jit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat2",
}


class MeasuredWalk(Walk):
    """One evaluation of a program by its plan."""

    def errors(
        self, jaxpr: Any, leaves: Sequence[Any], dtypes: Sequence[np.dtype | None] = ()
    ) -> list[float]:
        """The errors of the results of a jaxpr, of arrays and ScaledArrays; `dtypes`:
        of these in plain code.
        """
        args = [
            Tensor(entering(x), shadow.of_its_own(asarray(x)), UNKNOWN, self.now())
            for x in leaves
        ]
        formats = tuple(
            np.dtype(x.value.dtype) if type(x.value) is ScaledArray else None
            for x in args
        )
        plan = plan_of(jaxpr, formats)
        out = self.run_plan(jaxpr, plan, args, UNKNOWN, ())
        large = masks.of_arguments([x.value for x in args], formats)
        given, constants = {id(x.value) for x in args}, masks.constants_in(jaxpr, large)
        nonzero, _ = roots.taken_of(jaxpr, (False,) * len(out))
        results = [
            (
                x
                if fmt is None or is_as_it_is(x.value, fmt, given)
                else self.returned(x, store.result(x.value, fmt, large, nonzero=keep))
            )
            for x, fmt, large, keep in zip(
                out,
                formats_of_results(plan.out_formats, dtypes),
                constants,
                nonzero,
                strict=True,
            )
        ]
        return [x.error for x in results if is_float(x.shadow)]

    def run_plan(
        self, jaxpr: Any, plan: Plan, args: Sequence[Tensor], place: Place, path: tuple
    ) -> list[Tensor]:
        """The results of a jaxpr by its plan; `place` and `path` are those of the
        equation that calls it.
        """
        values = Operands(jaxpr, [x.value for x in args])
        constants = (Tensor(x, shadow.of_its_own(x), place, 0) for x in jaxpr.consts)
        env = dict(
            zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *args), strict=True)
        )

        def read(atom: Any) -> Tensor:
            return (
                Tensor(atom.val, atom.val, place, 0)
                if isinstance(atom, Literal)
                else env[atom]
            )

        for step in plan.steps:
            at, inside = place_of(step.eqn, place), (*path, id(step.eqn))
            out = self.step(step, values, list(map(read, step.eqn.invars)), at, inside)
            values.write(step, [x.value for x in out])
            stores = map(values.copy, step.eqn.outvars, step.store)
            made = [
                x.value if stored is None else stored
                for x, stored in zip(out, stores, strict=True)
            ]
            env |= zip(step.eqn.outvars, map(self.kept, out, made), strict=True)
        return list(map(read, jaxpr.outvars))

    def kept(self, x: Tensor, value: Any) -> Tensor:
        """A result as it is stored; if that rounds it, its row has the figures of what
        is left.
        """
        if value is x.value:
            return x
        out = dataclasses.replace(
            x, value=value, operand_error=max(x.operand_error, x.error)
        )
        if out.row is not None:
            out.row.dtype = str(value.dtype)
        self.look(out, out.row.primitive if out.row else "")
        return out

    def returned(self, x: Tensor, value: Any) -> Tensor:
        """A result of the function as it is stored; small elements that are lost beside
        others count, too.

        Beside what it was before, not beside plain FP32: of what cancels, as the
        gradient of a key's bias, roundings are left in both, and not the same ones.
        """
        out = self.kept(x, value)
        if (
            out.row is not None
            and out.figures is not None
            and watch.beside_lost(asarray(x.value), asarray(value)) > 0
        ):
            out.row.see(out.figures, out.blame, out.when, loses=True)
        return out

    def step(
        self,
        step: Step,
        values: Operands,
        operands: list[Tensor],
        place: Place,
        path: tuple,
    ) -> list[Tensor]:
        """The results of one step."""
        # what is inside reads values, and not how they are stored
        if step.kind in _INLINED or step.kind in TURNS:
            read = control.operands_of(step, values)
            operands = [
                dataclasses.replace(x, value=value)
                for x, value in zip(operands, read, strict=True)
            ]
        if step.kind in _INLINED:
            return self.run_plan(
                inner_jaxpr(step.eqn), inner_plan(step), operands, place, path
            )
        casts, exact, found = Casts(), None, None
        if step.kind in TURNS and _has_turns(step.eqn):
            turns = TURNS[step.kind](step.eqn, operands)
            out = getattr(self, f"_{step.kind}")(step, operands, turns, place, path)
            exact, found = turns.results(), [x.value for x in out]
        if found is None or exact is None:
            with watch.watching(casts.saw):
                found = kinds[step.kind](step, values)
            exact = self.beside(step.eqn, operands, place)
        scaled = [f is not None for f in step.out_formats]
        return self.seen(step.eqn, operands, found, exact, casts, place, path, scaled)

    def turn(
        self,
        jaxpr: Any,
        plan: Plan,
        known: Sequence[Tensor],
        values: Sequence[Any],
        place: Place,
        path: tuple,
    ) -> list[Tensor]:
        """One turn of a loop, or a branch: `values`, and the shadows of `known`."""
        args = [
            dataclasses.replace(y, value=x, row=None)
            for x, y in zip(values, known, strict=True)
        ]
        for x in args:
            self.look(x, "")
        return self.run_plan(jaxpr, plan, args, place, path)

    def _scan(
        self, step: Step, operands: list[Tensor], turns: Any, place: Place, path: tuple
    ) -> list[Tensor]:
        eqn, plan = step.eqn, inner_plan(step)
        consts, carry, xs = scan_parts(eqn, [x.value for x in operands])
        formats = step.out_formats[: len(carry)]
        slices, carry, ys = (
            list(map(control.sliced, xs)),
            list(map(control.carried, carry, formats)),
            [],
        )
        order = range(eqn.params["length"])
        for i in reversed(order) if eqn.params["reverse"] else order:
            parts = [
                control.of_slice(jax.tree.map(lambda a, i=i: a[i], x), y)
                for x, y in zip(slices, xs, strict=True)
            ]
            jaxpr = eqn.params["jaxpr"]
            out = self.turn(
                jaxpr,
                plan,
                turns.operands(jaxpr),
                [*consts, *carry, *parts],
                place,
                path,
            )
            turns.done(jaxpr, out)
            carry = [
                control.carried(x.value, f) for x, f in zip(out, formats, strict=False)
            ]
            ys.append([x.value for x in out[len(carry) :]])
        columns = zip(*(ys[::-1] if eqn.params["reverse"] else ys), strict=True)
        stacked = [jax.tree.map(lambda *a: jnp.stack(a), *column) for column in columns]
        return [Tensor(x, None, place, 0) for x in (*carry, *stacked)]

    def _while(
        self, step: Step, operands: list[Tensor], turns: Any, place: Place, path: tuple
    ) -> list[Tensor]:
        params = step.eqn.params
        formats, body_plan = while_carry(step.eqn, step.formats)
        cond_jaxpr, body_jaxpr, n, m = (
            params[k]
            for k in ("cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts")
        )
        cond_plan = plan_of(cond_jaxpr, (*step.formats[:n], *formats))
        values = [x.value for x in operands]
        carry = list(map(control.carried, values[n + m :], formats))

        def keep_on() -> bool:
            known = turns.operands(cond_jaxpr)
            return bool(
                self.turn(
                    cond_jaxpr, cond_plan, known, [*values[:n], *carry], place, path
                )[0].value
            )

        while keep_on():
            known = turns.operands(body_jaxpr)
            out = self.turn(
                body_jaxpr, body_plan, known, [*values[n : n + m], *carry], place, path
            )
            turns.done(body_jaxpr, out)
            carry = [
                control.carried(x.value, f) for x, f in zip(out, formats, strict=True)
            ]
        return [Tensor(x, None, place, 0) for x in carry]

    def _cond(
        self, step: Step, operands: list[Tensor], turns: Any, place: Place, path: tuple
    ) -> list[Tensor]:
        index, *values = (x.value for x in operands)
        branches = step.eqn.params["branches"]
        jaxpr = branches[min(max(int(index), 0), len(branches) - 1)]
        known = turns.operands(jaxpr)
        out = self.turn(
            jaxpr, plan_of(jaxpr, step.formats[1:]), known, values, place, path
        )
        turns.done(jaxpr, out)
        return [Tensor(jnp.asarray(store.wide(x.value)), None, place, 0) for x in out]


def _has_turns(eqn: Any) -> bool:
    """Whether control flow can be walked turn by turn; a batch of `while` loops, each
    with its end, is a whole.
    """
    condition = eqn.params.get("cond_jaxpr")
    return eqn.params.get("length") != 0 and (
        condition is None or condition.out_avals[0].shape == ()
    )
