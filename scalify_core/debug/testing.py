"""`check_scalify`, the one checker: a scaled function matches the plain one in FP32."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalify_core.array.scaled_array import ScaledArray, asarray, is_scaled_array
from scalify_core.array.tree import with_dynamic_scales, with_static_scales
from scalify_core.interpreter.reference_trace import (
    TraceError,
    dtypes_of_results,
    reference_trace,
)
from scalify_core.interpreter.transform import ScalePolicy, scalify
from scalify_core.numerics.formats import (
    E4M3,
    E5M2,
    FP32,
    FloatFormat,
    is_float,
    pow2_round,
)

WAYS = ("eager", "jit", "dynamic")


def check_scalify(
    fun: Callable,
    *args: Any,
    dtype: Any = jnp.float32,
    roundings: int = 4,
    reduction: int = 1,
    grad: bool = False,
    ways: Sequence[str] = WAYS,
    scales: ScalePolicy = "auto",
) -> Any:
    """Assert that `scalify(fun)(*args)` equals `fun(*args)`.

    Args:
        fun: function of pytrees of arrays, to pytrees of arrays.
        args: its arguments, at least one of them a ScaledArray. `fun` itself runs on
            their logical values in FP32.
        dtype: the dtype of the scaled arguments' data, which is cast to it first. So
            the cast is not part of the error.
        roundings: the number of roundings to `dtype` between arguments and result, on
            one path.
        reduction: the length of the longest sum. An element of a sum may be wrong by a
            rounding of the largest element of the result for each term; without sums
            (1) each element is compared at its own size.
        grad: whether to check the gradient, too: of a weighted sum of all
            floating-point results, with respect to the scaled arguments, as
            `scalify(jax.grad(...))`.
        ways: the ways to run it; leave some out where one function is checked many
            times.
        scales: as for `scalify`.

    A plain program in the format rounds the arguments' logical values to `dtype`, calls
    the function, and rounds its result to its format. An element that it keeps, within
    the allowed error, must be kept by the scaled function, too. Other elements
    overflow, or are below the format's smallest numbers. They may be lost if they are
    below the smallest number of the data times its scale.

    The function runs eagerly and under jit with static scales, and under jit with
    dynamic ones. Checked are:

    - the tree of the result, and its values, within (roundings + reduction) x epsilon;
    - infinities and NaNs, which must stand where the plain function has them;
    - scales, which must be powers of two within [2^-126, 2^126];
    - the format: `dtype` (FP16 for the results of arithmetic on FP8), or that of the
      plain result where the function itself casts to another. With measured scales it
      may be FP32 where plain code of the format has FP32, with the tolerance of
      `dtype`.

    Returns:
        The result of the first way.

    Raises:
        AssertionError: naming the result, how it was run, and the worst element.
        ValueError: none of the arguments is a ScaledArray.
    """
    leaves, tree = jax.tree.flatten(args, is_leaf=is_scaled_array)
    leaves = [x.astype(dtype) if is_scaled_array(x) else x for x in leaves]
    if not any(is_scaled_array(x) for x in leaves):
        raise ValueError("check_scalify: give at least one ScaledArray")
    check = functools.partial(_check, reduction=reduction, scales=scales)
    first = check(fun, leaves, tree, ways, roundings)
    if grad:
        scaled = [i for i, x in enumerate(leaves) if is_scaled_array(x)]
        gradient = _gradient_of(fun, tree, tuple(scaled))
        check(
            gradient,
            leaves,
            jax.tree.structure((0,) * len(leaves)),
            ways,
            2 * roundings,  # of the forward pass and the backward pass
        )
    return first


def _check(
    fun: Callable,
    leaves: Sequence[Any],
    tree: Any,
    ways: Sequence[str],
    roundings: int,
    *,
    reduction: int,
    scales: ScalePolicy,
) -> Any:
    """Check one function in all ways to run it."""
    formats = {FloatFormat.of(x.dtype) for x in leaves if is_scaled_array(x)}
    # The tolerance is the epsilon of one format.
    assert len(formats) == 1, f"one format at a time: {formats}"
    (fmt,) = formats
    static, dynamic = with_static_scales(leaves), with_dynamic_scales(leaves)
    plain, scaled, jitted = _functions(fun, tree, scales)
    expected = plain(*asarray(leaves))
    # What plain code loses as its arguments are rounded is not asked of the scaled one.
    narrow = plain(*(_rounded(x, fmt.dtype) for x in asarray(leaves)))
    # Propagated scales store every result in the format of the data.
    wide = _are_wide(plain, leaves) if scales == "auto" else None
    first = None
    for way in ways:
        actual = (scaled if way == "eager" else jitted)(
            *(dynamic if way == "dynamic" else static)
        )
        limits = {"roundings": roundings, "reduction": reduction}
        assert_close(
            actual, expected, fmt, **limits, narrow=narrow, wide=wide, where=way
        )
        if first is None:
            first = actual
    return first


@functools.lru_cache(maxsize=32)
def _functions(
    fun: Callable, tree: Any, scales: ScalePolicy
) -> tuple[Callable, Callable, Callable]:
    """Return the plain function of leaves under jit, and the scaled one without and
    with jit.

    They are compiled once for all calls.
    """

    def on_leaves(*leaves: Any) -> Any:
        return fun(*jax.tree.unflatten(tree, leaves))

    scaled = scalify(on_leaves, scales=scales)
    return jax.jit(on_leaves), scaled, jax.jit(scaled)


def _are_wide(fun: Callable, leaves: Sequence[Any]) -> list[bool] | None:
    """Return which results are FP32 in plain code with arrays in the leaves' formats.

    None: the function cannot be traced with these.
    """
    try:
        narrow = reference_trace(fun, leaves)
    except TraceError:
        # A branch on the dtype, or `jnp.linalg`, which has no FP16.
        return None
    return [dtype == np.float32 for dtype in dtypes_of_results(narrow.jaxpr)]


def _rounded(x: Any, dtype: Any) -> Any:
    """Return a plain float array rounded to a format, in its own dtype.

    Numbers beyond the format become infinite or NaN.
    """
    if not is_float(x):
        return x
    # NumPy's cast overflows to infinity, as plain code does; the library's own
    # saturates.
    with np.errstate(all="ignore"):
        return np.asarray(x).astype(dtype).astype(x.dtype)


def assert_close(
    actual: Any,
    expected: Any,
    fmt: FloatFormat,
    *,
    roundings: int = 4,
    reduction: int = 1,
    narrow: Any = None,
    wide: Sequence[bool] | None = None,
    where: str = "given",
) -> None:
    """Assert that a tree with ScaledArrays of format `fmt` has the values of a plain
    tree.

    Args:
        actual: the tree of arrays and ScaledArrays.
        expected: the plain tree.
        fmt: the format.
        roundings, reduction: see `check_scalify`.
        narrow: the plain tree of arguments rounded to the format; None: unknown.
        wide: for each leaf, whether it may be FP32; None: only where `fmt` is FP32.
        where: the beginning of messages.
    """
    actual_leaves, actual_tree = jax.tree.flatten(actual, is_leaf=is_scaled_array)
    expected_leaves, expected_tree = jax.tree.flatten_with_path(expected)
    assert str(actual_tree) == str(expected_tree), (
        f"{where}: tree {actual_tree}, expected {expected_tree}"
    )
    count = len(actual_leaves)
    narrow_leaves = jax.tree.leaves(narrow) or [None] * count
    may_be_wide = wide or [False] * count
    for x, (path, y), z, is_wide in zip(
        actual_leaves, expected_leaves, narrow_leaves, may_be_wide, strict=True
    ):
        name = f"{where}: result{jax.tree_util.keystr(path)}"
        if is_scaled_array(x):
            _assert_invariants(x, y, fmt, is_wide, name)
        _assert_leaf_close(x, y, z, fmt, roundings, reduction, name)


def _assert_leaf_close(
    x: Any,
    y: Any,
    narrow: Any,
    fmt: FloatFormat,
    roundings: int,
    reduction: int,
    where: str,
) -> None:
    assert x.shape == y.shape, f"{where}: shape {x.shape}, expected {y.shape}"
    # NumPy has no keys.
    if jax.dtypes.issubdtype(y.dtype, jax.dtypes.prng_key):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    scale: Any = 1.0
    if is_scaled_array(x):
        # With several scales, the largest: the bound is then too wide for some parts,
        # and never too narrow.
        scale = np.max(np.asarray(x.scale))
        # FP32 data is as exact as the operands, which are in `fmt`.
        if x.dtype != jnp.float32:
            fmt = FloatFormat.of(x.dtype)
    else:
        assert x.dtype == y.dtype, f"{where}: plain {x.dtype}, expected {y.dtype}"
    x, y = np.asarray(x), np.asarray(y)
    if not jnp.issubdtype(y.dtype, jnp.inexact):
        assert np.array_equal(x, y), f"{where}: {x}, expected {y}"
        return
    wide = np.complex128 if jnp.issubdtype(y.dtype, jnp.complexfloating) else np.float64
    x, y = x.astype(wide), y.astype(wide)
    finite = np.isfinite(y)
    same = finite == np.isfinite(x)
    same &= finite | (np.isnan(x) & np.isnan(y)) | (x == y)
    assert same.all(), (
        f"{where}: infinities or NaNs differ: {x[~same].ravel()[:4]}, expected"
        f" {y[~same].ravel()[:4]}"
    )
    x, y = np.where(finite, x, 0), np.where(finite, y, 0)
    # A sum's rounding is relative to its largest terms, whatever the sum is.
    size = np.abs(y) if reduction == 1 else np.max(np.abs(y), initial=0.0)
    bound = (roundings + reduction) * fmt.epsilon * size + roundings * FP32.min_normal
    # Values below the smallest numbers of the data, or of the plain program, may be
    # lost, but not values that plain data keeps. Devices may flush FP32's subnormals.
    least = roundings * max(fmt.min_subnormal, FP32.min_normal)
    of_data, of_plain = bound + least * scale, bound + least * min(scale, 1.0)
    bound = of_data
    if narrow is not None:
        rounded = np.asarray(_rounded(narrow, fmt.dtype)).astype(wide)
        # A plain program that overflows sets no bound.
        if np.isfinite(rounded).sum() == finite.sum():
            bound = np.where(
                np.abs(np.where(finite, rounded, 0) - y) <= of_plain, of_plain, of_data
            )
    error = np.abs(x - y)
    if np.any(error > bound):
        worst = np.argmax(error / bound)
        at = tuple(map(int, np.unravel_index(worst, error.shape)))
        limit = np.broadcast_to(bound, error.shape)[at]
        raise AssertionError(
            f"{where}: {x[at]} at {at}, expected {y[at]} within {limit:.3g}"
        )


def _assert_invariants(
    x: ScaledArray, y: Any, fmt: FloatFormat, is_wide: bool, where: str
) -> None:
    """Assert the invariants of a ScaledArray: an allowed format and allowed scales."""
    assert is_float(y), f"{where}: a ScaledArray, expected {y.dtype}"
    allowed = {y.dtype}
    if y.dtype == jnp.float32:
        allowed = {fmt.dtype}
        if fmt in (E4M3, E5M2):
            # Results of arithmetic on FP8 are FP16: each rounding to E4M3 costs up to
            # 2^-4.
            allowed.add(np.dtype(np.float16))
        if is_wide:
            allowed.add(y.dtype)
    assert x.dtype in allowed, f"{where}: data is {x.dtype}, expected {allowed}"
    for scale in np.ravel(np.asarray(x.scale, np.float32)):
        assert pow2_round(scale) == scale, (
            f"{where}: scale {scale} is no power of two in [2^-126, 2^126]"
        )


@functools.lru_cache(maxsize=32)
def _gradient_of(fun: Callable, tree: Any, scaled: tuple[int, ...]) -> Callable:
    """Return the gradient of a weighted sum of the floating-point results.

    It is taken with respect to the leaves `scaled`.
    """

    def loss(*leaves: Any) -> jax.Array:
        total = jnp.float32(0)
        for y in jax.tree.leaves(fun(*jax.tree.unflatten(tree, leaves))):
            if is_float(y):
                total += jnp.sum(
                    # Weights of both signs and unlike sizes: of a plain sum, all
                    # cotangents are 1, and a permuted gradient would pass.
                    y * np.cos(np.arange(y.size, dtype=np.float32)).reshape(y.shape)
                )
        return total

    return jax.grad(loss, argnums=scaled)
