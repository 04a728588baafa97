"""The rules, by family. Importing this package fills the table of
`scalify_core.interpreter.registry`.
"""

from scalify_core.interpreter.rules import (
    attention,
    collectives,
    composites,
    control,
    elementwise,
    loops,
    matmul,
    shape,
)

__all__ = [
    "attention",
    "collectives",
    "composites",
    "control",
    "elementwise",
    "loops",
    "matmul",
    "shape",
]
