"""The policy of measured scales, `scalify(fun, scales="auto")`.

Between stores, arithmetic is that of the plain FP32 program. Where a value is stored in
a narrow format, as an operand of a product or as a result, its scale is measured.
"""
