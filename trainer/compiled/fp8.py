"""Whether the linear layers that should be multiplied in FP8 are, in a compiled
program; and why each other is not.

A compiler may silently multiply in another dtype than the operands that it was given:
what it made is looked at.
"""

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import jax

from trainer.compiled.hlo import Program, fp8_share
from trainer.compiled.operations import Gemm
from trainer.errors import UserError
from trainer.precision.arrays import skipped_matmuls
from trainer.workload import Model

# rows and columns, the smaller first, as in the transposed product; contracted elements
Product = tuple[int, int, int]
# Of a model whose layers take an H200 as long as in bf16, as `python -m
# scripts.bench.crossover` computes; not yet measured.
PAYS_FROM_WIDTH = 512
PRODUCTS = ("its output", "the gradient of its input", "the gradient of its weight")


class Gpu(NamedTuple):
    """A kind of GPU: `jax.Device.device_kind`, and its CUDA compute capability."""

    kind: str
    capability: tuple[int, int]

    @classmethod
    def of(cls, device: jax.Device) -> "Gpu | None":
        """None for a device that is no NVIDIA GPU."""
        found = re.fullmatch(
            r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", ""))
        )
        return (
            cls(device.device_kind, (int(found[1]), int(found[2]))) if found else None
        )

    @property
    def has_fp8(self) -> bool:
        """Return whether its tensor cores multiply FP8: from Ada on."""
        return self.capability >= (8, 9)

    @property
    def is_for_fp8(self) -> bool:
        """Return whether FP8 is what one has it for: from Hopper on."""
        return self.capability >= (9, 0)


class Layer(NamedTuple):
    """A linear layer that is not FP8, why, and whether the precision wants it so."""

    path: str
    reason: str
    is_chosen: bool


def layer_products(size: tuple[int, int], tokens: int) -> list[Product]:
    """The `PRODUCTS` of a layer of so many inputs and outputs."""
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
    """Return whether a compiled product has the sizes of one that was written.

    Contractions that are cut up are padded, so it may have more contracted elements.
    """
    batch, rows, columns, contracted = gemm.sizes
    same = (min(rows, columns), max(rows, columns)) == product[:2]
    return same and product[2] <= batch * contracted < 2 * product[2]


def missing_products(
    expected: Iterable[Product], gemms: Iterable[Gemm]
) -> set[Product]:
    """Those of the expected products that none of the matrix products is, alone or
    joined with others.
    """
    left = sorted(gemms, key=lambda gemm: gemm.sizes[0] * gemm.sizes[3])
    missing: Counter[Product] = Counter()
    for product in sorted(expected):
        found = next((gemm for gemm in left if can_be(gemm, product)), None)
        if found is None:
            missing[product] += 1
        else:
            left.remove(found)
    for gemm in left:
        missing -= Counter(joined_in(gemm, missing))
    return set(missing)


def joined_in(gemm: Gemm, missing: Counter[Product]) -> tuple[Product, ...]:
    """Those of the missing products that a compiled one may hold side by side: XLA
    joins what has a common operand.

    Queries, keys and values are such, or both branches of a gated MLP; at most three
    products have one input.
    """
    batch, rows, columns, contracted = gemm.sizes
    for common, together in ((rows, columns), (columns, rows)):
        alike = [
            p
            for p in missing
            if common in p[:2] and p[2] <= batch * contracted < 2 * p[2]
        ]
        for count in (2, 3):
            for products in itertools.combinations_with_replacement(
                sorted(alike), count
            ):
                fits = sum(sum(p[:2]) - common for p in products) == together
                if fits and Counter(products) <= missing:
                    return products
    return ()


def products_made(
    size: tuple[int, int], tokens: int, gemms: Sequence[Gemm], *, is_trained: bool
) -> dict[str, Product]:
    """The products of a layer by their names, without those that a step need not make.

    A kernel that is not trained has no gradient; its input has one if something before
    it is trained: then the program has a product of such a size.
    """
    products = dict(zip(PRODUCTS, layer_products(size, tokens), strict=True))
    if not is_trained:
        _, of_input, of_weight = PRODUCTS
        del products[of_weight]
        if not any(can_be(gemm, products[of_input]) for gemm in gemms):
            del products[of_input]
    return products


def not_fp8(
    model: Model,
    program: Program,
    tokens: int,
    gpu: Gpu | None,
    frozen: Collection[str] = (),
) -> list[Layer]:
    """The linear layers of which a product is not FP8 in the program, and why.

    Each of the chosen layers makes the three FP8 products of `PRODUCTS`, or those of
    them that are needed where its kernel is not trained; nothing else makes any, so
    their number says whether one is missing. Products have no names in a compiled
    program: which one is missing is told by the sizes, and all layers that have a
    product of that size are named.

    Args:
      model: in its precision.
      program: the compiled train step.
      tokens: of one device's micro-batch.
      gpu: what it is compiled for; None: something that has FP8.
      frozen: the layers whose kernels are not trained.
    """
    layers, narrow = (
        model.family.linear_sizes(model.spec),
        [gemm for gemm in program.gemms if gemm.dtype == "fp8"],
    )
    left_out = skipped_matmuls(model.policy, layers)  # on purpose or by their widths
    # for the number of tokens, too
    skipped = skipped_matmuls(model.policy, layers, tokens)
    others = [gemm for gemm in program.gemms if gemm.dtype != "fp8"]
    products = {
        path: products_made(size, tokens, program.gemms, is_trained=path not in frozen)
        for path, size in layers.items()
        if path not in left_out
    }
    every = [product for made in products.values() for product in made.values()]
    missing: set[Product] = set()
    if len(narrow) != len(every):  # more, where a forward pass is computed again
        missing = missing_products(every, narrow)

    def compiled_as(product: Product) -> str:
        like = [gemm for gemm in others if can_be(gemm, product)] or others
        return (
            ", ".join(sorted({f"{gemm.dtype} ({gemm.kernel})" for gemm in like}))
            or "nothing that is known"
        )

    def reason(path: str) -> str | None:
        if path in skipped:
            return skipped[path]
        if model.policy.simulate:
            return "FP8 is simulated: precision.simulate=true"
        if gpu is not None and not gpu.has_fp8:
            return f"{gpu.kind} has no FP8 tensor cores"
        lost = [(name, p) for name, p in products[path].items() if p in missing]
        if not lost:
            return None
        listed = "; ".join(
            f"{name} ({small} x {large} over {contracted}) is compiled as"
            f" {compiled_as((small, large, contracted))}"
            for name, (small, large, contracted) in lost
        )
        return f"{listed}; {len(narrow)} of {len(every)} FP8 products are FP8"

    found = [(path, reason(path)) for path in layers]
    return [
        Layer(path, why, path in products) for path, why in found if why is not None
    ]


def check_device(device: jax.Device) -> None:
    """UserError for a device that does not multiply FP8, before anything is compiled
    for it.
    """
    gpu = Gpu.of(device)
    if gpu is None or not gpu.has_fp8:
        raise UserError(
            f"precision.require_fp8=true, but {device.device_kind} has no FP8 tensor"
            " cores; leave it out to train with the same numbers, slower"
        )


class Found(NamedTuple):
    """What a compiled step is: the FP8 share of the FLOPs of matrix products and
    attentions, and the same in words.
    """

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
) -> Found:
    """Read a step that was compiled for a GPU.

    Args:
      model: in its precision.
      program: the compiled train step.
      tokens: of one device's micro-batch.
      gpu: what it is compiled for.
      require: whether all chosen layers must be FP8; None: on GPUs that one has for it.
      frozen: as of `not_fp8`.

    Raises:
      UserError: a chosen layer is not FP8 and must be. It names the product.
    """
    layers, share = not_fp8(model, program, tokens, gpu, frozen), fp8_share(program)
    broken = [
        layer for layer in layers if layer.is_chosen and not model.policy.simulate
    ]
    if broken and (gpu.is_for_fp8 if require is None else require):
        more = f" (and {len(broken) - 1} more layers)" if len(broken) > 1 else ""
        raise UserError(
            f"compiled for {gpu.kind}, {broken[0].path} is not FP8:"
            f" {broken[0].reason}{more}; precision.exclude=[...] leaves layers in the"
            " compute dtype, precision.require_fp8=false trains as it is compiled"
        )
    narrow = sum(gemm.times for gemm in program.gemms if gemm.dtype == "fp8")
    line = (
        f"compiled step: {narrow} FP8 products, {share:.1%} of the FLOPs of matrix"
        " products and attentions"
    )
    lines = [line, *(f"not FP8: {layer.path}: {layer.reason}" for layer in broken)]
    if narrow and model.spec.d_model < PAYS_FROM_WIDTH:
        lines.append(
            "FP8 is not expected to be faster than bf16 at"
            f" model.d_model={model.spec.d_model}: it pays from {PAYS_FROM_WIDTH} on"
            " (an estimate for an H200, docs/results.md)"
        )
    return Found(share, lines)
