"""Confidence intervals of means."""

import math
import statistics
from collections.abc import Sequence

from scipy.special import stdtrit


def half_width(differences: Sequence[float]) -> float:
    """Return half the 95% interval of a mean: t(0.975, n-1) s / sqrt(n).

    Infinite for a single value, and where one is not finite.
    """
    n = len(differences)
    if n < 2 or not all(map(math.isfinite, differences)):
        return math.inf
    return interval_of(statistics.stdev(differences), n)


def interval_of(scatter: float, pairs: int) -> float:
    """Return half the 95% interval of `pairs` pairs of this standard deviation.

    Infinite for a single pair.
    """
    return (
        float(stdtrit(pairs - 1, 0.975)) * scatter / math.sqrt(pairs)
        if pairs > 1
        else math.inf
    )
