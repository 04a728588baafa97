"""Scale propagation for JAX programs: narrow floating point without loss scaling or amax histories."""

from scalify_core.composite import composite
from scalify_core.functional import (
    attention,
    cross_entropy,
    embedding,
    gelu,
    layer_norm,
    linear_cross_entropy,
    log_softmax,
    relu,
    rms_norm,
    silu,
    softmax,
    swiglu,
)

__all__ = [
    "attention",
    "composite",
    "cross_entropy",
    "embedding",
    "gelu",
    "layer_norm",
    "linear_cross_entropy",
    "log_softmax",
    "relu",
    "rms_norm",
    "silu",
    "softmax",
    "swiglu",
]
