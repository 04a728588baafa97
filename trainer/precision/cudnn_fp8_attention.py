"""cuDNN's FP8 attention, forward and backward: the one file that calls it.

JAX has it in a private module, for E4M3 operands without bias, window, dropout or
segments. A training step needs heads of 128 channels, sequences of a multiple of 128,
and compute capability 9.0 or 10. Every function binds one call.

Shape legend: B batch, T query positions, S key positions, H query heads, G heads of
keys and values, K head dim.

References:
    https://github.com/NVIDIA/cudnn-frontend, include/cudnn_frontend/node/sdpa_fp8.h and
    sdpa_fp8_bwd.h: the operations of both calls, and where they round.
    https://github.com/openxla/xla, xla/stream_executor/cuda/cuda_dnn.cc: the order of
    their operands.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

JAX_VERSION = "0.11.2"  # whose private module this file was written for
HEAD_WIDTH = 128
LENGTH_MULTIPLE = 128  # of queries and of keys
CAPABILITIES = (9, 10)  # major compute capabilities: Hopper, and Blackwell's servers
# By major compute capability: 9.10.0 has errors in the backward pass, and Blackwell has
# it from 9.19 on.
LEAST_CUDNN = {9: 91002, 10: 91900}


def wrong_jax() -> str:
    """Return a sentence if another JAX is installed than this file fits; else empty."""
    if jax.__version__ == JAX_VERSION:
        return ""
    return (
        f"FP8 attention is private in JAX, and written for jax {JAX_VERSION}; jax"
        f" {jax.__version__} is installed"
    )


def wrong_cudnn(major: int) -> str:
    """Return a sentence if the installed cuDNN lacks FP8 attention on a GPU of this
    major compute capability; else empty.
    """
    # None where JAX's CUDA plugin is not installed.
    from jax._src.lib import cuda_versions

    if cuda_versions is None:
        return "cuDNN is not installed"
    version = cuda_versions.cudnn_get_version()
    least = LEAST_CUDNN[major]
    if version < least:
        return f"cuDNN {version} is installed; FP8 attention here needs {least}"
    return ""


class Gradients(NamedTuple):
    """The results of the backward pass.

    Attributes:
        dq, dk, dv: E4M3, in the shapes of q, k and v.
        amax: FP32 [3], the largest magnitudes of the three before their scales.
    """

    dq: jax.Array
    dk: jax.Array
    dv: jax.Array
    amax: jax.Array


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    units: tuple[jax.Array, jax.Array],
    p_scale: float,
    causal: bool,
    logit_scale: float,
    is_training: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Return attention's output in the unit of `v`, and the logarithms of its sums.

    Args:
        q: E4M3 [B, T, H, K].
        k: E4M3 [B, S, G, K].
        v: E4M3 [B, S, G, K]; its unit is that of the output, and does not matter.
        units: the factors of `q` and `k`, FP32.
        p_scale: the factor of the probabilities before they are rounded.
        causal: whether query t sees the keys s <= t.
        logit_scale: the factor of the logits.
        is_training: whether the logarithms are returned, FP32 [B, H, T].
    """
    library = _library()
    # q, k, v; descales of the three and of the probabilities; scales of these and out
    scalars = (*units, 1.0, 1 / p_scale, p_scale, 1.0)
    out, _, _, *log_norm = library._dot_product_attention_fp8_fwd_p_wrapper.bind(
        q,
        k,
        v,
        *map(_scalar, scalars),
        scale=logit_scale,
        use_causal_mask=causal,
        layout=library.AttentionLayout.BTNH.value,
        is_training=is_training,
    )
    return out, log_norm[0] if log_norm else None


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    gradient: jax.Array,
    log_norm: jax.Array,
    *,
    units: tuple[jax.Array, jax.Array],
    p_scale: float,
    ds_scale: jax.Array,
    scales: jax.Array,
    causal: bool,
    logit_scale: float,
) -> Gradients:
    """Return the gradients of q, k and v.

    All are in the unit of `gradient`; those of q and k also in that of `v`.

    Args:
        q: as in `forward`.
        k: as in `forward`.
        v: as in `forward`.
        out: E4M3 [B, T, H, K], of `forward`.
        gradient: of `out`, E4M3; its unit does not matter.
        log_norm: FP32 [B, H, T], of `forward`.
        units: as in `forward`.
        p_scale: as in `forward`.
        ds_scale: the factor of the logits' gradients before they are rounded.
        scales: FP32 [3], the factors of the results before they are rounded.
        causal: as in `forward`.
        logit_scale: as in `forward`.
    """
    library = _library()
    # In the order in which XLA numbers them: see its
    # GetCudnnFlashAttentionBackwardF8OperationGraph. XLA binds operands by number.
    # JAX's primitive passes them on in order, so its names are wrong from the fourth
    # on. With the scalars in JAX's order cuDNN took descale_s for descale_dO and
    # scale_dQ for scale_dP, and an H200 gave wrong gradients. The keys here are cuDNN's
    # names: S are the probabilities, dP the gradients of the logits.
    scalars = {
        "descale_q": units[0],
        "descale_k": units[1],
        "descale_v": 1.0,
        "descale_s": 1 / p_scale,
        "descale_o": 1.0,
        "descale_dO": 1.0,
        "descale_dP": 1 / ds_scale,
        "scale_s": p_scale,
        "scale_dP": ds_scale,
        "scale_dQ": scales[0],
        "scale_dK": scales[1],
        "scale_dV": scales[2],
    }
    dq, dk, dv, *amax = library._dot_product_attention_fp8_bwd_p_wrapper.bind(
        q,
        k,
        v,
        out,
        gradient,
        log_norm,
        *map(_scalar, scalars.values()),
        scale=logit_scale,
        use_causal_mask=causal,
        layout=library.AttentionLayout.BTNH.value,
    )
    # The fourth is that of the logits' gradients, whose bound needs no measurement.
    return Gradients(dq, dk, dv, jnp.stack([x.reshape(()) for x in amax[:3]]))


def _library() -> Any:
    """Return JAX's private module; RuntimeError: another version than the one that this
    file was written for.
    """
    # Operands are bound by position: another version's kernel could take one for
    # another, in silence.
    if reason := wrong_jax():
        raise RuntimeError(reason)
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def _scalar(x: Any) -> jax.Array:
    # cuDNN's descriptions have tensors of four axes: JAX declares scalars so, too.
    return jnp.full((1, 1, 1, 1), x, jnp.float32)
