"""Check that a compiled program multiplies the chosen linear layers in FP8.

A compiler may silently multiply in another dtype than that of the operands, so the
compiled program is read.
"""

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from trainer.compiled.hlo import Program, fp8_share
from trainer.compiled.operations import Gemm
from trainer.errors import UserError
from trainer.model import Model
from trainer.models.flops import linear_sizes
from trainer.precision import cudnn_fp8_attention
from trainer.precision.arrays import skipped_matmuls
from trainer.precision.policy import Policy

# A matmul: its rows and columns, the smaller first, because the compiler may transpose
# it, and the contracted elements.
Product = tuple[int, int, int]
# Matmuls with a common operand, which the compiler may join to one.
Join = tuple[Product, ...]
# The width from which on a layer takes no longer than in bf16 on an H100, predicted by
# `python -m scripts.bench.crossover`
PAYS_FROM_WIDTH = 768
PRODUCTS = ("its output", "the gradient of its input", "the gradient of its weight")


class Gpu(NamedTuple):
    """A kind of GPU: `jax.Device.device_kind`, and its CUDA compute capability."""

    kind: str
    capability: tuple[int, int]

    @classmethod
    def from_device(cls, device: jax.Device) -> "Gpu | None":
        """Return the kind of a device; None for a device that is no NVIDIA GPU."""
        capability = str(getattr(device, "compute_capability", ""))
        # Only CUDA's devices have two numbers here.
        match = re.fullmatch(r"(\d+)\.(\d+)", capability)
        if match is None:
            return None
        return cls(device.device_kind, (int(match[1]), int(match[2])))

    def lacks(self, policy: Policy) -> str:
        """Return a sentence where the GPU lacks the precision's FP8 matmuls; else
        empty.
        """
        method = policy.method
        # Tuples: (10, 0) is more than (8, 9), which strings would not tell.
        if self.capability >= method.capability:
            return ""
        return f"{self.kind} has no {method.kernels} tensor cores"

    def lacks_attention(self) -> str:
        """Return a sentence where cuDNN has no FP8 attention for the GPU; else
        empty.
        """
        if self.capability[0] in cudnn_fp8_attention.CAPABILITIES:
            return ""
        majors = " or ".join(f"{n}.x" for n in cudnn_fp8_attention.CAPABILITIES)
        major, minor = self.capability
        return (
            f"{self.kind} has compute capability {major}.{minor}, and cuDNN's FP8"
            f" attention needs {majors}"
        )

    @property
    def is_for_fp8(self) -> bool:
        """Return whether FP8 is a main use of the GPU: from Hopper on."""
        return self.capability >= (9, 0)


class Layer(NamedTuple):
    """A linear layer that is not FP8, the reason, and whether it was chosen for FP8."""

    path: str
    reason: str
    is_chosen: bool


def layer_products(size: tuple[int, int], tokens: int) -> list[Product]:
    """Return the sizes of the `PRODUCTS` of a layer (inputs, outputs)."""
    inputs, outputs = size
    sizes = (
        (tokens, outputs, inputs),
        (tokens, inputs, outputs),
        (inputs, outputs, tokens),
    )
    return [
        (min(rows, columns), max(rows, columns), contracted)
        for rows, columns, contracted in sizes
    ]


def can_be(gemm: Gemm, product: Product) -> bool:
    """Return whether a compiled matmul has the sizes of a traced one.

    Split contractions are padded, so it may have more contracted elements.
    """
    batch, rows, columns, contracted = gemm.sizes
    same = (min(rows, columns), max(rows, columns)) == product[:2]
    # Rows and columns are exact. A multiple of the contracted elements is another
    # product.
    return same and product[2] <= batch * contracted < 2 * product[2]


def missing_products(
    layers: Iterable[Mapping[str, Mapping[str, Product]]], gemms: Iterable[Gemm]
) -> set[Product]:
    """Return the expected matmuls that are not compiled, alone or joined.

    Args:
      layers: for each group of sibling layers their matmuls, by layer and name.
      gemms: the compiled matmuls.
    """
    joins: list[set[Join]] = []
    missing: Counter[Product] = Counter()
    for siblings in layers:
        joins += possible_joins(list(siblings.values()))
        for products in siblings.values():
            missing.update(products.values())
    # Ascending, so that an expected matmul takes the least padded of the compiled ones
    # that can hold it.
    by_contracted = sorted(gemms, key=lambda gemm: gemm.sizes[0] * gemm.sizes[3])
    maybe_single = [g for g in by_contracted if any(can_be(g, p) for p in missing)]
    for gemm in by_contracted:
        # These have the sizes of no single matmul, so that only a joined one can be
        # meant: they come first.
        if gemm not in maybe_single:
            take_joined(gemm, missing, joins)
    for product in sorted(missing.elements()):
        match = next((gemm for gemm in maybe_single if can_be(gemm, product)), None)
        if match is not None:
            missing -= Counter([product])
            maybe_single.remove(match)
    # The rest repeat a forward pass, or are joined and have the sizes of a single one.
    for gemm in maybe_single:
        take_joined(gemm, missing, joins)
    return set(+missing)


def without_peeled(gemms: Iterable[Gemm]) -> list[Gemm]:
    """Return matmuls without copies in iterations that XLA took out of a loop.

    These have the name and the sizes of those in the loop, and run another number of
    times. Unrolled layers run as often as each other.
    """
    copies: dict[Any, dict[int, list[Gemm]]] = {}
    for gemm in gemms:
        by_times = copies.setdefault((gemm.op_name, gemm.sizes), {})
        by_times.setdefault(gemm.times, []).append(gemm)
    return [gemm for by_times in copies.values() for gemm in by_times[max(by_times)]]


def take_joined(gemm: Gemm, missing: Counter[Product], joins: list[set[Join]]) -> None:
    """Take from `missing` what a compiled matmul may hold side by side, and from
    `joins` the group that it is of: a repeated one is not missing.
    """
    products = joined_in(gemm, missing, sorted(set().union(*joins)))
    if products:
        # One group of siblings is joined once in a pass: a repeated forward pass would
        # stand in for matmuls of that size which are not FP8.
        missing.subtract(products)
        joins.remove(next(group for group in joins if products in group))


def possible_joins(siblings: Sequence[Mapping[str, Product]]) -> list[set[Join]]:
    """Return the matmuls of sibling layers that XLA may join, those of a common input:
    of their outputs, and of their weights' gradients.

    They are queries, keys and values, or both branches of a gated MLP: at most three.
    """
    groups = []
    output, _, weight_gradient = PRODUCTS
    for name in (output, weight_gradient):
        products = sorted(layer[name] for layer in siblings if name in layer)
        counts = (2, 3)
        groups.append({j for n in counts for j in itertools.combinations(products, n)})
    return groups


def joined_in(gemm: Gemm, missing: Counter[Product], joins: Iterable[Join]) -> Join:
    """Return the missing matmuls that a compiled one may hold side by side."""
    batch, rows, columns, contracted = gemm.sizes
    for products in joins:
        if any(not p[2] <= batch * contracted < 2 * p[2] for p in products):
            continue
        for common, other in ((rows, columns), (columns, rows)):
            fits = all(common in p[:2] for p in products) and (
                sum(sum(p[:2]) - common for p in products) == other
            )
            # `+` drops counts of zero and below, which are found already.
            if fits and Counter(products) <= +missing:
                return products
    return ()


def expected_products(
    model: Model,
    paths: Iterable[str],
    tokens: int,
    gemms: Sequence[Gemm],
    frozen: Collection[str],
    tensor: int,
) -> dict[str, dict[str, Product]]:
    """Return the FP8 matmuls that a step needs of each layer in `paths`, by name.

    A frozen kernel has no gradient. Its input only has one if an earlier layer is
    trained, in which case the program has a matmul of that size. See `not_fp8` for the
    arguments.
    """
    sizes = linear_sizes(model.spec)
    kinds = {role.layer: role.kind for role in jax.tree.leaves(model.roles)}
    output, input_gradient, weight_gradient = PRODUCTS
    expected = {}
    for path in paths:
        inputs, outputs = sizes[path]
        # Tensor parallelism splits kernels of kind `row` by inputs, all others by
        # outputs.
        if kinds.get(path) == "row":
            inputs //= tensor
        else:
            outputs //= tensor
        sizes_of_products = layer_products((inputs, outputs), tokens)
        products = dict(zip(PRODUCTS, sizes_of_products, strict=True))
        if model.policy.has_wide_forward:
            del products[output]
        if path in frozen:
            del products[weight_gradient]
            # The gradient of an input is only needed by trained layers before it.
            if not any(can_be(gemm, products[input_gradient]) for gemm in gemms):
                del products[input_gradient]
        expected[path] = products
    return expected


def not_fp8(
    model: Model,
    program: Program,
    tokens: int,
    gpu: Gpu | None,
    frozen: Collection[str] = (),
    tensor: int = 1,
) -> list[Layer]:
    """Return the linear layers with a matmul that is not FP8, and the reason.

    Each chosen layer has the three matmuls of `PRODUCTS`, or fewer where its kernel is
    frozen or its forward pass is in 16 bits. Nothing else is multiplied in FP8, so the
    number of FP8 matmuls tells whether one is missing. Matmuls have no names in a
    compiled program. So a missing one is identified by its sizes, and all layers with a
    matmul of them are returned.

    Args:
      model: in its precision.
      program: the compiled train step.
      tokens: of one device's micro-batch.
      gpu: the device that it is compiled for; None: one that has FP8.
      frozen: layers whose kernels are not trained.
      tensor: devices over which heads and hidden channels are split.
    """
    layers = linear_sizes(model.spec)
    not_chosen = skipped_matmuls(model.policy, layers)  # by configuration or widths
    skipped = skipped_matmuls(model.policy, layers, tokens)
    # A layer that is skipped for the number of tokens alone stays chosen, so that
    # `require_fp8` refuses the step: another micro-batch would have FP8.
    chosen = [path for path in layers if path not in not_chosen]
    products = expected_products(model, chosen, tokens, program.gemms, frozen, tensor)
    gemms = without_peeled(program.gemms)
    narrow = [gemm for gemm in gemms if gemm.is_narrow]
    others = [gemm for gemm in gemms if not gemm.is_narrow]
    every = [product for layer in products.values() for product in layer.values()]
    siblings: dict[str, dict[str, dict[str, Product]]] = {}
    for path, layer in products.items():
        # XLA joins matmuls with a common input: layers of one module are taken for
        # these. By sizes alone two queries of a Qwen3 would pass for queries, keys and
        # values.
        siblings.setdefault(path.rpartition(".")[0], {})[path] = layer
    missing: set[Product] = set()
    if len(narrow) != len(every):  # more FP8 matmuls where remat repeats a forward pass
        missing = missing_products(siblings.values(), narrow)

    def compiled_as(product: Product) -> str:
        # Sizes that no matmul has may be those of a part of a joined one: then all are
        # shown.
        like = [gemm for gemm in others if can_be(gemm, product)] or others
        kernels = sorted({f"{gemm.dtype} ({gemm.kernel})" for gemm in like})
        return ", ".join(kernels) or "an unknown kernel"

    def reason(path: str) -> str | None:
        if path in skipped:
            return skipped[path]
        if model.policy.simulate:
            return "FP8 is simulated: precision.simulate=true"
        if gpu is not None and (lack := gpu.lacks(model.policy)):
            return lack
        lost = [(name, p) for name, p in products[path].items() if p in missing]
        if not lost:
            return None
        listed = "; ".join(
            f"{name} ({small} x {large} over {contracted}) is compiled as"
            f" {compiled_as((small, large, contracted))}"
            for name, (small, large, contracted) in lost
        )
        return f"{listed}; {len(narrow)} of {len(every)} FP8 products are FP8"

    reasons = [(path, reason(path)) for path in layers]
    return [
        Layer(path, why, path in products) for path, why in reasons if why is not None
    ]


def check_device(device: jax.Device, policy: Policy) -> None:
    """Raise UserError for a device without the precision's FP8 matmuls, before anything
    is compiled for it.
    """
    # A device without CUDA has less than any method needs.
    gpu = Gpu.from_device(device) or Gpu(device.device_kind, (0, 0))
    if lack := gpu.lacks(policy):
        raise UserError(
            f"precision.require_fp8=true, but {lack}; set precision.require_fp8=false"
            " to train with the same numbers, slower"
        )


def check_attention_device(
    device: jax.Device, policy: Policy, *, is_described: bool = False
) -> None:
    """Raise UserError for a GPU on which the precision's attention does not run.

    Args:
      device: the device; other platforms than GPUs simulate FP8 attention.
      policy: the precision.
      is_described: whether the device is only described, so that nothing runs on it and
        cuDNN need not be installed.
    """
    gpu = Gpu.from_device(device)
    if gpu is None or not policy.has_fp8_attention:
        return
    # In this order: each check is for what is harder to change than the next.
    lack = gpu.lacks_attention() or cudnn_fp8_attention.wrong_jax()
    if not is_described:
        lack = lack or cudnn_fp8_attention.wrong_cudnn(gpu.capability[0])
    if lack:
        raise UserError(
            f"precision.attention={policy.attention}: {lack}; set"
            " precision.attention=null, the default"
        )


class StepReport(NamedTuple):
    """The FP8 share of the FLOPs of matmuls and attentions, and messages about it."""

    share: float
    lines: list[str]


def check_step(
    model: Model,
    program: Program,
    tokens: int,
    gpu: Gpu,
    *,
    require: bool | None,
    frozen: Collection[str] = (),
    tensor: int = 1,
) -> StepReport:
    """Check a step that was compiled for a GPU.

    Args:
      model: in its precision.
      program: the compiled train step.
      tokens: of one device's micro-batch.
      gpu: the GPU.
      require: whether all chosen layers must be FP8; None: on GPUs that `is_for_fp8`.
      frozen, tensor: as in `not_fp8`.

    Raises:
      UserError: a chosen layer is not FP8 and must be. It names the matmul.
    """
    layers = not_fp8(model, program, tokens, gpu, frozen, tensor)
    share = fp8_share(program)
    wide = [call for call in program.attentions if not call.is_narrow]
    # Attention may be compiled without a fused call: then there is none to look at.
    lost = model.policy.has_fp8_attention and (wide or not program.attentions)
    # Layers that nobody chose are not FP8 by intent.
    broken = [
        layer for layer in layers if layer.is_chosen and not model.policy.simulate
    ]
    if require is None:
        require = gpu.is_for_fp8
    if broken and require:
        more = f" (and {len(broken) - 1} more layers)" if len(broken) > 1 else ""
        raise UserError(
            f"compiled for {gpu.kind}, {broken[0].path} is not FP8:"
            f" {broken[0].reason}{more}; precision.exclude=[...] leaves layers in the"
            " compute dtype, precision.require_fp8=false trains as it is compiled"
        )
    if lost and require:
        dtypes = sorted({call.dtype for call in wide}) or ["matmuls and a softmax"]
        raise UserError(
            f"compiled for {gpu.kind}, attention is not FP8 but {', '.join(dtypes)};"
            " leave precision.attention out, or set precision.require_fp8=false to"
            " train as it is compiled"
        )
    narrow = sum(gemm.times for gemm in program.gemms if gemm.is_narrow)
    attentions = sum(call.times for call in program.attentions if call.is_narrow)
    fp8_attentions = f" and {attentions} FP8 attentions" if attentions else ""
    kind = model.policy.method.kernels
    line = (
        f"compiled step: {narrow} {kind} products{fp8_attentions}, {share:.1%} of the"
        " FLOPs of matrix products and attentions"
    )
    lines = [line, *(f"not FP8: {layer.path}: {layer.reason}" for layer in broken)]
    if narrow and model.spec.d_model < PAYS_FROM_WIDTH:
        lines.append(
            f"{kind} is not expected to be faster than bf16 at"
            f" model.d_model={model.spec.d_model}: it pays from {PAYS_FROM_WIDTH} on"
            " (an estimate for an H100, docs/results.md)"
        )
    return StepReport(share, lines)
