"""Analytic FLOPs of a training step, for model FLOPs utilization (MFU).

    MFU = tokens per second * flops_per_token / (devices * peak_flops)

Model FLOPs are counted, not executed ones: recomputation and vocabulary padding do not
raise MFU. A multiply-add counts 2. Elementwise operations, norms and the embedding
lookup are not counted.

Causal convention: attention counts all T positions although the mask hides half of them
on average, as in PaLM (Chowdhery et al. 2022, appendix B) and most published MFUs. It
is 13% of GPT-2's 124M at T = 1024.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax

from trainer.models.family import Spec
from trainer.models.registry import family_of


def forward_flops_per_token(spec: Spec) -> int:
    """Return the FLOPs of one token's forward pass at the full context."""
    return family_of(spec).forward_flops_per_token(spec)


def linear_flops_per_token(spec: Spec, paths: Iterable[str]) -> int:
    """Return the FLOPs of one token's forward pass through some linear layers."""
    sizes = family_of(spec).linear_sizes(spec)
    weights = sum(inputs * outputs for inputs, outputs in map(sizes.__getitem__, paths))
    return 2 * weights * (spec.n_layer if spec.scan_layers else 1)


def attention_flops_per_token(spec: Spec) -> int:
    """Return the FLOPs of one token's attention at the full context: those of the
    forward pass that neither a linear layer nor the head takes.
    """
    head = 2 * spec.d_model * spec.vocab_size
    linear = linear_flops_per_token(spec, family_of(spec).linear_sizes(spec))
    return forward_flops_per_token(spec) - linear - head


def flops_per_token(spec: Spec, frozen: Iterable[str] = ()) -> int:
    """Return the FLOPs of one token's training step, 3 forward passes.

    A linear layer with a `frozen` kernel lacks the matmul of the kernel's gradient. The
    head always counts. So do gradients of activations, even if no layer before them is
    trained.
    """
    return 3 * forward_flops_per_token(spec) - linear_flops_per_token(spec, frozen)


def flop_share(spec: Spec, paths: Iterable[str]) -> float:
    """Return the share of some linear layers in the FLOPs of a step that trains all."""
    return linear_flops_per_token(spec, paths) / forward_flops_per_token(spec)


def param_count(spec: Spec, part: Callable[[Any], Any] = lambda params: params) -> int:
    """Return the number of parameters, or of a part of them, without padding.

    Nothing is allocated.
    """
    model = family_of(spec).build(spec)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    sizes = jax.tree.map(
        lambda s, role: math.prod(s.shape) - role.padding * s.shape[-1],
        shapes,
        model.roles,
    )
    return sum(jax.tree.leaves(part(sizes)))
