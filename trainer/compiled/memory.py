"""Memory of a compiled step."""

from typing import Any


def held_bytes(memory: Any) -> int:
    """Return the bytes of a program's arguments and results, aliased ones once.

    `memory`: of `jax.stages.Compiled.memory_analysis`; its `temp_size_in_bytes` is the
    workspace, which is not included.
    """
    # A step donates its state, so most of its results alias arguments.
    return int(
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )
