"""Parser of the instructions of HLO text: names, types, operands and attributes.

References:
    https://openxla.org/xla/operation_semantics: the instructions and their syntax.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

# Instructions that launch no kernel. Loops and calls are not among the executed
# instructions: their bodies are.
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
    """An array's element type, as HLO spells it, and its sizes."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes in memory."""
        # Rounded up: two elements of four bits share a byte.
        return -(-self.elements * bits(self.dtype) // 8)


def bits(dtype: str) -> int:
    """Return the bits of an element: 8 for `f8e4m3fn` and `pred`, 0 for tokens."""
    # The digits behind the first letters are the bits, also of f8e4m3fn and f4e2m1fn.
    match = re.match(r"(?:bf|f|s|u|c)(\d+)", dtype)
    if match:
        return int(match[1])
    return 8 * (dtype == "pred")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: unique in the program.
      opcode: `fusion`, `custom-call`, `while`, ...
      shapes: of the result; of all leaves of a tuple.
      operands: names of instructions of the same computation.
      text: after the operands: attributes, metadata, backend configuration.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    text: str

    @cached_property
    def config(self) -> dict[str, Any]:
        """The backend's configuration of this instruction; empty where it has none."""
        _, separator, rest = self.text.partition("backend_config=")
        if not separator or not rest.startswith("{"):
            return {}
        # `raw_decode`, since other attributes may follow the object.
        config, _ = json.JSONDecoder().raw_decode(rest)
        return config

    @property
    def is_fusion(self) -> bool:
        """Return whether it is a generated kernel, started asynchronously or not."""
        return self.opcode in ("fusion", "fusion-start")

    @property
    def target(self) -> str:
        """The function of a custom call; empty for other instructions."""
        match = re.search(r'custom_call_target="([^"]*)"', self.text)
        if match:
            return match[1]
        return ""

    @property
    def op_name(self) -> str:
        """The traced operation with its scopes.

        Such as `jit(step)/transpose(jvp(...))/dot_general`.
        """
        match = re.search(r'op_name="([^"]*)"', self.text)
        if match:
            return match[1]
        return ""

    @cached_property
    def called(self) -> list[str]:
        """Names of the computations that it calls, including those of reductions."""
        # Most instructions call nothing, and each is asked.
        if "=%" not in self.text and "branch_computations" not in self.text:
            return []
        names = re.findall(
            r"(?:calls|body|condition|to_apply|\w+_computation)=%([^\s,}]+)", self.text
        )
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.text)
        if branches:
            names += re.findall(r"%([^\s,]+)", branches[1])
        return names

    @property
    def first_branch(self) -> str:
        """The computation of a conditional's index 0, or of its predicate false."""
        match = re.search(
            r"(?:false_computation=|branch_computations=\{)%([^\s,}]+)", self.text
        )
        assert match is not None, self.name
        return match[1]

    @property
    def trip_count(self) -> int | None:
        """Iterations of a loop, where the compiler knows them."""
        count = self.config.get("known_trip_count", {}).get("n")
        if count is None:
            return None
        # A protobuf's 64-bit numbers are text in JSON.
        return int(count)

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return sum(shape.bytes for shape in self.shapes)


Computation = dict[str, Instruction]  # by name, in the order of the text


def parse_instruction(line: str) -> Instruction | None:
    """Return the instruction of a line, or None."""
    match = re.match(r"\s+(?:ROOT )?%(\S+) = ", line)
    if not match:
        return None
    start = match.end()
    # The type of a tuple has spaces and comments such as `/*index=5*/`.
    stop = closing(line, start) if line[start] == "(" else line.index(" ", start)
    opening = line.index("(", stop)
    end = closing(line, opening)
    return Instruction(
        name=match[1],
        opcode=line[stop:opening].strip(),
        shapes=tuple(parse_shapes(line[start:stop])),
        # Types of operands may stand before their names, which alone begin with %.
        operands=tuple(re.findall(r"%([^\s,()]+)", line[opening:end])),
        text=line[end:],
    )


def closing(line: str, opening: int) -> int:
    """Return the position after the parenthesis that closes the one at `opening`."""
    # Types of nested tuples hold parentheses, which no regular expression counts.
    depth = 0
    for position in range(opening, len(line)):
        depth += (line[position] == "(") - (line[position] == ")")
        if depth == 0:
            return position + 1
    raise ValueError(f"unbalanced parentheses: {line[:80]}...")


def parse_shapes(text: str) -> Iterator[Shape]:
    """Yield the arrays of a type; of a tuple all leaves."""
    for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", text):
        # A scalar, `f32[]`, has no sizes.
        yield Shape(dtype, tuple(int(d) for d in dims.split(",") if d))
