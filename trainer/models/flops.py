"""Analytic FLOPs of a training step, for model FLOPs utilization (MFU).

    MFU = tokens per second * flops_per_token / (devices * peak_flops)

Model FLOPs are counted, not executed ones: recomputation and vocabulary padding do not
raise MFU. A multiply-add counts 2. Elementwise operations, norms and the embedding
lookup are not counted.

Causal convention: attention counts all T positions although the mask hides half of them
on average, as in PaLM (Chowdhery et al. 2022, appendix B) and most published MFUs. It
is 13% of GPT-2's 124M at T = 1024.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax

from trainer.models.family import Spec
from trainer.models.model_functions import Params
from trainer.models.registry import family_of
from trainer.models.roles import Role


# A trace of the initial parameters takes most of the time of counting FLOPs.
@functools.cache
def abstract_parameters(spec: Spec) -> tuple[Params, Params]:
    """Return the parameters' roles and shapes, without allocating the parameters."""
    model = family_of(spec).build(spec)
    return model.roles, model.shapes


def parameters(spec: Spec) -> tuple[tuple[Role, tuple[int, ...]], ...]:
    """Return role and shape of each parameter."""
    leaves = map(jax.tree.leaves, abstract_parameters(spec))
    return tuple((role, leaf.shape) for role, leaf in zip(*leaves, strict=True))


def linear_sizes(spec: Spec) -> dict[str, tuple[int, int]]:
    """Return input and output width of each linear layer inside the blocks, by path.

    A path is `h.3.mlp.c_fc`, or `h.*.mlp.c_fc` for scanned layers.
    """
    sizes = {
        # From the end: stacked layers have a first axis L.
        role.layer: (shape[-2], shape[-1])
        for role, shape in parameters(spec)
        if role.is_kernel and role.layer is not None
    }
    return family_of(spec).matmul_sizes(spec, sizes)


def linear_flops_per_token(spec: Spec, layers: Iterable[str]) -> int:
    """Return the FLOPs of one token's forward pass through linear layers.

    `layers`: their paths, keys of `linear_sizes`.
    """
    sizes = linear_sizes(spec)
    weights = sum(
        inputs * outputs for inputs, outputs in map(sizes.__getitem__, layers)
    )
    # The path of a scanned layer stands for all layers.
    return 2 * weights * (spec.n_layer if spec.scan_layers else 1)


def attention_flops_per_token(spec: Spec) -> int:
    """Return the FLOPs of one token's attention at the full context T.

    The scores and the weighted sum take 4 L T H K. A window takes the place of T. 0
    where the model has attention of its own.
    """
    if spec.head_width is None:
        return 0
    # A window that exceeds the context hides nothing.
    keys = min(spec.attention_window or spec.context, spec.context)
    return 4 * spec.n_layer * keys * spec.n_head * spec.head_width


def forward_flops_per_token(spec: Spec) -> int:
    """Return the FLOPs of one token's forward pass at the full context.

    They are those of linear layers, attention, and head, tied or not, without padding.
    """
    # Scanned kernels count with their axis L here, so layers need no factor.
    kernels = [shape for role, shape in parameters(spec) if role.is_kernel]
    weights = sum(map(math.prod, kernels)) + spec.d_model * spec.vocab_size
    return 2 * weights + attention_flops_per_token(spec)


def flops_per_token(spec: Spec, frozen: Iterable[str] = ()) -> int:
    """Return the FLOPs of one token's training step, 3 forward passes.

    Linear layers in `frozen` lack the matmul of the kernel's gradient. The
    head always counts. So do gradients of activations, even if no layer before them is
    trained.
    """
    # The backward pass has two matmuls for each of the forward pass.
    return 3 * forward_flops_per_token(spec) - linear_flops_per_token(spec, frozen)


def flop_share(spec: Spec, layers: Iterable[str]) -> float:
    """Return the share of some linear layers in the FLOPs of a step that trains all."""
    return linear_flops_per_token(spec, layers) / forward_flops_per_token(spec)


def param_count(spec: Spec, part: Callable[[Any], Any] = lambda params: params) -> int:
    """Return the number of parameters, or of a part of them, without padding."""
    sizes = jax.tree.map(
        lambda role, x: math.prod(x.shape) - role.padding * x.shape[-1],
        *abstract_parameters(spec),
    )
    return sum(jax.tree.leaves(part(sizes)))
