"""Studies: paired training runs whose figures stand in docs/measurements.md, and what
draws and compares them.
"""
