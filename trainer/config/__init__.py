"""What a user can set: the schema, its composition from `configs/` and the command
line, and what is refused.

Frozen dataclasses; nothing here imports JAX. Only `assembly` and the commands read what
it gives.
"""
