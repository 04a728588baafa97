"""Callbacks that observe casts to narrow formats: `explain` and the check mode.

Without an observer they cost nothing.
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

from scalify_core.numerics.jaxprs import NO_PLACE, Place, name_of, place_of

FLUSHED = 0.01  # reported share of a tensor's norm
# Reported share of an argument's elements; fewer may be inexact zeros, as cos(pi / 2).
ENTERING = 0.1
_watcher: ContextVar[Callable[[Any, Any], None] | None] = ContextVar(
    "watcher", default=None
)
_warned: dict = {}  # the registry of warnings that were shown
_place: ContextVar[tuple[Place, str]] = ContextVar("place", default=(NO_PLACE, ""))


class PrecisionWarning(UserWarning):
    """`scalify(f, check=True)` saw values vanish or saturate while the program ran."""


def is_watched() -> bool:
    """Return whether an observer is active."""
    return _watcher.get() is not None


def rounded(unrounded: Any, narrowed: Any) -> Any:
    """Return `narrowed`, after showing both arrays to an observer.

    `narrowed` is `unrounded` in a narrower format, or clipped to one.
    """
    watch = _watcher.get()
    if watch is not None:
        watch(unrounded, narrowed)
    return narrowed


@contextlib.contextmanager
def watching(watch: Callable[[Any, Any], None] | None) -> Iterator[None]:
    """Show each rounding inside the context to `watch(unrounded, narrowed)`.

    None: roundings are not observed.
    """
    token = _watcher.set(watch)
    try:
        yield
    finally:
        _watcher.reset(token)


@jax.jit
def losses(unrounded: Any, narrowed: Any) -> jax.Array:
    """Return the losses of a rounding, FP32 [3]; it can be traced.

    They are the shares of the norm and of the nonzero elements that become zero, and
    the share of finite elements that saturate.
    """
    x, y = jnp.abs(jnp.asarray(unrounded, jnp.float32)), jnp.asarray(narrowed)
    limit = float(jnp.finfo(y.dtype).max)
    finite = jnp.isfinite(x)
    peak = jnp.max(jnp.where(finite, x, 0), initial=0.0)
    # Squares of small numbers would underflow FP32.
    x_unit = jnp.where(finite, x, 0) / jnp.where(peak > 0, peak, 1)
    flushed = (x > 0) & (y == 0)
    squares = jnp.square(x_unit)
    norm = jnp.sqrt(
        jnp.sum(squares, where=flushed)
        / jnp.maximum(jnp.sum(squares), np.float32(1e-30))
    )
    share = jnp.sum(flushed) / jnp.maximum(jnp.sum(x > 0), 1)
    if x.size:
        saturated = jnp.mean((x > limit) & jnp.isfinite(y), dtype=jnp.float32)
    else:
        saturated = jnp.float32(0)
    return jnp.stack([norm, share.astype(jnp.float32), saturated])


@jax.jit
def beside_lost(unrounded: Any, narrowed: Any) -> jax.Array:
    """Return the share of small elements, if they are off by more than 1% (FP32).

    Elements are small 14 octaves below the largest. It is 0 where more elements lie 6
    to 14 octaves below the largest: the small ones are then the tail of a distribution.
    Arguments are the array, and the logical value of its stored form.
    """
    x, y = (jnp.asarray(a, jnp.float32) for a in (unrounded, narrowed))
    magnitude = jnp.where(jnp.isfinite(x), jnp.abs(x), 0)
    top = jnp.max(magnitude, initial=0.0)
    small = magnitude < top * 2.0**-14
    between = jnp.sum((magnitude < top * 2.0**-6) & ~small)
    count = jnp.sum(small & (magnitude > 0))
    largest = jnp.max(jnp.where(small, magnitude, 0), initial=0.0)
    # Squares of small numbers would underflow FP32.
    unit = jnp.where(largest > 0, largest, 1)
    off, size = (jnp.sum(jnp.square(jnp.where(small, a / unit, 0))) for a in (x - y, x))
    lost = (count > between) & ~(off <= FLUSHED**2 * size)
    return jnp.where(lost, count / max(x.size, 1), 0.0).astype(jnp.float32)


def entering(name: str, x: Any, data: Any, value: Callable[[], Any]) -> None:
    """Warn (`PrecisionWarning`) of numbers that a format cannot hold at their scale.

    It warns where more than a tenth of the elements of `x` become zero, or more than 1%
    of their norm saturates. The data is `data`, and its logical value `value()`. It
    does not warn about traced arrays. Later code cannot detect these losses.
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
    """Return the share of nonzero elements that become zero, and of the norm that
    saturates.
    """
    x = jnp.asarray(x, jnp.float32)
    clipped = jnp.isfinite(x) & (jnp.abs(data) == jnp.finfo(data.dtype).max)
    finite = jnp.where(jnp.isfinite(x), x, 0)
    # In units of the largest, so that no square overflows.
    unit = jnp.maximum(jnp.max(jnp.abs(finite)), jnp.finfo(jnp.float32).tiny)
    rest = jnp.sum(jnp.square(jnp.where(clipped, (x - value) / unit, 0)))
    return jnp.mean((x != 0) & (data == 0)), jnp.sqrt(
        rest / jnp.maximum(jnp.sum(jnp.square(finite / unit)), 1)
    )


def unreadable(where: str, names: Sequence[str]) -> None:
    """Warn (`PrecisionWarning`) once of ScaledArrays whose leaves hold no valid scale.

    They read as NaN.
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


def unreadable_when_run(where: str, is_invalid: Mapping[str, Any]) -> None:
    """Add a callback that warns of ScaledArrays with an invalid scale.

    `is_invalid` holds a flag for each array, by name; without arrays there is no
    callback.
    """
    if not is_invalid:
        return
    names = list(is_invalid)

    def report(*flags: Any) -> None:
        unreadable(
            where, [name for name, flag in zip(names, flags, strict=True) if flag.any()]
        )

    jax.debug.callback(report, *is_invalid.values())


class Observer:
    """Sees what an evaluator evaluates: an `Observer` by itself sees nothing."""

    def jaxpr(
        self, jaxpr: Any, args: Sequence[Any], run: Callable[[], list[Any]]
    ) -> list[Any]:
        """Return the results of a jaxpr, which `run` evaluates on `args`."""
        return run()

    def equation(self, eqn: Any, operands: Sequence[Any], run: Callable) -> list[Any]:
        """Return the results of an equation: `run(operands)`."""
        with self.at(eqn):
            return run(operands)

    def at(self, eqn: Any) -> contextlib.AbstractContextManager[None]:
        """Attribute roundings inside the context to this equation."""
        return contextlib.nullcontext()

    def returned(self, dtype: str, lost: Any) -> None:
        """See the lost share of a result, see `beside_lost`."""

    def call_is_done(self, results: Sequence[Any]) -> None:
        """See the results of a call."""


@contextlib.contextmanager
def made_at(observer: Observer | None, jaxpr: Any, var: Any) -> Iterator[None]:
    """Attribute roundings to the equation that makes a result, inside calls of jit."""
    with contextlib.ExitStack() as places:
        while observer is not None:
            eqn = next((eqn for eqn in jaxpr.eqns if var in eqn.outvars), None)
            if eqn is None:
                break
            places.enter_context(observer.at(eqn))
            if eqn.primitive.name != "jit":
                break
            jaxpr = eqn.params["jaxpr"]
            var = jaxpr.outvars[eqn.outvars.index(var)]
        yield


class Reporter(Observer):
    """The check mode of one scalified function.

    It gives one `PrecisionWarning` per place and call.
    """

    def __init__(self) -> None:
        self._reported: set[tuple] = set()
        self._lock = threading.Lock()  # callbacks come from the threads of the devices

    @contextlib.contextmanager
    def at(self, eqn: Any) -> Iterator[None]:
        """Attribute roundings inside the context to this equation."""
        outer, _ = _place.get()
        token = _place.set((place_of(eqn, outer), name_of(eqn)))
        try:
            with watching(self._watch):
                yield
        finally:
            _place.reset(token)

    def _watch(self, unrounded: Any, narrowed: Any) -> None:
        """Add a callback with the losses of a rounding."""
        place, name = _place.get()
        dtype = str(narrowed.dtype)
        with watching(None):
            jax.debug.callback(
                lambda lost: self._report(place, name, dtype, lost),
                losses(unrounded, narrowed),
            )

    def entered(self, is_invalid: Mapping[str, Any]) -> None:
        """Add a callback with flags of arguments whose scale is invalid, by name."""
        unreadable_when_run("argument", is_invalid)

    def returned(self, dtype: str, lost: Any) -> None:
        """Add a callback with the lost share of a result, see `beside_lost`."""
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

    def _warn(self, place: Place, name: str, dtype: str, texts: Sequence[str]) -> None:
        """Warn of losses that have not been reported in this call."""
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
        """Add a callback that runs after the results, and ends the call.

        From then on each place is reported again.
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
