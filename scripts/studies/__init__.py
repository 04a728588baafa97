"""Studies: paired training runs whose figures stand in docs/results.md, and what draws
and compares them.
"""
