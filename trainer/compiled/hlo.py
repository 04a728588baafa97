"""The matmuls, fused attentions, collectives and kernels of a compiled program.

They are read from `jax.stages.Compiled.as_text()`: HLO after all of XLA's passes, which
is partitioned, so every shape and figure is that of one device. An instruction inside a
loop counts once per iteration.

References:
    https://openxla.org/xla/operation_semantics and
    https://openxla.org/xla/gpu_architecture: the instructions, and the custom calls of
    cuBLASLt's and cuDNN's kernels in a program for CUDA.
"""

import itertools
import math
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
    NARROW_NAMES,
    Collective,
    Contraction,
    FusedAttention,
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
from trainer.precision.fp8_attention import RERUN

TINY = 1024  # bytes
# the instructions of a fusion that only copies
COPIES = {"fusion", "fusion-start", "parameter", "copy", "bitcast"}


class Executed(NamedTuple):
    """An instruction, its computation, and how often one run executes it."""

    instruction: Instruction
    computation: Computation
    times: int


class Kernel(NamedTuple):
    """A kernel that is launched `times` times.

    Attributes:
      kind: gemm, attention, collective; else `tiny` (at most TINY bytes: arithmetic of
        scales); else by content: reduce, transpose, cast (elementwise, to FP8), copy,
        elementwise, other.
      name: of its instruction.
      bytes: read and written by one run.
      times: launches.
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
      computations: by name, each a mapping of its instructions by name, in order.
      entry: the computation that is run.
    """

    def __init__(self, text: str) -> None:
        """Raise ValueError for a text without an entry computation."""
        self.computations: dict[str, Computation] = {}
        entry = None
        current: Computation | None = None
        for line in text.splitlines():
            if current is None:
                # Computations are not nested in the text: they call each other by name.
                header = re.match(r"(ENTRY )?%(\S+) .*\{$", line)
                if header:
                    current = self.computations.setdefault(header[2], {})
                    entry = header[2] if header[1] else entry
            # Only a brace in the first column ends a computation.
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
        """The instructions of a run, with loops unrolled and fusions not opened.

        All branches of a conditional count, and one iteration of a loop of unknown
        length. FP8 attention counts as if no guessed scale was wrong.
        """
        return list(self._executed(self.entry, 1))

    def _executed(self, computation: Computation, times: int) -> Iterator[Executed]:
        for instruction in computation.values():
            if instruction.opcode == "while":
                iterations = times * (instruction.trip_count or 1)
                body = re.search(r"body=%([^\s,}]+)", instruction.text)
                assert body is not None
                yield from self._executed(self.computations[body[1]], iterations)
            # Branch 0 is that of a false predicate: no guess was wrong.
            elif instruction.opcode == "conditional" and RERUN in instruction.op_name:
                yield from self._executed(
                    self.computations[instruction.first_branch], times
                )
            elif instruction.opcode in ("call", "conditional", "async-start"):
                for name in instruction.called:
                    yield from self._executed(self.computations[name], times)
            else:
                yield Executed(instruction, computation, times)

    def inside(self, executed: Executed) -> Iterator[tuple[Instruction, Computation]]:
        """Yield the instruction and, recursively, those that it calls."""
        yield executed.instruction, executed.computation
        for name in executed.instruction.called:
            computation = self.computations[name]
            for instruction in computation.values():
                yield from self.inside(Executed(instruction, computation, 1))

    @cached_property
    def gemms(self) -> list[Gemm]:
        """Matmuls, in the order of the schedule."""
        gemms = []
        for executed in self.executed:
            for instruction, computation in self.inside(executed):
                dims = contraction(instruction)
                if dims is not None:
                    gemms.append(self._gemm(executed, instruction, computation, dims))
        return gemms

    def _gemm(
        self,
        executed: Executed,
        product: Instruction,
        computation: Computation,
        dims: Contraction,
    ) -> Gemm:
        lhs, rhs = (computation[name].shapes[0] for name in product.operands[:2])
        # A product in a fusion has no target: the generator of the fusion is its
        # kernel.
        kernel = product.target or fusion_kind(executed.instruction) or product.opcode
        wide = max(lhs.dtype, rhs.dtype, key=bits)
        # The operands of the kernel decide, not what it converts them to: it is FP8
        # only where both are.
        dtype = NARROW_NAMES.get(bits(wide)) or DTYPE_NAMES.get(wide, wide)
        # Where XLA's passes left a product without a name, the kernel around it may
        # have one.
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
            # cuBLASLt computes alpha A B + beta C: with a beta of 1 it adds to C.
            accumulates='"beta":1' in product.text,
        )

    @cached_property
    def attentions(self) -> list[FusedAttention]:
        """cuDNN's fused attentions, in the order of the schedule."""
        return [
            attention(i, computation, times)
            for i, computation, times in self.executed
            if i.opcode == "custom-call" and i.target.startswith(ATTENTION)
        ]

    @cached_property
    def collectives(self) -> list[Collective]:
        """Collectives; one with arrays of several types appears once for each type."""
        collectives = []
        for executed in self.executed:
            # Triton has an all-reduce inside a fusion.
            for instruction, computation in self.inside(executed):
                op = collective_op(instruction)
                if op is not None:
                    name, devices = executed.instruction.name, group_size(instruction)
                    sizes = collective_bytes(instruction, computation)
                    collectives += [
                        Collective(op, t, size, devices, name, executed.times)
                        for t, size in sizes.items()
                    ]
        return collectives

    @cached_property
    def kernels(self) -> list[Kernel]:
        """Everything that is launched: kernels, copies, library calls, collectives."""
        kind_by_name = {gemm.name: "gemm" for gemm in self.gemms}
        kind_by_name |= {call.name: "attention" for call in self.attentions}
        kind_by_name |= {
            collective.name: "collective" for collective in self.collectives
        }
        kernels = []
        for executed in self.executed:
            opcode = executed.instruction.opcode
            # An asynchronous operation counts where it starts; the end of it only
            # waits.
            if opcode not in NOT_KERNELS and not opcode.endswith("-done"):
                size = self._traffic(executed)
                name = executed.instruction.name
                kind = kind_by_name.get(name) or self._kind(executed, size)
                kernels.append(Kernel(kind, name, size, executed.times))
        return kernels

    def writes_both_orders(self, executed: Executed) -> bool:
        """Return whether a kernel writes an array and its transpose."""
        transposes = sum(i.opcode == "transpose" for i, _ in self.inside(executed))
        shapes = executed.instruction.shapes
        # With a transpose for each result there would be one order only.
        return 0 < transposes < len(shapes) and any(
            a.dtype == b.dtype
            and math.prod(a.dims) == math.prod(b.dims)
            # A square matrix and its transpose have the same sizes.
            and (a.dims != b.dims or a.dims[0] == a.dims[-1])
            for a, b in itertools.combinations(shapes, 2)
        )

    def _kind(self, executed: Executed, size: int) -> str:
        instruction = executed.instruction
        if size <= TINY:
            return "tiny"
        # The first that is inside decides: a reduction that also casts has the rate of
        # reductions.
        inside = {i.opcode for i, _ in self.inside(executed)}
        if "reduce" in inside or "reduce-window" in inside:
            return "reduce"
        if "transpose" in inside:
            return "transpose"
        if instruction.opcode in ("copy", "copy-start") or inside <= COPIES:
            return "copy"
        if not instruction.is_fusion:
            return "other"
        if any(bits(shape.dtype) == 8 for shape in instruction.shapes):
            return "cast"
        return "elementwise"

    def _traffic(self, executed: Executed) -> int:
        """Return the bytes that one run reads and writes, every operand once.

        Of arrays that are sliced or updated only the part counts.
        """
        instruction, computation, _ = executed
        operands = list(dict.fromkeys(instruction.operands))
        if not instruction.is_fusion:
            written = bytes_written(instruction)
            read = sum(computation[name].bytes for name in operands)
            # XLA updates in place: it reads the update and writes as much.
            if instruction.opcode == "dynamic-update-slice":
                return 2 * computation[instruction.operands[1]].bytes
            if instruction.opcode in ("dynamic-slice", "slice", "gather"):
                return 2 * written
            return read + written
        body = self.computations[instruction.called[0]]
        return fusion_reads(body) + fusion_writes(body)


def fp8_share(program: Program) -> float:
    """Return FP8's share of the FLOPs of matmuls and attentions; 0 without any."""
    calls: list[Gemm | FusedAttention] = [*program.gemms, *program.attentions]
    narrow = sum(call.flops for call in calls if call.is_narrow)
    total = sum(call.flops for call in calls)
    if total:
        return narrow / total
    return 0.0
