"""What a compiler is told of how to keep arrays: every barrier and platform case that
exists for its sake alone.

None of them changes a number. `CASES` has each with what was measured without it
(docs/lab.md tells more), and each can be turned off, to see whether a newer compiler
still needs it: `with lowering.without("stored"): ...` around whatever traces, or the
environment variable SCALIFY_LOWERING_OFF=stored,together.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

CASES = {
    "stored": (
        "CUDA: a residual stream whose readers all begin by rounding it was written in"
        " FP32: 72 MiB of traffic a layer of 124M (batch 8) for 36, and 12 more for"
        " every reader"
    ),
    "row_major": (
        "CUDA: the order that cuBLASLt wants of a weight's second cast spread back to"
        " the parameter, which was then read transposed twice"
    ),
    "stored_both_ways": (
        "CUDA: the transposed order of an FP8 activation spread through the model: 415"
        " kernels for 390 in two layers of 124M"
    ),
    "together": (
        "CUDA: scalars that a large kernel reads were a kernel each: 77 for 60 in three"
        " layers"
    ),
    "apart": (
        "CUDA: numbers that kernels of large arrays read were parts of one array, so"
        " that no two of them were the same: of four layers of 124M, each of the 24"
        " largest kernels was compiled by itself"
    ),
    "rows": (
        "CUDA: the rows of a stack were a kernel each, which XLA merges where a row is"
        " taken of what is computed"
    ),
    "sums_at_once": (
        "CUDA: the sums of a gradient's columns and of their squares were two passes"
        " over it"
    ),
    "once": (
        "CPU: the chain of a global norm's scales was repeated in every kernel that"
        " reads one: 10,674 instructions for 2,351 in the norm of 8 arrays"
    ),
    "norm_statistics": (
        "CUDA: the mean of a row was computed again in each reader, a kernel for norms"
        " that writes FP32 alone"
    ),
    "late_zeros": (
        "CUDA: the zeros that a table's gradient is written into were made first, and"
        " held all the while"
    ),
    "not_folded": (
        "of a constant first state the compiler computed statistics and roundings"
        " itself, for minutes"
    ),
    "computed_again": (
        "new moments were held in FP32 until their scales were known: 3.75 FP32 tensors"
        " at the peak"
    ),
    "in_turn": (
        "CUDA: the roundings of equal parameters were merged into kernels that spill"
        " registers to memory"
    ),
    "squares_once": "every gradient was added up once more for the sum of its squares",
    "factors_once": "the factors of a checksum were computed again for every element",
}


def _known(names: Iterable[str]) -> frozenset[str]:
    """The names. Raises ValueError for one that is none of `CASES`."""
    found = frozenset(names)
    if unknown := found - set(CASES):
        raise ValueError(
            f"{', '.join(sorted(unknown))}: no case of lowering; valid:"
            f" {', '.join(CASES)}"
        )
    return found


_OFF = _known(filter(None, os.environ.get("SCALIFY_LOWERING_OFF", "").split(",")))
_off: ContextVar[frozenset[str]] = ContextVar("off", default=_OFF)


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Inside, what is traced anew does without these cases; a jitted function that was
    traced before stays as it is.
    """
    token = _off.set(_off.get() | _known(names))
    try:
        yield
    finally:
        _off.reset(token)


def turned_off() -> frozenset[str]:
    """The cases that are off in what is traced now."""
    return _off.get()


def is_on(name: str) -> bool:
    """Whether the case of that name is in what is traced now."""
    assert name in CASES, name
    return name not in _off.get()


# What a program that is traced inside of `scales_in_products` is to be compiled with
# for a GPU: Triton's products would take the widened operands and multiply them in 16
# bits; excess precision leaves the rounding to FP8 out; and a sum of parts would be
# rounded before its end.
PRODUCT_OPTIONS: dict[str, Any] = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_allow_excess_precision": False,
    "xla_gpu_experimental_force_split_k": 1,
}
# Part of the key by which JAX keeps traces: a function that is compiled otherwise
# elsewhere is traced anew there.
_scales_in_products = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def scales_in_products() -> Iterator[None]:
    """What is traced inside is compiled for CUDA with `PRODUCT_OPTIONS`: FP8 products
    take constants themselves.

    Compiled with other options, the results are as good, but the products are those of
    16-bit arrays.
    """
    with _scales_in_products(True):
        yield


def products_take_scales() -> bool:
    """Whether what is traced now is inside of `scales_in_products`."""
    return bool(_scales_in_products.value)


def held[T](name: str, tree: T) -> T:
    """`tree`. The compiler does not see through it: what makes it is computed once,
    before what reads it.
    """
    return lax.optimization_barrier(tree) if is_on(name) else tree


def _on_cuda(name: str, fun: Callable, *arrays: jax.Array, default: Callable) -> Any:
    return (
        lax.platform_dependent(*arrays, cuda=fun, default=default)
        if is_on(name)
        else default(*arrays)
    )


def stored(x: jax.Array) -> jax.Array:
    """`x`. Compiled for CUDA, what computes it writes it in its own format, and what
    reads it reads that.

    A compiler may otherwise write what `x` is rounded from, if several operations begin
    by rounding it.
    """
    return _on_cuda("stored", lax.optimization_barrier, x, default=lambda x: x)


def row_major(x: jax.Array) -> jax.Array:
    """`x`. Compiled for CUDA, elements that are neighbours on the last axis are
    neighbours in memory.
    """
    return _on_cuda("row_major", _row_major, x, default=lambda x: x)


def stored_both_ways(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A matrix, twice. Compiled for CUDA, what computes it writes both, the second with
    its columns in one piece.
    """

    def cuda(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        # or the order of the other would spread to what `x` is computed from
        x = _row_major(x)
        rows, columns = lax.optimization_barrier((x, _row_major(x.T)))
        return rows, columns.T

    return _on_cuda("stored_both_ways", cuda, x, default=lambda x: (x, x))


def _row_major(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def together(*scalars: jax.Array) -> tuple[jax.Array, ...]:
    """FP32 scalars. Compiled for CUDA, one kernel computes them; it would be one for
    each that a large kernel reads.
    """

    def cuda(*scalars: jax.Array) -> tuple[jax.Array, ...]:
        stacked = lax.optimization_barrier(jnp.stack(scalars))
        return tuple(stacked[i] for i in range(len(scalars)))

    return _on_cuda("together", cuda, *scalars, default=lambda *scalars: scalars)


def apart(x: jax.Array) -> tuple[jax.Array, ...]:
    """The parts of an array along its first axis. Compiled for CUDA, each is an array
    of its own.

    What reads one of them is then the same program for all, and compiled once: XLA
    makes a part's place a constant.
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

    return _on_cuda("apart", cuda, x, default=tuple) if len(x) else ()


def column_sums(x: jax.Array, at_once: Callable) -> tuple[jax.Array, jax.Array]:
    """The sums of `x` and of its squares over all axes but the last; for CUDA,
    `at_once((x, squares), axes)`.
    """
    rows = tuple(range(x.ndim - 1))
    return _on_cuda(
        "sums_at_once",
        lambda x: tuple(at_once((x, jnp.square(x)), rows)),
        x,
        default=lambda x: (jnp.sum(x, rows), jnp.sum(jnp.square(x), rows)),
    )


def once(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays. Compiled for CPU, they are computed once, and what reads them reads the
    result.

    XLA repeats what is elementwise in every kernel that reads it, with all it is
    computed from: of the scales of a sum of many terms, each of which follows from that
    before, more than a machine compiles.
    """
    if not is_on("once"):
        return arrays
    return lax.platform_dependent(
        *arrays,
        cpu=lambda *arrays: lax.optimization_barrier(arrays),
        default=lambda *arrays: arrays,
    )
