"""What a compiled program runs: its matrix products, fused attentions, collectives and
kernels, read in its HLO text.

The text is that of `jax.stages.Compiled.as_text()`: after all of XLA's passes,
partitioned, so every shape and every figure here is one device's. An instruction inside
a loop counts as often as the loop turns.

References:
    https://openxla.org/xla/operation_semantics and
    https://openxla.org/xla/gpu_architecture: the instructions, and the names of the
    custom calls that cuBLASLt's and cuDNN's kernels have in a program for CUDA.
"""

import re
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from trainer.compiled.instructions import (
    NOT_KERNELS,
    Computation,
    Instruction,
    bits,
    parse_instruction,
)
from trainer.compiled.operations import (
    ATTENTION,
    DTYPE_NAMES,
    Attention,
    Collective,
    Contraction,
    Gemm,
    attention,
    bytes_written,
    collective_bytes,
    collective_op,
    contraction,
    fusion_kind,
    fusion_reads,
    fusion_writes,
    group_size,
)

TINY = 1024  # bytes


class Executed(NamedTuple):
    """An instruction, the computation that it stands in, and how often a run of the
    program comes by it.
    """

    instruction: Instruction
    computation: Computation
    times: int


class Kernel(NamedTuple):
    """Something that is launched, `times` times.

    Attributes:
      kind: gemm, attention, collective; of the others `tiny` (at most TINY bytes: the
        arithmetic of scales), then by what they hold: reduce, transpose, cast
        (elementwise, to FP8), copy, elementwise, other.
      bytes: read and written by one run.
    """

    kind: str
    name: str
    bytes: int
    times: int


class Program:
    """A compiled program.

    Args:
      text: `compiled.as_text()`.

    Attributes:
      computations: by name, each its instructions by name, in order.
      entry: the computation that is run.
    """

    def __init__(self, text: str) -> None:
        """Raise ValueError for a text without an entry computation."""
        self.computations: dict[str, Computation] = {}
        entry = None
        current: Computation | None = None
        for line in text.splitlines():
            if current is None:
                header = re.match(r"(ENTRY )?%(\S+) .*\{$", line)
                if header:
                    current = self.computations.setdefault(header[2], {})
                    entry = header[2] if header[1] else entry
            elif line.startswith("}"):
                current = None
            else:
                instruction = parse_instruction(line)
                if instruction is not None:
                    current[instruction.name] = instruction
        if entry is None:
            raise ValueError("no ENTRY computation in the text of the compiled program")
        self.entry = self.computations[entry]

    @cached_property
    def executed(self) -> list[Executed]:
        """What a run of the program comes by, loops unrolled, bodies of fusions not
        opened.

        Of a conditional all branches are taken, of a loop of unknown length one turn
        (see `unknown_loops`).
        """
        return list(self._executed(self.entry, 1))

    def _executed(self, computation: Computation, times: int) -> Iterator[Executed]:
        for instruction in computation.values():
            if instruction.opcode == "while":
                turns = times * (instruction.trip_count or 1)
                body = re.search(r"body=%([^\s,}]+)", instruction.text)
                assert body is not None
                yield from self._executed(self.computations[body[1]], turns)
            elif instruction.opcode in ("call", "conditional", "async-start"):
                for name in instruction.called:
                    yield from self._executed(self.computations[name], times)
            else:
                yield Executed(instruction, computation, times)

    @property
    def unknown_loops(self) -> list[str]:
        """Names of the loops whose length the compiler does not know: what they hold
        counts once.
        """
        loops = (
            i
            for c in self.computations.values()
            for i in c.values()
            if i.opcode == "while"
        )
        return [loop.name for loop in loops if loop.trip_count is None]

    def inside(self, found: Executed) -> Iterator[tuple[Instruction, Computation]]:
        """The instruction, and those of the computations that it calls, of those again,
        and so on.
        """
        yield found.instruction, found.computation
        for name in found.instruction.called:
            computation = self.computations[name]
            for instruction in computation.values():
                yield from self.inside(Executed(instruction, computation, 1))

    @cached_property
    def gemms(self) -> list[Gemm]:
        """Matrix products, in the order of the schedule."""
        found = []
        for executed in self.executed:
            for instruction, computation in self.inside(executed):
                dims = contraction(instruction)
                if dims is not None:
                    found.append(self._gemm(executed, instruction, computation, dims))
        return found

    def _gemm(
        self,
        executed: Executed,
        product: Instruction,
        computation: Computation,
        dims: Contraction,
    ) -> Gemm:
        lhs, rhs = (computation[name].shapes[0] for name in product.operands[:2])
        kernel = product.target or fusion_kind(executed.instruction) or product.opcode
        wide = max(lhs.dtype, rhs.dtype, key=bits)
        # What cuBLASLt or a fusion is handed, not what a kernel converts it to: of
        # those, `f8` only where both are.
        dtype = "fp8" if bits(wide) == 8 else DTYPE_NAMES.get(wide, wide)
        op_name = product.op_name or executed.instruction.op_name
        sizes = dims.sizes(lhs.dims, rhs.dims)
        return Gemm(
            kernel,
            dtype,
            (lhs.dtype, rhs.dtype),
            sizes,
            op_name,
            executed.instruction.name,
            times=executed.times,
        )

    @cached_property
    def attentions(self) -> list[Attention]:
        """cuDNN's fused attentions, in the order of the schedule."""
        return [
            attention(i, computation, times)
            for i, computation, times in self.executed
            if i.opcode == "custom-call" and i.target.startswith(ATTENTION)
        ]

    @cached_property
    def collectives(self) -> list[Collective]:
        """Collective operations; one that takes arrays of several types appears once
        for each.
        """
        found = []
        for executed in self.executed:
            # Triton has an all-reduce inside a fusion
            for instruction, computation in self.inside(executed):
                op = collective_op(instruction)
                if op is not None:
                    name, devices = executed.instruction.name, group_size(instruction)
                    sizes = collective_bytes(instruction, computation)
                    found += [
                        Collective(op, t, size, devices, name, executed.times)
                        for t, size in sizes.items()
                    ]
        return found

    @cached_property
    def kernels(self) -> list[Kernel]:
        """What is launched: kernels, copies, library calls and collectives."""
        special = {gemm.name: "gemm" for gemm in self.gemms} | {
            call.name: "attention" for call in self.attentions
        }
        special |= {collective.name: "collective" for collective in self.collectives}
        found = []
        for executed in self.executed:
            opcode = executed.instruction.opcode
            if opcode not in NOT_KERNELS and not opcode.endswith("-done"):
                size = self._traffic(executed)
                name = executed.instruction.name
                kind = special.get(name) or self._kind(executed, size)
                found.append(Kernel(kind, name, size, executed.times))
        return found

    def _kind(self, executed: Executed, size: int) -> str:
        instruction = executed.instruction
        if size <= TINY:
            return "tiny"
        inside = {i.opcode for i, _ in self.inside(executed)}
        if "reduce" in inside or "reduce-window" in inside:
            return "reduce"
        if "transpose" in inside:
            return "transpose"
        if instruction.opcode in ("copy", "copy-start") or inside <= {
            "fusion",
            "fusion-start",
            "parameter",
            "copy",
            "bitcast",
        }:
            return "copy"
        if instruction.is_fusion:
            return (
                "cast"
                if any(bits(shape.dtype) == 8 for shape in instruction.shapes)
                else "elementwise"
            )
        return "other"

    def _traffic(self, executed: Executed) -> int:
        """Bytes that one run reads and writes, every operand once; of sliced or updated
        arrays only the part.
        """
        instruction, computation, _ = executed
        operands = list(dict.fromkeys(instruction.operands))
        if not instruction.is_fusion:
            written = bytes_written(instruction)
            read = sum(computation[name].bytes for name in operands)
            if instruction.opcode == "dynamic-update-slice":
                return 2 * computation[instruction.operands[1]].bytes
            if instruction.opcode in ("dynamic-slice", "slice", "gather"):
                return 2 * written
            return read + written
        body = self.computations[instruction.called[0]]
        return fusion_reads(body) + fusion_writes(body)


def fp8_share(program: Program) -> float:
    """FLOPs of FP8 matrix products over those of all products and attentions; 0 of a
    program without any.
    """
    narrow = sum(gemm.flops for gemm in program.gemms if gemm.dtype == "fp8")
    total = sum(gemm.flops for gemm in program.gemms) + sum(
        a.flops for a in program.attentions
    )
    return narrow / total if total else 0.0
