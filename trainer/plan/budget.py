"""Breakdown of a device's memory at the peak of a compiled step."""

from trainer.compiled.instructions import Shape
from trainer.plan.aot import Compiled

KINDS = (
    "weights",
    "optimizer",
    "FP8 weights",
    "gradients",
    "activations",
    "logits",
    "workspace",
    "rest",
    "gaps",
)
ARGUMENT_KINDS = {
    "state.params": "weights",
    "state.kahan_compensation": "weights",
    "state.opt_state": "optimizer",
}


def memory_of(compiled: Compiled, tokens: int, padded_vocab: int) -> dict[str, float]:
    """Return bytes at the memory peak by `KINDS`; their sum is the peak.

    Arguments are classified by name, temporaries by shape: that of a parameter
    (gradients, and FP8 copies of weights), a multiple of the tokens (activations), the
    vocabulary (logits), bytes without a type (workspace). `gaps` is the unused part of
    the allocator's arena.
    """
    out = dict.fromkeys(KINDS, 0.0)
    arguments = [i for i in compiled.program.entry.values() if i.opcode == "parameter"]
    weights: set[tuple[int, ...]] = set()
    for argument in arguments:
        # An argument's name is its path in the step's arguments, such as
        # `state.params['h'][0]`.
        field = ".".join(argument.op_name.split("[")[0].split(".")[:2])
        kind = ARGUMENT_KINDS.get(field, "rest")
        out[kind] += argument.bytes
        # A vector's length may be that of any other small array.
        if kind == "weights" and len(argument.shapes[0].dims) > 1:
            dims = argument.shapes[0].dims
            # Sorted, since XLA may transpose. Without the first axis they are one layer
            # of a stack.
            weights |= {tuple(sorted(dims)), tuple(sorted(dims[1:]))}
    for buffer in compiled.buffers:
        out[temporary_kind(buffer.shape, weights, tokens, padded_vocab)] += buffer.bytes
    # By difference, so that the kinds add up to the peak that XLA reports.
    out["gaps"] = compiled.peak - sum(out.values())
    return out


def temporary_kind(
    shape: Shape, weights: set[tuple[int, ...]], tokens: int, padded_vocab: int
) -> str:
    """Return the kind of a temporary array; see `memory_of`."""
    # XLA adds and removes axes of size 1.
    dims = tuple(sorted(d for d in shape.dims if d > 1))
    split = tuple(sorted(shape.dims[1:]))  # of a split-K matmul's partial sums
    # Libraries get their workspace as bytes without a type.
    if shape.dtype in ("s8", "u8"):
        return "workspace"
    # Before the question for tokens: a kernel's size may be a multiple of them, too.
    if dims in weights or (len(split) > 1 and split in weights):
        if shape.dtype == "f8e4m3fn":
            return "FP8 weights"
        return "gradients"
    if shape.elements and shape.elements % tokens == 0 and shape.dims:
        return "activations"
    if padded_vocab in shape.dims:
        return "logits"
    return "rest"
