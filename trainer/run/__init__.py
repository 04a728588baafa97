"""A run from its start to its end: the loop, the run directory, checkpoints, callbacks,
the watchdog.

Read `loop` first, then `session`.
"""
