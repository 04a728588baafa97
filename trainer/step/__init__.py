"""One optimizer step as pure functions of arrays, and the state that it carries.

Read `step` first. Beside it: the state, the optimizers, validation, and the search for
the first operation that is not finite.
"""
