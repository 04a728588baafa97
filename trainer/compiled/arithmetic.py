"""How long a generated kernel's arithmetic keeps a GPU's lanes at work, which its bytes
do not say.

A stochastic rounding hashes integers, GELU takes exponentials: such kernels may take
longer to compute than to read and write. Counted in the instructions of a fusion, each
once for every element of its result, equal ones of equal operands together: the
compiler makes one of them (seen in PTX: one tanh where a fusion had two). Addresses,
loads and stores are not in the program, and not counted.

References:
    CUDA C++ Programming Guide, throughput of native arithmetic instructions, compute
    capability 9.0: results per clock and multiprocessor, of 128 FP32 lanes.
"""

from collections.abc import Iterator

from trainer.compiled.hlo import Executed, Program
from trainer.compiled.instructions import NOT_KERNELS, Computation, Instruction

# Clocks of one lane for one element. Of integers and of conversions a multiprocessor
# gives 64 results a clock, of special functions 16; a division is a reciprocal and its
# correction. Of tanh XLA makes a quotient of polynomials: a division, nine fused
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
# What moves elements computes nothing but addresses.
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
    """Clocks of one lane that a run of an instruction takes, those of all lanes summed;
    0 of a library's call.
    """
    if executed.instruction.opcode == "custom-call":
        return 0
    return sum(
        clocks_of(instruction, computation)
        for instruction, computation in _different(program, executed)
    )


def _different(
    program: Program, executed: Executed
) -> Iterator[tuple[Instruction, Computation]]:
    """What runs inside of an instruction, of equal ones of equal operands in one
    computation the first.
    """
    first: dict[tuple[int, str], str] = {}
    seen: dict[object, str] = {}
    for instruction, computation in program.inside(executed):
        of = id(computation)
        operands = tuple(first.get((of, name), name) for name in instruction.operands)
        attributes = instruction.text.partition("metadata=")[0].rstrip(" ,")
        key = (of, instruction.opcode, instruction.shapes, operands, attributes)
        name = seen.setdefault(key, instruction.name) if operands else instruction.name
        first[of, instruction.name] = name
        if name == instruction.name:
            yield instruction, computation


def clocks_of(instruction: Instruction, computation: Computation) -> int:
    """The same of one instruction, without those of the computations that it calls."""
    if instruction.opcode in MOVES:
        return 0
    elements = instruction.shapes[0].elements
    if instruction.opcode in ("reduce", "reduce-window", "scatter", "sort"):
        # What it calls is for two elements; it is called for all of each operand, the
        # other half being first values.
        arrays = instruction.operands[: len(instruction.operands) // 2]
        return sum(computation[name].shapes[0].elements for name in arrays)
    if instruction.opcode == "convert":
        return CONVERSION * elements
    if instruction.opcode in SPECIALS:
        return SPECIAL * elements
    if instruction.opcode == "tanh":
        return TANH * elements
    return (INTEGER if instruction.shapes[0].dtype[0] in "su" else 1) * elements
