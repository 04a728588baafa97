"""The scaling methods of `precision.scaling`, which keep narrow numbers in range: one
entry each.

A new method is a subclass of `Method` that overrides what differs, and an entry of
METHODS. Configuration, training, evaluation, numerics, watchdog and report ask the
entry; none compares names. JAX is imported only where an entry computes.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from trainer.errors import UserError

if TYPE_CHECKING:
    from scalify_core.numerics.formats import FloatFormat
    from trainer.precision.blocks import Recipe
    from trainer.precision.dots import Dot
    from trainer.precision.fields import PrecisionFields
    from trainer.precision.gradients import LossFn, LossGradient


def formats_of(policy: "PrecisionFields") -> tuple["FloatFormat", "FloatFormat"]:
    """Return the formats `forward` and `backward` of chosen matmuls."""
    from scalify_core.numerics.formats import FloatFormat

    assert policy.forward is not None
    assert policy.backward is not None
    return FloatFormat.parse(policy.forward), FloatFormat.parse(policy.backward)


class Method:
    """No scaling. The other methods override what differs.

    Attributes:
      name: its value of `precision.scaling`.
      scaled: whether parameters, and what is computed from them, are scaled arrays.
      measures_scales: whether its FP8 products measure the scales of their operands.
      has_blocks: whether an operand has several scales, for its rows or blocks.
      any_rows: whether its FP8 products take any number of rows.
      multiple: the widths and rows that its FP8 products take are multiples of it.
      format_pairs: the pairs of `forward` and `backward` that its FP8 products take;
        empty: its products are always simulated.
      kernels: the kind of its FP8 products, in messages.
      capability: the least CUDA compute capability of GPUs that have them.
      has_history: whether the scales come from a state that only training writes.
      scales_gradients: whether the gradients that its FP8 products cast have a scale
        that fits any format.
      rounds_weight_gradients: whether its FP8 products round the weights' gradients to
        `compute`, whatever stores them.
      settings: the keys of `precision` that it alone uses.
      loss_scale_skips: number of skipped steps in a row that finding the initial loss
        scale may take.
    """

    name: ClassVar[str] = "none"
    scaled: ClassVar[bool] = False
    measures_scales: ClassVar[bool] = False
    has_blocks: ClassVar[bool] = False
    any_rows: ClassVar[bool] = False
    # As `scalify_core.ops.matmul.MULTIPLE`, whose module imports JAX.
    multiple: ClassVar[int] = 16
    format_pairs: ClassVar[tuple[tuple[str, str], ...]] = (("e4m3", "e5m2"),)
    kernels: ClassVar[str] = "FP8"
    capability: ClassVar[tuple[int, int]] = (8, 9)  # Ada
    has_history: ClassVar[bool] = False
    scales_gradients: ClassVar[bool] = False
    rounds_weight_gradients: ClassVar[bool] = False
    settings: ClassVar[tuple[str, ...]] = ()
    loss_scale_skips: ClassVar[int] = 0

    def check(self, policy: "PrecisionFields") -> None:
        """Raise UserError for fields that do not fit the method."""
        if self.measures_scales and not policy.in_fp8:
            raise UserError(
                f"precision.scaling={self.name} scales FP8 matmuls; set"
                " precision.forward and .backward"
            )

    def gradient_formats(
        self, policy: "PrecisionFields"
    ) -> tuple[tuple[str, ...], str]:
        """Return the possible formats of `weight_grad`, and why there are no others.

        The format closest to `compute` comes first.
        """
        # JAX gives gradients the dtype of the parameters.
        if policy.weights == "bf16":
            return ("bf16",), "precision.weights=bf16 have gradients of their own dtype"
        if policy.forward is None:
            why = f"no matmul is narrower than precision.compute={policy.compute}"
            return tuple(dict.fromkeys(("fp32", policy.compute))), why
        # BF16 has FP32's range, so a gradient without a scale keeps its small numbers
        # there.
        why = (
            "without precision.scaling=propagate gradients have no scale, and formats"
            " of less range would lose small ones"
        )
        return ("fp32", "bf16"), why

    def unused(self) -> dict[str, str]:
        """Return the keys that only other methods use, with the reason why they change
        nothing.
        """
        why: dict[str, str] = {}
        # The message names the first method of METHODS with the key: `propagate` comes
        # before `propagate_mx`, which inherits its keys.
        for method in METHODS.values():
            for key in method.settings:
                if key not in self.settings:
                    reason = f"precision.scaling={self.name}, not {method.name}"
                    why.setdefault(key, reason)
        return why

    def dot(self, path: str, policy: "PrecisionFields", **settings: Any) -> "Dot":
        """Return the `dot_general` of the chosen linear layer at `path`.

        It multiplies in FP8, or with `policy.simulate` rounded operands in FP32. The
        settings are those of `scalify_core.ops.matmul.Fp8DotGeneral`, among them
        `gradient`, the format of the gradient of its output.
        """
        from scalify_core.ops.matmul import Fp8DotGeneral
        from trainer.precision.dots import SimulatedDot

        # `Fp8DotGeneral` has E4M3 and E5M2 alone, in real FP8 dtypes.
        if policy.simulate:
            forward, _ = formats_of(policy)
            return SimulatedDot(forward, settings["gradient"])
        return Fp8DotGeneral(path, **settings)

    def differentiate(
        self,
        loss_fn: "LossFn",
        policy: "PrecisionFields",
        init_histories: Callable[[], Any],
    ) -> "LossGradient":
        """Return the gradient of a loss, with the state that it carries from step to
        step.

        Args:
          loss_fn: (parameters, tokens, segments, keys) to nats.
          policy: the precision.
          init_histories: makes the amax histories of the model's products.
        """
        import jax

        from trainer.precision.gradients import stateless

        return stateless(jax.value_and_grad(loss_fn))

    def transform(
        self, fun: Callable[..., Any], policy: "PrecisionFields"
    ) -> Callable[..., Any]:
        """Return `fun(parameters, ...)` computed in the precision; its result has the
        method's own form.
        """
        return fun

    def loss_arguments(self, state: Any) -> dict[str, Any]:
        """Return the keyword arguments of the loss, from the method's state."""
        return {}

    def loss_scale(self, state: Any) -> Any:
        """Return the FP32 scalar that multiplies the loss before it is
        differentiated.
        """
        return np.float32(1)

    def unscale(self, grads: Any, state: Any) -> Any:
        """Return the gradients of the loss, from those of the scaled loss."""
        return grads


class Propagated(Method):
    """Scale propagation: `scalify` of the function that the other methods
    differentiate.
    """

    name = "propagate"
    scaled = True
    scales_gradients = True
    settings = ("rescale_grads", "rescale_every")

    def check(self, policy: "PrecisionFields") -> None:
        """Raise UserError for FP16 weights that are computed in BF16."""
        # The data of FP16 weights would be rounded to BF16's 8 significant bits at each
        # use.
        if policy.compute == "bf16" and policy.weights == "fp16":
            raise UserError(
                "precision.compute=bf16 with precision.weights=fp16: choose fp16 for"
                " both, or bf16 for both"
            )

    def gradient_formats(
        self, policy: "PrecisionFields"
    ) -> tuple[tuple[str, ...], str]:
        """Return the compute dtype, and all other narrow formats if matmuls are
        narrower.
        """
        why = f"gradients are propagated in precision.compute={policy.compute}"
        if policy.forward is None:
            return (policy.compute,), f"{why}, and no matmul is narrower"
        formats = (policy.compute, "bf16", "fp16", "e4m3", "e5m2")
        return tuple(dict.fromkeys(formats)), why

    def differentiate(
        self,
        loss_fn: "LossFn",
        policy: "PrecisionFields",
        init_histories: Callable[[], Any],
    ) -> "LossGradient":
        """Return the scale-propagated loss and gradient; there is no state."""
        from trainer.precision.gradients import propagated

        return propagated(loss_fn, policy)

    def transform(
        self, fun: Callable[..., Any], policy: "PrecisionFields"
    ) -> Callable[..., Any]:
        """Return `fun` on scaled arrays whose data is in the compute dtype."""
        from trainer.precision.gradients import scalified

        return scalified(fun, policy)


class LossScaled(Method):
    """Dynamic loss scaling: every step that is not finite halves the loss scale."""

    name = "loss_scale"
    loss_scale_skips = 15  # halvings from the first loss scale, 2^15, to the least, 1

    def differentiate(
        self,
        loss_fn: "LossFn",
        policy: "PrecisionFields",
        init_histories: Callable[[], Any],
    ) -> "LossGradient":
        """Return the gradient of the scaled loss, divided by the loss scale; the state
        is a `LossScale`.
        """
        from trainer.precision.gradients import (
            LossGradient,
            first_loss_scale,
            loss_scaled,
            next_loss_scale,
        )

        return LossGradient(first_loss_scale, loss_scaled(loss_fn), next_loss_scale)

    def loss_scale(self, state: Any) -> Any:
        """Return the value of a `LossScale`."""
        return state.value

    def unscale(self, grads: Any, state: Any) -> Any:
        """Return the gradients in FP32, divided by the loss scale."""
        from trainer.precision.gradients import unscale

        return unscale(grads, state.value)


class Delayed(Method):
    """Delayed scaling with amax histories: Flax's own FP8 products."""

    name = "delayed"
    measures_scales = True
    # Flax's product does not ask for a number of rows: XLA pads operands where
    # cuBLASLt's kernels need a multiple.
    any_rows = True
    has_history = True
    rounds_weight_gradients = True
    settings = ("amax_history",)

    def dot(self, path: str, policy: "PrecisionFields", **settings: Any) -> "Dot":
        """Return Flax's product, with its histories."""
        from trainer.precision.dots import DelayedFp8Dot
        from trainer.precision.fields import DTYPES

        # The `settings` do not apply: Flax's product casts gradients to E5M2 itself.
        return DelayedFp8Dot(policy.amax_history, DTYPES[policy.compute])

    def differentiate(
        self,
        loss_fn: "LossFn",
        policy: "PrecisionFields",
        init_histories: Callable[[], Any],
    ) -> "LossGradient":
        """Return the gradient of the loss; the state holds the amax histories, whose
        next values are their gradient.
        """
        from trainer.precision.gradients import (
            LossGradient,
            next_histories,
            with_histories,
        )

        return LossGradient(init_histories, with_histories(loss_fn), next_histories)

    def loss_arguments(self, state: Any) -> dict[str, Any]:
        """Return the histories."""
        return {"histories": state}


class Current(Method):
    """Current scaling: the scale of each FP8 operand from its amax."""

    name = "current"
    measures_scales = True
    scales_gradients = True

    def dot(self, path: str, policy: "PrecisionFields", **settings: Any) -> "Dot":
        """Return the FP8 product that measures its operands and its gradient."""
        return super().dot(path, policy, current_scaling=True, **settings)


class Blocks(Method):
    """Block scaling: a scale for each block of an operand; see
    `trainer.precision.blocks`.
    """

    measures_scales = True
    has_blocks = True

    def check(self, policy: "PrecisionFields") -> None:
        """Raise UserError for fields that do not fit the method."""
        # Not the base's check, which refuses simulation: blocks may be simulated.
        if policy.forward is None or not (policy.simulate or self.format_pairs):
            simulate = "" if self.format_pairs else ", precision.simulate=true"
            raise UserError(
                f"precision.scaling={self.name} scales blocks of FP8 matmuls: choose"
                f" its preset, or set precision.forward, precision.backward{simulate}"
            )

    def recipe(self, policy: "PrecisionFields", *, native: bool) -> "Recipe":
        """Return the casts of a layer's operands; `native`: in narrow dtypes."""
        raise NotImplementedError

    def dot(self, path: str, policy: "PrecisionFields", **settings: Any) -> "Dot":
        """Return the product of the recipe: in the method's kernels, or in FP32."""
        from trainer.precision.blocks import BlockScaledDot

        return BlockScaledDot(self.recipe(policy, native=not policy.simulate))


class Mx(Blocks):
    """OCP microscaling: blocks of 32, each on a power of two."""

    name = "mx"
    multiple = 32
    capability = (10, 0)  # Blackwell
    format_pairs = (("e4m3", "e4m3"), ("e4m3", "e5m2"))
    kernels = "MXFP8"

    def recipe(self, policy: "PrecisionFields", *, native: bool) -> "Recipe":
        """Return `blocks.mx_recipe`."""
        from trainer.precision import blocks

        return blocks.mx_recipe(*formats_of(policy), native=native)


class PropagatedMx(Propagated, Mx):
    """Scale propagation, with products of the data in blocks of 32.

    The differentiation is that of Propagated, the products are those of Mx.
    """

    # `Propagated` is the first base, so that its `differentiate`, `transform` and
    # `gradient_formats` count. It has no `dot` and no `recipe`: these are those of Mx.
    name = "propagate_mx"
    scales_gradients = False  # as in Mx, whose presets have E4M3 gradients everywhere

    def check(self, policy: "PrecisionFields") -> None:
        """Raise UserError for fields that do not fit either method."""
        Propagated.check(self, policy)
        Mx.check(self, policy)


class Rowwise(Blocks):
    """A power of two for each row of an operand, along the sum."""

    name = "rowwise"
    # The products are those of FP8 numbers, whose scales are applied to the result:
    # sizes and GPUs are those of FP8, not of blocks.
    format_pairs = (("e4m3", "e4m3"), ("e4m3", "e5m2"))

    def recipe(self, policy: "PrecisionFields", *, native: bool) -> "Recipe":
        """Return `blocks.rowwise_recipe`."""
        from trainer.precision import blocks

        return blocks.rowwise_recipe(*formats_of(policy))


class DeepSeek(Blocks):
    """Blocks of 128, of weights 128 x 128, each on an FP32 scale; simulated."""

    name = "deepseek"
    # cuDNN's block-scaled products take scales in E8M0 or E4M3: blocks on FP32 scales
    # are only simulated.
    format_pairs = ()

    def recipe(self, policy: "PrecisionFields", *, native: bool) -> "Recipe":
        """Return `blocks.deepseek_recipe`."""
        from trainer.precision import blocks

        return blocks.deepseek_recipe(*formats_of(policy))


class Nvfp4(Blocks):
    """Blocks of 16 in four bits, on E4M3 scales.

    With 16 bits forward only the operands of both gradients are in four.
    """

    name = "nvfp4"
    multiple = 32
    # For an older GPU XLA multiplies the widened operands: correct, but no faster than
    # BF16.
    capability = (10, 0)  # Blackwell
    # The second is the wide forward pass, with which NVIDIA's recipe ends a training.
    format_pairs = (("e2m1", "e2m1"), ("bf16", "e2m1"))
    kernels = "NVFP4"
    settings = ("four_over_six",)

    def check(self, policy: "PrecisionFields") -> None:
        """Raise UserError for fields that do not fit, other formats among them."""
        # First, because the check below would name formats to somebody who chose none.
        super().check(policy)
        if (policy.forward, policy.backward) not in self.format_pairs:
            forward, backward = self.format_pairs[0]
            raise UserError(
                f"precision.scaling={self.name} rounds to {backward}, not"
                f" {policy.forward} and {policy.backward}; set"
                f" precision.forward={forward} precision.backward={backward}"
            )

    def recipe(self, policy: "PrecisionFields", *, native: bool) -> "Recipe":
        """Return `blocks.nvfp4_recipe`."""
        from trainer.precision import blocks

        forward, _ = formats_of(policy)
        return blocks.nvfp4_recipe(
            four_over_six=bool(policy.four_over_six),
            native=native,
            forward_dtype=forward.dtype,  # None: four bits
        )


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(),
        Propagated(),
        LossScaled(),
        Delayed(),
        Current(),
        Mx(),
        PropagatedMx(),
        Rowwise(),
        DeepSeek(),
        Nvfp4(),
    )
}
