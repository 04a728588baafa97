"""The rules, by family. Importing this package fills the table of
`scalify_core.interpreter.registry`.
"""

from scalify_core.interpreter.rules import (  # noqa: F401
    attention,
    collectives,
    composites,
    control,
    elementwise,
    loops,
    matmul,
    shape,
)
