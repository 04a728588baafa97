"""Storage of arrays in their own format in compiled programs."""

from __future__ import annotations

import jax

from scalify_core.numerics import compiler_hints
from scalify_core.ops.composite import composite


def materialised(x: jax.Array) -> jax.Array:
    """Return `x`; on CUDA, it is written once, in its own format, and read from memory.

    A compiler may otherwise fuse the last operation of an array, a rounding from FP32,
    into each of several readers, and store the FP32 array. Use it for arrays that are
    stored in any case: the residual stream.
    """
    return _materialised(x)


_materialised = composite(
    lambda x: x, name="materialised", cuda=lambda x: compiler_hints.barrier("stored", x)
)
_materialised.defvjp(
    lambda x: (x, None),
    lambda _, gradient: (gradient,),
    cuda=(
        lambda x: (compiler_hints.barrier("stored", x), None),
        lambda _, gradient: (gradient,),
    ),
)
