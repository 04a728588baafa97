"""A policy applied to arrays: which matmuls are FP8, and how weights and gradients are
stored and sent.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

import jax
import numpy as np

from scalify_core import ScaledArray, as_scaled_array, functional, weights
from scalify_core.array.scaled_array import is_scaled_array
from scalify_core.numerics.formats import E4M3, FloatFormat
from trainer.errors import UserError
from trainer.precision.dots import (
    ClippedDot,
    Dot,
    HadamardDot,
    narrow_gradient_dot,
    wide_gradient_dot,
)
from trainer.precision.fields import DTYPES
from trainer.precision.fp8_attention import fp8_attention
from trainer.precision.policy import Policy

# A step may be compiled before the weights exist. Static scales are constants of the
# program, so it is compiled for this one.
ASSUMED_SCALE = 2.0**-6


def skipped_matmuls(
    policy: Policy, sizes: Mapping[str, tuple[int, int]], rows: int | None = None
) -> dict[str, str]:
    """Return the linear layers whose matmuls are not FP8, with the reason for each.

    Args:
      policy: the precision.
      sizes: input and output width of each layer, by path.
      rows: tokens that a device multiplies them by at once; None: a number that FP8
        products take.

    Raises:
      UserError: a pattern matches no layer.
    """
    patterns_by_key = {
        "fp8_modules": policy.fp8_modules,
        "exclude": policy.exclude,
        "backward_e4m3": policy.backward_e4m3 or (),
    }
    # A pattern that matches nothing is a mistake in a path. Ignored, it would leave
    # layers in another precision than the user believes.
    for key, patterns in patterns_by_key.items():
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
    # Tokens are rows of the output and of the input's gradient, and the summed axis of
    # the weight's gradient: a number that does not fit concerns all layers.
    multiple = policy.method.multiple
    needs_multiple = not policy.simulate and not policy.method.any_rows
    if needs_multiple and rows is not None and rows % multiple:
        return dict.fromkeys(
            sizes,
            f"micro-batches of {rows} tokens a device, not a multiple of {multiple}",
        )

    wide_prefixes = wide_blocks(policy, sizes)

    def reason(path: str, size: tuple[int, int]) -> str | None:
        if not any(fnmatchcase(path, pattern) for pattern in policy.fp8_modules):
            return "not in precision.fp8_modules"
        if any(fnmatchcase(path, pattern) for pattern in policy.exclude):
            return "in precision.exclude"
        # `startswith` of an empty tuple is False: without wide ends this skips no
        # layer.
        if path.startswith(wide_prefixes):
            return "in precision.wide_ends"
        if not policy.simulate and any(width % multiple for width in size):
            return f"{size[0]} x {size[1]} are not multiples of {multiple}"
        return None

    reasons = {path: reason(path, size) for path, size in sizes.items()}
    return {path: why for path, why in reasons.items() if why is not None}


def wide_blocks(policy: Policy, paths: Collection[str]) -> tuple[str, ...]:
    """Return the paths of the blocks that `precision.wide_ends` chooses, such as
    `h.0.`.

    Raises:
      UserError: blocks are scanned, or none would be left.
    """
    if policy.wide_ends is None:
        return ()
    key = f"precision.wide_ends={list(policy.wide_ends)}"
    # With the dot at the end, `h.1.` is no prefix of the layers of block 10.
    matches = (re.match(r"[^.]+\.(\d+|\*)\.", path) for path in paths)
    # In the order of the blocks: JAX sorts the keys of dictionaries, and these are
    # integers, so that 10 comes after 9.
    blocks = list(dict.fromkeys(match[0] for match in matches if match))
    if any("*" in block for block in blocks):
        raise UserError(
            f"{key} needs blocks that are not scanned: set model.scan_layers=false, or"
            " precision.wide_ends=null for narrow matmuls in all blocks"
        )
    # Rounded up, so that a small model has wide blocks at both ends, too: the preset's
    # shares are 2 and 8 of 62 blocks, and 1 and 2 of 12.
    first, last = (math.ceil(share * len(blocks)) for share in policy.wide_ends)
    if blocks and first + last >= len(blocks):
        raise UserError(
            f"{key} leaves none of {len(blocks)} blocks in {policy.forward}; set"
            " precision.wide_ends=null for narrow matmuls in all blocks"
        )
    # Not `blocks[-last:]`, which is all blocks where `last` is 0.
    return (*blocks[:first], *blocks[len(blocks) - last :])


def dot_general_for(
    policy: Policy,
    narrow: Collection[str],
    *,
    keep_weights: bool,
    narrow_gradients: bool = False,
) -> Callable[[str], Dot]:
    """Return a function from the path of a linear layer to its dot_general.

    Args:
      policy: the precision.
      narrow: the paths of the layers with FP8 matmuls.
      keep_weights: whether FP8 weights are kept for the backward pass; see
        `models.family.Spec`.
      narrow_gradients: whether FP8 products return the gradients of scaled weights in
        `policy.weight_grad`.
    """
    chosen = set(narrow)
    rhs_gradient = None
    if narrow_gradients:
        rhs_gradient = FloatFormat.parse(policy.weight_grad).dtype

    def dot_general(path: str) -> Dot:
        backward = policy.backward_of(path)
        if path not in chosen or backward is None:
            # An FP8 or FP16 `weight_grad` is for the chosen layers alone: see
            # `store_gradients`.
            if policy.weight_grad == "fp32":
                return wide_gradient_dot
            return narrow_gradient_dot
        dot = policy.method.dot(
            path,
            policy,
            keep_rhs=keep_weights,
            rhs_gradient=rhs_gradient,
            gradient=FloatFormat.parse(backward),
        )
        return with_prepared_operands(dot, policy)

    return dot_general


def attention_of(policy: Policy) -> Callable[..., jax.Array]:
    """Return the attention of a model, a function like
    `scalify_core.functional.attention`.
    """
    if policy.attention is None:
        return functional.attention
    if policy.simulate:
        return simulated_fp8_attention
    return fp8_attention


def simulated_fp8_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, **settings: Any
) -> jax.Array:
    """Return FP8 attention computed in FP32, on GPUs, too."""
    return fp8_attention(q, k, v, simulate=True, **settings)


def with_prepared_operands(dot: Dot, policy: Policy) -> Dot:
    """Return `dot` of operands that are clipped and transformed as the policy says."""
    # The clip comes first in the product: a transform spreads an outlier over its
    # group, where no bound would reach it.
    if policy.hadamard is not None:
        dot = HadamardDot(dot, policy.hadamard)
    if policy.clip_outliers is not None:
        dot = ClippedDot(dot, policy.clip_outliers)
    return dot


def store_weights(params: Any, policy: Policy) -> Any:
    """Store FP32 master weights as the policy says. Not inside jit: scales are read
    from the device.
    """
    dtype = DTYPES[policy.weights]
    if policy.scaled:
        return weights.scaled_params(params, dtype)
    return jax.tree.map(lambda p: p.astype(dtype), params)


def kahan_compensation(exact: Any, params: Any, policy: Policy) -> Any:
    """Return the rounding error of `store_weights`, BF16, if the policy keeps it; else
    (). Not inside jit.
    """
    if policy.keeps_kahan_compensation:
        return weights.kahan_compensation(exact, params)
    return ()


def store_gradients(grads: Any, policy: Policy, narrow: Callable[[Any], bool]) -> Any:
    """Store the gradients of the chosen matmuls' kernels in `policy.weight_grad`.

    Args:
      grads: as differentiation gives them.
      policy: the precision.
      narrow: whether the parameter at a path of keys is such a kernel.
    """
    # Where no matmul is narrow, the products give gradients in `weight_grad`
    # themselves.
    if policy.forward is None or policy.weight_grad == "fp32":
        return grads
    fmt = FloatFormat.parse(policy.weight_grad)

    def store(path: Any, grad: Any) -> Any:
        if not narrow(path):
            return grad
        if is_scaled_array(grad):
            # Not measured again: the expected scale is off by a few octaves at most.
            return grad.astype(fmt.dtype)
        if policy.scaled:  # a mean over micro-batches
            return as_scaled_array(grad, dtype=fmt.dtype)
        return fmt.cast(grad)  # BF16, which has FP32's range

    return jax.tree_util.tree_map_with_path(store, grads, is_leaf=is_scaled_array)


def cast_for_all_gather(
    p: Any, policy: Policy, *, is_kernel: bool, is_narrow: bool, scaled_rows: bool
) -> Any:
    """Return a parameter in the format of its all-gather, rounded as its first use
    would round it.

    Args:
      p: the parameter.
      policy: the precision.
      is_kernel: whether it is the kernel of a linear layer.
      is_narrow: whether that layer's matmul is FP8.
      scaled_rows: whether its rows are multiplied by factors computed from the batch
        before they are rounded: rounded here, they would be rounded twice.
    """
    if policy.scaled:
        p = p.astype(DTYPES[policy.compute])
        # Blocks, simulated formats, and operands that are clipped or mixed are rounded
        # from the wide weight: E4M3 here would be one rounding more.
        is_first_used_in_fp8 = (
            is_narrow
            and not scaled_rows
            and not policy.simulate
            and not policy.method.has_blocks
            and not policy.prepares_operands
        )
        if is_first_used_in_fp8:
            return ScaledArray(E4M3.cast(p.data), p.scale)
        return p
    # Gains, tables and biases are used in FP32; FP8 kernels get their scale from the
    # weights themselves.
    if is_kernel and not is_narrow:
        return p.astype(DTYPES[policy.compute])
    return p


def abstract_weights(shapes: Any, policy: Policy, scale: float | None = None) -> Any:
    """Return the shapes and dtypes that `store_weights` makes.

    `scale`: static scales, as in training; None: dynamic ones, as in checkpoints.
    """

    def convert(s: jax.ShapeDtypeStruct) -> Any:
        data = jax.ShapeDtypeStruct(s.shape, DTYPES[policy.weights])
        if not policy.scaled:
            return data
        return ScaledArray(data, scale or jax.ShapeDtypeStruct((), np.float32))

    return jax.tree.map(convert, shapes)
