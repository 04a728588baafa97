"""What a precision means: the formats of weights, products, gradients and moments, and the scaling method.

Read `policy` first; `dots` has the products, `gradients` the differentiation.
"""
