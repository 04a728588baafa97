"""Readers of compiled programs: matmuls, collectives, kernels and FP8 in HLO text.

`hlo` reads any program; `fp8` checks that of a training step.
"""
