"""`ScaledArray`, the pair of narrow data and power-of-two scale of scaled programs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from scalify_core.numerics import precision_warnings
from scalify_core.numerics.formats import (
    as_float32,
    has_range_of_float32,
    is_float,
    pow2_round,
    saturating_cast,
)
from scalify_core.numerics.scales import (
    broadcast_scale,
    checked_scale,
    rms_scale,
    times,
)

_INSIDE = "take gradients inside, scalify(jax.grad(f))"
MOST_SHOWN = 16  # values that the repr of an array shows
_REFUSED = f"a ScaledArray cannot be differentiated outside of scalify: {_INSIDE}"


@jax.tree_util.register_pytree_with_keys_class
class ScaledArray:
    """The array `data * scale`: narrow data near RMS 1, and a power of two.

    Invariants:
        - `data` is a floating-point array; shape, dtype, ndim and size are those of the
          data.
        - `scale` is a power of two in [2^-126, 2^126], of one of two kinds. *Static*: a
          Python float. It is part of the pytree's structure, so `jit` compiles it as a
          constant, and recompiles for another scale. *Dynamic*: an FP32 array, a leaf
          beside the data; 2^-126 is the scale of zeros.
        - A dynamic scale is a scalar, or has the shape of the data's leading axes, (L,)
          for L layers. Or it has the rank of the data, with size 1 along the axes that
          share a scale.

    No arithmetic is defined on a ScaledArray, and it is no number: write
    `float(asarray(x))`. `jax.tree.map` over trees with ScaledArrays acts on data and
    scales separately, which is seldom meant. Compute with them inside `scalify`, or
    through `tree.py`.

    Take gradients inside scalify, `scalify(jax.grad(f))`: JAX would add cotangents of a
    ScaledArray leaf by leaf, data to data and scale to scale. So differentiating with
    respect to a ScaledArray is a TypeError.
    """

    # An attribute that a user adds would be lost by any function of trees: so it is an
    # AttributeError.
    __slots__ = ("data", "scale")

    def __init__(self, data: Any, scale: Any) -> None:
        """Pair data with a scale.

        The numbers of a dynamic scale on a device are not checked. A scale that is not
        a power of two reads as NaN in `asarray` and `scalify`.

        Args:
            data: array.
            scale: Python or NumPy number (static), or FP32 array (dynamic).

        Raises:
            TypeError: `data` is an array of integers, booleans or complex numbers, or a
                ScaledArray.
            ValueError: a static scale, or a NumPy one, is not a power of two in
                [2^-126, 2^126]; a dynamic scale has another shape than those above, or
                no float dtype.
        """
        if isinstance(data, ScaledArray):
            raise TypeError(
                "ScaledArray: data is a ScaledArray, expected an array; write"
                " x.rescale(scale) for another scale"
            )
        # A tree of vmap's axes, `in_axes=ScaledArray(0, None)`, holds a number for the
        # data.
        if hasattr(data, "dtype") and not jnp.issubdtype(data.dtype, jnp.floating):
            raise TypeError(
                f"ScaledArray: data is {data.dtype}, expected a floating-point dtype"
            )
        if isinstance(scale, (float, int, np.generic)) or (
            isinstance(scale, np.ndarray) and scale.ndim == 0
        ):
            scale = float(scale)
        # On the host alone: reading an array of a device waits for the device.
        if isinstance(scale, (float, np.ndarray)):
            check_powers(scale)
        if hasattr(data, "shape") and hasattr(scale, "shape"):
            check_dynamic(data, scale)
        self.data, self.scale = data, scale

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the data."""
        return self.data.shape

    @property
    def dtype(self) -> np.dtype:
        """Return the dtype of the data."""
        return self.data.dtype

    @property
    def ndim(self) -> int:
        """Return the rank of the data."""
        return self.data.ndim

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return self.data.size

    @property
    def is_static(self) -> bool:
        """Return whether the scale is a Python number, a constant of compiled code."""
        return isinstance(self.scale, float)

    def unscale(self, dtype: Any = jnp.float32) -> jax.Array:
        """Return the logical value `data * scale`, as `asarray` does.

        It is computed in FP32, infinite beyond it, then cast to `dtype`, saturating.
        The scale is not checked: in a compiled step a check is a kernel.
        """
        return _unscale(self, dtype)

    def astype(self, dtype: Any) -> ScaledArray:
        """Return the data cast, saturating, at the same scale."""
        return with_scale(saturating_cast(self.data, dtype), self.scale)

    def rescale(self, scale: Any) -> ScaledArray:
        """Return the same value at another scale, static or dynamic as given.

        The value is the same as far as the dtype of the data holds it there.
        """
        check_known(scale)
        scale = ScaledArray(self.data, scale).scale
        if isinstance(scale, float):
            # The same object where nothing changes: a step that asks again adds no cast
            # to the program.
            if self.is_static and self.scale == scale:
                return self
        else:
            scale = jnp.asarray(scale, jnp.float32)
        return _rescaled(not_differentiable(self), scale)

    def __getitem__(self, index: Any) -> ScaledArray:
        """Return elements, as for an array.

        A scale for each leading index is indexed, too.
        """
        scale = self.scale
        if np.ndim(scale):
            # A slice of layers keeps one scale for each. Any other index may mix
            # elements of several scales, so each element brings its own.
            along_first = isinstance(index, (int, slice)) and scale.shape[0] == len(
                self
            )
            if not along_first:
                scale = broadcast_scale(jnp.asarray(scale), self.data)
                scale = jnp.broadcast_to(scale, self.shape)
            scale = scale[index]
        return with_scale(self.data[index], scale)

    def __iter__(self) -> Iterator[ScaledArray]:
        """Iterate along the leading axis."""
        # Python's own iteration ends at an IndexError, and an index beyond a JAX array
        # gives its last element.
        return (self[i] for i in range(len(self)))

    def __len__(self) -> int:
        return len(self.data)

    def __bool__(self) -> bool:
        """Raise: by `__len__`, `if x:` would be true of zeros."""
        raise TypeError("a ScaledArray has no truth value; write bool(asarray(x))")

    def __eq__(self, other: object) -> bool:
        """Raise: Python's own `x == 0` would be false, one boolean for all elements."""
        raise TypeError("a ScaledArray is not compared; write asarray(x) == y")

    # Python takes the hash from a class that defines `__eq__`.
    __hash__ = object.__hash__

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the logical value as a NumPy array, FP32 if no dtype is given."""
        # `copy` comes from NumPy 2; data times scale is a new array in any case.
        return np.asarray(asarray(self), dtype=dtype)

    def __jax_array__(self) -> jax.Array:
        """Return the logical value in FP32, for `jax.numpy` outside of scalify.

        Without it JAX would ask `__array__` for the dtype of the data, which does not
        hold the value without the scale.
        """
        return asarray(self)

    def __repr__(self) -> str:
        scale = self.scale
        if self.is_static:
            scale = f"2^{np.log2(scale):g}"
        if self.data.size <= MOST_SHOWN:
            return f"ScaledArray(scale={scale}, data={self.data!r})"
        shape = ",".join(map(str, self.shape))
        return f"ScaledArray({self.dtype}[{shape}], scale={scale})"

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Return the leaves: the data, and the scale if it is dynamic."""
        leaves, static = self.tree_flatten()
        return [
            (jax.tree_util.GetAttrKey(name), x)
            # A static scale is no leaf: the second name is then left over.
            for name, x in zip(("data", "scale"), leaves, strict=False)
        ], static

    def tree_flatten(self) -> tuple[Any, Any]:
        """Return the leaves, without keys."""
        if self.is_static:
            return (self.data,), self.scale
        return (self.data, self.scale), None

    @classmethod
    def tree_unflatten(cls, static: float | None, children: tuple) -> ScaledArray:
        """Build the array without checks: JAX puts placeholders in trees."""
        return with_scale(children[0], children[1] if static is None else static)


def with_scale(data: Any, scale: Any) -> ScaledArray:
    """Return a ScaledArray without any check.

    A NumPy scale is dynamic here, as `jax.device_get` makes it.
    """
    out = object.__new__(ScaledArray)
    out.data, out.scale = data, scale
    return out


def is_scaled_array(x: Any) -> bool:
    """Return whether `x` is a ScaledArray, for `is_leaf=` of `jax.tree` functions."""
    return isinstance(x, ScaledArray)


def is_array(x: Any) -> bool:
    """Return whether a leaf is an array or a ScaledArray, which are traced.

    Numbers and booleans of Python are not: in a module they are settings, such as
    `inference`, or the rate of a dropout. Nor are dtypes, and the gradients of
    integers, whose dtype no equation has.
    """
    # Types, since `jnp.float16` as an argument has an attribute `dtype`.
    if isinstance(x, (type, jax.ShapeDtypeStruct)) or not hasattr(x, "dtype"):
        return False
    return x.dtype != jax.dtypes.float0


def data_of(x: Any) -> Any:
    """Return the data of a ScaledArray; another leaf is unchanged."""
    if is_scaled_array(x):
        return x.data
    return x


def value_of(x: Any) -> Any:
    """Return the logical value of a ScaledArray, FP32; another leaf is unchanged."""
    if is_scaled_array(x):
        return x.unscale()
    return x


def as_scaled_array(tree: Any, scale: Any = None, dtype: Any = None) -> Any:
    """Return a tree with every floating-point array as a ScaledArray of the same value.

    Outside `jit`, a `PrecisionWarning` names arrays with large losses. Either more than
    a tenth of the elements become zeros, because one scale does not hold them beside
    the rest, or more than 1% of the norm saturates.

    Args:
        tree: any pytree; ScaledArrays, integers, booleans, keys, and leaves that are
            not arrays are unchanged, such as numbers of Python.
        scale: the scale of every leaf: a number makes static scales, an FP32 array
            dynamic ones. None: the power of two nearest to the RMS of each leaf,
            dynamic. It is 1 for a leaf with infinities or NaNs. It is 2^-126 for zeros,
            so that a state that starts at zero does not set the scale of later sums.
        dtype: the dtype of the data; None: that of each leaf.

    Raises:
        ValueError: the scale is not a power of two.
        TypeError: differentiated; take gradients inside scalify. Or FP64 data, which
            needs no scale.

    Examples:
        >>> as_scaled_array(jnp.full(2, 3.0), dtype=jnp.float16).scale
        Array(4., dtype=float32)
    """

    def convert(path: Any, x: Any) -> Any:
        if is_scaled_array(x) or not is_array(x):
            return x
        if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            return x
        x = not_differentiable(jnp.asarray(x))
        # The RMS and not the amax: propagated rules expect data near RMS 1.
        at = ScaledArray(x, rms_scale(x) if scale is None else scale).scale
        if not isinstance(at, float):
            at = jnp.asarray(at, jnp.float32)
        to = np.dtype(x.dtype if dtype is None else dtype)
        name = f"as_scaled_array{jax.tree_util.keystr(path)}"
        if to.itemsize > 4:
            raise TypeError(
                f"{name}: {to} has no scaled form;"
                " give dtype=jnp.float32, or leave it a plain array"
            )
        # FP32 in between: `_rescaled` rounds to the dtype of its argument, so FP16 data
        # as BF16 would be rounded twice.
        out = _rescaled(ScaledArray(as_float32(x), 1.0), at).astype(to)
        precision_warnings.warn_of_losses(name, x, out.data, out.unscale)
        return out

    check_known(scale)
    return jax.tree_util.tree_map_with_path(convert, tree, is_leaf=is_scaled_array)


def asarray(tree: Any, dtype: Any = jnp.float32) -> Any:
    """Return a tree with every ScaledArray as the plain array of its logical value.

    A scale that is not a power of two reads as NaN: arithmetic was done on the scale
    outside scalify. Where it is not traced, a `PrecisionWarning` names such arrays.

    Args:
        tree: any pytree; leaves that are not ScaledArrays are unchanged.
        dtype: the dtype of the arrays; the product of data and scale is FP32.

    Raises:
        TypeError: differentiated with respect to a ScaledArray, other than a result of
            a scalified function in FP32 or BF16.
    """
    return jax.tree.map(
        lambda x: _unscale(x, dtype) if is_scaled_array(x) else x,
        with_valid_scales("asarray", tree),
        is_leaf=is_scaled_array,
    )


def paths(tree: Any) -> list[str]:
    """Return the path of each leaf of a tree, a ScaledArray being a leaf."""
    named = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scaled_array)
    return [jax.tree_util.keystr(path) for path, _ in named]


def with_valid_scales(
    where: str, tree: Any, names: Callable[[], Sequence[str]] | None = None
) -> Any:
    """Return a tree; ScaledArrays with an invalid scale read as NaN.

    A `PrecisionWarning` names those whose numbers are at hand: not tracers, nor arrays
    with shards on other hosts. There a scale of zero is invalid, unless all of the data
    is zero. Zero is the difference of two equal scales, and `jnp.zeros_like` of a
    scale.

    Args:
        where: the beginning of the warning.
        tree: any pytree.
        names: gives the names of its leaves; None: their paths.
    """
    structure: Any
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_scaled_array)
    dynamic = {
        i: x for i, x in enumerate(leaves) if is_scaled_array(x) and not x.is_static
    }
    # One transfer for all: each waits for the device.
    scales = jax.device_get(
        {
            i: x.scale
            for i, x in dynamic.items()
            if _is_at_hand(x.data) and _is_at_hand(x.scale)
        }
    )
    unread = [i for i, scale in scales.items() if not _is_valid(scale, leaves[i].data)]
    if unread:
        named = names() if names else paths(tree)
        precision_warnings.unreadable(where, [named[i] for i in unread])
    for i, x in dynamic.items():
        if i in unread:
            leaves[i] = with_scale(x.data, jnp.full(np.shape(x.scale), np.nan))
        # Under jit no number is known: the check is part of the program.
        elif isinstance(x.scale, jax.core.Tracer):
            scale = checked_scale(jnp.asarray(x.scale, jnp.float32))
            leaves[i] = with_scale(x.data, scale)
    return structure.unflatten(leaves)


def _is_valid(scale: Any, data: Any) -> bool:
    """Return whether numbers on the host can be the scale of this data."""
    scale = np.asarray(scale, np.float32)
    # NaN reads as NaN already.
    if np.all((np.frexp(scale)[0] == 0.5) | np.isnan(scale)):
        return True
    return not (np.any(scale) or np.any(jax.device_get(data)))


def _is_at_hand(x: Any) -> bool:
    """Return whether the numbers of an array can be read here and now."""
    is_known = isinstance(x, jax.typing.ArrayLike) and not isinstance(
        x, jax.core.Tracer
    )
    # Shards of other processes cannot be read here.
    return is_known and getattr(x, "is_fully_addressable", True)


# No stop_gradient: its zeros would train nothing, without a word.
@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _refuse_jvp(x: Any, message: str) -> Any:
    return x


@_refuse_jvp.defjvp
def _refuse_gradient(message: str, primals: Any, tangents: Any) -> Any:
    raise TypeError(message)


def not_differentiable(tree: Any, message: str = _REFUSED) -> Any:
    """Return the tree as it is; differentiating with respect to it is a TypeError."""
    return _refuse_jvp(tree, message)


def _rescaled(x: ScaledArray, scale: Any) -> ScaledArray:
    if x.is_static and isinstance(scale, float):
        # Python's FP64 holds any ratio of two scales, up to 2^252; `times` multiplies
        # by it in two steps.
        data = times(as_float32(x.data), x.scale / scale)
    else:
        if isinstance(scale, float):
            factor: Any = 1.0 / scale
        else:
            factor = 1 / broadcast_scale(scale, x.data)
        # The old scale first: a ratio of two scales may leave FP32.
        data = times(_times_scale(x.data, x.scale), factor)
    return with_scale(saturating_cast(data, x.dtype), scale)


def _unscale(x: ScaledArray, dtype: Any) -> jax.Array:
    dtype = np.dtype(dtype)
    if x.is_static:
        return _times_scale(not_differentiable(x.data), x.scale, dtype)
    return _unscale_dynamic(x.data, x.scale, dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _unscale_dynamic(data: Any, scale: Any, dtype: np.dtype) -> jax.Array:
    return _times_scale(data, scale, dtype)


def _unscale_jvp(dtype: np.dtype, primals: Any, tangents: Any) -> Any:
    """Differentiate a result of a scalified function, whose scale is a constant.

    The scale of an argument is not constant: JAX differentiates with respect to all
    leaves.
    """
    (data, scale), (tangent, of_scale) = primals, tangents
    # A zero of JAX's own says that nobody differentiates with respect to the scale.
    if not isinstance(of_scale, SymbolicZero):
        raise TypeError(_REFUSED)
    # The cotangent would have the dtype of the data, in FP16 without a scale.
    if not has_range_of_float32(data.dtype):
        raise TypeError(
            f"asarray: the gradient through a result in {data.dtype} would lose what "
            "that format does not hold; return it in FP32, x.astype(jnp.float32), or "
            f"a scalar loss, or {_INSIDE}"
        )
    return _times_scale(data, scale, dtype), _times_scale(tangent, scale, dtype)


_unscale_dynamic.defjvp(_unscale_jvp, symbolic_zeros=True)


def _times_scale(data: Any, scale: Any, dtype: Any = np.float32) -> jax.Array:
    """Return `data * scale`, which may be differentiated."""
    # FP64 keeps its digits at scale 1: at others, `times` makes FP32 of it.
    if data.dtype != jnp.float64:
        data = jnp.asarray(data, jnp.float32)
    if not isinstance(scale, float):
        scale = jnp.asarray(scale, jnp.float32)
    return saturating_cast(times(data, scale), dtype)


def check_powers(scale: Any) -> None:
    """Raise ValueError for numbers that are not valid scales."""
    for number in np.ravel(scale).tolist():
        # `not >` refuses NaN, too.
        if not number > 0 or pow2_round(number) != number:
            raise ValueError(
                f"ScaledArray: scale is {number}, expected a power of two in [2^-126,"
                " 2^126]"
            )


def check_known(scale: Any) -> None:
    """Check a given run-time scale (or None), as far as its numbers are known here.

    Raises:
        TypeError: it is neither a number nor an array, such as a dtype that was meant
            for another argument.
        ValueError: a number is not a valid scale.
    """
    # `as_scaled_array(x, jnp.float16)` is easily written for `dtype=`.
    if scale is not None and not isinstance(scale, jax.typing.ArrayLike):
        raise TypeError(
            f"scale is {scale!r}, expected a power of two or an FP32 array; a dtype is"
            " given by its name, dtype=..."
        )
    if scale is not None and _is_at_hand(scale):
        check_powers(scale)


def check_dynamic(data: Any, scale: Any) -> None:
    """Raise ValueError for an array that cannot be the run-time scale of this data."""
    fits = len(scale.shape) <= len(data.shape) and all(
        s in (1, n) for s, n in zip(scale.shape, data.shape, strict=False)
    )
    if not fits or not is_float(scale):
        raise ValueError(
            f"ScaledArray: scale {jax.typeof(scale)} for data {jax.typeof(data)},"
            " expected float32, a scalar, the shape of leading axes, or size 1 or that"
            " of the data along each axis"
        )
