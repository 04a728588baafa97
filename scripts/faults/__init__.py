"""What can go wrong, done on purpose: `python -m scripts.faults.chaos` throws faults at
a run, and looks.
"""
