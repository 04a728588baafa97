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

DIVISOR_RANGE = 2.0**-14, 2.0**14  # FP16 has these and their inverses


def smooth_swiglu(
    gate_NxF: jax.Array, linear_NxF: jax.Array, target_amax: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Return `swiglu` with each channel divided by a power of two, and the divisors.

    A channel's divisor brings the linear branch's amax over the batch near
    `target_amax`, a power of two. Divisors are `[F]`. The caller multiplies the rows of
    the next kernel by them before it quantizes the kernel.

    Under `scalify` an amax is that of a scaled array's data, without its scale:
    divisors are near 1, and the static scales of hidden channels and kernel stay valid.
    """
    data_NxF, _ = get_data_scale(linear_NxF)
    amax_F = jnp.max(jnp.abs(data_NxF.astype(jnp.float32)), axis=0)
    divisor_F = jnp.clip(pow2_round(amax_F) / target_amax, *DIVISOR_RANGE)
    divisor_F = jnp.where(amax_F > 0, divisor_F, 1.0)
    hidden_NxF = swiglu(gate_NxF, linear_NxF)
    hidden_NxF *= (1 / divisor_F)[None].astype(hidden_NxF.dtype)
    return hidden_NxF, divisor_F
