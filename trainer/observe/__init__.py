"""Observation of a run: rows, figures, display, trackers, numerics and heat maps.

Nothing here changes the training.
"""
