"""Observation of a run: metrics, display, trackers, numerics and heat maps.

Nothing here changes the training.
"""
