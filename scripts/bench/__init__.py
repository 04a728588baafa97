"""Benchmarks: speed, memory and MFU of training steps, data and checkpoints;
`python -m scripts.bench` is the first.
"""
