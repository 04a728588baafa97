"""The instructions of a compiled program's text: names, types, operands and attributes,
parsed line by line.

References:
    https://openxla.org/xla/operation_semantics: the instructions and how they are
    written.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

# Instructions that are no kernels; loops and calls are not among what is executed:
# their bodies are.
NOT_KERNELS = frozenset(
    (
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "add-dependency",
        "opt-barrier",
        "domain",
        "partition-id",
        "replica-id",
        "async-update",
    )
)


class Shape(NamedTuple):
    """An array's element type, as HLO writes it, and its sizes."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return -(-self.elements * bits(self.dtype) // 8)


def bits(dtype: str) -> int:
    """Bits of an element: 8 of `f8e4m3fn` and `pred`, 0 of tokens."""
    found = re.match(r"(?:bf|f|s|u|c)(\d+)", dtype)
    return int(found[1]) if found else 8 * (dtype == "pred")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: unique in the program.
      opcode: `fusion`, `custom-call`, `while`, ...
      shapes: of the result; of all leaves where it is a tuple.
      operands: names of instructions of the same computation.
      text: what follows the operands: attributes, metadata, backend configuration.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    text: str

    @cached_property
    def config(self) -> dict[str, Any]:
        """The backend's configuration of this instruction; empty where it has none."""
        _, found, rest = self.text.partition("backend_config=")
        if not found or not rest.startswith("{"):
            return {}
        config, _ = json.JSONDecoder().raw_decode(rest)
        return config

    @property
    def is_fusion(self) -> bool:
        """Return whether it is a generated kernel, started asynchronously or not."""
        return self.opcode in ("fusion", "fusion-start")

    @property
    def target(self) -> str:
        """The function that a custom call calls; empty for other instructions."""
        found = re.search(r'custom_call_target="([^"]*)"', self.text)
        return found[1] if found else ""

    @property
    def op_name(self) -> str:
        """The traced operation that it comes from, with its scopes:
        `jit(step)/transpose(jvp(...))/dot_general`.
        """
        found = re.search(r'op_name="([^"]*)"', self.text)
        return found[1] if found else ""

    @cached_property
    def called(self) -> list[str]:
        """Computations that it runs, in the order of the text; those that only say how
        to reduce are among them.
        """
        if "=%" not in self.text and "branch_computations" not in self.text:
            return []
        names = re.findall(
            r"(?:calls|body|condition|to_apply|\w+_computation)=%([^\s,}]+)", self.text
        )
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.text)
        return names + re.findall(r"%([^\s,]+)", branches[1] if branches else "")

    @property
    def trip_count(self) -> int | None:
        """Turns of a loop, where the compiler knows them."""
        count = self.config.get("known_trip_count", {}).get("n")
        return None if count is None else int(count)

    @property
    def bytes(self) -> int:
        """Of the result."""
        return sum(shape.bytes for shape in self.shapes)


Computation = dict[str, Instruction]  # by name, in the order of the text


def parse_instruction(line: str) -> Instruction | None:
    """The instruction of a line; None for a line that holds none."""
    found = re.match(r"\s+(?:ROOT )?%(\S+) = ", line)
    if not found:
        return None
    start = found.end()
    stop = closing(line, start) if line[start] == "(" else line.index(" ", start)
    opening = line.index("(", stop)
    end = closing(line, opening)
    return Instruction(
        name=found[1],
        opcode=line[stop:opening].strip(),
        shapes=tuple(parse_shapes(line[start:stop])),
        operands=tuple(re.findall(r"%([^\s,()]+)", line[opening:end])),
        text=line[end:],
    )


def closing(line: str, opening: int) -> int:
    """The position behind the parenthesis that closes the one at `opening`."""
    depth = 0
    for position in range(opening, len(line)):
        depth += (line[position] == "(") - (line[position] == ")")
        if depth == 0:
            return position + 1
    raise ValueError(f"unbalanced parentheses: {line[:80]}...")


def parse_shapes(text: str) -> Iterator[Shape]:
    """The arrays of a type; of a tuple's all leaves."""
    for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", text):
        yield Shape(dtype, tuple(int(d) for d in dims.split(",") if d))
