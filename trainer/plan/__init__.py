"""A GPU plan without a GPU: the step is compiled for a described target, and its
memory, time and wires read.

Read `targets`, `aot` (compiling for what is not there), `budget` and `plan` in this
order.
"""
