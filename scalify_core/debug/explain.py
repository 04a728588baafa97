"""`explain`: a scaled program, equation by equation, beside the same program in plain
FP32.

An observer of the evaluator that `scalify` uses, run eagerly: calls are entered, loops
are run iteration by iteration, and a composite is one equation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from scalify_core.array.scaled_array import asarray, is_scaled_array
from scalify_core.debug import fp32_reference
from scalify_core.debug.explanation import Explanation, Figures, Row, epsilon
from scalify_core.debug.figures import (
    Tensor,
    cancelled,
    differing,
    measured,
)
from scalify_core.debug.source_location import NO_PLACE, Place, name_of, place_of
from scalify_core.interpreter import registry
from scalify_core.interpreter import value as v
from scalify_core.interpreter.evaluator import Evaluator, as_operand, is_plain
from scalify_core.interpreter.measured import policy as measuring
from scalify_core.interpreter.reference_trace import traced
from scalify_core.interpreter.transform import ScalePolicy, call_of, measures_scales
from scalify_core.interpreter.value import Value
from scalify_core.numerics import precision_warnings
from scalify_core.numerics.formats import at_least_float32, is_float
from scalify_core.numerics.jaxprs import IN_FULL, PRODUCTS
from scalify_core.numerics.precision_warnings import LOST

# An error of 0 gives way to the first figures that are measured.
NOT_MEASURED = Figures(1.0, 1.0, *(0.0,) * 9)
# Its results but the first have a scale for each block or row: their bytes times the
# one scale of the tensor are no numbers to compare.
OPERANDS_IN_BLOCKS = "rounded_product.fwd"


def explain(
    fun: Callable,
    *args: Any,
    scales: ScalePolicy = "auto",
    **kwargs: Any,
) -> Explanation:
    """Explain the scales of `scalify(fun)(*args, **kwargs)`, and the first loss of
    values.

    `fun` may be any function that `scalify` takes: a loss, `jax.grad` of one, a
    training step. It runs once, eagerly, with the scales that `scalify` gives it.
    Beside it runs plain FP32 on the logical values of its arguments. This is slower
    than a compiled program by orders of magnitude: use a small batch. Branches of
    `cond` and the number of iterations of `while` are those of the scaled program.

    Values are lost where the error of a tensor exceeds 1%, and twice the error of the
    operands: the norm of its difference from plain FP32, over the norm of plain FP32.
    The cause is underflow, saturation, or a scale that is astray. If a coarser format
    takes part (FP8), its epsilon is the limit.

    Args:
        fun: function of pytrees.
        args: its arguments, at least one of them a ScaledArray.
        scales: as for `scalify`. Measured scales are never astray: rows have no
            expected RMS. Rows of values that are not stored have FP32 numbers without a
            scale. The losses of a cast are reported at the equation that reads the cast
            copy.
        kwargs: keyword arguments of `fun`.

    Returns:
        An Explanation: `print` it; `first_loss` is a sentence, `rows` has all figures.

    Raises:
        ValueError: `scales` is unknown, or no argument is a ScaledArray.
        TypeError: `fun` uses values of a surrounding transformation; call `explain`
            outside jit, grad and vmap.
    """
    call = call_of(fun, args, kwargs)
    leaves = call.leaves
    if not any(map(is_scaled_array, leaves)):
        raise ValueError(
            "explain: no argument is a ScaledArray; as_scaled_array(x,"
            " dtype=jnp.float16) makes them"
        )
    measures = measures_scales(scales)
    # The second trace finds the products that plain code has in FP32. Under propagated
    # scales these have the format of the data, too.
    program, closed_over = traced(call.fun, leaves, narrow=measures)
    if closed_over or any(
        isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(leaves)
    ):
        raise TypeError(
            "explain: call it outside of jit, grad and vmap; it evaluates eagerly"
        )
    recorder = Recorder(measures=measures)
    errors = recorder.errors(program.jaxpr, leaves, program.dtypes)
    return Explanation(
        list(recorder.rows.values()),
        errors,
        recorder.first_difference,
        program.unknown,
    )


class _Inside(NamedTuple):
    """The equation whose inner jaxprs are evaluated: references, place and path."""

    bodies: Any
    place: Place
    path: tuple
    name: str


class _Frame(NamedTuple):
    """The tensors of the jaxpr that is evaluated; place and path of its caller."""

    tensors: dict[Any, Tensor]
    place: Place
    path: tuple


class Recorder:
    """The observer of one evaluation.

    It keeps the tensors of plain FP32 beside those of the scaled program. What a JAX
    transformation traces, as the body of a `shard_map`, is part of its equation.
    """

    def __init__(self, *, measures: bool) -> None:
        self.evaluate = Evaluator(measures, self)
        self.rows: dict[tuple, Row] = {}
        # Booleans and integers have no error to measure: only the first place where
        # they differ is told.
        self.first_difference: str | None = None
        self._count = 0
        self._inside: _Inside | None = None
        self._frame: _Frame | None = None

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
        operands = [
            Tensor(
                as_operand(x),
                fp32_reference.as_reference(asarray(x)),
                NO_PLACE,
                self._next_number(),
            )
            for x in leaves
        ]
        values = [x.value for x in operands]
        program = fp32_reference.CallReference(operands)
        # The program is evaluated as the body of a call, whose results are its own.
        self._inside = _Inside(program, NO_PLACE, (), "jit")
        self.evaluate(jaxpr, values)
        out: list[Any] = program.out
        if self.evaluate.measures:
            made = measuring.leaving(jaxpr, values, [x.value for x in out], dtypes)
            out = list(map(self._as_returned, out, made))
        out = self._rounded(out)
        return [x.error for x in out if is_float(x.reference)]

    def _as_returned(self, x: Tensor, made: Any) -> Tensor:
        """Return a result in storage form; lost small elements count as a loss.

        They are compared with the result before it is stored. Against plain FP32, a
        result of cancelling terms (the gradient of a key's bias) is left with other
        roundings.
        """
        if not isinstance(made, Value):
            return x
        out = dataclasses.replace(
            x, value=made, operand_error=max(x.operand_error, x.error)
        )
        if out.row is not None:
            out.row.dtype = str(made.dtype)
        self.measure(out)
        if (
            out.row is not None
            and out.figures is not None
            and precision_warnings.beside_lost(v.logical(x.value), v.logical(made))
        ):
            out.row.see(out.figures, out.when, loses=True)
        return out

    def jaxpr(self, jaxpr: Any, args: Sequence[Any], run: Callable) -> list[Any]:
        """Evaluate a jaxpr, with a frame for its tensors."""
        outer = self._inside, self._frame
        inside, self._inside, self._frame = self._inside, None, None
        try:
            # A JAX transformation that is tracing this has no numbers.
            if inside is None or isinstance(lax.full((), 0), jax.core.Tracer):
                return run()
            # With jit again: only the call or loop itself is evaluated without it, so
            # that figures and equations are compiled.
            with jax.disable_jit(False), precision_warnings.watching(None):
                tensors = self._tensors_of(jaxpr, args, inside)
                self._frame = frame = _Frame(tensors, inside.place, inside.path)
                out = run()
                pairs = zip(jaxpr.outvars, out, strict=True)
                results = [self._read(frame, *pair) for pair in pairs]
                if inside.name not in fp32_reference.INLINE:
                    results = self._rounded(results)
                inside.bodies.done(jaxpr, results)
                return out
        finally:
            self._inside, self._frame = outer

    def _tensors_of(
        self, jaxpr: Any, args: Sequence[Any], inside: _Inside
    ) -> dict[Any, Tensor]:
        """Return the tensors of a jaxpr's constants and arguments."""
        constants = [
            Tensor(registry.known(x), fp32_reference.as_reference(x), inside.place, 0)
            for x in jaxpr.consts
        ]
        tensors = []
        for x, known in zip(args, inside.bodies.operands(jaxpr), strict=True):
            tensor = dataclasses.replace(known, value=x)
            if inside.name in fp32_reference.LOOPS:
                # An iteration's operands are no result that has a row.
                tensor = dataclasses.replace(tensor, place=inside.place, row=None)
                self.measure(tensor)
            tensors.append(tensor)
        names = (*jaxpr.constvars, *jaxpr.invars)
        return dict(zip(names, (*constants, *tensors), strict=True))

    def _read(self, frame: _Frame, atom: Any, x: Any) -> Tensor:
        if isinstance(atom, Literal):
            return Tensor(atom.val, atom.val, frame.place, 0)
        known = frame.tensors[atom]
        # A constant is made twice, here and by the evaluator.
        if known.value is x:
            return known
        return dataclasses.replace(known, value=x)

    def _rounded(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return results of a body as propagated scales store them."""
        if self.evaluate.measures:
            return tensors
        return [self.as_read(x, v.narrow) for x in tensors]

    def equation(self, eqn: Any, operands: Sequence[Any], run: Callable) -> list[Any]:
        """Evaluate an equation, and record the rows of its results."""
        frame = self._frame
        if frame is None:
            return run(operands)
        pairs = zip(eqn.invars, operands, strict=True)
        tensors = [self._read(frame, *pair) for pair in pairs]
        # JAX traces a jitted function once: two calls of it have the same equations,
        # and only the path of calls tells their rows apart.
        place, path = place_of(eqn, frame.place), (*frame.path, id(eqn))
        bodies = None
        if not is_plain(eqn, operands):
            rule = registry.rule_of(eqn)
            # The rule rounds its operands: that is the operands' loss, and not the
            # result's.
            if not rule.wide and not self.evaluate.measures:
                tensors = [self.as_read(x, rule.as_read) for x in tensors]
            bodies = _bodies(eqn, tensors)
        casts = Casts()
        self._frame = None
        self._inside = bodies and _Inside(bodies, place, path, eqn.primitive.name)
        try:
            with (
                precision_warnings.watching(casts.record),
                jax.disable_jit(bodies is not None),
            ):
                out = run([x.value for x in tensors])
        finally:
            self._inside, self._frame = None, frame
        exact = bodies and bodies.results()
        # The results of a call have rows already, of the equations inside.
        if exact is not None and eqn.primitive.name in fp32_reference.CALLS:
            results = [
                dataclasses.replace(y, value=x) for x, y in zip(out, exact, strict=True)
            ]
        else:
            if exact is None:
                references = (x.reference for x in tensors)
                made = fp32_reference.in_float32(eqn, *references)
                exact = [Tensor(None, y, place, 0) for y in made]
            results = self.recorded(eqn, tensors, out, exact, casts, place, path)
            # Rounded at one scale, the small terms of an operand are zeros. They matter
            # where the other operand makes up for them, which no norm of an operand
            # shows.
            if self.evaluate.measures and eqn.primitive.name in PRODUCTS:
                self._see_lost_terms(eqn, tensors, *results)
        frame.tensors.update(zip(eqn.outvars, results, strict=True))
        return out

    def _see_lost_terms(
        self, eqn: Any, operands: Sequence[Tensor], result: Tensor
    ) -> None:
        """Count terms of a product's sums that its narrow operands lack as a loss.

        The product is compared with that of the operands before they were rounded, in
        the size that its sums have without cancellation.
        """
        row, figures = result.row, result.figures
        if row is None or figures is None:
            return
        a, b, *rest = [at_least_float32(v.logical(x.value)) for x in operands]
        # Squares of small numbers underflow FP32, and of large ones overflow.
        units = [float(jnp.max(jnp.abs(x), initial=0.0)) or 1.0 for x in (a, b)]
        squares = [jnp.square(x / unit) for x, unit in zip((a, b), units, strict=True)]
        full = eqn.replace(params={**eqn.params, "precision": IN_FULL})
        exact, size = (
            np.asarray(fp32_reference.in_float32(full, *x, *rest)[0], np.float64)
            for x in ((a, b), squares)
        )
        # Not over the norm of `exact`: where terms cancel, what is left is their
        # roundings, as in plain FP16 code.
        wrong = np.linalg.norm(np.asarray(v.logical(result.value)) - exact)
        expected = units[0] * units[1] * math.sqrt(max(size.sum(), 0.0))
        limit = max(LOST, epsilon(row.dtype, *result.formats))
        if wrong > limit * expected:
            row.see(figures, result.when, loses=True)

    def recorded(
        self,
        eqn: Any,
        operands: Sequence[Tensor],
        results: Sequence[Any],
        exact: Sequence[Tensor],
        casts: Casts,
        place: Place,
        path: tuple,
    ) -> list[Tensor]:
        """Return results measured against the `exact` ones; scaled results get rows."""
        when = self._next_number()
        error = max((x.error for x in operands), default=0.0)
        if exact:
            error = max(error, cancelled(eqn, operands, exact[0].reference))
        vanished = max((x.figures.vanished for x in operands if x.figures), default=0.0)
        out = []
        for i, (x, like, var) in enumerate(
            zip(results, exact, eqn.outvars, strict=True)
        ):
            if (
                # Later ones may follow from the first: a branch that went the other
                # way.
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
                formats=casts.formats(),
            )
            if i and name_of(eqn) == OPERANDS_IN_BLOCKS:
                out.append(tensor)
                continue
            if isinstance(x, Value):
                # Measured scales leave a value that nothing stores in FP32, whatever
                # its dtype says.
                is_wide = x.expected_rms == v.MEASURED and not measuring.is_stored(x)
                dtype = "float32" if is_wide else str(x.dtype)
                shape = tuple(var.aval.shape)
                new = Row(place, name_of(eqn), shape, dtype, NOT_MEASURED)
                # The key is the same in every iteration: a loop of many turns has one
                # row.
                tensor.row = self.rows.setdefault((*path, i), new)
                tensor.row.turns += 1
            self.measure(tensor, casts.lost())
            out.append(tensor)
        return out

    def measure(
        self, x: Tensor, cast: tuple[float, float, float] = (0.0, 0.0, 0.0)
    ) -> None:
        """Measure a tensor.

        Args:
            x: the tensor.
            cast: the losses of casts in the equation, see `precision_warnings.losses`.
        """
        if not is_float(x.reference):
            return
        x.figures = measured(x, cast)
        if x.row is not None:
            data = x.value.data if isinstance(x.value, Value) else x.value
            # The data's own dtype: a value that is not stored has FP32's range.
            least = float(jnp.finfo(data.dtype).tiny)
            loses = x.figures.loses(epsilon(x.row.dtype, *x.formats), least)
            x.row.see(x.figures, x.when, loses=loses)

    def as_read(self, x: Tensor, read: Callable) -> Tensor:
        """Return the tensor in its format.

        If that rounds the tensor, its row gets the figures after rounding.
        """
        if not isinstance(x.value, Value):
            return x
        # Rounding does not make an error that the tensor already has.
        out = dataclasses.replace(
            x, value=read(x.value), operand_error=max(x.operand_error, x.error)
        )
        # The constant of a mask saturates on purpose.
        if out.value is not x.value and not x.value.is_fill_value:
            self.measure(out)
        return out


class Casts:
    """The losses of the casts inside one equation."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, Any]] = []

    def record(self, unrounded: Any, rounded_values: Any) -> None:
        # Its own casts must not be observed.
        with precision_warnings.watching(None):
            lost, dtype = (
                precision_warnings.losses(unrounded, rounded_values, rounded_values),
                str(rounded_values.dtype),
            )
            # Under a vmap of the equation, losses are known only when it runs.
            jax.debug.callback(
                lambda x: self._seen.append((dtype, np.asarray(x))), lost
            )

    def formats(self) -> tuple[str, ...]:
        return tuple(dtype for dtype, _ in self._seen)

    def lost(self) -> tuple[float, float, float]:
        # A rule may cast several operands: the worst of them counts.
        largest = np.max([np.zeros(4), *(x for _, x in self._seen)], axis=0)
        norm, share, _, saturated = largest.tolist()
        return norm, share, saturated


def _bodies(eqn: Any, operands: list[Tensor]) -> Any:
    """Return the references of an equation's inner jaxprs; None: it has none."""
    name = eqn.primitive.name
    if name in fp32_reference.CALLS:
        return fp32_reference.CallReference(operands)
    loop, condition = fp32_reference.LOOPS.get(name), eqn.params.get("cond_jaxpr")
    # A batch of `while` loops, each with its own end, has no common iterations.
    is_batch = condition is not None and condition.out_avals[0].shape
    # An empty scan evaluates no body, so it has no results of one.
    if loop is None or is_batch or eqn.params.get("length") == 0:
        return None
    return loop(eqn, operands)
