"""Functions of transformers with hand-written gradients, made with `composite` so that
`scalify` has rules for them.
"""

from scalify_core.ops.functional.activations import gelu, swiglu
from scalify_core.ops.functional.attention import attention
from scalify_core.ops.functional.embedding import embedding, materialized, rope
from scalify_core.ops.functional.losses import cross_entropy, linear_cross_entropy
from scalify_core.ops.functional.norms import layer_norm, rms_norm

__all__ = [
    "attention",
    "cross_entropy",
    "embedding",
    "gelu",
    "layer_norm",
    "linear_cross_entropy",
    "materialized",
    "rms_norm",
    "rope",
    "swiglu",
]
