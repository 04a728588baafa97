"""Functions of transformers with hand-written gradients, made with `composite` so that
`scalify` has rules for them.
"""

from scalify_core.functional.activations import gelu, relu, silu, swiglu
from scalify_core.functional.attention import attention
from scalify_core.functional.embedding import embedding
from scalify_core.functional.losses import (
    cross_entropy,
    linear_cross_entropy,
    log_softmax,
    softmax,
)
from scalify_core.functional.norms import layer_norm, rms_norm
from scalify_core.functional.rope import rope
from scalify_core.functional.storage import materialised

__all__ = [
    "attention",
    "cross_entropy",
    "embedding",
    "gelu",
    "layer_norm",
    "linear_cross_entropy",
    "log_softmax",
    "materialised",
    "relu",
    "rms_norm",
    "rope",
    "silu",
    "softmax",
    "swiglu",
]
