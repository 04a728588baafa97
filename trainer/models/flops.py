"""Analytic FLOPs of a training step, of any family: one half of model FLOPs utilization
(MFU).

    MFU = tokens per second * flops_per_token / (devices * peak_flops)

Model FLOPs are counted, not executed ones: recomputation and vocabulary padding do not
raise MFU. A multiply-add counts
2. Element-wise work, norms and the embedding's look-up are not counted.

Causal convention: attention counts all T positions although the mask hides half of them
on average, as in PaLM (Chowdhery et al. 2022, appendix B) and most published MFUs. It
is 13% of GPT-2's 124M at T = 1024.
"""

from collections.abc import Iterable

from trainer.models.family import Spec


def forward_flops_per_token(spec: Spec) -> int:
    """FLOPs of one token's forward pass at the full context."""
    return spec.family().forward_flops_per_token(spec)


def linear_flops_per_token(spec: Spec, paths: Iterable[str]) -> int:
    """FLOPs of one token's forward pass through these of the linear layers."""
    sizes = spec.family().linear_sizes(spec)
    weights = sum(inputs * outputs for inputs, outputs in map(sizes.__getitem__, paths))
    return 2 * weights * (spec.n_layer if spec.scan_layers else 1)


def flops_per_token(spec: Spec, frozen: Iterable[str] = ()) -> int:
    """FLOPs of one token's training step: the backward pass costs two forward passes,
    so 3 of them in all.

    Linear layers whose kernels are `frozen` have one product less, the gradient of the
    kernel. That of a head is counted all the same, as are the gradients of inputs below
    which nothing is trained.
    """
    return 3 * forward_flops_per_token(spec) - linear_flops_per_token(spec, frozen)


def flop_share(spec: Spec, paths: Iterable[str]) -> float:
    """The share of these of the linear layers in the FLOPs of a step that trains all,
    as `flops_per_token` counts.
    """
    return linear_flops_per_token(spec, paths) / forward_flops_per_token(spec)
