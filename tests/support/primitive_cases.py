"""The cases of the test of primitives, and the operands that they are made of."""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from scalify_core.array.scaled_array import ScaledArray

FREE, MULTIPLIES = (-100, 0, 100), (-60, 0, 60)
# functions whose value depends on more than the scale: from tiny to beyond their knees
LOGICAL = (-100, -10, 0, 2)


@dataclasses.dataclass(frozen=True)
class Plain:
    """An FP32 operand that has no scale."""

    array: Any


@dataclasses.dataclass(frozen=True)
class Case:
    """One function of arrays whose trace holds `primitive`, and its operands at scale
    1.

    Attributes:
        primitive: name.
        fun: takes `args`.
        args: FP32 arrays, which are scaled; `Plain` ones, integers and booleans, which
            are not.
        exponents: of the scales. Each is tried for all operands, and each pair of
            extremes on alternating operands.
        roundings: see `check_scalify`.
        reduction: see `check_scalify`.
        special: whether zeros, infinities and NaN among the elements must come out as
            in the plain function.
        narrow: the exponents in FP16 data; the same if None.
        grad: whether the gradient is checked, too.
    """

    primitive: str
    fun: Callable
    args: tuple
    exponents: tuple[int, ...] = FREE
    roundings: int = 4
    reduction: int = 1
    special: bool = True
    narrow: tuple[int, ...] | None = None
    grad: bool = False

    def __str__(self) -> str:
        shapes = ",".join("x".join(map(str, x.shape)) for x in self.plain)
        return f"{self.primitive}[{shapes}]"

    @property
    def plain(self) -> list:
        return [np.asarray(x.array if isinstance(x, Plain) else x) for x in self.args]

    @property
    def group(self) -> tuple:
        """Equal for cases that can be checked together."""
        tolerance = self.roundings, self.reduction
        return *tolerance, self.grad, self.special, self.narrow == ()

    def trials(self, dtype: Any) -> list[tuple[int, ...]]:
        """One exponent for each argument, for each trial; in the last, large ones
        beside small ones."""
        is_wide = dtype == jnp.float32 or self.narrow is None
        exponents = self.exponents if is_wide else self.narrow
        low, high, count = min(exponents), max(exponents), len(self.args)
        mixed = [
            tuple(pair[i % 2] for i in range(count))
            for pair in ((low, high), (high, low))
        ]
        return list(dict.fromkeys([*((e,) * count for e in exponents), *mixed]))

    def trial(self, number: int | None, dtype: Any) -> tuple[int, ...]:
        """The trial of this number; None: the middle exponent for all arguments."""
        if number is None:
            middle = sorted(self.exponents)[len(self.exponents) // 2]
            return (middle,) * len(self.args)
        trials = self.trials(dtype)
        return trials[number % len(trials)]

    def scaled(
        self, exponents: tuple[int, ...], replace: tuple[float, ...] = ()
    ) -> list:
        """The operands with these scales; the first elements of each are replaced."""
        args = []
        for i, (x, exponent) in enumerate(zip(self.args, exponents, strict=True)):
            if isinstance(x, Plain) or not np.issubdtype(x.dtype, np.floating):
                args.append(jnp.asarray(self.plain[i]))
                continue
            x = np.array(x)
            # Another order in every operand, so that each meets each.
            x.flat[: len(replace)] = np.roll(replace, i)[: x.size]
            args.append(ScaledArray(jnp.asarray(x), 2.0**exponent))
        return args


def _rng(shape: tuple[int, ...], salt: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(f"{shape}{salt}".encode()))


def normal(*shape: int, salt: str = "") -> np.ndarray:
    """Gaussian, RMS 1."""
    return np.asarray(_rng(shape, salt).normal(size=shape), np.float32)


def positive(*shape: int, salt: str = "") -> np.ndarray:
    """Between 1/2 and 2."""
    return np.asarray(2 ** _rng(shape, salt + "p").uniform(-1, 1, shape), np.float32)


def unit(*shape: int, salt: str = "") -> np.ndarray:
    """Between -0.9 and 0.9."""
    return np.asarray(_rng(shape, salt + "u").uniform(-0.9, 0.9, shape), np.float32)


def spd(n: int) -> np.ndarray:
    """A well-conditioned symmetric positive definite matrix."""
    a = normal(n, n, salt="spd") / 4
    return np.asarray(a @ a.T + np.eye(n), np.float32)
