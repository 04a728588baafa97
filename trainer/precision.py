"""What a precision preset means as dtypes. Orthogonal fields: a preset is nothing but a name for their combination."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

DTYPES: dict[str, DTypeLike] = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


class Policy(NamedTuple):
    """Dtypes of one run: `compute` for activations and matmuls, `params` for master weights and optimiser state."""

    compute: DTypeLike
    params: DTypeLike


def make_policy(compute: str) -> Policy:
    """The policy of the plain presets: FP32 master weights, gradients and optimiser state."""
    return Policy(compute=DTYPES[compute], params=jnp.float32)
