"""The rules, by family. Importing this package fills the table of
`scalify_core.interpreter.registry`.
"""

from scalify_core.interpreter.rules import (
    attention,
    collectives,
    composites,
    control,
    elementwise,
    fp8,
    indexing,
    loops,
    losses,
    matmul,
    reduce,
    rescale,
    shape,
)

__all__ = [
    "attention",
    "collectives",
    "composites",
    "control",
    "elementwise",
    "fp8",
    "indexing",
    "loops",
    "losses",
    "matmul",
    "reduce",
    "rescale",
    "shape",
]
