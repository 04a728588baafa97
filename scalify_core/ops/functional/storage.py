"""Where a compiler is to store an array in the format it has."""

from __future__ import annotations

import jax

from scalify_core.numerics import compiler_hints
from scalify_core.ops.composite import composite


def materialised(x: jax.Array) -> jax.Array:
    """`x`. Compiled for CUDA, it is written once, in its own format, and everyone who
    reads it reads that.

    A compiler may otherwise fuse the last operation of an array with several readers, a
    rounding from FP32, into each of them, and store the FP32 array. Meant for what is
    stored in any case: the residual stream.
    """
    return _materialised(x)


_materialised = composite(
    lambda x: x, name="materialised", cuda=lambda x: compiler_hints.held("stored", x)
)
_materialised.defvjp(
    lambda x: (x, None),
    lambda _, gradient: (gradient,),
    cuda=(
        lambda x: (compiler_hints.held("stored", x), None),
        lambda _, gradient: (gradient,),
    ),
)
