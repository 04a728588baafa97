"""Warnings about lost numbers, and callbacks by which `explain` observes casts.

Without `explain` the callbacks cost nothing.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

LOST = 0.01  # reported share of a tensor's norm, flushed, rounded or saturated
# Reported share of an argument's elements; fewer may be inexact zeros, as cos(pi / 2).
ENTERING = 0.1
# A context variable: programs that are traced in other threads are not observed.
_watcher: ContextVar[Callable[[Any, Any], None] | None] = ContextVar(
    "watcher", default=None
)
# Of the texts that were shown: each is shown once, from whatever module it comes.
_warned: dict = {}


class PrecisionWarning(UserWarning):
    """Numbers are lost: a format does not hold them, or a scale is not valid."""


def is_watched() -> bool:
    """Return whether an observer is active."""
    return _watcher.get() is not None


def observe_rounding(unrounded: Any, narrowed: Any) -> Any:
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
def losses(unrounded: Any, narrowed: Any, value: Any) -> jax.Array:
    """Return the losses of a rounding, FP32 [4]; it can be traced.

    They are the shares of the norm and of the elements that become zero, and the shares
    of the norm and of the elements that saturate. `value` is the array `narrowed` in
    the units of `unrounded`.
    """
    x, y, value = (
        jnp.abs(jnp.asarray(a, jnp.float32)) for a in (unrounded, narrowed, value)
    )
    # An infinity, as of a mask, is no loss of the rounding.
    finite = jnp.where(jnp.isfinite(x), x, 0)
    # In units of the largest: squares of small numbers would underflow FP32.
    peak = jnp.max(finite, initial=0.0)
    unit = jnp.where(peak > 0, peak, 1)
    size = jnp.maximum(jnp.linalg.norm(finite / unit), 1)  # 1: of zeros

    def shares(lost: jax.Array, off: jax.Array) -> list[jax.Array]:
        """Return the shares of the norm and of the elements."""
        norm = jnp.linalg.norm(jnp.where(lost, off / unit, 0))
        return [norm / size, jnp.sum(lost) / max(x.size, 1)]

    # The largest number of a format may also be the right one.
    saturated = (y == float(jnp.finfo(narrowed.dtype).max)) & (x > value)
    return jnp.stack(
        [*shares((x > 0) & (y == 0), finite), *shares(saturated, finite - value)]
    )


@jax.jit
def beside_lost(unrounded: Any, narrowed: Any) -> jax.Array:
    """Return whether small elements are off by more than 1%.

    Elements are small 14 octaves below the largest. They do not count where more
    elements lie 6 to 14 octaves below it: they are then the tail of a distribution.
    Arguments are the array, and the logical value of its stored form.
    """
    x, y = (jnp.asarray(a, jnp.float32) for a in (unrounded, narrowed))
    magnitude = jnp.where(jnp.isfinite(x), jnp.abs(x), 0)
    top = jnp.max(magnitude, initial=0.0)
    small = magnitude < top * 2.0**-14
    # Counted, since a gap without any element tells nothing: large numbers of a product
    # cross zero, and fill it.
    between = jnp.sum((magnitude < top * 2.0**-6) & ~small)
    count = jnp.sum(small & (magnitude > 0))
    largest = jnp.max(jnp.where(small, magnitude, 0), initial=0.0)
    # Squares of small numbers would underflow FP32.
    unit = jnp.where(largest > 0, largest, 1)
    off, size = (jnp.sum(jnp.square(jnp.where(small, a / unit, 0))) for a in (x - y, x))
    # `not <=`: a NaN counts as lost.
    return (count > between) & ~(off <= LOST**2 * size)


def warn_of_losses(name: str, x: Any, data: Any, value: Callable[[], Any]) -> None:
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
    _, flushed, saturated, _ = losses(x, data, value()).tolist()
    if flushed > ENTERING:
        _warn_once(
            f"{name}: more than a tenth of its elements become zeros in {data.dtype} at"
            " its scale; keep the large and the small ones in arrays of their own, or"
            " take dtype=jnp.bfloat16; or give scale=, a smaller one at which the"
            " largest still fits"
        )
    if saturated > LOST:
        _warn_once(
            f"{name}: more than {LOST:.0%} of its norm is beyond what {data.dtype}"
            " holds at its scale; give a larger scale=, or none, which is measured; or"
            " clip what is far larger than the rest"
        )


def _warn_once(text: str) -> None:
    warnings.warn_explicit(text, PrecisionWarning, "scalify", 0, registry=_warned)


def unreadable(where: str, names: Sequence[str]) -> None:
    """Warn (`PrecisionWarning`) once of ScaledArrays whose leaves hold no valid scale.

    They read as NaN.
    """
    if not names:
        return
    # A tree that is one ScaledArray has an empty path.
    which = names[0] or "a ScaledArray"
    if len(names) > 1:
        which = f"{which} (and {len(names) - 1} more)"
    _warn_once(
        f"{where}: {which} reads as NaN: what stands for its scale is none, because"
        " outside of scalify arithmetic was done on the leaves of ScaledArrays, as"
        " optax.apply_updates, nnx.Optimizer and any optax optimizer do; use"
        " weights.apply_updates and optim.scaled_state(optimizer), take gradients"
        " inside, scalify(jax.grad(f)), and compute inside, or on asarray(tree)"
    )
