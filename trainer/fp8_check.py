"""Whether the linear layers that should be multiplied in FP8 are, in a compiled program; and why each other is not.

A compiler may silently multiply in another dtype than the operands that it was given: what it made is looked at.
"""

import math
from collections import Counter
from typing import NamedTuple

from scalify_core.matmul import MULTIPLE
from trainer.hlo import Program
from trainer.precision import Policy
from trainer.spec import GPT2Spec, linear_paths
from trainer.targets import Target
from trainer.workload import Model


class Layer(NamedTuple):
    """A linear layer that is not FP8, why, and whether the precision wants it so."""

    path: str
    reason: str
    is_chosen: bool


def layer_sizes(spec: GPT2Spec, path: str) -> tuple[int, int]:
    """Inputs and outputs of the linear layer `h.3.attn.c_attn`, `h.*.mlp.c_fc`, ..."""
    D, F = spec.d_model, spec.mlp_width
    return {"attn.c_attn": (D, 3 * D), "attn.c_proj": (D, D), "mlp.c_proj": (F, D)}.get(path.split(".", 2)[2], (D, F))


def not_fp8(model: Model, program: Program, tokens: int, target: Target | None) -> list[Layer]:
    """The linear layers of which a product is not FP8 in the program, and why.

    Products have no names in a compiled program, and a partitioner may cut each along any axis: they are told apart by
    the number of their multiplications. A layer has three products (the output, the gradient of the input and that of
    the weight), all with as many; of the layers that share a number all are named where one product is missing.

    Args:
      model: in its precision.
      program: the compiled train step.
      tokens: of one device's micro-batch.
      target: the GPU; None: one that has FP8.
    """
    paths = linear_paths(model.spec)

    def multiplications(path: str) -> int:
        return tokens * math.prod(layer_sizes(model.spec, path))

    expected = Counter(multiplications(path) for path in model.narrow for _ in range(3))
    narrow: Counter[int] = Counter()
    kernels: dict[int, set[str]] = {}
    for gemm in program.gemms:
        size = math.prod(gemm.sizes)
        if gemm.dtype == "fp8":
            narrow[size] += 1
        else:
            kernels.setdefault(size, set()).add(f"{gemm.dtype} ({gemm.kernel})")

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
        size = multiplications(path)
        if narrow[size] >= expected[size]:
            return None
        others = f"; others are {', '.join(sorted(kernels[size]))}" if size in kernels else ""
        return f"of {expected[size]} products of this size {narrow[size]} are FP8{others}"

    found = [(path, reason(path)) for path in paths]
    return [Layer(path, why, path in model.narrow) for path, why in found if why is not None]


def why_wide(policy: Policy) -> str:
    """Why a layer is not among the chosen ones."""
    if policy.forward is None:
        return f"the precision computes all in {policy.compute}"
    return f"in {policy.compute} by precision.matmuls={list(policy.matmuls)} and precision.keep={list(policy.keep)}"
