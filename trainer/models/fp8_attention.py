"""The models that FP8 attention takes. Nothing here imports JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.models.family import Spec
    from trainer.precision.policy import Policy

# Copies of `precision.cudnn_fp8_attention`, which imports JAX. A test compares both.
HEAD_WIDTH = 128  # the only width of cuDNN's FP8 kernels
LENGTH_MULTIPLE = 128


def check_fp8_attention(spec: Spec, policy: Policy) -> None:
    """Raise UserError for a model whose attention cannot be in FP8 as the precision
    says.
    """
    if policy.attention is None:
        return
    key = f"precision.attention={policy.attention}"
    if spec.head_width is None:
        raise UserError(
            f"{key} is for the models of the configuration, and a model of your own has"
            " its own attention; leave precision.attention out"
        )
    window = spec.attention_window
    # A window that holds all keys is none.
    if window is not None and window < spec.context:
        raise UserError(
            f"{key}: FP8 attention has no sliding window, and this model's is of"
            f" {window} keys; set model.context={window} or less, or leave"
            " precision.attention out"
        )
    if policy.simulate:
        return
    if spec.head_width != HEAD_WIDTH:
        raise UserError(
            f"{key}: heads have {spec.head_width} channels, and cuDNN's FP8 kernels"
            f" take {HEAD_WIDTH}; change model.n_head, or leave precision.attention"
            " out; precision=fp32 precision.simulate=true simulates any width"
        )
    if spec.context % LENGTH_MULTIPLE:
        raise UserError(
            f"{key}: model.context={spec.context} is not a multiple of"
            f" {LENGTH_MULTIPLE}, as cuDNN's FP8 kernels need; change model.context, or"
            " leave precision.attention out"
        )
