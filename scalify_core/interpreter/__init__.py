"""`scalify`: tracing a function, and evaluating its jaxpr with scales.

`transform` is the border, `evaluator` the loop over equations. Under `scales="static"`
the `rules` of `registry` propagate scales; under `scales="auto"` the policy in
`measured` measures them where values are stored.
"""
