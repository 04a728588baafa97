"""Sizes and bytes of matmuls, fused attentions and collectives in compiled programs."""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from trainer.compiled.instructions import Computation, Instruction, bits

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
BLOCK_SCALED = "__cudnn$blockScaledDot"
# By width, since one kernel may take e4m3 and e5m2 side by side.
NARROW_NAMES = {4: "fp4", 8: "fp8"}  # by bits
DTYPE_NAMES = {"f32": "fp32", "bf16": "bf16", "f16": "fp16", "f64": "fp64"}
SLICES = ("dynamic-slice", "slice", "gather")


class Gemm(NamedTuple):
    """A matmul that runs `times` times.

    Attributes:
      kernel: `__cublas$lt$matmul$f8` and the like; the kind of fusion (`__triton_gemm`)
          for a matmul inside a fusion.
      dtype: fp4, fp8, bf16, fp16, fp32: that of the kernel's operands.
      operands: both element types, as HLO spells them.
      sizes: batch, rows, columns, contracted elements.
      op_name: see `Instruction.op_name`.
      name: of the instruction.
      times: runs.
      accumulates: whether it adds to what its result held.
    """

    kernel: str
    dtype: str
    operands: tuple[str, str]
    sizes: tuple[int, int, int, int]
    op_name: str
    name: str
    times: int
    accumulates: bool

    @property
    def is_narrow(self) -> bool:
        """Whether both operands have eight bits or fewer."""
        return self.dtype in NARROW_NAMES.values()

    @property
    def flops(self) -> int:
        """FLOPs of all runs; a multiply-add counts 2."""
        return 2 * math.prod(self.sizes) * self.times


class FusedAttention(NamedTuple):
    """A fused attention that runs `times` times.

    Attributes:
      dtype: of queries, keys and values.
      backward: whether it is the gradient.
      causal: whether its mask is causal; `flops` counts all positions nevertheless, as
          `trainer.models.flops` does.
      sizes: batch, heads, queries, keys, head dim.
      name: of the instruction.
      times: runs.
    """

    dtype: str
    backward: bool
    causal: bool
    sizes: tuple[int, int, int, int, int]
    name: str
    times: int

    @property
    def is_narrow(self) -> bool:
        """Whether its operands have eight bits."""
        return self.dtype in NARROW_NAMES.values()

    @property
    def flops(self) -> int:
        """FLOPs of all runs: two matmuls forward, five backward.

        One of the five recomputes the logits.
        """
        matmuls = 5 if self.backward else 2
        return 2 * math.prod(self.sizes) * matmuls * self.times


class Collective(NamedTuple):
    """A collective that runs `times` times.

    Attributes:
      op: all-reduce, all-gather, reduce-scatter, ...
      dtype: as HLO spells it.
      bytes: of one run, the full array: an all-gather's result, a reduce-scatter's
          operand.
      devices: of each group; 0: all.
      name: of the instruction.
      times: runs.
    """

    op: str
    dtype: str
    bytes: int
    devices: int
    name: str
    times: int

    def sent(self, all_devices: int) -> float:
        """Return the bytes that every device sends in all runs, on a ring."""
        n = self.devices or all_devices
        # On a ring each device sends all parts of the array but one, twice for an
        # all-reduce.
        share = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}.get(
            self.op, (n - 1) / n
        )
        return self.times * self.bytes * share


class Contraction(NamedTuple):
    """The contracted axes of both operands of a matmul, and the batch axes."""

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    lhs_batch: tuple[int, ...]
    rhs_batch: tuple[int, ...]

    def sizes(
        self, lhs: tuple[int, ...], rhs: tuple[int, ...]
    ) -> tuple[int, int, int, int]:
        """Return batch, rows, columns and contracted elements."""
        batch = math.prod(lhs[axis] for axis in self.lhs_batch)
        contracted = math.prod(lhs[axis] for axis in self.lhs)
        return (
            batch,
            math.prod(lhs) // (batch * contracted),
            math.prod(rhs) // (batch * contracted),
            contracted,
        )


def contraction(instruction: Instruction) -> Contraction | None:
    """Return the axes of a matmul; None for another instruction."""
    names = ("lhs_contracting", "rhs_contracting", "lhs_batch", "rhs_batch")
    # Triton's products are dots in a fusion, cuBLASLt's and cuDNN's are custom calls.
    if instruction.opcode in ("dot", "scaled-dot"):
        axes = []
        for name in names:
            match = re.search(rf"{name}_dims=\{{([\d,]*)\}}", instruction.text)
            # HLO leaves out axes where there are none, such as those of a batch.
            axes.append(_numbers(match[1].split(",") if match else ()))
        return Contraction(*axes)
    if instruction.opcode == "custom-call" and instruction.target.startswith(
        "__cublas"
    ):
        # For a custom call the axes are only in the backend's configuration.
        dims = instruction.config["gemm_backend_config"]["dot_dimension_numbers"]
        return Contraction(
            *(_numbers(dims.get(f"{name}_dimensions", ())) for name in names)
        )
    if instruction.target == BLOCK_SCALED:  # [B, M, K] and [B, N, K]
        return Contraction((2,), (2,), (0,), (0,))
    return None


def _numbers(texts: Iterable[str]) -> tuple[int, ...]:
    return tuple(int(text) for text in texts if text)


def fusion_kind(instruction: Instruction) -> str:
    """Return a fusion's generator, such as `__triton_gemm`; empty for XLA's own."""
    return instruction.config.get("fusion_backend_config", {}).get("kind", "")


def attention(
    instruction: Instruction, computation: Computation, times: int
) -> FusedAttention:
    """Return the description of a fused attention's call."""
    config = instruction.config["cudnn_fmha_backend_config"]
    query = computation[instruction.operands[0]].shapes[0]
    # The sizes of the logits: those of the operands depend on the layout, and for
    # grouped queries have other heads.
    batch, heads, queries, keys = (
        int(d) for d in config["intermediate_tensor_shape"]["dimensions"]
    )
    return FusedAttention(
        NARROW_NAMES.get(bits(query.dtype))
        or DTYPE_NAMES.get(query.dtype, query.dtype),
        backward="Backward" in instruction.target,
        causal="CAUSAL" in config.get("mask_type", ""),
        sizes=(batch, heads, queries, keys, query.dims[-1]),
        name=instruction.name,
        times=times,
    )


def collective_op(instruction: Instruction) -> str | None:
    """Return the collective that an instruction is or starts, or None."""
    # An asynchronous collective is a pair, of which the start has the arrays.
    op = instruction.opcode.removesuffix("-start")
    if op in COLLECTIVES:
        return op
    return None


def collective_bytes(
    instruction: Instruction, computation: Computation
) -> dict[str, int]:
    """Return the bytes of the full arrays, by element type."""
    operands = [
        shape for name in instruction.operands for shape in computation[name].shapes
    ]
    # The result of an asynchronous start holds its operands first.
    results = instruction.shapes[-len(operands) :]
    sizes: dict[str, int] = {}
    for operand, result in zip(operands, results, strict=True):
        # The larger is the full array: the result of an all-gather, the operand of a
        # reduce-scatter.
        sizes[operand.dtype] = sizes.get(operand.dtype, 0) + max(
            operand.bytes, result.bytes
        )
    return sizes


def group_size(instruction: Instruction) -> int:
    """Return the devices of each group of a collective; 0: all of them."""
    # XLA writes groups in three ways: by the axes of a mesh, by the shape of an iota
    # ([groups, devices of each]), or listed.
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", instruction.text)
    if mesh:
        axes = {
            name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])
        }
        return math.prod(axes[name] for name in re.findall(r"'([^']+)'", mesh[2]))
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]", instruction.text)
    if iota:
        return int(iota[1])
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", instruction.text)
    if listed:
        return len(listed[1].split(","))
    return 0


def fusion_reads(body: Computation) -> int:
    """Return the bytes of a fusion's parameters.

    A parameter that is only sliced counts with its slices. One that is updated in place
    does not count. Bitcasts in between do not read.
    """
    total = 0
    users_of: dict[str, list[Instruction]] = {}
    for instruction in body.values():
        for name in set(instruction.operands):
            users_of.setdefault(name, []).append(instruction)
    for parameter in (i for i in body.values() if i.opcode == "parameter"):
        names, users = [parameter.name], list[Instruction]()
        for name in names:  # grows by bitcasts of the parameter
            direct = users_of.get(name, [])
            names += [i.name for i in direct if i.opcode == "bitcast"]
            users += [i for i in direct if i.opcode != "bitcast"]
        is_sliced = all(i.opcode in SLICES for i in users)
        # As the first operand only: an array that is written into another is read.
        is_updated = all(
            i.opcode == "dynamic-update-slice" and i.operands[0] in names for i in users
        )
        # Without users both are true, and nothing reads the parameter.
        if users and is_sliced:
            total += sum(user.bytes for user in users)
        elif not is_updated:
            total += parameter.bytes
    return total


def fusion_writes(body: Computation) -> int:
    """Return the bytes of a fusion's results; of arrays updated in place, the part."""
    # The root is the last instruction of a computation's text.
    *_, root = body.values()
    outputs = (
        [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    )
    total = 0
    for output in outputs:
        # The update in place may stand behind a change of the layout.
        while output.opcode in ("bitcast", "copy") and len(output.operands) == 1:
            output = body[output.operands[0]]
        in_place = output.opcode == "dynamic-update-slice"
        total += body[output.operands[1]].bytes if in_place else bytes_written(output)
    return total


def bytes_written(instruction: Instruction) -> int:
    """Return the bytes of a result without the workspace of a library's call.

    The workspace is memory, not traffic.
    """
    # cuBLASLt's calls return their workspace beside the result, as bytes: 32 MiB from
    # Hopper on, 4 MiB before.
    library = instruction.opcode in ("custom-call", "get-tuple-element")
    return sum(
        shape.bytes
        for shape in instruction.shapes
        if not (library and shape.dtype in ("s8", "u8"))
    )
