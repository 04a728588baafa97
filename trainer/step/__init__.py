"""One optimiser step as pure functions of arrays, and what it carries on: `step` has it
on one screen.

Beside it: the state, the optimisers, validation, and where a function first leaves the
finite numbers.
"""
