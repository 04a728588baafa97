"""Numbers: formats, power-of-two scales, casts, and hints to compilers.

This package does not depend on `ScaledArray`. `precision_warnings` reports the losses
of casts.
"""
