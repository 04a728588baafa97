"""Benchmarks: speed, memory and MFU of training steps, and checkpoints;
`python -m scripts.bench` is the first.
"""
