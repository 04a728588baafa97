"""A run from its start to its end: the loop, the run directory, checkpoints, the guard
and the watchdog.

Read `loop` first.
"""
