"""Analytic FLOPs of a training step and the peak rate of devices: the two halves of model FLOPs utilisation (MFU).

    MFU = tokens per second * flops_per_token / (devices * peak_flops)

Model FLOPs are counted, not executed ones: recomputation and vocabulary padding do not raise MFU.
"""

from collections.abc import Iterable

from trainer.models.spec import GPT2Spec, linear_sizes


def forward_flops_per_token(spec: GPT2Spec) -> int:
    """FLOPs of one token's forward pass at the full context T; a multiply-add counts 2.

    Matmuls with weights: 2 L (4 D^2 + m D F) with m = 2 (gelu) or 3 (swiglu); attention's scores and weighted sum:
    4 L T D; tied head: 2 D V without padding. Element-wise work, norms and the embedding's look-up are not counted.

    Causal convention: attention counts all T positions although the mask hides half of them on average, as in PaLM
    (Chowdhery et al. 2022, appendix B) and most published MFUs. It is 13% of the 124M model at T = 1024.
    """
    D, F = spec.d_model, spec.mlp_width
    mlp_matrices = 2 if spec.mlp == "gelu" else 3
    weights = spec.n_layer * (4 * D * D + mlp_matrices * D * F)
    scores = 4 * spec.n_layer * spec.context * D
    return 2 * weights + scores + 2 * D * spec.vocab_size


def flops_per_token(spec: GPT2Spec) -> int:
    """FLOPs of one token's training step: the backward pass costs two forward passes, so 3 of them in all."""
    return 3 * forward_flops_per_token(spec)


def flop_share(spec: GPT2Spec, paths: Iterable[str]) -> float:
    """Of a training step's FLOPs, as `flops_per_token` counts them, the share of these of `spec.linear_sizes`."""
    sizes = linear_sizes(spec)
    weights = sum(inputs * outputs for inputs, outputs in map(sizes.__getitem__, paths))
    return 2 * weights * (spec.n_layer if spec.scan_layers else 1) / forward_flops_per_token(spec)
