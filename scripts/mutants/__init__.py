"""The strength of the tests, measured: faults of one line that they must catch."""
