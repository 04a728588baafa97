"""What a precision preset means: orthogonal fields, and what follows from them for weights, matmuls and gradients.

A preset is nothing but a name for a combination of the fields of `Policy`. Under `scaling=propagate` the loss and its
gradient are scale-propagated: `scalify` is applied to the very function that the other presets differentiate.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from scalify_core import FloatFormat, ScaledArray, optim, weights
from scalify_core.formats import E4M3, FP32
from scalify_core.matmul import MULTIPLE
from trainer.errors import UserError
from trainer.precision.dots import Dot, make_dot

DTYPES: dict[str, DTypeLike] = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
STORED = (*DTYPES, "e4m3", "e5m2")
# The field of each optimiser's state that `mu` and `nu` mean; None: it has no such moment.
MOMENTS: dict[str, tuple[str | None, str | None]] = {
    "adamw": ("mu", "nu"),
    "lion": ("mu", None),
    "sgd": ("trace", None),
    "muon": ("mu", "nu"),
    "adafactor": (None, None),
}
PLACES = ("layer_norm", "qkv")  # where a gradient can be rescaled
ASSUMED_SCALE = 2.0**-6  # of weights that do not exist yet, where a program is compiled without them


@dataclass(frozen=True)
class Policy:
    """The precision of a run.

    Attributes:
      compute: activations and all matmuls that are not chosen by `matmuls`: fp32, bf16 or fp16.
      forward: format of the operands of the chosen matmuls (e4m3; any eXmY when simulated); None: `compute`.
      backward: of the gradient of their output.
      simulate: round FP32 values to `forward` and `backward` instead of multiplying in them.
      matmuls: patterns of module paths, such as `h.*` or `h.*.mlp.*`: the chosen ones.
      keep: patterns of those among them that stay in `compute`, such as `h.0.*`.
      scaling: none; propagate (scalify); loss_scale (dynamic); delayed (amax history) or current (amax of the tensor).
      weights: storage of the master weights: fp32, bf16 or fp16. Scaled arrays under `propagate`.
      weights_rounding: of their update: nearest or stochastic.
      weight_grad: of the weights of the chosen matmuls, on its way to the optimiser: fp32, bf16, fp16, e4m3 or e5m2;
        see `gradient_formats`.
      mu, nu: storage of the first and second moment: fp32, bf16, fp16, e4m3 or e5m2; narrow ones are scaled arrays.
      moments_rounding: auto (see `scalify_core.optim`), nearest or stochastic.
      update: what the optimiser computes in: fp32, or propagate, in scaled arrays of `compute` data.
      rescale_grads: where scales propagate, the places whose gradient gets the scale of its RMS, measured at run time:
        layer_norm (the input of each) and qkv (queries, keys and values of each attention).
      clip_outliers: operands of the chosen matmuls are clipped to so many times their RMS before the cast; None: not.
      amax_history: steps that `delayed` looks back.
    """

    compute: str
    forward: str | None
    backward: str | None
    simulate: bool
    matmuls: tuple[str, ...]
    keep: tuple[str, ...]
    scaling: str
    weights: str
    weights_rounding: optim.Rounding
    weight_grad: str
    mu: str
    nu: str
    moments_rounding: Any
    update: str
    rescale_grads: tuple[str, ...]
    clip_outliers: float | None
    amax_history: int

    def __post_init__(self) -> None:
        """Raise UserError for fields that contradict each other."""
        for place in self.rescale_grads:
            if place not in PLACES:
                raise UserError(f"precision.rescale_grads: {place!r} is not a place; valid: {', '.join(PLACES)}")
        if (self.forward is None) != (self.backward is None):
            raise UserError(
                f"precision.forward={self.forward}, precision.backward={self.backward}: give both formats or neither"
            )
        for key, name in (("forward", self.forward), ("backward", self.backward)):
            fmt = None if name is None else parse_format(f"precision.{key}", name)
            if fmt is not None and not self.simulate and fmt.dtype not in (jnp.float8_e4m3fn, jnp.float8_e5m2):
                raise UserError(
                    f"precision.{key}={name}: matmuls take e4m3 or e5m2; any other format needs precision.simulate=true"
                )
        if self.forward is not None and not self.simulate and (self.forward, self.backward) != ("e4m3", "e5m2"):
            raise UserError(
                f"precision.forward={self.forward}, precision.backward={self.backward}: the FP8 matmul takes e4m3 "
                "forward and e5m2 backward; others need precision.simulate=true"
            )
        if self.clip_outliers is not None and self.forward is None:
            raise UserError(
                f"precision.clip_outliers={self.clip_outliers:g} clips what is rounded to FP8, and no matmul is; set "
                "precision.forward and .backward, or leave it out"
            )
        if self.scaling in ("delayed", "current") and (self.forward is None or self.simulate):
            raise UserError(f"precision.scaling={self.scaling} scales FP8 matmuls; set precision.forward and .backward")
        if self.scaling == "propagate" and self.compute == "bf16" and self.weights == "fp16":
            raise UserError(
                "precision.compute=bf16 with precision.weights=fp16: choose fp16 for both, or bf16 for both"
            )
        if self.scaling != "propagate" and self.weights == "fp16":
            raise UserError(
                "precision.weights=fp16 needs precision.scaling=propagate: FP16 weights without a scale lose small ones"
            )
        if self.update == "propagate" and (not self.scaled or self.moments_rounding == "stochastic"):
            raise UserError(
                "precision.update=propagate needs precision.scaling=propagate, and rounds to nearest: set "
                "precision.moments_rounding=nearest, or precision.update=fp32"
            )
        formats, why = gradient_formats(self)
        if self.weight_grad not in formats:
            raise UserError(
                f"precision.weight_grad={self.weight_grad}, but {why}; set precision.weight_grad={' or '.join(formats)}"
            )
        if self.simulate and self.compute != "fp32":
            raise UserError(f"precision.simulate=true rounds FP32 values; it needs compute=fp32, not {self.compute}")

    @property
    def scaled(self) -> bool:
        """Whether scales propagate."""
        return self.scaling == "propagate"

    @property
    def weight_gradients(self) -> str:
        """What the weight gradients of the chosen matmuls are, in words: `delayed` rounds them before anything else."""
        if self.scaling != "delayed" or self.compute in ("fp32", self.weight_grad):
            return self.weight_grad
        return f"rounded to {self.compute} by Flax's product, kept in {self.weight_grad}"

    @property
    def logical(self) -> DTypeLike:
        """The dtype that the model is written in: under `scalify` every array looks like FP32."""
        return jnp.float32 if self.scaled else DTYPES[self.compute]


def gradient_formats(policy: Policy) -> tuple[tuple[str, ...], str]:
    """What `weight_grad` can be, the closest to `compute` first, and in words why it can be nothing else."""
    compute = policy.compute
    if policy.scaled and policy.forward is not None:
        narrow = tuple(name for name in STORED if name not in ("fp32", compute))
        return (compute, *narrow), f"gradients are propagated in precision.compute={compute}"
    if policy.scaled:
        return (compute,), f"gradients are propagated in precision.compute={compute}, and no matmul is narrower"
    if policy.weights == "bf16":
        return ("bf16",), "precision.weights=bf16 have gradients of their own dtype"
    if policy.forward is None:
        return tuple(dict.fromkeys(("fp32", compute))), f"no matmul is narrower than precision.compute={compute}"
    why = "without precision.scaling=propagate gradients have no scale, and formats of less range would lose small ones"
    return ("fp32", "bf16"), why


def parse_format(key: str, name: str) -> FloatFormat:
    """A format by name: fp32, fp16, bf16, e4m3, e5m2 or any eXmY. UserError names `key`."""
    try:
        return FloatFormat.parse(name)
    except ValueError as error:
        raise UserError(f"{key}={name}: {error}") from None


def skipped_matmuls(policy: Policy, sizes: Mapping[str, tuple[int, int]], rows: int | None = None) -> dict[str, str]:
    """Those of the linear layers that are not narrow, and why not. UserError for a pattern without a match.

    Args:
      policy: the precision.
      sizes: input and output width of each, by path.
      rows: tokens that a device multiplies them by at once; None: some multiple of 16.
    """
    for key, patterns in (("matmuls", policy.matmuls), ("keep", policy.keep)):
        for pattern in patterns:
            if not any(fnmatchcase(path, pattern) for path in sizes):
                raise UserError(
                    f"precision.{key}: no matmul matches {pattern!r}; there are {', '.join(sorted(sizes)[:8])} ..."
                )
    if policy.forward is None:
        return dict.fromkeys(sizes, f"precision.forward=null: all are in {policy.compute}")
    ours = not policy.simulate and policy.scaling != "delayed"  # Flax's product takes any number of rows
    if ours and rows is not None and rows % MULTIPLE:
        return dict.fromkeys(sizes, f"micro-batches of {rows} tokens a device, not a multiple of {MULTIPLE}")

    def reason(path: str, size: tuple[int, int]) -> str | None:
        if not any(fnmatchcase(path, pattern) for pattern in policy.matmuls):
            return "not in precision.matmuls"
        if any(fnmatchcase(path, pattern) for pattern in policy.keep):
            return "in precision.keep"
        if not policy.simulate and any(width % MULTIPLE for width in size):
            return f"{size[0]} x {size[1]} are not multiples of {MULTIPLE}"
        return None

    return {path: why for path, size in sizes.items() if (why := reason(path, size)) is not None}


def without_effect(policy: Policy) -> dict[str, str]:
    """Fields of the precision that change nothing, and why not."""
    why: dict[str, str] = {}
    if policy.forward is None:
        why |= dict.fromkeys(("matmuls", "keep"), f"no matmul is narrower than precision.compute={policy.compute}")
    if policy.weights == "fp32":
        why["weights_rounding"] = "precision.weights=fp32"
    if policy.mu == policy.nu == "fp32":
        why["moments_rounding"] = "precision.mu=fp32 and precision.nu=fp32"
    if policy.scaling != "delayed":
        why["amax_history"] = f"precision.scaling={policy.scaling}, not delayed"
    if not policy.scaled:
        why |= dict.fromkeys(("rescale_grads", "rescale_every"), f"precision.scaling={policy.scaling}, not propagate")
    return why


def dot_general_for(policy: Policy, narrow: Collection[str], *, keep_weights: bool) -> Callable[[str], Dot]:
    """From a linear layer's path to its dot_general; `narrow`: those whose matmuls are."""
    chosen = set(narrow)

    def dot_general(path: str) -> Dot:
        narrow = path in chosen
        return make_dot(
            path,
            forward=FloatFormat.parse(policy.forward) if narrow and policy.forward else None,
            backward=FloatFormat.parse(policy.backward) if narrow and policy.backward else None,
            simulate=policy.simulate,
            scaling=policy.scaling,
            wide_gradient=policy.weight_grad == "fp32",
            clip=policy.clip_outliers,
            history=policy.amax_history,
            keep_weights=keep_weights,
        )

    return dot_general


def store_weights(params: Any, policy: Policy) -> Any:
    """FP32 master weights in the form they are kept in. Not inside jit: scales are read from the device."""
    dtype = DTYPES[policy.weights]
    if policy.scaled:
        return weights.scaled_params(params, dtype)
    return jax.tree.map(lambda p: p.astype(dtype), params)


def in_transit(p: Any, policy: Policy, *, kernel: bool, narrow: bool, factor: bool) -> Any:
    """A parameter as devices send it each other: rounded as the first who uses it would round it.

    Args:
      kernel: whether it is that of a linear layer.
      narrow: whether of one whose matmul is narrow.
      factor: whether its rows are multiplied by what depends on the batch before they are rounded to FP8.
    """
    if policy.scaled:
        p = p.astype(DTYPES[policy.compute])
        in_fp8 = narrow and not factor and not policy.simulate and policy.clip_outliers is None
        return ScaledArray(E4M3.cast(p.data), p.scale) if in_fp8 else p
    # Gains, tables and biases are used in FP32; FP8 kernels get their scale from what the weights are.
    return p.astype(DTYPES[policy.compute]) if kernel and not narrow else p


def abstract_weights(shapes: Any, policy: Policy, scale: float | None = None) -> Any:
    """What `store_weights` makes, as shapes and dtypes; with dynamic scales as in checkpoints, or a static one."""

    def convert(s: jax.ShapeDtypeStruct) -> Any:
        data = jax.ShapeDtypeStruct(s.shape, DTYPES[policy.weights])
        if not policy.scaled:
            return data
        return ScaledArray(data, scale or jax.ShapeDtypeStruct((), np.float32))

    return jax.tree.map(convert, shapes)


def store_moments(
    tx: optax.GradientTransformation, name: str, policy: Policy, seed: Any
) -> optax.GradientTransformationExtraArgs:
    """The optimiser `tx`, called `name`, with its moments stored and its update computed as the policy says.

    `seed`: of the stochastic rounding, an integer or an integer scalar. Raises UserError as `moment_settings` does.
    """
    settings = moment_settings(name, policy)
    if policy.update == "propagate":
        formats = {field: how.format for field, how in settings["fields"].items()}
        return optim.propagated_state(tx, fields=formats, compute=DTYPES[policy.compute])
    return optim.scaled_state(tx, seed=seed, **settings)


def moment_settings(name: str, policy: Policy) -> dict[str, Any]:
    """How `scalify_core.optim` stores the moments of the optimiser `name`. UserError for what it does not have."""
    formats = {key: parse_format(f"precision.{key}", getattr(policy, key)) for key in ("mu", "nu")}
    fields = dict(zip(("mu", "nu"), MOMENTS[name], strict=True))
    for key, fmt in formats.items():
        if fmt is not FP32 and fields[key] is None:
            raise UserError(
                f"precision.{key}={getattr(policy, key)}, but optimizer={name} has no such moment; "
                f"set precision.{key}=fp32, or choose another optimizer"
            )
        if fmt is FP32 and fields[key] is not None and policy.update == "propagate":
            raise UserError(
                f"precision.{key}=fp32, but precision.update=propagate computes in {policy.compute}; "
                f"set precision.{key}={policy.compute} or narrower"
            )
    plain = policy.update == "propagate"
    if name == "adamw" and not plain:
        return formats | {"rounding": policy.moments_rounding}

    def stored(key: str, fmt: FloatFormat) -> optim.Stored:
        rounding: Any = "nearest" if plain else policy.moments_rounding
        if rounding == "auto":
            rounding = "nearest" if key == "mu" and fmt.mantissa_bits >= 10 else "stochastic"
        return optim.Stored(fmt, sqrt=key == "nu" and not plain, rounding=rounding)

    return {"fields": {fields[key]: stored(key, fmt) for key, fmt in formats.items() if fmt is not FP32}}


def convert_moments(state: Any, name: str, source: Policy, policy: Policy, seed: int) -> Any:
    """An optimiser's state stored for one policy as it is stored for another."""
    wide = optim.wide_state(state, **moment_settings(name, source))
    return optim.narrow_state(wide, seed=seed, **moment_settings(name, policy))
