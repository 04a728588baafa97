"""What `explain` measures of a tensor, and what of it follows from the operands of its
equation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalify_core.array.scaled_array import ScaledArray, is_scaled_array
from scalify_core.debug.explanation import Blame, Figures, Row, epsilon
from scalify_core.interpreter import registry
from scalify_core.interpreter.measured.policy import as_array
from scalify_core.interpreter.value import UNKNOWN, Value
from scalify_core.numerics.scales import broadcast_scale, is_static
from scalify_core.numerics.source_location import Place

_POWERS = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "cbrt": 1 / 3}


@dataclasses.dataclass
class Tensor:
    """An operand or result: as the scaled program has it, and in plain FP32.

    `row`: None for what has no scale, or is not made by an equation; `when`: the number
    of the evaluation; `blame`: see `Row`; `formats`: of the casts inside of the
    equation.
    """

    value: Any
    shadow: Any
    place: Place
    when: int
    row: Row | None = None
    operand_error: float = 0.0
    operand_vanished: float = 0.0
    blame: Blame = dataclasses.field(default_factory=dict)
    figures: Figures | None = None
    formats: tuple[str, ...] = ()

    @property
    def format(self) -> str:
        """The format of its data; empty where it has no scale."""
        return str(self.value.dtype) if isinstance(self.value, Value) else ""

    @property
    def error(self) -> float:
        """Its relative error; 0 before it is measured."""
        return self.figures.error if self.figures else 0.0

    @property
    def astray(self) -> float:
        """Octaves by which its scale is astray; 0 before it is measured."""
        return self.figures.astray if self.figures else 0.0

    def size(self) -> float:
        """RMS of the logical value."""
        return self.figures.scale * self.figures.due if self.figures else 0.0

    def expected_size(self) -> float:
        """The RMS that the rules expect of it."""
        return self.figures.scale * self.figures.expected if self.figures else 0.0


def measured(x: Tensor, cast: tuple[float, float, float]) -> Figures:
    """The figures of a tensor, in FP64, without its drift; `cast`: see
    `watch.losses`.
    """
    exact = np.asarray(x.shadow, np.float64)
    data, scale, expected, least, limit = _taken_apart(x.value)
    with np.errstate(all="ignore"):
        logical = data * scale
        # A mask's constant, in FP32 that stands for a narrower format: it is as good as
        # any that is as large.
        masked = (
            (np.minimum(np.abs(exact / scale), np.abs(data)) > limit)
            & np.isfinite(data)
            & (exact * logical > 0)
        )
        right, data = np.isfinite(exact) & ~masked, np.where(masked, 0, data)
        saturated = right & (~np.isfinite(logical) | (np.abs(data) >= limit))
        flushed = right & (exact != 0) & (logical == 0)
        size = np.linalg.norm(exact[right])
        apart = np.linalg.norm((logical - exact)[right])
        # FP32 has no smaller numbers, a scale has
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
            vanished=_share(flushed & (np.abs(exact) >= least), exact.size),
            saturated=max(_share(saturated, exact.size), cast[2]),
            error=float(error) if np.isfinite(error) else float("inf"),
            operand_error=x.operand_error,
            operand_vanished=x.operand_vanished,
        )


def _taken_apart(x: Any) -> tuple[np.ndarray, np.ndarray, float, float, float]:
    """Data, scale, expected RMS (0: there is none), and the smallest and the largest
    number of the value's format.
    """
    if type(x) is ScaledArray:
        fmt, scale = (
            jnp.finfo(x.dtype),
            x.scale if x.is_static else broadcast_scale(jnp.asarray(x.scale), x.data),
        )
        data = np.asarray(x.data).astype(np.float64)
        return (
            data,
            np.asarray(scale, np.float64),
            0.0,
            float(fmt.smallest_subnormal),
            float(fmt.max),
        )
    if isinstance(x, Value) and x.rho == UNKNOWN:
        x = as_array(x)
        if is_scaled_array(x):
            return _taken_apart(x)
    if not isinstance(x, Value):
        return np.asarray(x, np.float64), np.ones(()), 0.0, np.inf, np.inf
    scale = x.scale if is_static(x.scale) else broadcast_scale(x.scale, x.data)
    data = np.asarray(x.data).astype(np.float64) * x.factor
    fmt = jnp.finfo(x.dtype)
    limit = float(fmt.max) * abs(x.factor if x.data.dtype == x.dtype else 1.0)
    return (
        data,
        np.asarray(scale, np.float64),
        x.rho,
        float(fmt.smallest_subnormal),
        limit,
    )


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


def _share(where: np.ndarray, size: int) -> float:
    return float(np.count_nonzero(where) / size) if size else 0.0


def inherited(eqn: Any, operands: Sequence[Tensor]) -> Blame:
    """How far a result's scale is astray because those of its operands are, if it
    follows the rule.

    Octaves of factors add up. Of terms, the largest expected one has the scale, the
    largest one the size.
    """
    name = eqn.primitive.name
    scaled = [
        x
        for x in operands
        if isinstance(x.value, Value) and x.value.rho != UNKNOWN and x.figures
    ]
    if registry.rule_of(eqn).kind in ("default", "unscaled"):
        return {}
    if name in ("mul", "dot_general", "ragged_dot_general", "conv_general_dilated"):
        return sum_of((x.blame, 1.0) for x in scaled)
    if name == "div":
        return sum_of((x.blame, 1.0 if x is operands[0] else -1.0) for x in scaled)
    if name in _POWERS or name == "integer_pow":
        return sum_of((x.blame, _POWERS.get(name) or eqn.params["y"]) for x in scaled)
    if name in ("add", "sub", "add_any") and len(scaled) == 2:
        expected, largest = (
            max(scaled, key=size) for size in (Tensor.expected_size, Tensor.size)
        )
        astray = (
            math.log2(largest.size() / expected.expected_size())
            if largest.size() > 0
            else 0.0
        )
        part = astray / expected.astray if expected.astray else 1.0
        return sum_of([(expected.blame, min(max(part, 0.0), 1.0))])
    return max(
        (x.blame for x in scaled),
        key=lambda blame: abs(sum(blame.values())),
        default={},
    )


def sum_of(terms: Iterable[tuple[Blame, float]]) -> Blame:
    """The sum of blames, each times a factor."""
    out: Blame = {}
    for blame, factor in terms:
        for source, octaves in blame.items():
            out[source] = out.get(source, 0.0) + factor * octaves
    return out


def cancelled(eqn: Any, operands: Sequence[Tensor], exact: Any) -> float:
    """The error that a sum has because its terms cancel: theirs, as much larger as it
    is smaller than expected.

    As the gradient of a bias that moves all logits alike, which is zero but for
    roundings. 0 for what is no sum of floats.
    """
    name, terms = eqn.primitive.name, [x for x in operands if is_float(x.shadow)]
    if len(terms) < len(operands):
        return 0.0
    sizes = [_rms(np.asarray(x.shadow, np.float64)) for x in terms]
    if name in ("add", "sub", "add_any") and len(sizes) == 2:
        expected = math.hypot(*sizes)
    elif name == "reduce_sum":
        expected = sizes[0] * math.sqrt(
            math.prod(terms[0].shadow.shape[axis] for axis in eqn.params["axes"])
        )
    elif name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        expected = (
            sizes[0]
            * sizes[1]
            * math.sqrt(math.prod(terms[0].shadow.shape[axis] for axis in contracted))
        )
    else:
        return 0.0
    error = max(max(x.error, epsilon(x.format) if x.format else 0.0) for x in terms)
    size = _rms(np.asarray(exact, np.float64))
    if not size:
        return math.inf
    return (
        error * expected / size
        if math.isfinite(expected) and math.isfinite(size)
        else 0.0
    )


def is_float(x: Any) -> bool:
    """Whether an array or number is real and floating-point; a reference to an array is
    none.
    """
    return not isinstance(x, jax.Ref) and jnp.issubdtype(
        jnp.result_type(x), jnp.floating
    )


def differing(found: Any, exact: Any) -> float:
    """The share of the elements that differ of booleans or integers; 0 of all else, of
    which figures tell.
    """
    dtype = getattr(exact, "dtype", None)
    if dtype is None or not (jnp.issubdtype(dtype, jnp.integer) or dtype == np.bool_):
        return 0.0
    differ = np.asarray(found) != np.asarray(exact)
    return float(np.mean(differ)) if differ.size else 0.0
