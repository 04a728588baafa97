"""What SwiGLU does to a narrow format, and what is done against it.

The product of two branches that align has channels that are squares of others: outliers of a tensor that is quantised
as a whole.

Legend: N tokens, D model, F MLP.

Reference: Fishman et al. 2024, arXiv 2409.12517, section 4.
"""

from typing import Any

import jax
import jax.numpy as jnp

from scalify_core import get_data_scale, swiglu
from scalify_core.formats import pow2_round

SIZES = 2.0**-14, 2.0**14  # of smoothed channels: powers whose inverses FP16 has too


def smooth_swiglu(gate_NxF: jax.Array, linear_NxF: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`swiglu` with every hidden channel divided by its size before it is rounded, and the sizes, `[F]`.

    Each channel's power of two is that of the linear branch's largest magnitude over the batch; whoever takes the
    result multiplies the rows of the next kernel by it before that is quantised. Under `scalify` it is that of the
    data: the scales of product and kernel, which are static, are then as right after it as before.
    """
    data_NxF, _ = get_data_scale(linear_NxF)
    peak_F = jnp.max(jnp.abs(data_NxF.astype(jnp.float32)), axis=0)
    size_F = jnp.where(peak_F > 0, jnp.clip(pow2_round(peak_F), *SIZES), 1.0)
    hidden_NxF = swiglu(gate_NxF, linear_NxF)
    hidden_NxF *= (1 / size_F)[None].astype(hidden_NxF.dtype)
    return hidden_NxF, size_F


def align(gate: Any, linear: Any, channels: int, gain: float) -> None:
    """Let the first `channels` of two layers start as training aligns them late: as one column, `gain` times its size.

    Without channels, nothing is changed.
    """
    if channels:
        aligned_DxF = linear.kernel[:, :channels] * gain
        for branch in (gate, linear):
            branch.kernel[...] = branch.kernel[...].at[:, :channels].set(aligned_DxF)
