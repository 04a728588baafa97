"""Whether the linear layers that should be multiplied in FP8 are, in a compiled program; and why each other is not.

A compiler may silently multiply in another dtype than the operands that it was given: what it made is looked at.
"""

from collections import Counter
from typing import NamedTuple

from scalify_core.matmul import MULTIPLE
from trainer.hlo import Program
from trainer.precision import Policy
from trainer.spec import GPT2Spec, linear_paths
from trainer.targets import Target
from trainer.workload import Model

Product = tuple[int, int, int]  # rows and columns, the smaller first, and contracted elements


class Layer(NamedTuple):
    """A linear layer that is not FP8, why, and whether the precision wants it so."""

    path: str
    reason: str
    is_chosen: bool


def layer_sizes(spec: GPT2Spec, path: str) -> tuple[int, int]:
    """Inputs and outputs of the linear layer `h.3.attn.c_attn`, `h.*.mlp.c_fc`, ..."""
    D, F = spec.d_model, spec.mlp_width
    return {"attn.c_attn": (D, 3 * D), "attn.c_proj": (D, D), "mlp.c_proj": (F, D)}.get(path.split(".", 2)[2], (D, F))


def layer_products(spec: GPT2Spec, path: str, tokens: int) -> list[Product]:
    """The output, the gradient of the input and that of the weight."""
    inputs, outputs = layer_sizes(spec, path)
    return [
        product_of(*size) for size in ((tokens, outputs, inputs), (tokens, inputs, outputs), (inputs, outputs, tokens))
    ]


def product_of(rows: int, columns: int, contracted: int) -> Product:
    """What a product has in common with its transpose."""
    return min(rows, columns), max(rows, columns), contracted


def not_fp8(model: Model, program: Program, tokens: int, target: Target | None) -> list[Layer]:
    """The linear layers of which a product is not FP8 in the program, and why.

    Products have no names in a compiled program; they are told apart by their sizes. Of a size that several layers
    have and that is FP8 too seldom, all that should be are named.

    Args:
      model: in its precision.
      program: the compiled train step.
      tokens: of one device's micro-batch.
      target: the GPU; None: one that has FP8.
    """
    expected: Counter[Product] = Counter()
    allowed: Counter[Product] = Counter()
    paths = linear_paths(model.spec)
    for path in paths:
        (expected if path in model.narrow else allowed).update(layer_products(model.spec, path, tokens))
    narrow: Counter[Product] = Counter()
    other: Counter[Product] = Counter()
    kernels: dict[Product, set[str]] = {}
    for gemm in program.gemms:
        batch, rows, columns, contracted = gemm.sizes
        product = product_of(rows, columns, batch * contracted)  # of a sum in parts, all parts
        (narrow if gemm.dtype == "fp8" else other)[product] += 1
        if gemm.dtype != "fp8":
            kernels.setdefault(product, set()).add(f"{gemm.dtype} ({gemm.kernel})")

    def reason(path: str) -> str | None:
        if path not in model.narrow:
            return why_wide(model.policy)
        inputs, outputs = layer_sizes(model.spec, path)
        if any(size % MULTIPLE for size in (inputs, outputs, tokens)):
            sizes = f"{tokens} tokens, {inputs} inputs, {outputs} outputs"
            return f"sizes are not all multiples of {MULTIPLE}: {sizes}"
        if model.policy.simulate:
            return "FP8 is simulated: precision.simulate=true"
        if target is not None and not target.has_fp8:
            return f"{target.device} has no FP8 tensor cores"
        products = layer_products(model.spec, path, tokens)
        if all(narrow[p] >= expected[p] and other[p] <= allowed[p] for p in products):
            return None
        found = sorted(set().union(*(kernels.get(p, set()) for p in products)))
        return f"compiled as {', '.join(found) or 'no product of its size'}"

    found = [(path, reason(path)) for path in paths]
    return [Layer(path, why, path in model.narrow) for path, why in found if why is not None]


def why_wide(policy: Policy) -> str:
    """Why a layer is not among the chosen ones."""
    if policy.forward is None:
        return f"the precision computes all in {policy.compute}"
    return f"in {policy.compute} by precision.matmuls={list(policy.matmuls)} and precision.keep={list(policy.keep)}"
