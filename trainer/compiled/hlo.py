"""What a compiled program runs: its matrix products, fused attentions, collectives and kernels, read in its HLO text.

The text is that of `jax.stages.Compiled.as_text()`: after all of XLA's passes, partitioned, so every shape and every
figure here is one device's. An instruction inside a loop counts as often as the loop turns.

References:
    https://openxla.org/xla/operation_semantics and https://openxla.org/xla/gpu_architecture: the instructions, and the
    names of the custom calls that cuBLASLt's and cuDNN's kernels have in a program for CUDA.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

# Instructions that are no kernels; loops and calls are not among what is executed: their bodies are.
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
COLLECTIVES = frozenset(
    (
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "all-to-all",
        "ragged-all-to-all",
        "collective-permute",
        "collective-broadcast",
    )
)
ATTENTION = "__cudnn$fmha"
TINY = 1024  # bytes
DTYPE_NAMES = {"f32": "fp32", "bf16": "bf16", "f16": "fp16", "f64": "fp64"}


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
        """Whether it is a generated kernel, started asynchronously or not."""
        return self.opcode in ("fusion", "fusion-start")

    @property
    def target(self) -> str:
        """The function that a custom call calls; empty for other instructions."""
        found = re.search(r'custom_call_target="([^"]*)"', self.text)
        return found[1] if found else ""

    @property
    def op_name(self) -> str:
        """The traced operation that it comes from, with its scopes: `jit(step)/transpose(jvp(...))/dot_general`."""
        found = re.search(r'op_name="([^"]*)"', self.text)
        return found[1] if found else ""

    @cached_property
    def called(self) -> list[str]:
        """Computations that it runs, in the order of the text; those that only say how to reduce are among them."""
        if "=%" not in self.text and "branch_computations" not in self.text:
            return []
        names = re.findall(r"(?:calls|body|condition|to_apply|\w+_computation)=%([^\s,}]+)", self.text)
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


Computation = dict[str, Instruction]


class Executed(NamedTuple):
    """An instruction, the computation that it stands in, and how often a run of the program comes by it."""

    instruction: Instruction
    computation: Computation
    times: int


class Gemm(NamedTuple):
    """A matrix product that runs, `times` times.

    Attributes:
      kernel: `__cublas$lt$matmul$f8` and the like; the kind of fusion (`__triton_gemm`) where a fusion holds it.
      dtype: fp8, bf16, fp16, fp32: of the operands as the kernel multiplies them.
      operands: both element types, as HLO writes them.
      sizes: batch, rows, columns, contracted elements.
      op_name: see `Instruction.op_name`.
    """

    kernel: str
    dtype: str
    operands: tuple[str, str]
    sizes: tuple[int, int, int, int]
    op_name: str
    name: str
    times: int

    @property
    def flops(self) -> int:
        """Of all its runs; a multiply-add counts 2."""
        return 2 * math.prod(self.sizes) * self.times


class Attention(NamedTuple):
    """A fused attention that runs, `times` times.

    Attributes:
      dtype: of queries, keys and values.
      backward: whether it is the gradient.
      causal: whether its mask is; `flops` counts all positions nevertheless, as `trainer.models.flops` does.
      sizes: batch, heads, queries, keys, head dim.
    """

    dtype: str
    backward: bool
    causal: bool
    sizes: tuple[int, int, int, int, int]
    name: str
    times: int

    @property
    def flops(self) -> int:
        """Of all its runs: two products forward; five backward, one of them the logits again."""
        return 2 * math.prod(self.sizes) * (5 if self.backward else 2) * self.times


class Collective(NamedTuple):
    """A collective operation that runs, `times` times.

    Attributes:
      op: all-reduce, all-gather, reduce-scatter, ...
      dtype: as HLO writes it.
      bytes: of one run, the whole array: what an all-gather gives, what a reduce-scatter takes.
      devices: of each group; 0: all.
    """

    op: str
    dtype: str
    bytes: int
    devices: int
    name: str
    times: int

    def sent(self, all_devices: int) -> float:
        """Bytes that every device of `all_devices` sends in all its runs, on a ring."""
        n = self.devices or all_devices
        # A ring sends all parts of the array but one on, twice for an all-reduce.
        share = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}.get(self.op, (n - 1) / n)
        return self.times * self.bytes * share


class Kernel(NamedTuple):
    """Something that is launched, `times` times.

    Attributes:
      kind: gemm, attention, collective; of the others `tiny` (at most TINY bytes: the arithmetic of scales), then by
        what they hold: reduce, transpose, cast (elementwise, to FP8), copy, elementwise, other.
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
        """What a run of the program comes by, loops unrolled, bodies of fusions not opened.

        Of a conditional all branches are taken, of a loop of unknown length one turn (see `unknown_loops`).
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
        """Names of the loops whose length the compiler does not know: what they hold counts once."""
        loops = (i for c in self.computations.values() for i in c.values() if i.opcode == "while")
        return [loop.name for loop in loops if loop.trip_count is None]

    def inside(self, found: Executed) -> Iterator[tuple[Instruction, Computation]]:
        """The instruction, and those of the computations that it calls, of those again, and so on."""
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

    def _gemm(self, executed: Executed, product: Instruction, computation: Computation, dims: "Contraction") -> Gemm:
        lhs, rhs = (computation[name].shapes[0] for name in product.operands[:2])
        kernel = product.target or fusion_kind(executed.instruction) or product.opcode
        wide = max(lhs.dtype, rhs.dtype, key=bits)
        # What cuBLASLt or a fusion is handed, not what a kernel converts it to: of those, `f8` only where both are.
        dtype = "fp8" if bits(wide) == 8 else DTYPE_NAMES.get(wide, wide)
        op_name = product.op_name or executed.instruction.op_name
        sizes = dims.sizes(lhs.dims, rhs.dims)
        return Gemm(
            kernel, dtype, (lhs.dtype, rhs.dtype), sizes, op_name, executed.instruction.name, times=executed.times
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
        """Collective operations; one that takes arrays of several types appears once for each."""
        found = []
        for executed in self.executed:
            for instruction, computation in self.inside(executed):  # Triton has an all-reduce inside a fusion
                op = collective_op(instruction)
                if op is not None:
                    name, devices = executed.instruction.name, group_size(instruction)
                    sizes = collective_bytes(instruction, computation)
                    found += [Collective(op, t, size, devices, name, executed.times) for t, size in sizes.items()]
        return found

    @cached_property
    def kernels(self) -> list[Kernel]:
        """What is launched: kernels, copies, library calls and collectives."""
        special = {gemm.name: "gemm" for gemm in self.gemms} | {call.name: "attention" for call in self.attentions}
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
            return "cast" if any(bits(shape.dtype) == 8 for shape in instruction.shapes) else "elementwise"
        return "other"

    def _traffic(self, executed: Executed) -> int:
        """Bytes that one run reads and writes, every operand once; of sliced or updated arrays only the part."""
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


class Contraction(NamedTuple):
    """The axes of both operands of a product that are contracted, and those that are batch."""

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    lhs_batch: tuple[int, ...]
    rhs_batch: tuple[int, ...]

    def sizes(self, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Batch, rows, columns, contracted elements."""
        batch = math.prod(lhs[axis] for axis in self.lhs_batch)
        contracted = math.prod(lhs[axis] for axis in self.lhs)
        return batch, math.prod(lhs) // (batch * contracted), math.prod(rhs) // (batch * contracted), contracted


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


def contraction(instruction: Instruction) -> Contraction | None:
    """The axes of a matrix product; None for what is none."""
    names = ("lhs_contracting", "rhs_contracting", "lhs_batch", "rhs_batch")
    if instruction.opcode in ("dot", "scaled-dot"):
        found = {name: re.search(rf"{name}_dims=\{{([\d,]*)\}}", instruction.text) for name in names}
        return Contraction(*(_numbers(match[1].split(",") if match else ()) for match in found.values()))
    if instruction.opcode == "custom-call" and instruction.target.startswith("__cublas"):
        dims = instruction.config["gemm_backend_config"]["dot_dimension_numbers"]
        return Contraction(*(_numbers(dims.get(f"{name}_dimensions", ())) for name in names))
    return None


def _numbers(texts: Iterable[str]) -> tuple[int, ...]:
    return tuple(int(text) for text in texts if text)


def fusion_kind(instruction: Instruction) -> str:
    """The generator of a fusion: `__triton_gemm`, `__cudnn$fusion`, ...; empty where the compiler's own is used."""
    return instruction.config.get("fusion_backend_config", {}).get("kind", "")


def attention(instruction: Instruction, computation: Computation, times: int) -> Attention:
    """The description of a fused attention's call."""
    config = instruction.config["cudnn_fmha_backend_config"]
    query = computation[instruction.operands[0]].shapes[0]
    batch, heads, queries, keys = (int(d) for d in config["intermediate_tensor_shape"]["dimensions"])
    return Attention(
        DTYPE_NAMES.get(query.dtype, query.dtype),
        backward="Backward" in instruction.target,
        causal="CAUSAL" in config.get("mask_type", ""),
        sizes=(batch, heads, queries, keys, query.dims[-1]),
        name=instruction.name,
        times=times,
    )


def collective_op(instruction: Instruction) -> str | None:
    """The collective that an instruction is or starts; None for what is none."""
    op = instruction.opcode.removesuffix("-start")
    return op if op in COLLECTIVES else None


def collective_bytes(instruction: Instruction, computation: Computation) -> dict[str, int]:
    """Bytes of the whole arrays, by element type."""
    operands = [shape for name in instruction.operands for shape in computation[name].shapes]
    # The result of an asynchronous start holds its operands too, in front.
    results = instruction.shapes[-len(operands) :]
    sizes: dict[str, int] = {}
    for operand, result in zip(operands, results, strict=True):
        sizes[operand.dtype] = sizes.get(operand.dtype, 0) + max(operand.bytes, result.bytes)
    return sizes


def group_size(instruction: Instruction) -> int:
    """Devices of each group of a collective; 0: all of them."""
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", instruction.text)
    if mesh:
        axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        return math.prod(axes[name] for name in re.findall(r"'([^']+)'", mesh[2]))
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]", instruction.text)
    if iota:
        return int(iota[1])
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", instruction.text)
    return len(listed[1].split(",")) if listed else 0


def fusion_reads(body: Computation) -> int:
    """Bytes of a fusion's parameters; of those that it only slices, the slices."""
    total = 0
    users_of: dict[str, list[Instruction]] = {}
    for instruction in body.values():
        for name in set(instruction.operands):
            users_of.setdefault(name, []).append(instruction)
    for parameter in (i for i in body.values() if i.opcode == "parameter"):
        users = users_of.get(parameter.name, [])
        if users and all(i.opcode in ("dynamic-slice", "slice", "gather") for i in users):
            total += sum(user.bytes for user in users)
        elif not all(i.opcode == "dynamic-update-slice" and i.operands[0] == parameter.name for i in users):
            total += parameter.bytes
    return total


def fusion_writes(body: Computation) -> int:
    """Bytes of a fusion's results; of arrays that it updates in place, the part."""
    *_, root = body.values()
    outputs = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    total = 0
    for output in outputs:
        while output.opcode in ("bitcast", "copy") and len(output.operands) == 1:
            output = body[output.operands[0]]
        in_place = output.opcode == "dynamic-update-slice"
        total += body[output.operands[1]].bytes if in_place else bytes_written(output)
    return total


def bytes_written(instruction: Instruction) -> int:
    """Of the result, without the workspace of a library's call, which is memory and no traffic."""
    library = instruction.opcode in ("custom-call", "get-tuple-element")
    return sum(shape.bytes for shape in instruction.shapes if not (library and shape.dtype in ("s8", "u8")))


def fp8_share(program: Program) -> float:
    """FLOPs of FP8 matrix products over those of all products and attentions; 0 of a program without any."""
    narrow = sum(gemm.flops for gemm in program.gemms if gemm.dtype == "fp8")
    total = sum(gemm.flops for gemm in program.gemms) + sum(a.flops for a in program.attentions)
    return narrow / total if total else 0.0
