"""What a policy does to arrays: which products are narrow, and the form of weights
where they are kept and sent.
"""

from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

import jax
import numpy as np

from scalify_core import FloatFormat, ScaledArray, weights
from scalify_core.formats import E4M3
from scalify_core.matmul import MULTIPLE
from trainer.errors import UserError
from trainer.precision.dots import (
    ClippedDot,
    Dot,
    MixedDot,
    narrow_gradient_dot,
    wide_gradient_dot,
)
from trainer.precision.policy import DTYPES, Policy

# of weights that do not exist yet, where a program is compiled without them
ASSUMED_SCALE = 2.0**-6


def skipped_matmuls(
    policy: Policy, sizes: Mapping[str, tuple[int, int]], rows: int | None = None
) -> dict[str, str]:
    """Those of the linear layers that are not narrow, and why not. UserError for a
    pattern without a match.

    Args:
      policy: the precision.
      sizes: input and output width of each, by path.
      rows: tokens that a device multiplies them by at once; None: some multiple of 16.
    """
    chosen = {
        "fp8_modules": policy.fp8_modules,
        "exclude": policy.exclude,
        "backward_e4m3": policy.backward_e4m3 or (),
    }
    for key, patterns in chosen.items():
        for pattern in patterns:
            if not any(fnmatchcase(path, pattern) for path in sizes):
                raise UserError(
                    f"precision.{key}: no matmul matches {pattern!r}; there are"
                    f" {', '.join(sorted(sizes)[:8])} ..."
                )
    if policy.forward is None:
        return dict.fromkeys(
            sizes, f"precision.forward=null: all are in {policy.compute}"
        )
    whole = not policy.simulate and not policy.method.any_rows
    if whole and rows is not None and rows % MULTIPLE:
        return dict.fromkeys(
            sizes,
            f"micro-batches of {rows} tokens a device, not a multiple of {MULTIPLE}",
        )

    def reason(path: str, size: tuple[int, int]) -> str | None:
        if not any(fnmatchcase(path, pattern) for pattern in policy.fp8_modules):
            return "not in precision.fp8_modules"
        if any(fnmatchcase(path, pattern) for pattern in policy.exclude):
            return "in precision.exclude"
        if not policy.simulate and any(width % MULTIPLE for width in size):
            return f"{size[0]} x {size[1]} are not multiples of {MULTIPLE}"
        return None

    return {
        path: why
        for path, size in sizes.items()
        if (why := reason(path, size)) is not None
    }


def dot_general_for(
    policy: Policy,
    narrow: Collection[str],
    *,
    keep_weights: bool,
    store_gradients: bool = False,
) -> Callable[[str], Dot]:
    """The function that gives every linear layer, by its path, its dot_general.

    Args:
      policy: the precision.
      narrow: the paths of the layers whose matmuls are narrow.
      keep_weights: whether FP8 weights are kept for the backward pass; see
          `models.family.Spec`.
      store_gradients: whether FP8 products give the gradients of scaled weights in
          `policy.weight_grad` themselves.
    """
    chosen = set(narrow)
    rhs_gradient = (
        FloatFormat.parse(policy.weight_grad).dtype if store_gradients else None
    )

    def dot_general(path: str) -> Dot:
        backward = policy.backward_of(path)
        if path not in chosen or policy.forward is None or backward is None:
            return (
                wide_gradient_dot
                if policy.weight_grad == "fp32"
                else narrow_gradient_dot
            )
        dot: Dot
        gradient = FloatFormat.parse(backward)
        if policy.simulate:
            dot = policy.method.simulated(FloatFormat.parse(policy.forward), gradient)
        else:
            dot = policy.method.dot(
                path,
                policy,
                keep_rhs=keep_weights,
                rhs_gradient=rhs_gradient,
                gradient=gradient,
            )
        return prepared(dot, policy)

    return dot_general


def prepared(dot: Dot, policy: Policy) -> Dot:
    """`dot`, with what happens to its operands before it casts them."""
    if policy.hadamard is not None:
        dot = MixedDot(dot, policy.hadamard)
    return (
        dot if policy.clip_outliers is None else ClippedDot(dot, policy.clip_outliers)
    )


def store_weights(params: Any, policy: Policy) -> Any:
    """FP32 master weights in the form they are kept in. Not inside jit: scales are read
    from the device.
    """
    dtype = DTYPES[policy.weights]
    if policy.scaled:
        return weights.scaled_params(params, dtype)
    return jax.tree.map(lambda p: p.astype(dtype), params)


def kahan_compensation(exact: Any, params: Any, policy: Policy) -> Any:
    """What `store_weights` lost of FP32 weights, BF16, where the policy keeps it; else
    (). Not inside jit.
    """
    return weights.remainders(exact, params) if policy.keeps_lost else ()


def for_allgather(
    p: Any, policy: Policy, *, kernel: bool, narrow: bool, factor: bool
) -> Any:
    """Return a parameter in the format of its all-gather, rounded as its first use
    would round it.

    Args:
      kernel: whether it is that of a linear layer.
      narrow: whether of one whose matmul is narrow.
      factor: whether its rows are multiplied by what depends on the batch before they
          are rounded to FP8.
    """
    if policy.scaled:
        p = p.astype(DTYPES[policy.compute])
        in_fp8 = (
            narrow
            and not factor
            and not policy.simulate
            and policy.casts_operands_as_they_are
        )
        return ScaledArray(E4M3.cast(p.data), p.scale) if in_fp8 else p
    # Gains, tables and biases are used in FP32; FP8 kernels get their scale from what
    # the weights are.
    return p.astype(DTYPES[policy.compute]) if kernel and not narrow else p


def abstract_weights(shapes: Any, policy: Policy, scale: float | None = None) -> Any:
    """What `store_weights` makes, as shapes and dtypes; with dynamic scales as in
    checkpoints, or a static one.
    """

    def convert(s: jax.ShapeDtypeStruct) -> Any:
        data = jax.ShapeDtypeStruct(s.shape, DTYPES[policy.weights])
        if not policy.scaled:
            return data
        return ScaledArray(data, scale or jax.ShapeDtypeStruct((), np.float32))

    return jax.tree.map(convert, shapes)
