"""What a precision preset means: orthogonal fields, and which combinations of them
there are.

A preset is nothing but a name for a combination of the fields of `Policy`, which are
the keys of the configuration's group `precision` too. Nothing here imports JAX:
`trainer.precision.arrays` has what a policy does to arrays.
"""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import ml_dtypes
import numpy as np

from trainer.bounds import POWER_OF_TWO, Bound, OneOf, Positive, at_least, check_fields
from trainer.errors import UserError
from trainer.precision.methods import METHODS, Method

Computed = Literal["fp32", "bf16", "fp16"]
Kept = Literal["fp32", "bf16", "fp16", "e4m3", "e5m2"]
DTYPES: dict[str, np.dtype] = {
    "fp32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
}
ALIASES = (*DTYPES, "float32", "bfloat16", "float16")
WIDEST = 256  # groups of channels that are mixed by a matrix
PLACES = ("layer_norm", "qkv")  # where a gradient can be rescaled


def is_format(name: str) -> bool:
    """Return whether `scalify_core.FloatFormat` can be of this name."""
    bits = re.fullmatch(r"e(\d+)m(\d+)[ts]?", name.lower())
    if bits is None:
        return name.lower() in ALIASES
    return 2 <= int(bits[1]) <= 8 and 1 <= int(bits[2]) <= 23


Format = Annotated[
    str,
    Bound(
        is_format,
        "eXmY of 2 to 8 exponent bits and 1 to 23 mantissa bits, such as e4m3, e4m3t or"
        " e4m3s, or fp32, bf16 or fp16",
    ),
]


@dataclass(frozen=True)
class Policy:
    """The precision of a run.

    Attributes:
      compute: activations and all matmuls that are not chosen by `fp8_modules`: fp32,
          bf16 or fp16.
      forward: format of the operands of the chosen matmuls (e4m3; any eXmY when
          simulated); None: `compute`.
      backward: of the gradient of their output.
      backward_e4m3: patterns of those among the chosen matmuls where that is e4m3: a
        digit more and 14 octaves less, where the range that is measured allows it;
        None: nowhere.
      simulate: round FP32 values to `forward` and `backward` instead of multiplying in
        them; to nearest, or where the format's name ends in a t, as in e4m3t, by
        leaving out the digits behind the last place, in an s stochastically.
      fp8_modules: patterns of module paths, such as `h.*` or `h.*.mlp.*`: the chosen
          ones.
      exclude: patterns of those among them that stay in `compute`, such as `h.0.*`.
      scaling: the name of a method that keeps narrow numbers in range, of
          `trainer.precision.methods.METHODS`.
      weights: storage of the master weights: fp32, bf16 or fp16. Scaled arrays where
          the method scales parameters.
      weights_rounding: of their update: nearest, stochastic, or kahan: to nearest, and
        what that loses is kept, in BF16 beside the weights, and part of the next
        update.
      weight_grad: of the weights of the chosen matmuls, on its way to the optimiser:
        fp32, bf16, fp16, e4m3 or e5m2; see `Method.gradient_formats`.
      mu, nu: storage of the first and second moment: fp32, bf16, fp16, e4m3 or e5m2;
          narrow ones are scaled arrays.
      moments_rounding: auto (see `scalify_core.optim`), nearest or stochastic.
      update: what the optimiser computes in: fp32, or propagate, in scaled arrays of
          `compute` data.
      rescale_grads: where scales propagate, the places whose gradient gets the scale of
        its RMS, measured at run time: layer_norm (the input of each) and qkv (queries,
        keys and values of each attention).
      clip_outliers: operands of the chosen matmuls are clipped to so many times their
          RMS before the cast; None: not.
      hadamard: both operands of the chosen matmuls are multiplied by one random
        orthogonal matrix in groups of so many channels of their sum, a power of two,
        before the cast; None: not.
      amax_history: steps that delayed scaling looks back.
    """

    compute: Computed
    forward: Format | None
    backward: Format | None
    backward_e4m3: tuple[str, ...] | None
    simulate: bool
    fp8_modules: tuple[str, ...]
    exclude: tuple[str, ...]
    scaling: Annotated[str, OneOf(METHODS)]
    weights: Computed
    weights_rounding: Literal["nearest", "stochastic", "kahan"]
    weight_grad: Kept
    mu: Kept
    nu: Kept
    moments_rounding: Literal["auto", "nearest", "stochastic"]
    update: Literal["fp32", "propagate"]
    rescale_grads: tuple[str, ...]
    clip_outliers: Annotated[float, at_least(1)] | None
    hadamard: Annotated[int, at_least(2), POWER_OF_TWO] | None
    amax_history: Positive

    def __post_init__(self) -> None:
        """Raise UserError for fields out of their bounds, and for those that contradict
        each other.
        """
        check_fields(self, "precision.")
        for place in self.rescale_grads:
            if place not in PLACES:
                raise UserError(
                    f"precision.rescale_grads: {place!r} is not a place; valid:"
                    f" {', '.join(PLACES)}"
                )
        self._check_products()
        self.method.check(self)
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
        """Raise UserError for formats that no product takes."""
        if (self.forward is None) != (self.backward is None):
            raise UserError(
                f"precision.forward={self.forward}, precision.backward={self.backward}:"
                " give both formats or neither"
            )
        for key, name in (("forward", self.forward), ("backward", self.backward)):
            if (
                name is not None
                and not self.simulate
                and name.lower() not in ("e4m3", "e5m2")
            ):
                raise UserError(
                    f"precision.{key}={name}: matmuls take e4m3 or e5m2; any other"
                    " format needs precision.simulate=true"
                )
        if (
            self.forward is not None
            and not self.simulate
            and (self.forward, self.backward) != ("e4m3", "e5m2")
        ):
            raise UserError(
                f"precision.forward={self.forward}, precision.backward={self.backward}:"
                " the FP8 matmul takes e4m3 forward and e5m2 backward; others need"
                " precision.simulate=true"
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
        if self.backward_e4m3 and (self.backward or "").lower()[-1:] in ("s", "t"):
            raise UserError(
                "precision.backward_e4m3 rounds to nearest, not as"
                f" precision.backward={self.backward} does; leave one of them out"
            )
        if self.hadamard is not None and self.hadamard > WIDEST:
            raise UserError(
                f"precision.hadamard={self.hadamard}: groups are of up to {WIDEST}"
                " channels"
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
        """Return whether scales propagate: parameters, and all that is computed from
        them, are scaled arrays.
        """
        return self.method.scaled

    @property
    def propagated_update(self) -> bool:
        """Return whether the optimiser itself computes in scaled arrays."""
        return self.update == "propagate"

    @property
    def rounding(self) -> Literal["nearest", "stochastic"]:
        """How the weights' update is rounded."""
        return "nearest" if self.weights_rounding == "kahan" else self.weights_rounding

    @property
    def keeps_lost(self) -> bool:
        """Return whether what that loses is kept."""
        return self.weights_rounding == "kahan" and self.weights != "fp32"

    @property
    def in_fp8(self) -> bool:
        """Return whether the chosen matmuls multiply in FP8, not in a simulation of
        it.
        """
        return self.forward is not None and not self.simulate

    @property
    def casts_operands_as_they_are(self) -> bool:
        """Return whether nothing happens to operands of the chosen matmuls before they
        are cast.
        """
        return self.clip_outliers is None and self.hadamard is None

    def backward_of(self, path: str) -> Format | None:
        """The format of the gradient of what the chosen matmul at `path` gives."""
        fine = any(fnmatchcase(path, pattern) for pattern in self.backward_e4m3 or ())
        return "e4m3" if fine else self.backward

    @property
    def weight_gradients(self) -> str:
        """What the weight gradients of the chosen matmuls are, in words; a method may
        round them before that.
        """
        if not self.method.rounds_weight_gradients or self.compute in (
            "fp32",
            self.weight_grad,
        ):
            return self.weight_grad
        return (
            f"rounded to {self.compute} by Flax's product, kept in {self.weight_grad}"
        )

    @property
    def wide_gradients(self) -> str:
        """What the gradients of weights whose matmuls are not narrow are."""
        return self.compute if self.scaled else self.weight_grad

    @property
    def rescaled_places(self) -> tuple[str, ...]:
        """The places whose gradients are rescaled; none where no scales propagate."""
        return self.rescale_grads if self.scaled else ()

    @property
    def logical(self) -> np.dtype:
        """The dtype that the model is written in: under `scalify` every array looks
        like FP32.
        """
        return DTYPES["fp32" if self.scaled else self.compute]


def without_effect(policy: Policy) -> dict[str, str]:
    """Fields of the precision that change nothing, and why not."""
    why: dict[str, str] = {}
    if policy.forward is None:
        why |= dict.fromkeys(
            ("fp8_modules", "exclude"),
            f"no matmul is narrower than precision.compute={policy.compute}",
        )
    if policy.weights == "fp32":
        why["weights_rounding"] = "precision.weights=fp32"
    if policy.mu == policy.nu == "fp32":
        why["moments_rounding"] = "precision.mu=fp32 and precision.nu=fp32"
    return why | policy.method.unused()
