"""Fault injection: `python -m scripts.faults.chaos` injects faults into a run, and
`lost_machines` kills what a run under Ray consists of.
"""
