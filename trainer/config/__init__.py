"""The configuration: its schema, its composition from `configs/` and the command line,
and its checks.

Read `schema` first.
"""
