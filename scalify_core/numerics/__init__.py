"""Numbers: formats, power-of-two scales, casts, and hints to compilers.

Knows nothing of `ScaledArray`. `precision_warnings` is where casts tell what they lose.
"""
