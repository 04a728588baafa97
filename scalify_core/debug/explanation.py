"""The result of `explain`: rows of figures, the first loss, and a table of both."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from scalify_core.debug.source_location import Place
from scalify_core.numerics.precision_warnings import LOST

# Octaves. A scale so near to the true RMS does not round worse, see `scales.near`.
ASTRAY = 4.0
TOP = 24  # rows of a printed table: a training step has hundreds
_TITLES = (
    "equation",
    "shape",
    "format",
    "scale",
    "expected",
    "measured",
    "flushed",
    "saturated",
    "error",
)


class Figures(NamedTuple):
    """Figures of one tensor at one time.

    Attributes:
        scale: its scale, a power of two; the largest, where it has several.
        expected: the RMS that the rules expect of its data, which is about 1.
        measured: the RMS of its data.
        due: the RMS that its data would have without losses.
        flushed: the share of its elements that are zero here and not in plain FP32.
        flushed_norm: their share of the tensor's norm, in plain FP32.
        vanished: the share of its elements that are zero here, and that plain data of
            the same format would hold.
        saturated: the share of its elements at the format's largest number, or not
            finite, that are finite in plain FP32.
        error: the norm of its difference from plain FP32, over the norm of plain FP32.
        operand_error: the largest error of its operands.
        operand_vanished: the largest share of an operand that has vanished.
    """

    scale: float
    expected: float
    measured: float
    due: float
    flushed: float
    flushed_norm: float
    vanished: float
    saturated: float
    error: float
    operand_error: float
    operand_vanished: float

    @property
    def astray(self) -> float:
        """Return the octaves from the expected RMS to the true one.

        A negative number means that the scale is too large. It is 0 for zeros.
        """
        # Measured scales expect no RMS: they are never astray.
        if not (0 < self.due < math.inf and self.expected > 0):
            return 0.0
        return math.log2(self.due / self.expected)

    def loses(self, epsilon: float, least: float) -> bool:
        """Return whether this equation first loses values to a tensor's range.

        Losses to rounding do not count. If the narrowest format is coarser than `LOST`
        (FP8), or the operands' errors are as large, vanished elements are
        only noise.

        Args:
            epsilon: that of the narrowest format that takes part; errors below it are
                noise.
            least: the smallest normal number of the data. Not far above it, bits are
                lost before elements are.
        """
        # Cancellation makes an error, too, with nothing flushed or saturated: no range
        # causes that.
        reason = (
            self.flushed_norm > LOST / 2
            or self.saturated > 0
            or 0 < self.due < 2**ASTRAY * least
        )
        # An equation that doubles the error of its operands only passes it on.
        wrong = self.error > max(LOST, epsilon, 2 * self.operand_error)
        # However small their part in the norm.
        vanishes = max(epsilon, self.operand_error) <= LOST
        vanishes = vanishes and self.vanished > max(LOST, 2 * self.operand_vanished)
        return (reason and wrong) or vanishes


# By identity: rows of equal figures are several rows.
@dataclasses.dataclass(eq=False)
class Row:
    """One result of one equation; in a loop, of all its iterations.

    Attributes:
        place: the user's line.
        primitive: the equation's primitive, or the name of a composite.
        shape: the shape of the result.
        dtype: the format of its data.
        figures: those of the first iteration that loses values; if none does, of the
            iteration with the largest error.
        turns: the number of times that the equation was evaluated.
        lost_at: the number of the evaluation, counted over the program, that first lost
            values; None: no evaluation did.
    """

    place: Place
    primitive: str
    shape: tuple[int, ...]
    dtype: str
    figures: Figures
    turns: int = 0
    lost_at: int | None = None

    def see(self, figures: Figures, when: int, *, loses: bool) -> None:
        """Record the figures of evaluation `when`, or of its result in storage form."""
        # `when` again: a result is seen a second time in storage form.
        first = loses and self.lost_at in (None, when)
        if first or (self.lost_at is None and figures.error >= self.figures.error):
            self.figures = figures
        if first:
            self.lost_at = when

    @property
    def name(self) -> str:
        """Return the primitive, and the pass that it belongs to if that is backward."""
        if self.place.backward:
            return f"{self.primitive} of the backward pass"
        return self.primitive

    @property
    def is_float32(self) -> bool:
        """Return whether the tensor is never stored in a narrow format."""
        return self.dtype == "float32"

    @property
    def weight(self) -> tuple[bool, float, float]:
        """Return the key that tables choose rows by.

        Losses come first, then flushed or saturated shares, then the octaves that a
        scale is astray by.
        """
        f = self.figures
        return (
            self.lost_at is not None,
            # To hundredths, or noise in a share would decide before the scale does.
            round(max(f.flushed_norm, f.vanished) + f.saturated, 2),
            abs(f.astray),
        )


@dataclasses.dataclass
class Explanation:
    """Rows in program order, and a summary; `str` returns a table of the most telling
    rows.

    Attributes:
        rows: a Row for each floating-point result with a scale, of each equation.
        errors: the error of each floating-point result of the function, in the order of
            its leaves.
        first_difference: the place where booleans or integers, such as comparisons,
            first differ from plain FP32; None: nowhere.
        unknown: the reason why the FP32 products of plain code are unknown; None: they
            are known.
    """

    rows: list[Row]
    errors: list[float]
    first_difference: str | None = None
    unknown: str | None = None

    @property
    def first_row(self) -> Row | None:
        """Return the first row, in the order of evaluation, that loses values."""
        # Rows are in program order, where a loop's last line may lose in an early
        # iteration.
        lost = [row for row in self.rows if row.lost_at is not None]
        return min(
            lost, key=lambda row: (row.lost_at or 0, self.rows.index(row)), default=None
        )

    @property
    def first_loss(self) -> str | None:
        """Return one sentence: the place, extent and cause of the first loss, and the
        remedy.

        It is None if no values are lost.
        """
        row = self.first_row
        if row is None:
            return None
        return _sentence(row, self._origin(row))

    def _origin(self, row: Row) -> Row:
        """Return the first row whose scale is astray by at least half as much."""
        # Scales drift from one equation to the next: most of the drift comes from the
        # row that has half of it.
        least, sign = abs(row.figures.astray) / 2, math.copysign(1, row.figures.astray)
        return next(x for x in self.rows if sign * x.figures.astray >= least)

    def lines(self) -> dict[Place, list[Row]]:
        """Return the rows of each of the user's lines, in program order.

        Rows of the forward and the backward pass of a line stand together.
        """
        # JAX places the backward pass after the whole forward pass, where a reader
        # would look for the line in vain.
        rows_of: dict[Place, list[Row]] = {}
        for row in self.rows:
            rows_of.setdefault(row.place.line_alone, []).append(row)
        return rows_of

    def table(self, top: int | None = None) -> str:
        """Return the `top` most telling rows, or all, in program order under their
        lines.
        """
        wanted = sorted(self.rows, key=lambda row: row.weight, reverse=True)[:top]
        chosen = set(map(id, wanted))
        columns = zip(_TITLES, *map(_cells, wanted), strict=True)
        widths = [max(map(len, column)) for column in columns]
        lines = [_line(_TITLES, widths)]
        for place, rows in self.lines().items():
            shown = [_line(_cells(row), widths) for row in rows if id(row) in chosen]
            if shown:
                lines += [str(place), *shown]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def text(self, top: int = TOP) -> str:
        """Return a summary, and a table of the `top` most telling rows."""
        text = f"{len(self.rows)} results of equations at {len(self.lines())} lines"
        if len(self.rows) > top:
            text += f"; shown are the {top} most telling ones"
        text += f"; largest error of a result: {max(self.errors, default=0.0):.2e}\n"
        if self.first_loss:
            text += f"first loss: {self.first_loss}"
        else:
            text += self._without_loss()
        if self.unknown:
            text += (
                "\nproducts that plain code has in FP32 may be narrow in this program:"
                f" {self.unknown}"
            )
        return f"{text}\n\n{self.table(top)}"

    def _without_loss(self) -> str:
        """Return the summary where no equation loses much.

        Results may be off all the same.
        """
        # `not <=`: a NaN is off, too.
        off = [x for x in self.errors if not x <= LOST]
        if not off:
            return f"nothing is lost (beyond {LOST:.1%} of a norm){self._flushed()}"
        reason = (
            self.first_difference
            or "roundings are left where larger numbers cancel, the format is coarse,"
            " or plain 16-bit arrays, which have no scale, were computed with"
        )
        return (
            f"no equation loses much (beyond {LOST:.1%}), but a result is off"
            f" by {max(off):.1e}: {reason}"
        )

    def _flushed(self) -> str:
        """Return a clause about the tensor with the most zeros that loses none of its
        norm.

        It is empty where the share of zeros is small.
        """
        # A gradient may have 29% zeros and none of its norm in them.
        row = max(self.rows, key=lambda row: row.figures.flushed, default=None)
        if row is None or row.figures.flushed <= LOST:
            return ""
        return (
            f"; but zero in {row.dtype} beside much larger ones are"
            f" {row.figures.flushed:.1%} of the elements of {row.place}, {row.name}"
        )


def _sentence(row: Row, origin: Row) -> str:
    f = row.figures
    zero, lost = f"zero in {row.dtype}", f"its last bits are lost in {row.dtype}"
    # A value that is not stored cannot lose to a format: what it was computed from did.
    if row.is_float32:
        zero, lost = "zero, which are not in plain FP32", "it differs"
    what = []
    if f.flushed > 0:
        what.append(
            f"{f.flushed:.1%} of its elements ({f.flushed_norm:.1%} of its norm) are"
            f" {zero}"
        )
    if f.saturated > 0:
        what.append(f"{f.saturated:.1%} of its elements saturate in {row.dtype}")
    lost = " and ".join(what) or lost
    where = f"{row.place}, {row.name}"
    if row.turns > 1:
        where += f", in one of {row.turns} turns"
    reason = _reason(row, origin)
    return f"{where}: {lost}, an error of {_error(f.error)}, because {reason}"


def _reason(row: Row, origin: Row) -> str:
    """Return the cause of a loss, and the remedy."""
    astray = row.figures.astray
    # Neither a scale nor a wider format of this value would help.
    if abs(astray) <= ASTRAY and row.is_float32:
        return (
            "what it is computed from, in FP32, was rounded before: a comparison, a"
            " maximum or a sign went the other way there, or what was small beside"
            " others in an operand of a product counts here; compare with a margin, or"
            " give what is compared or multiplied to more digits, x.astype(jnp.float32)"
        )
    if abs(astray) <= ASTRAY:
        return (
            "one scale does not hold numbers so far apart; keep the large and the small"
            " ones in tensors of their own, or give them a wider format"
        )
    rescale, where = "dynamic_rescale_rms", "there"
    if origin.place.backward:
        rescale = "dynamic_rescale_rms_grad"
    size = "large" if astray < 0 else "small"
    if (origin.place, origin.primitive) != (row.place, row.primitive):
        where = f"at {origin.place}, {origin.name}, where"
        where += " it begins to be"
    return f"its scale is 2^{abs(astray):.1f} too {size}; put {rescale} {where}"


def _cells(row: Row) -> tuple[str, ...]:
    f = row.figures
    name = row.primitive
    if row.place.backward:
        name += " (backward)"
    if row.place.library:
        name += f" in {row.place.library}"
    return (
        name if len(name) <= 34 else name[:32] + "..",
        "x".join(map(str, row.shape)) or "scalar",
        row.dtype,
        _power(f.scale),
        _power(f.expected) if f.expected else "-",
        _power(f.measured),
        _share(f.flushed),
        _share(f.saturated),
        _error(f.error) + (" <- lost" if row.lost_at is not None else ""),
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return a line of the table: names aligned left, figures right."""
    columns = zip(cells, "<<<>>>>>>", widths, strict=True)
    padded = [f"{cell:{side}{width}}" for cell, side, width in columns]
    return "  ".join(["", *padded]).rstrip()


def _power(x: float) -> str:
    if not 0 < x < math.inf:
        return str(x)
    exponent = round(math.log2(x), 1) + 0.0  # which is no negative zero
    return f"2^{exponent:g}"


def _share(x: float) -> str:
    if x == 0:
        return "-"
    return f"{x:.2%}"


def _error(x: float) -> str:
    return f"{x:.1e}"


def epsilon(*dtypes: str) -> float:
    """Return the coarsest epsilon of some formats."""
    return max((float(jnp.finfo(dtype).eps) for dtype in dtypes), default=0.0)
