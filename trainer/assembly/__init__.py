"""From a checked configuration to a run: the objects are built here, and only here.

Read `training` first.
"""
