"""What a precision means: the formats of weights, products, gradients and moments, and
the scaling method.

Read `policy` and `methods` first, which need no JAX; `arrays` has what a policy does to
arrays, `dots` the products, `gradients` the differentiation.
"""
