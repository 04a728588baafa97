"""The line of the user's code that makes an equation."""

from __future__ import annotations

import dataclasses
import functools
import os
import sysconfig
from typing import Any

from scalify_core.interpreter.reference_trace import LIBRARIES
from scalify_core.interpreter.registry import COMPOSITE, key_of

# Flax and Optax are installed beside JAX: the user cannot change their lines.
_INSTALLED = tuple(
    sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")
)


@dataclasses.dataclass(frozen=True)
class Place:
    """A line of a program.

    Attributes:
        file: path of the file; empty where no line of the user's is known.
        line: number of the line, from 1.
        function: qualified name of the function that the line stands in.
        library: name of the function of another library that the line calls and that
            makes the equation, or empty.
        backward: whether the equation belongs to the backward pass of a differentiated
            function.
    """

    file: str = ""
    line: int = 0
    function: str = ""
    library: str = ""
    backward: bool = False

    def __str__(self) -> str:
        if not self.file:
            return "(no line of yours)"
        return (
            f"{os.path.basename(self.file)}:{self.line}"
            f" {self.function.rpartition('<locals>.')[2]}"
        )

    @property
    def line_alone(self) -> Place:
        """Return the line, without the fields that tell its equations apart."""
        return dataclasses.replace(self, library="", backward=False)


NO_PLACE = Place()


def place_of(eqn: Any, outer: Place = NO_PLACE) -> Place:
    """Return the innermost line of the user's code that makes an equation.

    JAX traces a function that it has jitted (`jax.nn.silu`) once for all callers, so
    its equations know no line of a user. They get `outer`, the place of the equation
    that calls them.
    """
    backward = (
        outer.backward
        # JAX's name scope of a backward pass.
        or "transpose(" in str(eqn.source_info.name_stack)
        or name_of(eqn).endswith(".bwd")
    )
    known = getattr(eqn.source_info.traceback, "frames", [])
    frames = [frame for frame in known if not _is_of(frame.file_name, LIBRARIES)]
    user_frame = next(
        (frame for frame in frames if not _is_of(frame.file_name, _INSTALLED)), None
    )
    if user_frame is None:
        return dataclasses.replace(outer, backward=backward)
    # The innermost frame outside of JAX is a function of Flax or Optax that the user's
    # line calls.
    library = "" if frames[0] is user_frame else frames[0].function_name
    return Place(
        user_frame.file_name,
        user_frame.line_num,
        user_frame.function_name,
        library,
        backward,
    )


def name_of(eqn: Any) -> str:
    """Return the name of an equation's primitive, or of the composite that it calls."""
    return key_of(eqn).removeprefix(COMPOSITE)


# Thousands of equations come from a few files.
@functools.lru_cache(maxsize=4096)
def _is_of(file: str, folders: tuple[str, ...]) -> bool:
    # `python -m` and imports have frames of frozen modules, which lie in no folder.
    return file.startswith((*folders, "<frozen "))
