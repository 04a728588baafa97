"""The figures that `explain` measures."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from scalify_core.debug.explanation import Figures, Row, epsilon
from scalify_core.debug.source_location import Place
from scalify_core.interpreter.measured.policy import is_stored
from scalify_core.interpreter.value import MEASURED, Value, logical
from scalify_core.numerics.formats import is_float
from scalify_core.numerics.scales import broadcast_scale, is_static


@dataclasses.dataclass
class Tensor:
    """An operand or result, in the scaled program and in plain FP32.

    Attributes:
        value: its value in the scaled program.
        reference: its value in plain FP32.
        place: the user's line.
        when: the number of the evaluation.
        row: its row; None without a scale, and for tensors that no equation makes.
        operand_error: see `Figures`.
        operand_vanished: see `Figures`.
        figures: its figures; None before it is measured.
        formats: the formats of the casts inside the equation.
    """

    value: Any
    reference: Any
    place: Place
    when: int
    row: Row | None = None
    operand_error: float = 0.0
    operand_vanished: float = 0.0
    figures: Figures | None = None
    formats: tuple[str, ...] = ()

    @property
    def format(self) -> str:
        """Return the format of its data; empty where it has no scale."""
        if isinstance(self.value, Value):
            return str(self.value.dtype)
        return ""

    @property
    def error(self) -> float:
        """Return its relative error; 0 before it is measured."""
        if self.figures:
            return self.figures.error
        return 0.0


def measured(x: Tensor, cast: tuple[float, float, float]) -> Figures:
    """Return the figures of a tensor, in FP64.

    `cast` holds the losses of casts, see `precision_warnings.losses`.
    """
    # On the host: in FP64 no square of an FP32 number over- or underflows, and JAX has
    # no FP64 by default.
    exact = np.asarray(x.reference, np.float64)
    data, scale, expected, least, limit = _taken_apart(x.value)
    with np.errstate(all="ignore"):
        logical = data * scale
        # The constant of a mask, in FP32 data of a narrower format: any number as large
        # serves.
        masked = (
            (np.minimum(np.abs(exact / scale), np.abs(data)) > limit)
            & np.isfinite(data)
            & (exact * logical > 0)
        )
        # What is infinite in plain FP32, too, is no loss of ours.
        right, data = np.isfinite(exact) & ~masked, np.where(masked, 0, data)
        saturated = right & (~np.isfinite(logical) | (np.abs(data) >= limit))
        flushed = right & (exact != 0) & (logical == 0)
        size = np.linalg.norm(exact[right])
        apart = np.linalg.norm((logical - exact)[right])
        # A scaled value may be smaller than any FP32 number.
        error = apart / size if size else float(apart > 2.0**-120)
        return Figures(
            scale=float(np.max(scale, initial=0.0)),
            expected=expected,
            measured=_rms(data),
            due=_rms((exact / scale)[right]),
            flushed=max(_share(flushed, exact.size), cast[1]),
            flushed_norm=max(
                float(np.linalg.norm(exact[flushed]) / size) if size else 0.0, cast[0]
            ),
            # Below `least`, plain data of the format has zeros, too: no scale is to
            # blame.
            vanished=_share(flushed & (np.abs(exact) >= least), exact.size),
            saturated=max(_share(saturated, exact.size), cast[2]),
            error=float(np.nan_to_num(error, nan=np.inf, posinf=np.inf)),
            operand_error=x.operand_error,
            operand_vanished=x.operand_vanished,
        )


def _taken_apart(x: Any) -> tuple[np.ndarray, np.ndarray, float, float, float]:
    """Return data, scale, expected RMS, and the format's smallest and largest number.

    The expected RMS is 0 where there is none.
    """
    # A value that is not stored has no scale, and no format whose limits it could meet.
    if isinstance(x, Value) and x.expected_rms == MEASURED and not is_stored(x):
        x = logical(x)
    if not isinstance(x, Value):
        return np.asarray(x, np.float64), np.ones(()), 0.0, np.inf, np.inf
    scale = x.scale if is_static(x.scale) else broadcast_scale(x.scale, x.data)
    data = np.asarray(x.data).astype(np.float64)
    fmt = jnp.finfo(x.dtype)
    return (
        data,
        np.asarray(scale, np.float64),
        x.expected_rms,
        float(fmt.smallest_subnormal),
        float(fmt.max),
    )


def _rms(x: np.ndarray) -> float:
    if x.size:
        return float(np.sqrt(np.mean(np.square(x))))
    return 0.0


def _share(where: np.ndarray, size: int) -> float:
    if size:
        return float(np.count_nonzero(where) / size)
    return 0.0


def cancelled(eqn: Any, operands: Sequence[Tensor], exact: Any) -> float:
    """Return the error of a sum whose terms cancel, 0 for other equations.

    It is the error of the terms, magnified as the sum is smaller than expected. An
    example is the gradient of a bias that moves all logits alike: zero but for
    roundings.
    """
    name, terms = eqn.primitive.name, [x for x in operands if is_float(x.reference)]
    # Integers and booleans have no errors to magnify.
    if len(terms) < len(operands):
        return 0.0
    sizes = [_rms(np.asarray(x.reference, np.float64)) for x in terms]
    if name in ("add", "sub", "add_any") and len(sizes) == 2:
        expected = math.hypot(*sizes)
    elif name in ("reduce_sum", "dot_general"):
        axes = eqn.params.get("axes")
        if axes is None:
            (axes, _), _ = eqn.params["dimension_numbers"]
        # Independent terms add up as the root of their number.
        count = math.prod(terms[0].reference.shape[axis] for axis in axes)
        expected = math.prod(sizes) * math.sqrt(count)
    else:
        return 0.0
    # At least a rounding: a term that is exact here may be rounded where the sum reads
    # it.
    error = max(max(x.error, epsilon(x.format) if x.format else 0.0) for x in terms)
    size = _rms(np.asarray(exact, np.float64))
    # All terms cancel: whatever is left here is their roundings.
    if not size:
        return math.inf
    if math.isfinite(expected) and math.isfinite(size):
        return error * expected / size
    return 0.0


def differing(actual: Any, exact: Any) -> float:
    """Return the share of differing elements, of booleans or integers.

    It is 0 for other arrays, which have figures.
    """
    dtype = getattr(exact, "dtype", None)
    if dtype is None or not (jnp.issubdtype(dtype, jnp.integer) or dtype == np.bool_):
        return 0.0
    differ = np.asarray(actual) != np.asarray(exact)
    if differ.size:
        return float(np.mean(differ))
    return 0.0
