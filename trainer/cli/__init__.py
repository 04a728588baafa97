"""The command line: `scalify-trainer COMMAND key=value ...`, a file for each command.

`arguments` parses a command's own keys, and `composing` adds the keys of training.
"""
