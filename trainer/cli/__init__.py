"""The command line: `scalify-trainer COMMAND key=value ...`, a file for each command.

`commands` runs them, `arguments` parses a command's own keys, and `training_keys` adds
the keys of training.
"""
