"""Reports of a run: the HTML page, its charts and verdicts, and comparisons of runs.

The modules read run directories only. The exception is `messages`, the lines that a run
prints at its start and end.
"""
