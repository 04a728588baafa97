"""The precision policy of a run: the fields of a preset, checked against each other.

A preset is a name for a combination of fields. Nothing here imports JAX;
`trainer.precision.arrays` applies a policy to arrays.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import numpy as np

from trainer.bounds import OneOf, check_fields
from trainer.errors import UserError
from trainer.precision.fields import DTYPES, Format, PrecisionFields
from trainer.precision.methods import METHODS, Method


@dataclass(frozen=True)
class Policy(PrecisionFields):
    """A precision whose fields do not contradict each other."""

    scaling: Annotated[str, OneOf(METHODS)]

    def __post_init__(self) -> None:
        """Raise UserError for fields out of bounds, or that contradict each other."""
        # First: the checks below read the fields as if each were in its bounds.
        check_fields(self, "precision.")
        self._check_products()
        self.method.check(self)
        if self.weights == "fp16" and not self.scaled:
            raise UserError(
                "precision.weights=fp16 needs precision.scaling=propagate: FP16 weights"
                " without a scale lose small ones"
            )
        if self.propagated_update and (
            not self.scaled or self.moments_rounding == "stochastic"
        ):
            raise UserError(
                "precision.update=propagate needs precision.scaling=propagate, and"
                " rounds to nearest: set precision.moments_rounding=nearest, or"
                " precision.update=fp32"
            )
        formats, why = self.method.gradient_formats(self)
        if self.weight_grad not in formats:
            raise UserError(
                f"precision.weight_grad={self.weight_grad}, but {why}; set"
                f" precision.weight_grad={' or '.join(formats)}"
            )
        if self.simulate and self.compute != "fp32":
            raise UserError(
                "precision.simulate=true rounds FP32 values; it needs compute=fp32,"
                f" not {self.compute}"
            )

    def _check_products(self) -> None:
        """Raise UserError for formats that no matmul takes."""
        if (self.forward is None) != (self.backward is None):
            raise UserError(
                f"precision.forward={self.forward}, precision.backward={self.backward}:"
                " give both formats or neither"
            )
        # A method without pairs is only simulated: its own `check` asks for
        # precision.simulate.
        formats, valid = (self.forward, self.backward), self.method.format_pairs
        if self.in_fp8 and valid and formats not in valid:
            pairs = (f"{a} forward and {b} backward" for a, b in valid)
            raise UserError(
                f"precision.forward={self.forward}, precision.backward={self.backward}:"
                f" the {self.method.kernels} matmul takes {', or '.join(pairs)}; others"
                " need precision.simulate=true"
            )
        if self.backward_e4m3 and (
            self.forward is None or not self.method.scales_gradients
        ):
            scaled = " or ".join(
                name for name, method in METHODS.items() if method.scales_gradients
            )
            raise UserError(
                "precision.backward_e4m3 needs FP8 matmuls whose gradients have scales"
                " of their own: set precision.forward, precision.backward and"
                f" precision.scaling={scaled}; found {self.forward}, {self.backward}"
                f" and {self.scaling}"
            )
        # The name of a format that truncates ends in t, that of stochastic rounding in
        # s.
        if self.backward_e4m3 and (self.backward or "").lower()[-1:] in ("s", "t"):
            raise UserError(
                "precision.backward_e4m3 rounds to nearest, not as"
                f" precision.backward={self.backward} does; leave one of them out"
            )
        for key in ("clip_outliers", "hadamard"):
            if getattr(self, key) is not None and self.forward is None:
                raise UserError(
                    f"precision.{key}={getattr(self, key):g} acts on what is rounded to"
                    " FP8, and no matmul is; set precision.forward and .backward, or"
                    " leave it out"
                )

    @property
    def method(self) -> Method:
        """The scaling method."""
        return METHODS[self.scaling]

    @property
    def scaled(self) -> bool:
        """Return whether scales propagate.

        Parameters, and what is computed from them, are then scaled arrays.
        """
        return self.method.scaled

    @property
    def propagated_update(self) -> bool:
        """Return whether the optimizer computes in scaled arrays."""
        return self.update == "propagate"

    @property
    def rounding(self) -> Literal["nearest", "stochastic"]:
        """The rounding of the weights' update."""
        if self.weights_rounding == "kahan":
            # Kahan's compensation is the error of a rounding to nearest.
            return "nearest"
        return self.weights_rounding

    @property
    def keeps_kahan_compensation(self) -> bool:
        """Return whether the rounding error of the weights' update is kept (Kahan)."""
        # FP32 weights are not rounded: there is nothing to keep.
        return self.weights_rounding == "kahan" and self.weights != "fp32"

    @property
    def has_wide_forward(self) -> bool:
        """Return whether the chosen matmuls round their operands for gradients alone,
        and multiply them in 16 bits in the forward pass.
        """
        formats = self.forward, self.backward
        # Both conditions: a simulated format of 16 bits in blocks is rounded as any
        # other.
        return self.forward in DTYPES and formats in self.method.format_pairs

    @property
    def prepares_operands(self) -> bool:
        """Return whether operands of the chosen matmuls are clipped or Hadamard
        transformed before they are cast.
        """
        return self.clip_outliers is not None or self.hadamard is not None

    def backward_of(self, path: str) -> Format | None:
        """Return the format of the gradient of the output of the chosen matmul at
        `path`.
        """
        if any(fnmatchcase(path, pattern) for pattern in self.backward_e4m3 or ()):
            return "e4m3"
        return self.backward

    def describe_gradients(self, *, is_narrow: bool) -> str:
        """Return the formats of weights' gradients, in words.

        `is_narrow`: of the chosen matmuls' weights; else of all others.
        """
        # Gradients of scaled arrays have the format of the data, whatever `weight_grad`
        # is.
        if self.scaled and not is_narrow:
            return self.compute
        is_rounded = is_narrow and self.method.rounds_weight_gradients
        if is_rounded and self.compute not in ("fp32", self.weight_grad):
            return (
                f"rounded to {self.compute} by Flax's product, kept in"
                f" {self.weight_grad}"
            )
        return self.weight_grad

    @property
    def rescaled_places(self) -> tuple[str, ...]:
        """The places whose gradients are rescaled; none where no scales propagate."""
        if self.scaled:
            return self.rescale_grads
        return ()

    @property
    def model_dtype(self) -> np.dtype:
        """The dtype in which the model's code computes: under `scalify` every array
        looks like FP32.
        """
        # Traced in FP16, small constants such as an epsilon of 1e-8 would be zero
        # before `scalify` sees them.
        return DTYPES["fp32" if self.scaled else self.compute]


def without_effect(policy: Policy) -> dict[str, str]:
    """Return the fields of the precision that change nothing, with the reason for
    each.
    """
    why: dict[str, str] = {}
    if policy.forward is None:
        why |= dict.fromkeys(
            ("fp8_modules", "exclude", "wide_ends"),
            f"no matmul is narrower than precision.compute={policy.compute}",
        )
    if policy.weights == "fp32":
        why["weights_rounding"] = "precision.weights=fp32"
    if policy.mu == policy.nu == "fp32":
        why["moments_rounding"] = "precision.mu=fp32 and precision.nu=fp32"
    return why | policy.method.unused()
