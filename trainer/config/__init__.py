"""The configuration: its schema, its checks, and its composition from
`trainer/configs/` and the command line.

Read `schema` first.
"""
