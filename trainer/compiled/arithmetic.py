"""Arithmetic of generated kernels: the clocks of a GPU's lanes that it takes.

Stochastic rounding hashes integers, and GELU takes exponentials. Such kernels may take
longer to compute than to read and write. The clocks are counted in the instructions of
a fusion, each once for every element of its result. Identical instructions with the
same operands count once, because the compiler merges them (seen in PTX: one tanh where
a fusion had two). Addresses, loads and stores are not in the program, so not counted.

References:
    CUDA C++ Programming Guide, throughput of native arithmetic instructions, compute
    capability 9.0: results per clock and multiprocessor, of 128 FP32 lanes.
"""

from collections.abc import Iterator

from trainer.compiled.hlo import Executed, Program
from trainer.compiled.instructions import NOT_KERNELS, Computation, Instruction

# Clocks of one lane per element. A multiprocessor gives 64 results a clock for integers
# and conversions, 16 for special functions; a division is a reciprocal and its
# correction. XLA computes tanh as a quotient of polynomials: a division, nine fused
# multiply-adds, and seven operations around them (PTX for sm_90a, jax 0.11.2).
INTEGER, CONVERSION, SPECIAL, TANH = 2, 2, 8, 24
SPECIALS = frozenset(
    (
        "cbrt",
        "cosine",
        "divide",
        "erf",
        "exponential",
        "exponential-minus-one",
        "log",
        "log-plus-one",
        "logistic",
        "power",
        "rsqrt",
        "sine",
        "sqrt",
    )
)
# Instructions that move elements only compute addresses.
MOVES = NOT_KERNELS | {
    "broadcast",
    "concatenate",
    "copy",
    "dynamic-slice",
    "dynamic-update-slice",
    "fusion",
    "fusion-start",
    "gather",
    "iota",
    "pad",
    "reshape",
    "reverse",
    "slice",
    "transpose",
}


def lane_clocks(program: Program, executed: Executed) -> int:
    """Return the lane clocks of one run of an instruction; 0 for a library's call."""
    # Its instructions are not in the program, and its time follows from FLOPs and
    # bytes.
    if executed.instruction.opcode == "custom-call":
        return 0
    return sum(
        clocks_of(instruction, computation)
        for instruction, computation in _distinct(program, executed)
    )


def _distinct(
    program: Program, executed: Executed
) -> Iterator[tuple[Instruction, Computation]]:
    """Yield what runs inside an instruction, identical instructions once."""
    representatives: dict[tuple[int, str], str] = {}
    seen: dict[object, str] = {}
    for instruction, computation in program.inside(executed):
        scope = id(computation)
        operands = tuple(
            representatives.get((scope, name), name) for name in instruction.operands
        )
        # Metadata name the traced operation, which may differ between equal
        # instructions.
        attributes = instruction.text.partition("metadata=")[0].rstrip(" ,")
        key = (scope, instruction.opcode, instruction.shapes, operands, attributes)
        # Without operands it may be a parameter or a constant, whose number or literal
        # is not part of the key: two of them would seem equal.
        name = seen.setdefault(key, instruction.name) if operands else instruction.name
        # Users of a merged instruction are then equal, too, if the rest of them is.
        representatives[scope, instruction.name] = name
        if name == instruction.name:
            yield instruction, computation


def clocks_of(instruction: Instruction, computation: Computation) -> int:
    """Return the lane clocks of an instruction, without the computations it calls."""
    if instruction.opcode in MOVES:
        return 0
    elements = instruction.shapes[0].elements
    if instruction.opcode in ("reduce", "reduce-window", "scatter", "sort"):
        # It calls a computation for two elements, once for each element of its arrays;
        # the other half of the operands are initial values.
        arrays = instruction.operands[: len(instruction.operands) // 2]
        return sum(computation[name].shapes[0].elements for name in arrays)
    if instruction.opcode == "convert":
        return CONVERSION * elements
    if instruction.opcode in SPECIALS:
        return SPECIAL * elements
    if instruction.opcode == "tanh":
        return TANH * elements
    # HLO names integers s32, u8 and the like.
    if instruction.shapes[0].dtype[0] in "su":
        return INTEGER * elements
    return elements
