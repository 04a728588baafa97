"""Smooth SwiGLU, against the outliers that SwiGLU makes for narrow formats.

Training aligns the gate and up columns of some channels. Their product is then nearly
the square of one branch: an outlier, which costs all other channels of the tensor
precision, because they share its scale.

Legend: N tokens, D model, F MLP.

Reference: Fishman et al. 2024, arXiv 2409.12517, section 4.
"""

import jax
import jax.numpy as jnp

from scalify_core.numerics.formats import pow2_round
from scalify_core.ops.functional import swiglu
from scalify_core.static import get_data_scale

SIZES = 2.0**-14, 2.0**14  # limits of channel sizes, whose inverses FP16 has too


def smooth_swiglu(
    gate_NxF: jax.Array, linear_NxF: jax.Array, peak: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Return `swiglu` with every channel divided by its size, and the sizes `[F]`.

    The size is the power of two that brings the linear branch's largest magnitude over
    the batch near `peak`, a power of two. The caller multiplies the rows of the next
    kernel by the sizes before it quantizes the kernel. Under `scalify` magnitudes are
    those of the data, so the static scales of matmul and kernel stay right.
    """
    data_NxF, _ = get_data_scale(linear_NxF)
    peak_F = jnp.max(jnp.abs(data_NxF.astype(jnp.float32)), axis=0)
    size_F = jnp.where(peak_F > 0, jnp.clip(pow2_round(peak_F) / peak, *SIZES), 1.0)
    hidden_NxF = swiglu(gate_NxF, linear_NxF)
    hidden_NxF *= (1 / size_F)[None].astype(hidden_NxF.dtype)
    return hidden_NxF, size_F
