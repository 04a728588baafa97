"""Fault injection: `python -m scripts.faults.chaos` injects faults into a run."""
