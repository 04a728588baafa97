"""What a compiled program really runs, read in its optimized HLO text: products,
collectives, kernels, FP8.

`hlo` reads any program; `fp8` judges that of a training step.
"""
