"""Who looks on while values are rounded to narrow formats: `explain` and the check mode; nobody else, at no cost."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalify_core.places import UNKNOWN, Place, name_of, place_of

FLUSHED = 0.01  # share of a tensor's norm: what is reported
_watcher: ContextVar[Callable[[Any, Any], None] | None] = ContextVar("watcher", default=None)
_place: ContextVar[tuple[Place, str]] = ContextVar("place", default=(UNKNOWN, ""))


class PrecisionWarning(UserWarning):
    """`scalify(f, check=True)` saw values vanish or saturate while the program ran."""


def is_watched() -> bool:
    """Whether anybody looks on."""
    return _watcher.get() is not None


def rounded(before: Any, after: Any) -> Any:
    """`after`, which `before` has become in a narrower format, or has been clipped to; who watches is shown both."""
    watch = _watcher.get()
    if watch is not None:
        watch(before, after)
    return after


@contextlib.contextmanager
def watching(watch: Callable[[Any, Any], None] | None) -> Iterator[None]:
    """Inside, each rounding to a narrow format is shown to `watch(before, after)`; None: to nobody."""
    token = _watcher.set(watch)
    try:
        yield
    finally:
        _watcher.reset(token)


@jax.jit
def losses(before: Any, after: Any) -> jax.Array:
    """What a rounding loses, FP32 [3]; it can be traced.

    It gives the shares of the norm and of the elements other than zero that become zero, and the share of all elements
    that the format's largest number stands for, though they were larger.
    """
    x, y = jnp.abs(jnp.asarray(before, jnp.float32)), jnp.asarray(after)
    limit = float(jnp.finfo(y.dtype).max)
    finite = jnp.isfinite(x)
    peak = jnp.max(jnp.where(finite, x, 0), initial=0.0)
    x_unit = jnp.where(finite, x, 0) / jnp.where(peak > 0, peak, 1)  # squares of small numbers would leave FP32
    flushed = (x > 0) & (y == 0)
    squares = jnp.square(x_unit)
    norm = jnp.sqrt(jnp.sum(squares, where=flushed) / jnp.maximum(jnp.sum(squares), np.float32(1e-30)))
    share = jnp.sum(flushed) / jnp.maximum(jnp.sum(x > 0), 1)
    saturated = jnp.mean((x > limit) & jnp.isfinite(y), dtype=jnp.float32) if x.size else jnp.float32(0)
    return jnp.stack([norm, share.astype(jnp.float32), saturated])


class Reporter:
    """The check mode of one scalified function: a `PrecisionWarning` per place and call."""

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

    @contextlib.contextmanager
    def of_gradients(self) -> Iterator[None]:
        """Inside, what is rounded are gradients that get the static scales of what they are the gradients of."""
        token = _place.set((UNKNOWN, "gradient at the static scale of its argument"))
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
            jax.debug.callback(lambda lost: self._report(place, name, dtype, lost), losses(before, after))

    def _report(self, place: Place, name: str, dtype: str, lost: Any) -> None:
        norm, share, saturated = (float(x) for x in np.asarray(lost))
        if norm <= FLUSHED and saturated == 0:
            return
        with self._lock:
            key = (place, name, dtype)
            if key in self._reported:
                return
            self._reported.add(key)
        texts = []
        if norm > FLUSHED:
            texts.append(f"{share:.2%} of its elements, {norm:.2%} of its norm, are flushed to zero")
        if saturated > 0:
            texts.append(f"{saturated:.2%} of its elements saturate")
        name += " of the backward pass" if place.backward else ""
        text = f"{place}, {name}: in {dtype} {' and '.join(texts)} (scalify_core.explain shows where from)"
        warnings.warn_explicit(text, PrecisionWarning, place.file or "scalify", place.line)

    def call_is_done(self, results: Sequence[Any]) -> None:
        """Puts into the program a callback that depends on the results: from then on each place is reported again."""
        leaves = (x for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.floating))
        jax.debug.callback(self._forget, *(jnp.any(jnp.isnan(x)) for x in leaves))

    def _forget(self, *_: Any) -> None:
        with self._lock:
            self._reported.clear()
