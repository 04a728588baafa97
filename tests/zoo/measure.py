"""Gradients of a model of the zoo under `scalify`, leaf by leaf, against those of plain
JAX in FP32, FP16 and BF16.

The errors are norms: |g - r| / |r|, r being the gradient of plain FP32. What is asked
of a leaf:

    FP16, BF16  at most twice the error of plain code in the format, where that is
                finite and no worse than 1%; at most 1% where it is. Below a few
                roundings of the format nothing is asked, or a leaf at which plain code
                is exact by chance would count.
    FP8         at most twice the error of FP32 code whose products round the same
                operands to FP8 at the best scales (of their largest magnitudes).
    FP32        1e-5.
    any         no more zeros than plain BF16, which has the range of FP32, where r is
    not zero.

Some gradients are not determined by their model: that of the bias of attention's keys
is zero, and FP32 finds noise. So FP32 is asked twice, once with parameters moved in
their last place. What that changes, FP16 cannot know: a leaf without a digit that FP16
could have is judged by its size beside the whole gradient. Likewise every format may be
twice as wrong as FP32 on weights that were moved in the format's last place: where a
kink (of a ReLU, a maximum, a choice of experts) is near, an error is a matter of luck.
And a zero counts where the element is above three times the error that its row or its
column may have: what is below the rounding of their sums may vanish.
"""

from __future__ import annotations

import functools
import math
import re
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import scalify_core as sc
from scalify_core.array.scaled_array import is_scaled_array
from scalify_core.numerics.formats import BF16, E4M3, FP16, FP32
from zoo import BUILDERS, takes_fp8
from zoo.case import Case

FORMATS = {"fp32": FP32, "fp16": FP16, "bf16": BF16, "fp8": FP16}  # name: of the data
SCALES = ("static", "dynamic")
ROUNDINGS = 4  # of a weight, an activation, a cotangent and the result
FAILS = 0.01  # from here on plain code is called wrong, and no excuse
LAST_PLACE = 2.0**-23
SAMPLES = 4  # of weights moved in the last place of a format

Gradient = dict[str, np.ndarray]  # by path, float64


class Leaf(NamedTuple):
    """One leaf of a gradient.

    Attributes:
        path: in the tree of parameters.
        error: relative to plain FP32.
        plain: error of plain code in the format (of FP8: of FP32 code with FP8 products
            at the best scales).
        limit: of the error.
        zeros: share of elements that are zero where FP32's are not.
        plain_zeros: the same of plain BF16, where that is asked for: where `zeros` is
            not 0.
        determined: whether the model determines this gradient; if not, neither error
            nor zeros mean anything.
        fits: whether it is within the figures.
    """

    path: str
    error: float
    plain: float
    limit: float
    zeros: float
    plain_zeros: float
    determined: bool
    fits: bool


class Found(NamedTuple):
    """The leaves of one model, in one format, with one kind of scales."""

    model: str
    format: str
    scales: str
    leaves: list[Leaf]

    @property
    def fits(self) -> bool:
        """Whether every leaf is within the figures."""
        return all(leaf.fits for leaf in self.leaves)

    @property
    def worst(self) -> Leaf:
        """The leaf that is furthest beyond its limit, of those that the model
        determines; rather one that fails."""
        return max(
            (x for x in self.leaves if x.determined),
            key=lambda x: (not x.fits, _or_inf(x.error / x.limit)),
        )

    @property
    def failures(self) -> list[Leaf]:
        """The leaves that are not within the figures."""
        return [leaf for leaf in self.leaves if not leaf.fits]

    def lines(self) -> list[str]:
        """A line for each leaf that fails."""
        return [
            f"{self.model} {self.format} {self.scales} {x.path}: error {x.error:.2g} of"
            f" at most {x.limit:.2g}, plain {x.plain:.2g}; zeros {x.zeros:.1%}, plain"
            f" BF16 {x.plain_zeros:.1%}"
            for x in self.failures
        ]


class Subject:
    """A model, and what is compared with: made once, when it is first asked for."""

    def __init__(
        self, name: str, depth: int | None = None, width: int | None = None
    ) -> None:
        """`depth` and `width`: None for those that the model has by itself."""
        self.name = name
        self.sizes = {
            key: size
            for key, size in (("depth", depth), ("width", width))
            if size is not None
        }
        self.case = self.build()
        self._compiled = jax.jit(gradient_of(self.case))

    def build(self, dot_general: Callable | None = None) -> Case:
        """The case, its products by `dot_general` if one is given."""
        given: dict[str, Any] = (
            {} if dot_general is None else {"dot_general": dot_general}
        )
        return BUILDERS[self.name](**self.sizes, **given)

    def of_fp32(self, params: Any, batch: Any) -> Gradient:
        """Plain FP32's gradient."""
        return as_numbers(self._compiled(params, batch))

    @functools.cached_property
    def reference(self) -> Gradient:
        """Plain FP32's gradient of the model as it is."""
        return self.of_fp32(self.case.params, self.case.batch)

    @functools.cached_property
    def noise(self) -> dict[str, float]:
        """By how much each leaf changes, relatively, when parameters move in their last
        place."""
        return self.moved(LAST_PLACE, 1)

    @functools.cache  # noqa: B019, lives as long as a test
    def moved(self, step: float, times: int) -> dict[str, float]:
        """The largest error of FP32's gradient with weights up or down by a relative
        step, at random, so many times."""
        rng, worst = np.random.default_rng(0), dict.fromkeys(self.reference, 0.0)

        def moved(x: Any) -> Any:
            signs = rng.choice(np.asarray([-1, 1], np.float32), np.shape(x))
            return x * (1 + step * signs) if _is_float(x) else x

        for _ in range(times):
            actual = self.of_fp32(
                jax.tree.map(moved, self.case.params), self.case.batch
            )
            worst = {
                path: max(worst[path], error(actual[path], x))
                for path, x in self.reference.items()
            }
        return worst

    @functools.cache  # noqa: B019
    def plain(self, format: str) -> Gradient:
        """Plain code in a format; for FP8, FP32 code whose products are FP8 at the best
        scales."""
        case, dtype = self.case, FORMATS[format].dtype
        if format == "fp32":
            return self.reference
        if format == "fp8":
            dot_general = sc.ops.matmul.Fp8DotGeneral(current_scaling=True)
            return as_numbers(
                jax.jit(gradient_of(self.build(dot_general)))(case.params, case.batch)
            )
        params, batch = jax.tree.map(
            lambda x: x.astype(dtype) if _is_float(x) else x, (case.params, case.batch)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # constants such as -1e38 overflow in FP16
            return as_numbers(jax.jit(gradient_of(case))(params, batch))

    def scaled(self, format: str, scales: str) -> tuple[Callable, tuple[Any, Any]]:
        """The scalified gradient, not compiled, and its arguments."""
        case = self.build(sc.fp8_dot_general) if format == "fp8" else self.case
        args = sc.as_scaled_array(
            (case.params, case.batch), dtype=FORMATS[format].dtype
        )
        if scales == "static":
            args = sc.tree.map_arrays(
                lambda x: (
                    sc.ScaledArray(x.data, float(x.scale)) if is_scaled_array(x) else x
                ),
                args,
            )
        return sc.scalify(gradient_of(case)), args

    def gradient(self, format: str, scales: str) -> Gradient:
        """The gradient under `scalify`."""
        fun, args = self.scaled(format, scales)
        with warnings.catch_warnings():
            # that a primitive has no rule is no error; a wrong gradient is
            warnings.simplefilter("ignore")
            return as_numbers(jax.jit(fun)(*args))


def measure(subject: Subject, format: str, scales: str = "static") -> Found:
    """Compare one model's gradients, leaf by leaf.

    Args:
        subject: the model.
        format: of `FORMATS`.
        scales: "static" (constants of the program) or "dynamic" (arguments).

    Raises:
        ValueError: FP8 of a model whose products cannot be replaced.
    """
    if format == "fp8" and not takes_fp8(subject.name):
        raise ValueError(f"{subject.name} has no products that could be FP8")
    actual = subject.gradient(format, scales)
    gradient_norm = math.sqrt(
        sum(float(np.sum(x**2)) for x in subject.reference.values())
    )
    leaves = [
        _judged(subject, format, path, actual[path], gradient_norm)
        for path in subject.reference
    ]
    return Found(subject.name, format, scales, leaves)


def _judged(
    subject: Subject, format: str, path: str, actual: np.ndarray, gradient_norm: float
) -> Leaf:
    """One leaf; `gradient_norm` is that of all leaves."""
    reference, plain = subject.reference[path], subject.plain(format)[path]
    off, plain_off = error(actual, reference), error(plain, reference)
    limit, epsilon = limit_of(subject, format, path, plain_off), _epsilon(format)
    zeros, may_be_zero = share_of_zeros(actual, reference, 3 * limit), 0.0
    if zeros:  # seldom, and to compile plain BF16 costs seconds
        others = [subject.plain("bf16")[path], *([plain] if format == "fp8" else [])]
        may_be_zero = max(share_of_zeros(x, reference, 3 * limit) for x in others)
    determined = subject.noise[path] * epsilon / LAST_PLACE < 1 / 4
    if determined:
        fits = off <= limit and zeros <= may_be_zero
    else:
        size = float(np.linalg.norm(actual - reference))
        fits = off <= 2 * plain_off or size <= ROUNDINGS * epsilon * gradient_norm
    return Leaf(path, off, plain_off, limit, zeros, may_be_zero, determined, fits)


def _epsilon(format: str) -> float:
    """The relative error of one rounding."""
    return (E4M3 if format == "fp8" else FORMATS[format]).epsilon / 2


def limit_of(subject: Subject, format: str, path: str, plain: float) -> float:
    """Of a leaf's error."""
    if format == "fp32":
        return max(1e-5, ROUNDINGS * subject.noise[path])
    epsilon = _epsilon(format)
    limit = 2 * plain if format == "fp8" or plain <= FAILS else FAILS
    return max(limit, ROUNDINGS * epsilon, 2 * subject.moved(epsilon, SAMPLES)[path])


class Cost(NamedTuple):
    """What the scalified gradient costs, over the plain one's in the same format.

    Times are medians of interleaved rounds.
    """

    trace: float
    compile: float
    instructions: float  # of the compiled program, those inside of fusions too
    temporaries: float  # bytes


def cost(
    subject: Subject, format: str = "fp16", scales: str = "static", *, rounds: int = 3
) -> Cost:
    """Trace both gradients, and compile both, in turns, all caches of JAX empty."""
    case, dtype = subject.case, FORMATS[format].dtype
    plain = jax.tree.map(
        lambda x: x.astype(dtype) if _is_float(x) else x, (case.params, case.batch)
    )
    ways: tuple[tuple[Callable, tuple], ...] = (
        (gradient_of(case), plain),
        subject.scaled(format, scales),
    )
    traces: list[list[float]] = [[], []]
    compiles: list[list[float]] = [[], []]
    sizes = [(0, 0), (0, 0)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for turn in range(rounds + 1):
            for i in (0, 1) if turn % 2 else (1, 0):
                fun, args = ways[i]
                jax.clear_caches()
                start = time.perf_counter()
                traced = jax.jit(fun).trace(*args)
                traces[i].append(time.perf_counter() - start)
                if turn:  # the first round warms what Python caches
                    lowered = traced.lower()
                    start = time.perf_counter()
                    compiled = lowered.compile()
                    compiles[i].append(time.perf_counter() - start)
                    sizes[i] = _sizes(compiled)
    trace_ratios = [b / a for a, b in zip(traces[0][1:], traces[1][1:], strict=True)]
    (plain_count, plain_bytes), (count, size) = sizes
    return Cost(
        statistics.median(trace_ratios),
        statistics.median(b / a for a, b in zip(*compiles, strict=True)),
        count / plain_count,
        size / plain_bytes,
    )


def _sizes(compiled: Any) -> tuple[int, int]:
    """The instructions of a compiled program, and the bytes of its temporaries."""
    lines = compiled.as_text().splitlines()
    count = sum(bool(re.match(r"\s+(ROOT )?%?[\w.-]+ = ", line)) for line in lines)
    return count, compiled.memory_analysis().temp_size_in_bytes


def gradient_of(case: Case) -> Callable[[Any, Any], Any]:
    """`(params, batch)` to the gradient with respect to the parameters; a function of
    its own at each call."""

    def gradient(params: Any, batch: Any) -> Any:
        actual = jax.grad(case.loss, has_aux=case.has_aux)(params, batch)
        return actual[0] if case.has_aux else actual

    return gradient


def as_numbers(gradient: Any) -> Gradient:
    """The leaves by path, in float64, where data times scale is exact."""
    actual = jax.tree_util.tree_leaves_with_path(gradient, is_leaf=is_scaled_array)

    def wide(x: Any) -> np.ndarray:
        if is_scaled_array(x):
            return np.asarray(x.data).astype(np.float64) * np.float64(x.scale)
        return np.asarray(x).astype(np.float64)

    return {jax.tree_util.keystr(path): wide(x) for path, x in actual}


def error(actual: np.ndarray, reference: np.ndarray) -> float:
    """|found - reference| / |reference|; infinite where something is not finite, or
    should be zero and is not."""
    with np.errstate(all="ignore"):
        off, size = np.linalg.norm(actual - reference), np.linalg.norm(reference)
        return 0.0 if off == 0 else _or_inf(off / size)


def share_of_zeros(actual: np.ndarray, reference: np.ndarray, small: float) -> float:
    """The share of elements that are zero and should not be.

    Those are not small, by this factor, beside the root mean square of any line of
    elements through them.
    """
    sizes = np.abs(reference)
    lines = [
        np.sqrt(np.mean(np.square(reference), axis, keepdims=True))
        for axis in range(reference.ndim)
    ]
    counts = sizes > 0
    for line in lines[1:]:
        lines[0] = np.minimum(lines[0], line)
    if lines:
        counts &= sizes > small * lines[0]
    return float(np.mean((actual == 0) & counts))


def _or_inf(x: Any) -> float:
    return float(x) if np.isfinite(x) else math.inf


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)
