"""Attention with larger values, a stress for narrow formats; off by default.

Legend: N tokens, D model, E = 2 D, F columns, H heads, K head dim.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from trainer.models.gpt2.block import Attention
from trainer.models.gpt2.spec import GPT2Spec
from trainer.models.layers import DotGeneral, Factory, Linear, dense


class LastColumns(nnx.Module):
    """A layer made of the last columns of a `Linear`.

    It shares their parameters, and multiplies them by `gain`.
    """

    probes: ClassVar[tuple[str, ...]] = ("in", "out")

    def __init__(
        self, linear: Linear, columns: int, gain: float, dot_general: DotGeneral
    ) -> None:
        # The same variables: NNX keeps a shared one once, so the model has no parameter
        # more.
        self.kernel, self.bias = linear.kernel, linear.bias
        self.dtype = linear.dtype
        self.columns = columns
        self.gain = gain
        self.dot_general = dot_general

    def __call__(self, x_NxD: jax.Array) -> jax.Array:
        """Return `[N, columns]`."""
        assert self.bias is not None
        # A power of two: the product's roundings are those without a gain, as long as
        # nothing saturates or underflows.
        kernel_DxF = self.kernel[:, -self.columns :] * self.gain
        bias_F = self.bias[-self.columns :] * self.gain
        return dense(x_NxD, kernel_DxF, bias_F, self.dot_general, self.dtype)


class ValueGainAttention(Attention):
    """`Attention` with larger values and a smaller output kernel, by `value_gain`.

    The values have a matmul of their own, `c_value`, on the last third of the
    parameters of `c_attn`. In one matmul with queries and keys they would share the
    scales of its gradient and of its FP8 kernel.
    """

    def __init__(self, spec: GPT2Spec, layers: Factory) -> None:
        assert spec.value_gain is not None
        super().__init__(spec, layers)
        self.value_gain = spec.value_gain
        self.c_value = LastColumns(
            self.c_attn,
            spec.d_model,
            spec.value_gain,
            layers.dot_general_of("attn.c_value"),
        )

    def qkv(self, x_NxD: jax.Array) -> list[jax.Array]:
        """Return queries, keys and values, `[N, H*K]` each."""
        q_and_k_NxE = self.rescale_gradient(
            self.c_attn(x_NxD, columns=2 * x_NxD.shape[1])
        )
        return [
            *jnp.split(q_and_k_NxE, 2, axis=1),
            self.rescale_gradient(self.c_value(x_NxD)),
        ]

    def project(self, out_NxD: jax.Array) -> jax.Array:
        """Apply the output projection."""
        return self.c_proj(out_NxD, factor=1 / self.value_gain)
