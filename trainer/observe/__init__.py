"""What a run shows of itself while it lasts: rows, figures, the display, trackers,
numerics, heat maps.

Nothing here decides anything.
"""
