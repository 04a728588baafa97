"""Scale propagation that is right without being told: `scalify(fun, scales="auto")`.

Between stores, arithmetic is that of the plain FP32 program; where a value is stored in
a narrow format, as an operand of a product or as a result, its scale is measured.
`plan` decides where that is, `evaluate` does it.
"""

from scalify_core.measured import composites, control  # noqa: F401  (fill the table)
from scalify_core.measured.evaluate import evaluated

__all__ = ["evaluated"]
