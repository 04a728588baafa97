"""The gated MLP of all families, and smooth SwiGLU.

Smooth SwiGLU is against the outliers that SwiGLU makes for narrow formats.
Training aligns the gate and up columns of some channels. Their product is then nearly
the square of one branch: an outlier, which costs all other channels of the tensor
precision, because they share its scale.

Legend: N tokens, D model, F MLP.

Reference: Fishman et al. 2024, arXiv 2409.12517, section 4.
"""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from scalify_core.numerics.formats import pow2_round
from scalify_core.ops.functional import swiglu
from scalify_core.static import get_data_scale
from trainer.models.layers import Factory, Linear, Norm, maybe_remat, project_normed

DIVISOR_RANGE = 2.0**-14, 2.0**14  # FP16 has these and their inverses


def smooth_swiglu(
    gate_NxF: jax.Array, linear_NxF: jax.Array, target_amax: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Return `swiglu` with each channel divided by a power of two, and the divisors.

    A channel's divisor brings the linear branch's amax over the batch near
    `target_amax`, a power of two. Divisors are `[F]`. The next kernel's
    rows are multiplied by the divisors, so the layer computes the same function.

    Under `scalify` an amax is that of a scaled array's data, without its scale:
    divisors are near 1, and the static scales of hidden channels and kernel stay valid.
    """
    data_NxF, _ = get_data_scale(linear_NxF)
    amax_F = jnp.max(jnp.abs(data_NxF.astype(jnp.float32)), axis=0)
    # A power of two: dividing by it changes no digit of a normal number, so both
    # factors cancel.
    divisor_F = jnp.clip(pow2_round(amax_F) / target_amax, *DIVISOR_RANGE)
    # A channel of zeros would get the least divisor, and its kernel rows be multiplied
    # by 2^-14.
    divisor_F = jnp.where(amax_F > 0, divisor_F, 1.0)
    hidden_NxF = swiglu(gate_NxF, linear_NxF)
    hidden_NxF *= (1 / divisor_F)[None].astype(hidden_NxF.dtype)
    return hidden_NxF, divisor_F


def align(gate: Linear, linear: Linear, channels: int, gain: float) -> None:
    """Give both layers the same first `channels` columns, as late training does.

    They are the columns of `linear`, `gain` times as large: a stress for narrow
    formats. 0 channels change nothing.
    """
    if channels:
        aligned_DxF = linear.kernel[:, :channels] * gain
        for branch in (gate, linear):
            branch.kernel[...] = branch.kernel[...].at[:, :channels].set(aligned_DxF)


class GatedMLP(nnx.Module):
    """D -> F twice, silu(gate) * linear, F -> D, of the normalized input.

    `mlp=smooth_swiglu` of the spec gives the same function of the same parameters.

    A family overrides:
      names: the names of the gate, linear and output layer.
      bias: whether the layers have biases.
      hidden_amax: `target_amax` of `smooth_swiglu`.
      rebalance_hidden: moves a power of two of hidden channels from data into scale.

    Reference: Shazeer 2020, "GLU variants improve transformer".
    """

    names: ClassVar[tuple[str, str, str]]
    bias: ClassVar[bool]
    hidden_amax: ClassVar[float] = 1.0

    def __init__(self, spec: Any, layers: Factory) -> None:
        self.tensor_axis = layers.tensor_axis
        self.recompute = spec.remat == "elementwise"
        self.smooth = spec.mlp == "smooth_swiglu"
        make = functools.partial(layers.linear, gated=True, bias=self.bias)
        *branches, output = self.names
        for name in branches:
            layer = make(
                f"mlp.{name}", spec.d_model, spec.mlp_width, spec.init_std, "column"
            )
            setattr(self, name, layer)
        # `scaled_rows`, because the kernel is multiplied by the divisors before it is
        # rounded: an all-gather in FP8 would round it twice.
        layer = make(
            f"mlp.{output}",
            spec.mlp_width,
            spec.d_model,
            spec.residual_stddev,
            "row",
            scaled_rows=self.smooth,
        )
        setattr(self, output, layer)
        # After all layers are made: the values of all other parameters are the same
        # without it.
        align(*self.input_layers, spec.align_channels, spec.align_gain)

    def __call__(self, x_NxD: jax.Array, norm: Norm) -> jax.Array:
        branches = project_normed(
            x_NxD, norm, self.branches, self.tensor_axis, self.recompute
        )
        return maybe_remat(self.project_down, self.recompute)(branches)

    @property
    def input_layers(self) -> tuple[Linear, Linear]:
        """The gate and the linear layer."""
        gate, linear, _ = (getattr(self, name) for name in self.names)
        return gate, linear

    def branches(self, x_NxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return gate and linear branch, `[N, F]` each."""
        gate, linear = self.input_layers
        return gate(x_NxD), linear(x_NxD)

    def rebalance_hidden(self, hidden_NxF: jax.Array) -> jax.Array:
        """Return the hidden channels, as their next matmul gets them."""
        return hidden_NxF

    def project_down(self, branches: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Apply SwiGLU and the last matmul."""
        output = getattr(self, self.names[2])
        if not self.smooth:
            return output(self.rebalance_hidden(swiglu(*branches)))
        hidden_NxF, divisor_F = smooth_swiglu(*branches, target_amax=self.hidden_amax)
        return output(self.rebalance_hidden(hidden_NxF), factor=divisor_F[:, None])
