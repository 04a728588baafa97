"""Whether the linear layers that should be multiplied in FP8 are, in a compiled program; and why each other is not.

A compiler may silently multiply in another dtype than the operands that it was given: what it made is looked at.
"""

from collections.abc import Iterable
from typing import NamedTuple

from scalify_core.matmul import MULTIPLE
from trainer.hlo import Gemm, Program
from trainer.spec import linear_sizes
from trainer.targets import Target
from trainer.workload import Model

Product = tuple[int, int, int]  # rows and columns, the smaller first, as in the transposed product; contracted elements


class Layer(NamedTuple):
    """A linear layer that is not FP8, why, and whether the precision wants it so."""

    path: str
    reason: str
    is_chosen: bool


def layer_products(size: tuple[int, int], tokens: int) -> list[Product]:
    """The output, the gradient of the input and that of the weight, of a layer of so many inputs and outputs."""
    inputs, outputs = size
    sizes = ((tokens, outputs, inputs), (tokens, inputs, outputs), (inputs, outputs, tokens))
    return [(min(rows, columns), max(rows, columns), contracted) for rows, columns, contracted in sizes]


def missing_products(expected: Iterable[Product], gemms: Iterable[Gemm]) -> set[Product]:
    """Those of the expected products that none of the matrix products is.

    Contractions that are cut up are padded, so a product may have more contracted elements than it was written with.
    """
    found: dict[tuple[int, int], list[int]] = {}
    for batch, rows, columns, contracted in sorted(gemm.sizes for gemm in gemms):
        found.setdefault((min(rows, columns), max(rows, columns)), []).append(batch * contracted)
    missing = set()
    for small, large, contracted in sorted(expected):
        left = found.get((small, large), [])
        fitting = [size for size in left if contracted <= size < 2 * contracted]
        if fitting:
            left.remove(min(fitting))
        else:
            missing.add((small, large, contracted))
    return missing


def not_fp8(model: Model, program: Program, tokens: int, target: Target | None) -> list[Layer]:
    """The linear layers of which a product is not FP8 in the program, and why.

    Each of the chosen layers makes three FP8 products (the output, the gradient of the input and that of the weight);
    nothing else makes any, so their number says whether one is missing. Products have no names in a compiled program:
    which one is missing is told by the sizes, and all layers that have a product of that size are named.

    Args:
      model: in its precision.
      program: the compiled train step.
      tokens: of one device's micro-batch.
      target: the GPU; None: one that has FP8.
    """
    layers, narrow = linear_sizes(model.spec), [gemm for gemm in program.gemms if gemm.dtype == "fp8"]
    wide = ", ".join(sorted({f"{gemm.dtype} ({gemm.kernel})" for gemm in program.gemms if gemm.dtype != "fp8"}))
    products = {path: layer_products(layers[path], tokens) for path in model.narrow}
    missing: set[Product] = set()
    if len(narrow) != 3 * len(products):  # more, where a forward pass is computed again
        missing = missing_products([p for ps in products.values() for p in ps], narrow)

    def reason(path: str) -> str | None:
        if path in model.skipped:
            return model.skipped[path]
        if tokens % MULTIPLE:
            return f"micro-batches of {tokens} tokens a device, not a multiple of {MULTIPLE}"
        if model.policy.simulate:
            return "FP8 is simulated: precision.simulate=true"
        if target is not None and not target.has_fp8:
            return f"{target.device} has no FP8 tensor cores"
        if missing.isdisjoint(products[path]):
            return None
        return f"of {3 * len(products)} FP8 products {len(narrow)} were compiled as such; others are {wide}"

    found = [(path, reason(path)) for path in layers]
    return [Layer(path, why, path in products) for path, why in found if why is not None]
