"""Confidence intervals of means."""

import math
import statistics
from collections.abc import Sequence

# scipy.stats has the same quantile, and takes longer to import.
from scipy.special import stdtrit


def half_width(differences: Sequence[float]) -> float:
    """Return half the 95% interval of a mean: t(0.975, n-1) s / sqrt(n).

    Infinite for a single value, and where one is not finite.
    """
    n = len(differences)
    if n < 2 or not all(map(math.isfinite, differences)):
        return math.inf
    return float(stdtrit(n - 1, 0.975)) * statistics.stdev(differences) / math.sqrt(n)
