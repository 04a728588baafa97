"""The command line: `scalify-trainer COMMAND key=value ...`, a file for each command.

`arguments` reads the keys of the commands that have their own.
"""
