"""Classes of kernels, shared by profiles and the time model, so that both compare.

The class of an instruction is read from the compiled program. The class of a profiled
kernel without a known instruction follows from its name.
"""

import re

from trainer.compiled.hlo import Program

FP8, PRODUCTS, PRODUCTS32 = "FP8 products", "16-bit products", "FP32 products"
ATTENTION, TRANSPOSES, REDUCTIONS, ELEMENTWISE = (
    "attention",
    "transposes",
    "reductions",
    "elementwise",
)
UPDATE, COLLECTIVES, COPIES, OTHER = "update", "collectives", "copies", "other"
CLASSES = (
    FP8,
    PRODUCTS,
    PRODUCTS32,
    ATTENTION,
    TRANSPOSES,
    REDUCTIONS,
    ELEMENTWISE,
    UPDATE,
    COLLECTIVES,
    COPIES,
    OTHER,
)
GAPS = "gaps"  # between kernels: no class of kernels, but a part of a step's time
KINDS = {
    "attention": ATTENTION,
    "collective": COLLECTIVES,
    "transpose": TRANSPOSES,
    "reduce": REDUCTIONS,
    "copy": COPIES,
    "cast": ELEMENTWISE,
    "elementwise": ELEMENTWISE,
    "tiny": ELEMENTWISE,
}
WIDTHS = {"fp4": FP8, "fp8": FP8, "fp32": PRODUCTS32, "fp64": PRODUCTS32}
GRADIENT = "jvp("  # in the op_name of everything in the forward and backward pass
# Tried in this order. cuBLASLt's nvjet kernels have a letter for the type of each
# operand: q is E4M3, r is E5M2, s is FP32.
NAMES = (
    (ATTENTION, r"sdpa|fmha|flash|dot_do_o|convert_dq|matmul_dq"),
    (FP8, r"nvjet_(sm\d+_)?[qr][qr]|e4m3|e5m2|f8f8|fp8.*gemm|gemm.*fp8"),
    (PRODUCTS32, r"nvjet_(sm\d+_)?ss|tf32|sgemm|gemm_f32"),
    (PRODUCTS, r"nvjet|gemm|cutlass|xmma|cublas|splitk|(^|_)dot"),
    (COLLECTIVES, r"nccl|all_?reduce|all_?gather"),
    (COPIES, r"memcpy|memset|^copy"),
    (TRANSPOSES, r"transpose"),
    (REDUCTIONS, r"reduce|reduction"),
    (ELEMENTWISE, r"fusion|^loop_|^input_|^wrapped_|convert|elementwise"),
)


def classes_of(program: Program) -> dict[str, str]:
    """Return the class of each kernel's instruction, by name.

    A kernel outside forward and backward pass belongs to the optimizer's update.
    """
    products = {gemm.name: WIDTHS.get(gemm.dtype, PRODUCTS) for gemm in program.gemms}
    traced = {
        executed.instruction.name: executed.instruction.op_name
        for executed in program.executed
    }
    classes = {}
    # Products and attention come before the question for the update: Muon's has
    # matmuls.
    for kernel in program.kernels:
        if kernel.kind == "gemm":
            classes[kernel.name] = products[kernel.name]
        elif kernel.kind in ("attention", "collective"):
            classes[kernel.name] = KINDS[kernel.kind]
        # Kernels whose instruction has no name of a traced operation count with the
        # update, too.
        elif GRADIENT not in traced[kernel.name]:
            classes[kernel.name] = UPDATE
        else:
            classes[kernel.name] = KINDS.get(kernel.kind, OTHER)
    return classes


def class_of_name(name: str) -> str:
    """Return the class of a kernel by its name alone."""
    for kind, pattern in NAMES:
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return OTHER
