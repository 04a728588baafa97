"""GPU plans without a GPU: compile the step for a described target and read the result.

Read `targets`, `aot` (ahead-of-time compilation), `budget` and `plan` in this order.
"""
