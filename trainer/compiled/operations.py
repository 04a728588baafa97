"""What instructions of a compiled program compute and move: products, fused attentions,
collectives and their bytes.
"""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from trainer.compiled.instructions import Computation, Instruction

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
DTYPE_NAMES = {"f32": "fp32", "bf16": "bf16", "f16": "fp16", "f64": "fp64"}


class Gemm(NamedTuple):
    """A matrix product that runs, `times` times.

    Attributes:
      kernel: `__cublas$lt$matmul$f8` and the like; the kind of fusion (`__triton_gemm`)
          where a fusion holds it.
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
      causal: whether its mask is; `flops` counts all positions nevertheless, as
          `trainer.models.flops` does.
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
        """Of all its runs: two products forward; five backward, one of them the logits
        again.
        """
        return 2 * math.prod(self.sizes) * (5 if self.backward else 2) * self.times


class Collective(NamedTuple):
    """A collective operation that runs, `times` times.

    Attributes:
      op: all-reduce, all-gather, reduce-scatter, ...
      dtype: as HLO writes it.
      bytes: of one run, the whole array: what an all-gather gives, what a
          reduce-scatter takes.
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
        share = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}.get(
            self.op, (n - 1) / n
        )
        return self.times * self.bytes * share


class Contraction(NamedTuple):
    """The axes of both operands of a product that are contracted, and those that are
    batch.
    """

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    lhs_batch: tuple[int, ...]
    rhs_batch: tuple[int, ...]

    def sizes(
        self, lhs: tuple[int, ...], rhs: tuple[int, ...]
    ) -> tuple[int, int, int, int]:
        """Batch, rows, columns, contracted elements."""
        batch = math.prod(lhs[axis] for axis in self.lhs_batch)
        contracted = math.prod(lhs[axis] for axis in self.lhs)
        return (
            batch,
            math.prod(lhs) // (batch * contracted),
            math.prod(rhs) // (batch * contracted),
            contracted,
        )


def contraction(instruction: Instruction) -> Contraction | None:
    """The axes of a matrix product; None for what is none."""
    names = ("lhs_contracting", "rhs_contracting", "lhs_batch", "rhs_batch")
    if instruction.opcode in ("dot", "scaled-dot"):
        found = {
            name: re.search(rf"{name}_dims=\{{([\d,]*)\}}", instruction.text)
            for name in names
        }
        return Contraction(
            *(
                _numbers(match[1].split(",") if match else ())
                for match in found.values()
            )
        )
    if instruction.opcode == "custom-call" and instruction.target.startswith(
        "__cublas"
    ):
        dims = instruction.config["gemm_backend_config"]["dot_dimension_numbers"]
        return Contraction(
            *(_numbers(dims.get(f"{name}_dimensions", ())) for name in names)
        )
    return None


def _numbers(texts: Iterable[str]) -> tuple[int, ...]:
    return tuple(int(text) for text in texts if text)


def fusion_kind(instruction: Instruction) -> str:
    """The generator of a fusion: `__triton_gemm`, `__cudnn$fusion`, ...; empty where
    the compiler's own is used.
    """
    return instruction.config.get("fusion_backend_config", {}).get("kind", "")


def attention(
    instruction: Instruction, computation: Computation, times: int
) -> Attention:
    """The description of a fused attention's call."""
    config = instruction.config["cudnn_fmha_backend_config"]
    query = computation[instruction.operands[0]].shapes[0]
    batch, heads, queries, keys = (
        int(d) for d in config["intermediate_tensor_shape"]["dimensions"]
    )
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


def collective_bytes(
    instruction: Instruction, computation: Computation
) -> dict[str, int]:
    """Bytes of the whole arrays, by element type."""
    operands = [
        shape for name in instruction.operands for shape in computation[name].shapes
    ]
    # The result of an asynchronous start holds its operands too, in front.
    results = instruction.shapes[-len(operands) :]
    sizes: dict[str, int] = {}
    for operand, result in zip(operands, results, strict=True):
        sizes[operand.dtype] = sizes.get(operand.dtype, 0) + max(
            operand.bytes, result.bytes
        )
    return sizes


def group_size(instruction: Instruction) -> int:
    """Devices of each group of a collective; 0: all of them."""
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
    return len(listed[1].split(",")) if listed else 0


def fusion_reads(body: Computation) -> int:
    """Bytes of a fusion's parameters; of those that it only slices, the slices; none of
    one that it updates in place.

    Bitcasts between are no reading.
    """
    total = 0
    users_of: dict[str, list[Instruction]] = {}
    for instruction in body.values():
        for name in set(instruction.operands):
            users_of.setdefault(name, []).append(instruction)
    for parameter in (i for i in body.values() if i.opcode == "parameter"):
        names, users = [parameter.name], list[Instruction]()
        for name in names:  # grows as bitcasts are found
            found = users_of.get(name, [])
            names += [i.name for i in found if i.opcode == "bitcast"]
            users += [i for i in found if i.opcode != "bitcast"]
        if users and all(
            i.opcode in ("dynamic-slice", "slice", "gather") for i in users
        ):
            total += sum(user.bytes for user in users)
        elif not all(
            i.opcode == "dynamic-update-slice" and i.operands[0] in names for i in users
        ):
            total += parameter.bytes
    return total


def fusion_writes(body: Computation) -> int:
    """Bytes of a fusion's results; of arrays that it updates in place, the part."""
    *_, root = body.values()
    outputs = (
        [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    )
    total = 0
    for output in outputs:
        while output.opcode in ("bitcast", "copy") and len(output.operands) == 1:
            output = body[output.operands[0]]
        in_place = output.opcode == "dynamic-update-slice"
        total += body[output.operands[1]].bytes if in_place else bytes_written(output)
    return total


def bytes_written(instruction: Instruction) -> int:
    """Of the result, without the workspace of a library's call, which is memory and no
    traffic.
    """
    library = instruction.opcode in ("custom-call", "get-tuple-element")
    return sum(
        shape.bytes
        for shape in instruction.shapes
        if not (library and shape.dtype in ("s8", "u8"))
    )
