"""`ScaledArray`, the pair of narrow data and power-of-two scale that scaled programs take and give."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalify_core import cotangents, peaks, watch
from scalify_core.refusals import NoNumber, check_dynamic, check_known, check_powers
from scalify_core.scales import broadcast_scale, rms_scale, times
from scalify_core.storage import as_float32, saturating_cast
from scalify_core.varying import axes_of, varying


@jax.tree_util.register_pytree_with_keys_class
class ScaledArray(NoNumber):
    """The array `data * scale`. `data` is narrow and near RMS 1, `scale` a power of two.

    Invariants:
        - `data` is a floating-point array; shape, dtype, ndim and size are those of the data.
        - `scale` is positive, a power of two in [2^-126, 2^126], in one of two kinds. *Static*: a Python float. It is
          part of the pytree's structure, so for `jit` it is a constant of the compiled program, and another scale is
          another compilation. *Dynamic*: an FP32 array, a leaf beside the data; 2^-126 is that of zeros.
        - A dynamic scale is a scalar, or has the shape of leading axes of the data ((L,) for L layers), or the rank of
          the data with size 1 along the axes it is common to.

    No arithmetic is defined on a ScaledArray, and `jax.tree.map` over trees that hold some acts on data and scales
    separately, which is seldom meant. Compute with them inside `scalify`, or through `tree.py`.

    As a cotangent (outside of scalified functions) it is the logical gradient's, and all its methods are differentiated
    so. The constructor is not: it leaves out the factor that the chain rule asks for. Use `as_scaled_array` there.

    The leaf of a dynamic scale may be a mark that stands for it (`cotangents`). `scale` is the power of two, or NaN.
    """

    __slots__ = ("_known", "_leaf", "data")

    def __init__(self, data: Any, scale: Any) -> None:
        """`data`: array; `scale`: Python or NumPy number (static) or FP32 array (dynamic).

        The numbers of a dynamic scale on a device are not looked at: what is no power of two reads as NaN. The leaf of
        a gradient that was taken outside is what it is in that gradient.

        Raises:
            TypeError: `data` or a dynamic scale is an array of integers, booleans or complex numbers.
            ValueError: a static scale, or a NumPy one, that is not a power of two in [2^-126, 2^126]; a dynamic scale
                of another shape than those above.
        """
        if hasattr(data, "dtype") and not jnp.issubdtype(data.dtype, jnp.floating):
            raise TypeError(f"ScaledArray: data is {data.dtype}, expected a floating-point dtype")
        if isinstance(scale, (float, int, np.generic)) or (isinstance(scale, np.ndarray) and scale.ndim == 0):
            scale = float(scale)
        if isinstance(scale, (float, np.ndarray)):
            check_powers(scale)
        if hasattr(data, "shape") and hasattr(scale, "shape"):
            check_dynamic(data, scale)
        self.data, self._leaf, self._known = data, scale, not isinstance(scale, jax.Array)

    @property
    def scale(self) -> Any:
        """The power of two: a float where static, else an FP32 array; NaN where the leaf says none.

        It counts as a constant where it is differentiated: a gradient that arrives here becomes NaN.
        """
        if not _is_unread(self):
            return self._leaf
        read = cotangents.read if isinstance(self._leaf, jax.core.Tracer) else cotangents.number
        scale = cotangents.of_data(read(self._leaf, np.dtype(self.data.dtype)), self._leaf, self.data)
        return scale if isinstance(self._leaf, jax.Array) else np.asarray(scale)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the data."""
        return self.data.shape

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the data."""
        return self.data.dtype

    @property
    def ndim(self) -> int:
        """Rank of the data."""
        return self.data.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.data.size

    @property
    def is_static(self) -> bool:
        """Whether the scale is a Python number, hence a constant of compiled programs."""
        return isinstance(self._leaf, float)

    def unscale(self, dtype: Any = jnp.float32) -> jax.Array:
        """The logical value `data * scale`: computed in FP32, infinite beyond it, then cast to `dtype`, saturating."""
        return _unscale(self, np.dtype(dtype))

    def astype(self, dtype: Any) -> ScaledArray:
        """The same scale, the data cast, saturating."""
        return trusted(_cast(self, np.dtype(dtype), self._known))

    def rescale(self, scale: Any) -> ScaledArray:
        """The same value with another scale, static or dynamic as given, as far as the data's dtype holds it there."""
        check_known(scale)
        scale = ScaledArray(self.data, scale)._leaf
        if not isinstance(scale, float):
            return trusted(_rescale_dynamic(self, jnp.asarray(scale, jnp.float32), self._known))
        return self if self.is_static and self.scale == scale else _rescale_static(self, scale)

    def __getitem__(self, index: Any) -> ScaledArray:
        """Elements, as for an array; a scale per leading index is indexed along."""
        leaf = self._leaf
        if not self.is_static and np.ndim(leaf):
            along_first = type(index) in (int, slice) and leaf.shape[0] == len(self)
            every = leaf if along_first else jnp.broadcast_to(broadcast_scale(jnp.asarray(leaf), self.data), self.shape)
            leaf = every[index]
        return with_scale(self.data[index], leaf, known=self._known)

    def __iter__(self) -> Iterator[ScaledArray]:
        """Along the leading axis."""
        return (self[i] for i in range(len(self)))

    def __len__(self) -> int:
        return len(self.data)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The logical value as a NumPy array, FP32 if no dtype is given."""
        return np.asarray(self.unscale(), dtype=dtype)

    def __repr__(self) -> str:
        scale = self.scale
        if self.is_static:
            scale = f"2^{np.log2(scale):g}"
        return f"ScaledArray(scale={scale}, data={self.data!r})"

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Leaves: data, and that of the scale if it is dynamic."""
        leaves, static = self.tree_flatten()
        return [(jax.tree_util.GetAttrKey(name), x) for name, x in zip(("data", "scale"), leaves, strict=False)], static

    def tree_flatten(self) -> tuple[Any, Any]:
        """As `tree_flatten_with_keys`, without keys."""
        return ((self.data,), self._leaf) if self.is_static else ((self.data, self._leaf), None)

    @classmethod
    def tree_unflatten(cls, static: float | None, children: tuple) -> ScaledArray:
        """No checks: JAX puts placeholders in trees."""
        return with_scale(children[0], children[1] if static is None else static, known=False)


def with_scale(data: Any, leaf: Any, *, known: bool = True) -> ScaledArray:
    """Without checks, and NumPy numbers are dynamic (`jax.device_get`); `known`: the leaf is the scale, and no mark."""
    out = object.__new__(ScaledArray)
    out.data, out._leaf, out._known = data, leaf, known
    return out


def _is_unread(x: ScaledArray) -> bool:
    """Whether the leaf of the scale is an array that may be a mark."""
    if x._known or not isinstance(x._leaf, (jax.Array, np.ndarray, np.generic)) or not hasattr(x.data, "dtype"):
        return False
    return all(jnp.issubdtype(y.dtype, jnp.floating) for y in (x.data, x._leaf))


def read(x: Any) -> Any:
    """A ScaledArray with the scale that its leaf says; anything else as it is.

    For who is not differentiated, as the inside of a `custom_vjp`: the leaf of a cotangent does not pass.
    """
    if not (is_scaled_array(x) and _is_unread(x)):
        return x
    return with_scale(x.data, cotangents.of_data(cotangents.number(x._leaf, np.dtype(x.dtype)), x._leaf, x.data))


def trusted(x: Any) -> Any:
    """A ScaledArray of which the leaf is known to be the scale: it is not read again. Anything else as it is."""
    return with_scale(x.data, x._leaf) if is_scaled_array(x) else x


def is_scaled_array(x: Any) -> bool:
    """For `is_leaf=` of the functions of `jax.tree`."""
    return isinstance(x, ScaledArray)


def as_scaled_array(tree: Any, scale: Any = None, dtype: Any = None) -> Any:
    """Every floating-point array of a tree as a ScaledArray of the same value (up to rounding).

    Args:
        tree: any pytree; ScaledArrays, integers, booleans and keys in it stay as they are.
        scale: of every leaf: a number makes static scales, an FP32 array dynamic ones. None: the power of two that
            is nearest to the RMS of each leaf, dynamic (1 for a leaf with infinities or NaNs, and 2^-126 for zeros, so
            that a state which begins with zeros does not set the scale of what is added to it).
        dtype: of the data; that of each leaf if None.

    The gradient with respect to the tree is the logical gradient. Where nothing is traced, a `PrecisionWarning` names
    arrays of which more than a tenth become zeros, because one scale does not hold them beside the rest, or of which
    more than 1% of the norm is beyond what the format holds. ValueError: a scale that is no power of two.
    """

    def convert(path: Any, x: Any) -> Any:
        if is_scaled_array(x) or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            return x
        x = jnp.asarray(x)
        at = ScaledArray(x, rms_scale(x) if scale is None else scale)._leaf
        to = np.dtype(x.dtype if dtype is None else dtype)
        is_static = isinstance(at, float)
        out = _scale_static(x, at, to) if is_static else trusted(_scale_dynamic(x, jnp.asarray(at, jnp.float32), to))
        watch.entering(f"as_scaled_array{jax.tree_util.keystr(path)}", x, out.data, out.unscale)
        return out

    check_known(scale)
    return jax.tree_util.tree_map_with_path(convert, tree, is_leaf=is_scaled_array)


def asarray(tree: Any, dtype: Any = jnp.float32) -> Any:
    """Every ScaledArray of a tree as the plain array of its logical value, in `dtype`; other leaves as they are.

    Where it is not traced, a `PrecisionWarning` names what reads as NaN because its leaf says no scale.
    """

    def convert(x: Any) -> Any:
        return _unscale(x, np.dtype(dtype)) if is_scaled_array(x) else x

    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scaled_array)
    say_unreadable("asarray", [x for _, x in found], lambda: [jax.tree_util.keystr(path) for path, _ in found])
    return jax.tree.map(convert, tree, is_leaf=is_scaled_array)


def say_unreadable(where: str, leaves: Sequence[Any], names: Callable[[], Sequence[str]], traced: bool = False) -> None:
    """Warn (`PrecisionWarning`) of ScaledArrays that read as NaN, by name; of traced ones, if asked, by a callback."""
    unread = {i: (x._leaf, x.data) for i, x in enumerate(leaves) if is_scaled_array(x) and _is_unread(x)}
    found = cotangents.seen_unreadable(unread)
    later = [i for i, pair in unread.items() if traced and any(isinstance(x, jax.core.Tracer) for x in pair)]
    if found or later:
        named = names()
        watch.unreadable(where, [named[i] for i in found])
        watch.unreadable_when_run(where, {named[i]: is_unreadable(leaves[i]) for i in later})


def is_unreadable(x: ScaledArray) -> jax.Array:
    """Whether the leaf of a dynamic scale is a number, but none that says a scale: a boolean scalar."""
    return cotangents.is_unreadable(x._leaf, x.data)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _scale_static(x: jax.Array, scale: float, dtype: np.dtype) -> ScaledArray:
    return _scaled(x, scale, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _scale_dynamic(x: jax.Array, scale: jax.Array, dtype: np.dtype) -> ScaledArray:
    return _scaled(x, scale, dtype)


def _scaled(x: jax.Array, scale: Any, dtype: np.dtype) -> ScaledArray:
    return _rescaled(ScaledArray(as_float32(x), 1.0), scale).astype(dtype)


# `known`: of the argument, which comes out of a custom_vjp without it.
@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _rescale_static(x: ScaledArray, scale: float) -> ScaledArray:
    return _rescaled(x, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rescale_dynamic(x: ScaledArray, scale: jax.Array, known: bool) -> ScaledArray:
    return _rescaled(trusted(x) if known else x, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _cast(x: ScaledArray, dtype: np.dtype, known: bool) -> ScaledArray:
    x = trusted(x) if known else read(x)
    return with_scale(saturating_cast(x.data, dtype), x.scale)


def _rescaled(x: ScaledArray, scale: Any) -> ScaledArray:
    x = read(x)
    if x.is_static and isinstance(scale, float):
        data = as_float32(x.data) if x.scale == scale else times(as_float32(x.data), x.scale / scale)
    else:
        factor = 1.0 / scale if isinstance(scale, float) else 1 / broadcast_scale(scale, x.data)
        # The old scale first: a product of an ordinary value and a scale is in range, a ratio of scales may not be.
        data = times(_unscaled(x, jnp.float32), factor)
    return with_scale(saturating_cast(data, x.dtype), scale)


def _unscale(x: ScaledArray, dtype: np.dtype) -> jax.Array:
    return _unscale_as(x, dtype, x._known)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _unscale_as(x: ScaledArray, dtype: np.dtype, known: bool) -> jax.Array:
    return _unscaled(trusted(x) if known else x, dtype)


def _unscaled(x: ScaledArray, dtype: Any) -> jax.Array:
    x = read(x)
    data = x.data if x.dtype == jnp.float64 else jnp.asarray(x.data, jnp.float32)
    return saturating_cast(times(data, x.scale if x.is_static else jnp.asarray(x.scale, jnp.float32)), dtype)


def gradients_like(primals: Sequence[Any], gradients: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """Gradients as their primals' kinds: plain, with the primal's static scale, or with a mark of a dynamic one.

    That has the shape of the primal's: the largest of the gradient's along each axis that it is common to. What a
    static scale loses is said by a warning when it happens, by name.
    """
    out = [_gradient_like(x, g) for x, g in zip(primals, gradients, strict=True)]
    at_static_scales = []
    for x, g, y, name in zip(primals, gradients, out, names, strict=True):
        if is_scaled_array(x) and x.is_static:
            data, scale = (g.data, g.scale) if is_scaled_array(g) else (g, 1.0)
            at_static_scales.append(watch.Gradient(name, data, scale, y.data, x.scale))
    watch.gradients(at_static_scales)
    return out


def _gradient_of_argument(primal: ScaledArray, gradient: Any) -> Any:
    """As `gradients_like`, of one."""
    return gradients_like([primal], [gradient], ["a ScaledArray"])[0]


def _gradient_of_cast(primal: ScaledArray, dtype: np.dtype, gradient: ScaledArray) -> Any:
    """As `_gradient_of_argument`; zero where the cast saturates."""
    limit = float(jnp.finfo(dtype).max)
    if limit < float(jnp.finfo(primal.dtype).max):
        magnitude = jnp.abs(primal.data.astype(jnp.float32))
        plain = jnp.where((magnitude > limit) & jnp.isfinite(magnitude), 0, _unscale(gradient, np.dtype(np.float32)))
        return _gradient_of_argument(primal, plain)
    return _gradient_of_argument(primal, gradient)


def _gradient_like(primal: Any, gradient: Any) -> Any:
    if not is_scaled_array(primal):
        return asarray(gradient, jnp.result_type(primal)) if is_scaled_array(gradient) else gradient
    gradient = gradient if is_scaled_array(gradient) else ScaledArray(gradient, 1.0)
    if primal.is_static:
        return gradient.rescale(primal.scale).astype(primal.dtype)
    leaf = primal._leaf
    return _marked(gradient, np.dtype(primal.dtype), np.shape(leaf), axes_of(leaf))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _marked(x: ScaledArray, dtype: np.dtype, shape: tuple[int, ...], axes: frozenset) -> ScaledArray:
    """A gradient in a format, with marks of this shape that vary over these axes, see `cotangents`."""
    if cotangents.has_range_of_float32(dtype):
        return with_scale(_unscaled(x, dtype), varying(jnp.full(shape, cotangents.OF_ONE), axes), known=False)
    x = read(x)
    if x.dtype != dtype:  # what FP32, BF16 or a plain array holds at its scale, may be zeros or saturate in this format
        parts = shape + (1,) * (x.ndim - len(shape)) if max(shape, default=1) > 1 else ()
        x = with_scale(*peaks.measured_result(_unscaled(x, jnp.float32), np.dtype(dtype), parts))
    scale = jnp.asarray(x.scale, jnp.float32)
    if scale.ndim:
        scale = broadcast_scale(scale, x.data)
        common = tuple(axis for axis in range(scale.ndim) if axis >= len(shape) or shape[axis] == 1)
        scale = jnp.max(scale, common, keepdims=True)
        scale = jnp.broadcast_to(scale.reshape(scale.shape[: len(shape)]), shape)
        x = _rescaled(x, scale)
    return with_scale(x.data, cotangents.marked(varying(jnp.broadcast_to(scale, shape), axes)), known=False)


# Each calls itself, so that second derivatives are logical, too. An empty array carries the dtype that the gradient
# must have.
_scale_static.defvjp(
    lambda x, scale, dtype: (_scale_static(x, scale, dtype), jnp.zeros(0, x.dtype)),
    lambda scale, dtype, like, gradient: (_unscale(gradient, like.dtype),),
)
_scale_dynamic.defvjp(
    lambda x, scale, dtype: (_scale_dynamic(x, scale, dtype), (jnp.zeros(0, x.dtype), scale)),
    lambda dtype, like, gradient: (_unscale(gradient, like[0].dtype), jnp.zeros_like(like[1])),
)
_rescale_static.defvjp(
    lambda x, scale: (_rescale_static(x, scale), x),
    lambda scale, x, gradient: (_gradient_of_argument(x, gradient),),
)
_rescale_dynamic.defvjp(
    lambda x, scale, known: (_rescale_dynamic(x, scale, known), (x, scale)),
    lambda known, like, gradient: (_gradient_of_argument(like[0], gradient), jnp.zeros_like(like[1])),
)
_unscale_as.defvjp(
    lambda x, dtype, known: (_unscale_as(x, dtype, known), x),
    lambda dtype, known, x, gradient: (_gradient_of_argument(x, as_float32(gradient)),),
)
_cast.defvjp(
    lambda x, dtype, known: (_cast(x, dtype, known), x),
    lambda dtype, known, x, gradient: (_gradient_of_cast(x, dtype, gradient),),
)
_marked.defvjp(
    lambda x, dtype, shape, axes: (_marked(x, dtype, shape, axes), x),
    lambda dtype, shape, axes, x, gradient: (_gradient_of_argument(x, gradient),),
)
