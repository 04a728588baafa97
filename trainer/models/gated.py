"""What SwiGLU does to a narrow format, and what is done against it.

The product of two branches that align has channels that are squares of others: outliers
of a tensor that is quantized as a whole.

Legend: N tokens, D model, F MLP.

Reference: Fishman et al. 2024, arXiv 2409.12517, section 4.
"""

import jax
import jax.numpy as jnp

from scalify_core import get_data_scale, swiglu
from scalify_core.formats import pow2_round

SIZES = 2.0**-14, 2.0**14  # of smoothed channels: powers whose inverses FP16 has too


def smooth_swiglu(
    gate_NxF: jax.Array, linear_NxF: jax.Array, peak: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """`swiglu` with every hidden channel divided by its size before it is rounded, and
    the sizes, `[F]`.

    A channel's size is a power of two: what the linear branch's largest magnitude over
    the batch is divided by to be near `peak`, which is one too. Whoever takes the
    result multiplies the rows of the next kernel by the sizes before that is quantized.
    Under `scalify` magnitudes are those of the data: the scales of product and kernel,
    which are static, are then as right after it as before.
    """
    data_NxF, _ = get_data_scale(linear_NxF)
    peak_F = jnp.max(jnp.abs(data_NxF.astype(jnp.float32)), axis=0)
    size_F = jnp.where(peak_F > 0, jnp.clip(pow2_round(peak_F) / peak, *SIZES), 1.0)
    hidden_NxF = swiglu(gate_NxF, linear_NxF)
    hidden_NxF *= (1 / size_F)[None].astype(hidden_NxF.dtype)
    return hidden_NxF, size_F
