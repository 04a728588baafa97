"""Hints to the compiler on how to keep arrays: barriers and platform-dependent cases.

They do not change results. A hint without a measured effect is removed. Each line says
what happened without the hint (docs/lab.md has more):

- `kept_narrow`: on CUDA a residual stream whose readers all begin by rounding it was
  written in FP32: 72 MiB of traffic a layer of 124M (batch 8) instead of 36, and 12
  more for every reader.
- `row_major`: on CUDA the order that cuBLASLt wants of a weight's second cast spread
  back to the parameter, which was then read transposed twice.
- `kept_in_both_orders`: on CUDA the transposed order of an FP8 activation spread
  through the model: 415 kernels instead of 390 in two layers of 124M. And a kernel that
  writes both orders reaches a quarter of an H100's bandwidth, one that transposes bytes
  half.
- `in_one_kernel`: on CUDA scalars that a large kernel reads were a kernel each: 77
  instead of 60 in three layers.
- `separate_buffers`, `separate_scalars`: on CUDA numbers that kernels of large arrays
  read were parts of one array, so that no two of them were the same: of four layers of
  124M, each of the 24 largest kernels was compiled by itself.
- `materialize_once`: on CPU the chain of a global norm's scales was repeated in every
  kernel that reads one: 10,674 instructions instead of 2,351 in the norm of 8 arrays.
- `barrier`: its callers say why.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

# GPU compiler options for programs traced inside `scales_in_products`. Triton would
# multiply the widened operands in 16 bits; excess precision omits the rounding to FP8;
# and split-K would round partial sums.
PRODUCT_OPTIONS: dict[str, Any] = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_allow_excess_precision": False,
    "xla_gpu_experimental_force_split_k": 1,
}

# These two contexts, entered by `with scales_in_products(True)`, are part of the key of
# JAX's trace cache: a function that is compiled with other options is traced anew.

# The trace is compiled for CUDA with `PRODUCT_OPTIONS`. There `dot_fp8` multiplies an
# operand by its constant, and XLA makes of that the operand's scale, an argument of the
# GEMM. Compiled with other options the results are as good, but products run in 16
# bits.
scales_in_products = jax.make_user_context(default_value=False)
# The trace is for GPUs whose FP8 products take operands of any memory layout. Other
# GPUs sum over the last axis of both operands, so arrays are transposed.
products_in_any_layout = jax.make_user_context(default_value=False)


def barrier[T](tree: T) -> T:
    """Return `tree` behind an optimization barrier.

    Its arrays are computed once, before their readers.
    """
    return lax.optimization_barrier(tree)


def _on_cuda(fun: Callable, *arrays: jax.Array, default: Callable) -> Any:
    return lax.platform_dependent(*arrays, cuda=fun, default=default)


def kept_narrow(x: jax.Array) -> jax.Array:
    """Return `x`; on CUDA, it is written in its own format and read from memory.

    Otherwise a compiler may write the array that `x` is rounded from, if several
    operations begin by rounding it.
    """
    return _on_cuda(lax.optimization_barrier, x, default=lambda x: x)


def row_major(x: jax.Array) -> jax.Array:
    """Return `x`; on CUDA, its last axis is contiguous in memory."""
    return _on_cuda(_row_major, x, default=lambda x: x)


def kept_in_both_orders(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a matrix twice; on CUDA, the second with contiguous columns.

    The second is transposed from the first, once that is stored. Where products take
    any layout, it is the first.
    """
    if products_in_any_layout.value:
        return (kept_narrow(x),) * 2

    def cuda(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Otherwise the transposed order would spread to the producers of `x`.
        rows = lax.optimization_barrier(_row_major(x))
        return rows, lax.optimization_barrier(_row_major(rows.T)).T

    return _on_cuda(cuda, x, default=lambda x: (x, x))


def _row_major(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def in_one_kernel(*scalars: jax.Array) -> tuple[jax.Array, ...]:
    """Return FP32 scalars; on CUDA, one kernel computes them.

    Otherwise each scalar that a large kernel reads is a kernel.
    """

    def cuda(*scalars: jax.Array) -> tuple[jax.Array, ...]:
        stacked = lax.optimization_barrier(jnp.stack(scalars))
        return tuple(stacked[i] for i in range(len(scalars)))

    return _on_cuda(cuda, *scalars, default=lambda *scalars: scalars)


def separate_buffers(x: jax.Array) -> tuple[jax.Array, ...]:
    """Return the parts of an array along its first axis; on CUDA, in separate buffers.

    The readers of the parts are then the same program, and compiled once: XLA makes a
    part's offset a constant.
    """

    def cuda(x: jax.Array) -> tuple[jax.Array, ...]:
        # XLA merges kernels that read different parts of an array only if that has less
        # than 1 KiB.
        block = max(1, (2**10 - 1) // (x.nbytes // len(x)))
        blocks = [
            lax.optimization_barrier(x[i : i + block]) for i in range(0, len(x), block)
        ]
        # A part alone would be a copy, and no kernel that others are merged with.
        one = lax.optimization_barrier(jnp.ones((), x.dtype))
        return lax.optimization_barrier(
            tuple(part * one for block in blocks for part in block)
        )

    if len(x):
        return _on_cuda(cuda, x, default=tuple)
    return ()


def separate_scalars(scalars: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Return FP32 scalars; on CUDA, in separate buffers."""
    if scalars:
        return separate_buffers(jnp.stack(scalars))
    return ()


def materialize_once(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return arrays; on CPU, they are computed once, and readers read the result.

    XLA repeats elementwise producers in every kernel that reads them. For the scales of
    a sum of many terms, each of which depends on the one before, that is more code than
    a machine can compile.
    """
    return lax.platform_dependent(*arrays, cpu=_barrier_of, default=_unchanged)


# Named functions, whose traces JAX keeps.
def _barrier_of(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return lax.optimization_barrier(arrays)


def _unchanged(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return arrays
