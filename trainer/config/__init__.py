"""The configuration: its schema, its composition from `trainer/configs/` and the
command line, and its checks.

Read `schema` first.
"""
