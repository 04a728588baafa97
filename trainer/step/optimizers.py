"""The optimizers of a configuration: one entry each, with its settings and the fields
of its state.

An entry is a subclass of `Optimizer`, which is also the schema of its configuration.
Nothing here imports JAX until a transformation is made. Clipping and weight decay are
added by `trainer.step.clip_and_decay`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from trainer.bounds import Amount, Bound, ShareBelow1
from trainer.errors import UserError
from trainer.precision.policy import Policy

if TYPE_CHECKING:
    import optax

# Keys of `precision` for the storage of first and second moments.
MOMENT_KEYS: tuple[Literal["mu", "nu"], ...] = ("mu", "nu")

# With eps=0 a weight whose gradients were all zero becomes 0/0. XLA may flush FP32
# values below 2^-126 to 0.
Epsilon = Annotated[
    float, Bound(lambda x: x >= 2**-126, "at least 2^-126, such as 1e-8")
]


class Moment(NamedTuple):
    """An average that an optimizer keeps for the parameters it updates.

    Attributes:
      field: its name in the optimizer's state.
      key: the key of `precision` for its storage: mu for a first moment, nu for a
        second moment, whose square root is stored in a narrow format.
      relative_to: the field of the second moment by whose square root this moment is
        divided in FP8; None: it is not divided.
      required: whether every state has it; False: it is absent if no updated parameter
        needs it, such as Muon's `nu` if only kernels are trained.
    """

    field: str
    key: Literal["mu", "nu"]
    relative_to: str | None = None
    required: bool = True


@dataclass(frozen=True)
class Optimizer:
    """The settings that every optimizer has; base class of the entries.

    Attributes:
      lr: peak of the learning rate.
      weight_decay: decoupled, on matrices only.
      clip_norm: bound on the global norm of the gradients; 0: no bound.
      moments: the averages in its state.
      unquantized: other floating-point fields of its state, which keep the dtype that
        the optimizer gives them.
      elementwise: whether the update of an element depends on no other element, except
        through the global norm. Then small parameters may be updated together.
    """

    name: str
    lr: Amount
    weight_decay: Amount
    clip_norm: Amount
    moments: ClassVar[tuple[Moment, ...]]
    unquantized: ClassVar[tuple[str, ...]] = ()
    elementwise: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Raise TypeError for an entry without `moments` (may be empty) or
        `scale_by`.
        """
        # `vars`, not `getattr`: the moments of a base entry may not be those of this
        # one.
        if "moments" not in vars(cls):
            raise TypeError(
                f"{cls.__name__} does not say its `moments`; () says that its state"
                " keeps none"
            )
        if cls.scale_by is Optimizer.scale_by:
            raise TypeError(
                f"{cls.__name__} has no method `scale_by`, which makes its"
                " transformation"
            )

    def scale_by(self, roles: Any) -> "optax.GradientTransformation":
        """Return the transformation at a learning rate of 1, without clip and decay.

        Its result, times the learning rate, is subtracted from the parameters: what
        optax has negated, as in `optax.adafactor`, is negated once more. `roles` is a
        tree like the parameters.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam with bias correction."""

    b1: ShareBelow1
    b2: ShareBelow1
    eps: Epsilon
    moments = (
        Moment("mu", "mu", relative_to="nu"),
        Moment("nu", "nu"),
    )
    elementwise = True

    def scale_by(self, roles: Any) -> "optax.GradientTransformation":
        """Return `optax.adamw` without the decay."""
        import optax

        # The three numbers alone: clip, decay and learning rate are added for every
        # optimizer, so that their meaning does not depend on optax's defaults.
        return optax.scale_by_adam(self.b1, self.b2, self.eps)


@dataclass(frozen=True)
class Lion(Optimizer):
    """Lion: the sign of an interpolated momentum."""

    b1: ShareBelow1
    b2: ShareBelow1
    moments = (Moment("mu", "mu"),)
    elementwise = True

    def scale_by(self, roles: Any) -> "optax.GradientTransformation":
        """Return `optax.lion` without the decay."""
        import optax

        return optax.scale_by_lion(self.b1, self.b2)


@dataclass(frozen=True)
class Adafactor(Optimizer):
    """Adafactor: factored second moments, which are small in FP32, too."""

    moments = ()
    unquantized = ("v_row", "v_col", "v")

    def scale_by(self, roles: Any) -> "optax.GradientTransformation":
        """Return Adafactor, clipped and scaled per tensor, and per layer where layers
        are stacked.
        """
        import jax
        import optax

        # `optax.adafactor` negates its updates; `scale_by_adam` and the like do not.
        core = optax.chain(optax.adafactor(1.0), optax.scale(-1.0))

        # The factors of a stack [L, n, m] would be those of its two largest axes, and
        # its updates would be clipped by the RMS of all layers.
        def over_layers(fn: Callable[..., Any]) -> Callable[..., Any]:
            def mapped(tree: Any, *args: Any) -> Any:
                # vmap refuses a tree without arrays.
                if not jax.tree.leaves(tree):
                    return fn(tree, *args)
                return jax.vmap(fn)(tree, *args)

            return mapped

        stacked = optax.GradientTransformation(
            over_layers(core.init), over_layers(core.update)
        )
        # The labels True and False are parts of the moments' names in checkpoints.
        return optax.partition(
            {True: stacked, False: core}, jax.tree.map(lambda role: role.stacked, roles)
        )


@dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient descent with momentum."""

    momentum: ShareBelow1
    moments = (Moment("trace", "mu"),)
    elementwise = True

    def scale_by(self, roles: Any) -> "optax.GradientTransformation":
        """Return heavy-ball momentum."""
        import optax

        return optax.trace(self.momentum)


@dataclass(frozen=True)
class Muon(Optimizer):
    """Orthogonalized momentum for kernels, Adam for the rest; the first moment of both
    is `mu`.
    """

    momentum: ShareBelow1
    b1: ShareBelow1
    b2: ShareBelow1
    eps: Epsilon
    moments = (
        Moment("mu", "mu"),
        Moment("nu", "nu", required=False),  # Adam's alone
    )
    unquantized = ("ns_coeffs",)  # coefficients of the Newton-Schulz iteration

    def scale_by(self, roles: Any) -> "optax.GradientTransformation":
        """Return Muon for kernels, and Adam (b1, b2) for the other parameters.

        Muon acts on the last two axes; an earlier axis counts layers.
        """
        import jax
        import optax

        from trainer.models.roles import role_of

        def axes(
            path: tuple[Any, ...], leaf: Any
        ) -> optax.contrib.MuonDimensionNumbers | None:
            role = role_of(roles, path)
            # None: Adam. Embeddings and the LM head are matrices too, but not of the
            # kind that the method orthogonalizes.
            if role is None or not role.is_kernel:
                return None
            return optax.contrib.MuonDimensionNumbers(-2, -1)

        # An update's RMS is 0.2, as AdamW's: one learning rate serves both parts (arXiv
        # 2502.16982, section 2.2).
        muon = optax.contrib.muon(
            1.0,
            beta=self.momentum,
            eps=self.eps,
            adam_b1=self.b1,
            adam_b2=self.b2,
            muon_weight_dimension_numbers=lambda params: (
                jax.tree_util.tree_map_with_path(axes, params)
            ),
            consistent_rms=0.2,
        )
        return optax.chain(muon, optax.scale(-1.0))


OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adamw": AdamW,
    "lion": Lion,
    "adafactor": Adafactor,
    "sgd": SGD,
    "muon": Muon,
}


def check_moments(name: str, policy: Policy) -> None:
    """Raise UserError if an optimizer cannot store its moments as a policy says.

    The errors are a format for a moment that the optimizer lacks, and an FP32 moment
    with `precision.update=propagate`.
    """
    for key in MOMENT_KEYS:
        fmt = getattr(policy, key)
        has_moment = any(moment.key == key for moment in OPTIMIZERS[name].moments)
        # Ignored, a narrow format would look as if it saved memory.
        if fmt != "fp32" and not has_moment:
            raise UserError(
                f"precision.{key}={fmt}, but optimizer={name} has no such moment;"
                f" set precision.{key}=fp32, or choose another optimizer"
            )
        # The update computes on ScaledArrays in this format: FP32 would hold nothing
        # more.
        if fmt == "fp32" and has_moment and policy.propagated_update:
            raise UserError(
                f"precision.{key}=fp32, but precision.update=propagate computes in"
                f" {policy.compute}; set precision.{key}={policy.compute} or narrower"
            )
