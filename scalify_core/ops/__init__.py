"""Functions that users call: layers, FP8 products, rescaling.

By themselves they are plain JAX.
"""
