"""The precision of a run: formats of weights, products, gradients and moments, and the
scaling methods.

Read `fields`, `policy` and `methods` first, which need no JAX. `arrays` applies a
policy to arrays, `dots` has the products, `blocks` those with scales of blocks,
`gradients` the differentiation.
"""
