"""Scale propagation for JAX programs: narrow floating point without loss scaling or
amax histories.
"""

from scalify_core import optim
from scalify_core.array import tree
from scalify_core.array.scaled_array import ScaledArray, as_scaled_array, asarray
from scalify_core.debug.explain import explain
from scalify_core.debug.explanation import Explanation
from scalify_core.debug.stats import summarize
from scalify_core.debug.testing import check_scalify
from scalify_core.interpreter.registry import composite_rule
from scalify_core.interpreter.transform import scalify
from scalify_core.numerics.formats import FloatFormat
from scalify_core.numerics.precision_warnings import PrecisionWarning
from scalify_core.ops.composite import composite
from scalify_core.ops.functional import (
    attention,
    cross_entropy,
    embedding,
    gelu,
    layer_norm,
    linear_cross_entropy,
    log_softmax,
    materialised,
    relu,
    rms_norm,
    rope,
    silu,
    softmax,
    swiglu,
)
from scalify_core.ops.matmul import Fp8DotGeneral, Scaling, fp8_dot_general
from scalify_core.ops.rescale import (
    cast_on_backward,
    cast_on_forward,
    dynamic_rescale_max,
    dynamic_rescale_max_grad,
    dynamic_rescale_rms,
    dynamic_rescale_rms_grad,
    get_data_scale,
    rebalance,
    rebalance_grad,
    set_scaling,
    stop_scaling,
)
from scalify_core.optim import weights

__all__ = [
    "Explanation",
    "FloatFormat",
    "Fp8DotGeneral",
    "PrecisionWarning",
    "ScaledArray",
    "Scaling",
    "as_scaled_array",
    "asarray",
    "attention",
    "cast_on_backward",
    "cast_on_forward",
    "check_scalify",
    "composite",
    "composite_rule",
    "cross_entropy",
    "dynamic_rescale_max",
    "dynamic_rescale_max_grad",
    "dynamic_rescale_rms",
    "dynamic_rescale_rms_grad",
    "embedding",
    "explain",
    "fp8_dot_general",
    "gelu",
    "get_data_scale",
    "layer_norm",
    "linear_cross_entropy",
    "log_softmax",
    "materialised",
    "optim",
    "rebalance",
    "rebalance_grad",
    "relu",
    "rms_norm",
    "rope",
    "scalify",
    "set_scaling",
    "silu",
    "softmax",
    "stop_scaling",
    "summarize",
    "swiglu",
    "tree",
    "weights",
]
