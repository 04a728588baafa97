"""FP32 data at any scale: gradients are to be as right where a loss, or what goes in,
is 2^100 times as large."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import scalify_core as sc
from scalify_core.array.scaled_array import ScaledArray, is_scaled_array
from zoo.measure import Gradient, Subject, as_numbers, error, gradient_of, limit_of

LARGEST = 120  # exponent of a scale
UNDETERMINED = 1 / 8  # of FP32's own noise: see `measure`


def loss_scaled(
    subject: Subject,
    scales: str = "static",
    exponents: Iterable[int] = (-LARGEST, -60, 60, LARGEST),
) -> dict[int, float]:
    """The loss times 2^exponent: the largest error of a determined leaf over its limit,
    for each exponent.

    `scales` are those of parameters and batch; the factor's is dynamic, so that one
    program serves all.
    """
    _, args = subject.scaled("fp32", scales)
    case = subject.case

    def gradient(factor: jax.Array, params: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            out = case.loss(params, batch)
            return factor * (out[0] if case.has_aux else out)

        return jax.grad(loss)(params)

    scaled, plain, actual = jax.jit(sc.scalify(gradient)), jax.jit(gradient), {}
    for exponent in exponents:
        factor = ScaledArray(jnp.float32(1), jnp.float32(2.0**exponent))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gradients = (
                as_numbers(scaled(factor, *args)),
                as_numbers(plain(*sc.asarray((factor, *args)))),
            )
        actual[exponent] = _worst(
            subject, *gradients, dict.fromkeys(subject.reference, exponent)
        )
    return actual


def inputs_moved(subject: Subject, scales: str = "dynamic") -> dict[int, float]:
    """Parameters and batch times powers of 2^exponent that change the gradient by known
    powers: as `loss_scaled`.

    Raises:
        ValueError: the case does not know of such powers.
    """
    if subject.case.powers is None:
        raise ValueError(
            f"{subject.name}: no powers of its inputs are known to change its gradient"
            " by a power"
        )
    of_params, of_batch, of_gradient = subject.case.powers
    fun, args = subject.scaled("fp32", scales)
    most = max(abs(power) for power in jax.tree.leaves(subject.case.powers))
    by_path = {
        jax.tree_util.keystr(path): power
        for path, power in jax.tree_util.tree_leaves_with_path(of_gradient)
    }
    gradient, plain, actual = jax.jit(fun), jax.jit(gradient_of(subject.case)), {}
    for exponent in (-(subject.case.reach // most), subject.case.reach // most):

        def moved(x: Any, power: int, exponent: int = exponent) -> Any:
            return (
                ScaledArray(x.data, x.scale * 2.0 ** (exponent * power))
                if is_scaled_array(x)
                else x
            )

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inputs = sc.tree.map_arrays(moved, args, (of_params, of_batch))
            gradients = (
                as_numbers(gradient(*inputs)),
                as_numbers(plain(*sc.asarray(inputs))),
            )
        actual[exponent] = _worst(
            subject,
            *gradients,
            {path: exponent * power for path, power in by_path.items()},
        )
    return actual


def _worst(
    subject: Subject, actual: Gradient, plain: Gradient, exponents: dict[str, int]
) -> float:
    """The largest error over its limit, the gradient's leaves being 2^exponent times
    what they are by themselves.

    What plain FP32 code loses of the same inputs may be lost: numbers below 2^-126, on
    the way or at the end.
    """
    worst = 0.0
    for path, x in subject.reference.items():
        exponent = exponents[path]
        lost = (
            math.sqrt(x.size)
            * 2.0 ** (-126 - exponent)
            / max(float(np.linalg.norm(x)), 1e-300)
        )
        lost += 2 * error(plain[path] * 2.0**-exponent, x)
        off = error(actual[path] * 2.0**-exponent, x) / (
            limit_of(subject, "fp32", path, 0.0) + lost
        )
        worst = max(worst, off if subject.noise[path] < UNDETERMINED else 0.0)
    return worst
