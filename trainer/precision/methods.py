"""The methods that keep narrow numbers in range, `precision.scaling`: an entry each,
which says all that is its own.

A new method is a subclass of `Method`, which overrides what it does otherwise, and its
place in METHODS: configuration, training, evaluation, numerics, watchdog and report ask
the entry, and none of them compares names. A configuration is checked against it
without JAX, which is imported where an entry computes.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from trainer.errors import UserError

if TYPE_CHECKING:
    from scalify_core import FloatFormat
    from trainer.precision.dots import Dot
    from trainer.precision.gradients import Differentiate, LossFn
    from trainer.precision.policy import Policy

# what gradients that have a scale can be kept in
NARROW = ("bf16", "fp16", "e4m3", "e5m2")


class Method:
    """No scaling: numbers are kept as they are. Every other method says where it
    differs.

    Attributes:
      name: what `precision.scaling` calls it.
      scaled: whether parameters, and all that is computed from them, are scaled arrays.
      in_products: whether FP8 products measure the scales of their operands, which the
          tensors do not have themselves.
      any_rows: whether its FP8 products take any number of rows.
      has_history: whether the scales come from a state that only training writes.
      scales_gradients: whether those that its FP8 products cast have a scale that fits
          any format.
      rounds_weight_gradients: whether its FP8 products round the weights' gradients to
          `compute`, whatever keeps them.
      settings: the keys of `precision` that it alone uses.
      calibration: steps in a row that may be skipped until it has found its place,
          beside those that are allowed.
    """

    name: ClassVar[str] = "none"
    scaled: ClassVar[bool] = False
    in_products: ClassVar[bool] = False
    any_rows: ClassVar[bool] = False
    has_history: ClassVar[bool] = False
    scales_gradients: ClassVar[bool] = False
    rounds_weight_gradients: ClassVar[bool] = False
    settings: ClassVar[tuple[str, ...]] = ()
    calibration: ClassVar[int] = 0

    def check(self, policy: "Policy") -> None:
        """Raise UserError for fields that the method cannot go with."""
        if self.in_products and not policy.in_fp8:
            raise UserError(
                f"precision.scaling={self.name} scales FP8 matmuls; set"
                " precision.forward and .backward"
            )
        if policy.weights == "fp16":
            raise UserError(
                "precision.weights=fp16 needs precision.scaling=propagate: FP16 weights"
                " without a scale lose small ones"
            )

    def gradient_formats(self, policy: "Policy") -> tuple[tuple[str, ...], str]:
        """What `weight_grad` can be, the closest to `compute` first, and in words why
        it can be nothing else.
        """
        if policy.weights == "bf16":
            return ("bf16",), "precision.weights=bf16 have gradients of their own dtype"
        if policy.forward is None:
            why = f"no matmul is narrower than precision.compute={policy.compute}"
            return tuple(dict.fromkeys(("fp32", policy.compute))), why
        return (
            ("fp32", "bf16"),
            (
                "without precision.scaling=propagate gradients have no scale, and"
                " formats of less range would lose small ones"
            ),
        )

    def unused(self) -> dict[str, str]:
        """The keys of `precision` that only other methods use, and why they change
        nothing here.
        """
        others = [method for method in METHODS.values() if method is not self]
        return {
            key: f"precision.scaling={self.name}, not {method.name}"
            for method in others
            for key in method.settings
            if key not in self.settings
        }

    def dot(self, path: str, policy: "Policy", **settings: Any) -> "Dot":
        """The FP8 product of the linear layer at `path`; the settings are those of
        `scalify_core.Fp8DotGeneral`.
        """
        from scalify_core import Fp8DotGeneral, Scaling

        return Fp8DotGeneral(path, Scaling(), **settings)

    def simulated(self, forward: "FloatFormat", backward: "FloatFormat") -> "Dot":
        """The FP32 product of a linear layer whose operands are rounded to the
        formats.
        """
        from trainer.precision.dots import SimulatedDot

        return SimulatedDot(forward, backward)

    def differentiate(
        self, loss_fn: "LossFn", policy: "Policy", init_histories: Callable[[], Any]
    ) -> "Differentiate":
        """The gradient of `loss_fn(parameters, tokens, segments, keys)`, and what is
        carried from step to step for it.

        `init_histories` makes the amax histories of the model's products.
        """
        from trainer.precision.gradients import plain

        return plain(loss_fn)

    def through(self, fun: Callable[..., Any], policy: "Policy") -> Callable[..., Any]:
        """`fun(parameters, ...)` as the precision computes it; what it gives has the
        method's own form.
        """
        return fun

    def arguments(self, state: Any) -> dict[str, Any]:
        """The keyword arguments that the loss takes from the state that the method
        carries along.
        """
        return {}

    def factor(self, state: Any) -> Any:
        """The FP32 scalar by which the loss is multiplied before it is
        differentiated.
        """
        return np.float32(1)

    def unscaled(self, grads: Any, state: Any) -> Any:
        """The gradients of the loss, from those of the loss times `factor`."""
        return grads


class Propagated(Method):
    """Scale propagation: `scalify` of the very function that the other methods
    differentiate.
    """

    name = "propagate"
    scaled = True
    scales_gradients = True
    settings = ("rescale_grads", "rescale_every")

    def check(self, policy: "Policy") -> None:
        """Raise UserError for weights that have more digits than what they are computed
        in, or less range.
        """
        if policy.compute == "bf16" and policy.weights == "fp16":
            raise UserError(
                "precision.compute=bf16 with precision.weights=fp16: choose fp16 for"
                " both, or bf16 for both"
            )

    def gradient_formats(self, policy: "Policy") -> tuple[tuple[str, ...], str]:
        """The compute dtype; where matmuls are narrower, all other narrow formats
        too.
        """
        why = f"gradients are propagated in precision.compute={policy.compute}"
        if policy.forward is None:
            return (policy.compute,), f"{why}, and no matmul is narrower"
        return (
            policy.compute,
            *(name for name in NARROW if name != policy.compute),
        ), why

    def differentiate(
        self, loss_fn: "LossFn", policy: "Policy", init_histories: Callable[[], Any]
    ) -> "Differentiate":
        """The scale-propagated loss and gradient; nothing is carried along."""
        from trainer.precision.gradients import plain, propagated, stateless

        return plain(loss_fn)._replace(
            value_and_grad=stateless(propagated(loss_fn, policy))
        )

    def through(self, fun: Callable[..., Any], policy: "Policy") -> Callable[..., Any]:
        """`fun` on scaled arrays whose data is in the compute dtype."""
        from trainer.precision.gradients import scalified

        return scalified(fun, policy)


class LossScaled(Method):
    """A dynamic factor of the loss, halved by every step that is not finite."""

    name = "loss_scale"
    calibration = 15  # halvings from the first factor, 2^15, to the least, 1

    def differentiate(
        self, loss_fn: "LossFn", policy: "Policy", init_histories: Callable[[], Any]
    ) -> "Differentiate":
        """The gradient of the loss times the factor, divided by it; a `LossScale` is
        carried along.
        """
        from trainer.precision.gradients import (
            Differentiate,
            first_loss_scale,
            loss_scaled,
            next_loss_scale,
        )

        return Differentiate(first_loss_scale, loss_scaled(loss_fn), next_loss_scale)

    def factor(self, state: Any) -> Any:
        """The factor of a `LossScale`."""
        return state.value

    def unscaled(self, grads: Any, state: Any) -> Any:
        """The gradients in FP32, divided by the factor."""
        from trainer.precision.gradients import divided

        return divided(grads, state.value)


class Delayed(Method):
    """Scales of FP8 operands from the largest magnitudes of the last steps: Flax's own
    products.
    """

    name = "delayed"
    in_products = True
    any_rows = True
    has_history = True
    rounds_weight_gradients = True
    settings = ("amax_history",)

    def dot(self, path: str, policy: "Policy", **settings: Any) -> "Dot":
        """Flax's product, with its histories."""
        from trainer.precision.dots import DelayedFp8Dot

        return DelayedFp8Dot(policy.amax_history)

    def differentiate(
        self, loss_fn: "LossFn", policy: "Policy", init_histories: Callable[[], Any]
    ) -> "Differentiate":
        """The gradient of the loss, and as that of the histories, which are carried
        along, their next values.
        """
        from trainer.precision.gradients import (
            Differentiate,
            next_histories,
            with_histories,
        )

        return Differentiate(init_histories, with_histories(loss_fn), next_histories)

    def arguments(self, state: Any) -> dict[str, Any]:
        """The histories."""
        return {"histories": state}


class Current(Method):
    """Scales of FP8 operands from the largest magnitude of each tensor as it is."""

    name = "current"
    in_products = True
    scales_gradients = True

    def dot(self, path: str, policy: "Policy", **settings: Any) -> "Dot":
        """The FP8 product whose operands and gradient are measured."""
        from scalify_core import Fp8DotGeneral, Scaling

        return Fp8DotGeneral(path, Scaling("amax", "amax", "amax"), **settings)


class Blocks(Method):
    """A scale for each block of a product's operands, simulated; see
    `trainer.precision.blocks`.
    """

    in_products = True
    # of forward and backward; None: any
    formats: ClassVar[tuple[str, ...] | None] = None

    def check(self, policy: "Policy") -> None:
        """Raise UserError where no product is simulated, or in another format than the
        recipe's.
        """
        if not policy.simulate or policy.forward is None:
            raise UserError(
                f"precision.scaling={self.name} is simulated: choose its preset, or set"
                " precision.simulate=true, precision.forward and precision.backward"
            )
        if (
            self.formats is not None
            and (policy.forward, policy.backward) != self.formats
        ):
            raise UserError(
                f"precision.scaling={self.name} rounds to {self.formats[0]}, not"
                f" {policy.forward} and {policy.backward}; set"
                f" precision.forward={self.formats[0]}"
                f" precision.backward={self.formats[1]}"
            )
        if policy.weights == "fp16":
            raise UserError(
                "precision.weights=fp16 needs precision.scaling=propagate, not"
                f" {self.name}"
            )


class Mx(Blocks):
    """OCP microscaling: blocks of 32, each on a power of two."""

    name = "mx"

    def simulated(self, forward: "FloatFormat", backward: "FloatFormat") -> "Dot":
        """See `blocks.mx_recipe`."""
        from trainer.precision import blocks

        return blocks.BlockScaledDot(blocks.mx_recipe(forward, backward))


class DeepSeek(Blocks):
    """Blocks of 128, of weights 128 x 128, each on an FP32 scale."""

    name = "deepseek"

    def simulated(self, forward: "FloatFormat", backward: "FloatFormat") -> "Dot":
        """See `blocks.deepseek_recipe`."""
        from trainer.precision import blocks

        return blocks.BlockScaledDot(blocks.deepseek_recipe(forward, backward))


class Nvfp4(Blocks):
    """Blocks of 16 in four bits, on E4M3 scales."""

    name = "nvfp4"
    formats = ("e2m1", "e2m1")

    def simulated(self, forward: "FloatFormat", backward: "FloatFormat") -> "Dot":
        """See `blocks.nvfp4_recipe`."""
        from trainer.precision import blocks

        return blocks.BlockScaledDot(blocks.nvfp4_recipe())


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(),
        Propagated(),
        LossScaled(),
        Delayed(),
        Current(),
        Mx(),
        DeepSeek(),
        Nvfp4(),
    )
}
