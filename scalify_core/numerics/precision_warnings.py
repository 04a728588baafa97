"""Who looks on while values are rounded to narrow formats: `explain` and the check
mode; nobody else, at no cost.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalify_core.numerics.source_location import UNKNOWN, Place, name_of, place_of

FLUSHED = 0.01  # share of a tensor's norm: what is reported
# share of an argument's elements; fewer may be what is left of a zero, as cos(pi / 2)
ENTERING = 0.1
_watcher: ContextVar[Callable[[Any, Any], None] | None] = ContextVar(
    "watcher", default=None
)
_warned: dict = {}  # what `warnings` remembers of what it has shown
_place: ContextVar[tuple[Place, str]] = ContextVar("place", default=(UNKNOWN, ""))


class PrecisionWarning(UserWarning):
    """`scalify(f, check=True)` saw values vanish or saturate while the program ran."""


def is_watched() -> bool:
    """Whether anybody looks on."""
    return _watcher.get() is not None


def rounded(before: Any, after: Any) -> Any:
    """`after`, which `before` has become in a narrower format, or has been clipped to;
    who watches is shown both.
    """
    watch = _watcher.get()
    if watch is not None:
        watch(before, after)
    return after


@contextlib.contextmanager
def watching(watch: Callable[[Any, Any], None] | None) -> Iterator[None]:
    """Inside, each rounding to a narrow format is shown to `watch(before, after)`;
    None: to nobody.
    """
    token = _watcher.set(watch)
    try:
        yield
    finally:
        _watcher.reset(token)


@jax.jit
def losses(before: Any, after: Any) -> jax.Array:
    """What a rounding loses, FP32 [3]; it can be traced.

    It gives the shares of the norm and of the elements other than zero that become
    zero, and the share of all elements that the format's largest number stands for,
    though they were larger.
    """
    x, y = jnp.abs(jnp.asarray(before, jnp.float32)), jnp.asarray(after)
    limit = float(jnp.finfo(y.dtype).max)
    finite = jnp.isfinite(x)
    peak = jnp.max(jnp.where(finite, x, 0), initial=0.0)
    # squares of small numbers would leave FP32
    x_unit = jnp.where(finite, x, 0) / jnp.where(peak > 0, peak, 1)
    flushed = (x > 0) & (y == 0)
    squares = jnp.square(x_unit)
    norm = jnp.sqrt(
        jnp.sum(squares, where=flushed)
        / jnp.maximum(jnp.sum(squares), np.float32(1e-30))
    )
    share = jnp.sum(flushed) / jnp.maximum(jnp.sum(x > 0), 1)
    saturated = (
        jnp.mean((x > limit) & jnp.isfinite(y), dtype=jnp.float32)
        if x.size
        else jnp.float32(0)
    )
    return jnp.stack([norm, share.astype(jnp.float32), saturated])


def lines_lost(
    multiply: Callable[[Any, Any], Any],
    lines: tuple[Sequence[int], Sequence[int]],
    lhs: tuple[Any, Any],
    rhs: tuple[Any, Any],
    scales: tuple[Any, Any],
    smallest: float = 0.0,
) -> jax.Array:
    """Of a product of stored operands, the shares of its rows and of its columns that
    are off by more than 1%.

    FP32 [2]; off for what the operands lose below the format's smallest normal number,
    of bits or altogether. A row is what one index along the axes of `lhs` gives that
    are not contracted, a column one of `rhs`. The norm of an operand does not show it:
    a row by itself, or the other operand, may make up for how small it is.

    Args:
        multiply: the product of FP32 operands, of all their bits.
        lines: the axes of the result that are of the left operand alone, and those of
            the right one.
        lhs: the operand, FP32, in units of what is stored, and the same in its format.
        rhs: the other operand.
        scales: of the result because of either operand; they broadcast to it.
        smallest: lines below this share of the largest do not count.
    """
    least = float(jnp.finfo(lhs[1].dtype).tiny)
    lhs_kept, rhs_kept = (jnp.asarray(y, jnp.float32) for _, y in (lhs, rhs))
    lhs_lost, rhs_lost = (
        jnp.where(jnp.abs(x) < least, x - kept, 0)
        for (x, _), kept in ((lhs, lhs_kept), (rhs, rhs_kept))
    )
    lost = jnp.abs(
        multiply(lhs_lost, rhs_kept + rhs_lost) + multiply(lhs_kept, rhs_lost)
    )
    out = jnp.abs(multiply(lhs_kept, rhs_kept))
    # of the largest: what is 2^126 times as small is nothing beside it in any line
    for scale in scales:
        relative = jnp.asarray(scale, jnp.float32) / jnp.max(
            jnp.asarray(scale, jnp.float32), initial=0.0
        )
        lost, out = lost * relative, out * relative
    enough = smallest * jnp.max(lost + out, initial=0.0)

    def off(axes: Sequence[int]) -> jax.Array:
        # Largest magnitudes: squares of what is 2^60 times as small would leave FP32.
        wrong, kept = (jnp.max(x, tuple(axes), initial=0.0) for x in (lost, out))
        return (wrong > FLUSHED * kept) & (jnp.maximum(wrong, kept) >= enough)

    found = map(off, reversed(lines))
    return jnp.stack(
        [jnp.mean(x, dtype=jnp.float32) if x.size else jnp.float32(0) for x in found]
    )


@jax.jit
def beside_lost(before: Any, after: Any) -> jax.Array:
    """Of an array, the share of its elements that are small beside others, if they are
    off by more than 1% (FP32).

    It is 0 where more are of sizes in between: within 8 octaves below those within 6 of
    the largest. Then the small ones are a tail. `before`, and the logical value of what
    it is stored as.
    """
    x, y = (jnp.asarray(a, jnp.float32) for a in (before, after))
    magnitude = jnp.where(jnp.isfinite(x), jnp.abs(x), 0)
    top = jnp.max(magnitude, initial=0.0)
    small = magnitude < top * 2.0**-14
    between = jnp.sum((magnitude < top * 2.0**-6) & ~small)
    count = jnp.sum(small & (magnitude > 0))
    largest = jnp.max(jnp.where(small, magnitude, 0), initial=0.0)
    # squares of small numbers would leave FP32
    unit = jnp.where(largest > 0, largest, 1)
    off, size = (jnp.sum(jnp.square(jnp.where(small, a / unit, 0))) for a in (x - y, x))
    lost = (count > between) & ~(off <= FLUSHED**2 * size)
    return jnp.where(lost, count / max(x.size, 1), 0.0).astype(jnp.float32)


def entering(name: str, x: Any, data: Any, value: Callable[[], Any]) -> None:
    """Warns (`PrecisionWarning`) of numbers that are given a format that does not hold
    them at their scale.

    Of `x`, whose data is `data` and whose value then is `value()`: where more than a
    tenth of them are zeros, or more than 1% of their norm is beyond the largest.
    Nothing is said of what is traced. No program can tell later.
    """
    if (
        data.dtype.itemsize >= 4
        or not x.size
        or any(isinstance(a, jax.core.Tracer) for a in (x, data))
    ):
        return
    flushed, saturated = _not_held(x, data, value())
    if flushed > ENTERING:
        _warn_entering(
            f"{name}: more than a tenth of its elements become zeros in {data.dtype} at"
            " its scale; keep the large and the small ones in arrays of their own, or"
            " take dtype=jnp.bfloat16; or give scale=, a smaller one at which the"
            " largest still fits"
        )
    if saturated > FLUSHED:
        _warn_entering(
            f"{name}: more than {FLUSHED:.0%} of its norm is beyond what {data.dtype}"
            " holds at its scale; give a larger scale=, or none, which is measured; or"
            " clip what is far larger than the rest"
        )


def _warn_entering(text: str) -> None:
    warnings.warn_explicit(text, PrecisionWarning, "scalify", 0, registry=_warned)


@jax.jit
def _not_held(
    x: jax.Array, data: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The share of elements that are no zeros in `x` and zeros in `data`, and that of
    the norm which saturates.
    """
    x = jnp.asarray(x, jnp.float32)
    clipped = jnp.isfinite(x) & (jnp.abs(data) == jnp.finfo(data.dtype).max)
    finite = jnp.where(jnp.isfinite(x), x, 0)
    # no square overflows
    unit = jnp.maximum(jnp.max(jnp.abs(finite)), jnp.finfo(jnp.float32).tiny)
    rest = jnp.sum(jnp.square(jnp.where(clipped, (x - value) / unit, 0)))
    return jnp.mean((x != 0) & (data == 0)), jnp.sqrt(
        rest / jnp.maximum(jnp.sum(jnp.square(finite / unit)), 1)
    )


def unreadable(where: str, names: Sequence[str]) -> None:
    """Warns (`PrecisionWarning`), once, of ScaledArrays that read as NaN because their
    leaves say no scale.
    """
    if not names:
        return
    which = names[0] or "a ScaledArray"
    if len(names) > 1:
        which = f"{which} (and {len(names) - 1} more)"
    text = (
        f"{where}: {which} reads as NaN: what stands for its scale is none, because"
        " outside of scalify arithmetic was done on the leaves of ScaledArrays, as"
        " optax.apply_updates, nnx.Optimizer and any optax optimiser do; use"
        " weights.apply_updates and optim.scaled_state(optimiser), take gradients"
        " inside, scalify(jax.grad(f)), and compute inside, or on asarray(tree)"
    )
    warnings.warn_explicit(text, PrecisionWarning, "scalify", 0, registry=_warned)


def unreadable_when_run(where: str, found: Mapping[str, Any]) -> None:
    """Puts into the program a callback with ScaledArrays, by name, and whether they say
    no scale; none without any.
    """
    if not found:
        return
    names = list(found)

    def report(*flags: Any) -> None:
        unreadable(
            where, [name for name, flag in zip(names, flags, strict=True) if flag.any()]
        )

    jax.debug.callback(report, *found.values())


class Reporter:
    """The check mode of one scalified function: a `PrecisionWarning` per place and
    call.
    """

    def __init__(self) -> None:
        self._reported: set[tuple] = set()
        self._lock = threading.Lock()  # callbacks come from the threads of the devices

    @contextlib.contextmanager
    def at(self, eqn: Any) -> Iterator[None]:
        """Inside, what is rounded belongs to this equation."""
        outer, _ = _place.get()
        token = _place.set((place_of(eqn, outer), name_of(eqn)))
        try:
            with watching(self._watch):
                yield
        finally:
            _place.reset(token)

    def _watch(self, before: Any, after: Any) -> None:
        """Puts into the program a callback with what a rounding loses."""
        place, name = _place.get()
        dtype = str(after.dtype)
        with watching(None):
            jax.debug.callback(
                lambda lost: self._report(place, name, dtype, lost),
                losses(before, after),
            )

    def entered(self, found: Mapping[str, Any]) -> None:
        """Puts into the program a callback with arguments, by name, and whether they
        say no scale.
        """
        unreadable_when_run("argument", found)

    def multiplied(self, dtype: str, lost: Any) -> None:
        """Puts into the program a callback with the lines of a product's result that
        are lost, see `lines_lost`.
        """
        place, name = _place.get()
        jax.debug.callback(
            lambda lost: self._report_lines(place, name, dtype, lost), lost
        )

    def returned(self, dtype: str, lost: Any) -> None:
        """Puts into the program a callback with the share of a result that is lost, see
        `beside_lost`.
        """
        place, name = _place.get()

        def report(lost: Any) -> None:
            share = float(np.max(lost))
            text = (
                f"{share:.2%} of its elements are off by more than 1%, because they are"
                " small beside the others"
            )
            self._warn(place, name, dtype, [text] if share > 0 else [])

        jax.debug.callback(report, lost)

    def _report(self, place: Place, name: str, dtype: str, lost: Any) -> None:
        norm, share, saturated = (float(x) for x in np.asarray(lost))
        texts = []
        if norm > FLUSHED:
            texts.append(
                f"{share:.2%} of its elements, {norm:.2%} of its norm, are flushed to"
                " zero"
            )
        if saturated > 0:
            texts.append(f"{saturated:.2%} of its elements saturate")
        self._warn(place, name, dtype, texts)

    def _report_lines(self, place: Place, name: str, dtype: str, lost: Any) -> None:
        shares = zip(
            np.max(np.asarray(lost).reshape(-1, 2), 0).tolist(),
            ("rows", "columns"),
            strict=True,
        )
        texts = [f"{share:.2%} of its {lines}" for share, lines in shares if share > 0]
        if texts:
            why = (
                "are off by more than 1%, for small elements of its operands are lost"
                " beside large ones"
            )
            self._warn(place, name, dtype, [f"{' and '.join(texts)} {why}"])

    def _warn(self, place: Place, name: str, dtype: str, texts: Sequence[str]) -> None:
        """Warns of what is lost, if it has not been reported in this call."""
        key = (place, name, dtype)
        with self._lock:
            if not texts or key in self._reported:
                return
            self._reported.add(key)
        name += " of the backward pass" if place.backward else ""
        text = (
            f"{place}, {name}: in {dtype} {' and '.join(texts)} (scalify_core.explain"
            " shows where from)"
        )
        warnings.warn_explicit(
            text, PrecisionWarning, place.file or "scalify", place.line
        )

    def call_is_done(self, results: Sequence[Any]) -> None:
        """Puts into the program a callback that depends on the results: from then on
        each place is reported again.
        """
        leaves = (
            x
            for x in jax.tree.leaves(results)
            if jnp.issubdtype(jnp.result_type(x), jnp.floating)
        )
        jax.debug.callback(self._forget, *(jnp.any(jnp.isnan(x)) for x in leaves))

    def _forget(self, *_: Any) -> None:
        with self._lock:
            self._reported.clear()
