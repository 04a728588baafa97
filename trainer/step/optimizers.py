"""The optimisers that a configuration can name: an entry each, of what a user sets and
of what its state is.

An entry is a subclass of `Optimizer`, which is also the schema of its configuration, so
nothing here imports JAX before a transformation is made. `trainer.step.optimizer` adds
what all have: clipping and weight decay.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from trainer.bounds import Amount, Bound, ShareBelow1
from trainer.errors import UserError
from trainer.precision.policy import Policy

if TYPE_CHECKING:
    import optax

# of `precision`: what first and second moments are stored in
KEYS: tuple[Literal["mu", "nu"], ...] = ("mu", "nu")

# Without it a weight whose gradients were all zero becomes 0/0. Smaller ones are zero
# in FP32.
Epsilon = Annotated[
    float, Bound(lambda x: x >= 2**-126, "at least 2^-126, such as 1e-8")
]


class Moment(NamedTuple):
    """An average that an optimiser keeps of every parameter it updates.

    Attributes:
      field: its name in the optimiser's state.
      key: the key of `precision` that says what it is stored in: mu, of a first moment,
          or nu, of a second one.
      root: whether its square root is stored where it is narrow. Only of what is never
          negative.
      relative_to: the field of the second moment by whose root it is divided where both
        are stored in eight bits; None: it is stored as it is.
    """

    field: str
    key: Literal["mu", "nu"]
    root: bool
    relative_to: str | None = None


@dataclass(frozen=True)
class Optimizer:
    """What every optimiser has.

    Attributes:
      lr: the peak of the learning rate.
      weight_decay: decoupled, on matrices only.
      clip_norm: the global norm that gradients are scaled down to; 0: any.
      moments: the averages in its state.
      unstored: other fields of its state with floating-point arrays, which stay as the
          optimiser makes them.
      elementwise: whether what becomes of an element depends on no other one, but for
        the norm of all: then small parameters may be updated together.
    """

    name: str
    lr: Amount
    weight_decay: Amount
    clip_norm: Amount
    moments: ClassVar[tuple[Moment, ...]]
    unstored: ClassVar[tuple[str, ...]] = ()
    elementwise: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Raise TypeError for an entry that does not say its moments, be it that it has
        none, or what it computes.
        """
        if "moments" not in vars(cls):
            raise TypeError(
                f"{cls.__name__} does not say its `moments`; () says that its state"
                " keeps none"
            )
        if cls.descent is Optimizer.descent:
            raise TypeError(
                f"{cls.__name__} has no method `descent`, which makes its"
                " transformation"
            )

    def descent(self, roles: Any) -> "optax.GradientTransformation":
        """What is subtracted from the parameters at a learning rate of 1, in which it
        must be linear.

        Without clipping and weight decay, which are the same for all. `roles`: a tree
        like that of the parameters.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam with bias correction."""

    b1: ShareBelow1
    b2: ShareBelow1
    eps: Epsilon
    moments = (
        Moment("mu", "mu", root=False, relative_to="nu"),
        Moment("nu", "nu", root=True),
    )
    elementwise = True

    def descent(self, roles: Any) -> "optax.GradientTransformation":
        """`optax.adamw` but for the decay."""
        import optax

        return optax.scale_by_adam(self.b1, self.b2, self.eps)


@dataclass(frozen=True)
class Lion(Optimizer):
    """The sign of an interpolated momentum."""

    b1: ShareBelow1
    b2: ShareBelow1
    moments = (Moment("mu", "mu", root=False),)
    elementwise = True

    def descent(self, roles: Any) -> "optax.GradientTransformation":
        """`optax.lion` but for the decay."""
        import optax

        return optax.scale_by_lion(self.b1, self.b2)


@dataclass(frozen=True)
class Adafactor(Optimizer):
    """Second moments of rows and columns, which are small as they are."""

    moments = ()
    unstored = ("v_row", "v_col", "v")

    def descent(self, roles: Any) -> "optax.GradientTransformation":
        """Clipped and scaled per tensor: per layer too where layers are stacked."""
        import jax
        import optax

        core = optax.chain(optax.adafactor(1.0), optax.scale(-1.0))

        def over_layers(fn: Callable[..., Any]) -> Callable[..., Any]:
            # Without stacked layers there is nothing to map over.
            return lambda tree, *rest: (jax.vmap(fn) if jax.tree.leaves(tree) else fn)(
                tree, *rest
            )

        stacked = optax.GradientTransformation(
            over_layers(core.init), over_layers(core.update)
        )
        return optax.partition(
            {True: stacked, False: core}, jax.tree.map(lambda role: role.stacked, roles)
        )


@dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient descent with momentum."""

    momentum: ShareBelow1
    moments = (Moment("trace", "mu", root=False),)
    elementwise = True

    def descent(self, roles: Any) -> "optax.GradientTransformation":
        """Heavy-ball momentum."""
        import optax

        return optax.trace(self.momentum)


@dataclass(frozen=True)
class Muon(Optimizer):
    """Orthogonalised momentum for kernels, Adam for the rest; both call their first
    moment `mu`.
    """

    momentum: ShareBelow1
    b1: ShareBelow1
    b2: ShareBelow1
    eps: Epsilon
    moments = (Moment("mu", "mu", root=False), Moment("nu", "nu", root=True))
    unstored = ("ns_coeffs",)  # of the Newton-Schulz iteration

    def descent(self, roles: Any) -> "optax.GradientTransformation":
        """Muon over the last two axes of kernels, any leading ones being layers; Adam
        (b1, b2) elsewhere.
        """
        import jax
        import optax

        from trainer.models.roles import role_of

        def axes(
            path: tuple[Any, ...], leaf: Any
        ) -> optax.contrib.MuonDimensionNumbers | None:
            role = role_of(roles, path)
            return (
                optax.contrib.MuonDimensionNumbers(-2, -1)
                if role and role.is_kernel
                else None
            )

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


ENTRIES: dict[str, type[Optimizer]] = {
    "adamw": AdamW,
    "lion": Lion,
    "adafactor": Adafactor,
    "sgd": SGD,
    "muon": Muon,
}


def check_moments(name: str, policy: Policy) -> None:
    """Raise UserError where the policy asks of the moments of the optimiser `name` what
    they cannot be.

    That is a format for a moment which it does not have, and moments wider than an
    update that is propagated.
    """
    for key in KEYS:
        kept_in, has = (
            getattr(policy, key),
            any(moment.key == key for moment in ENTRIES[name].moments),
        )
        if kept_in != "fp32" and not has:
            raise UserError(
                f"precision.{key}={kept_in}, but optimizer={name} has no such moment; "
                f"set precision.{key}=fp32, or choose another optimizer"
            )
        if kept_in == "fp32" and has and policy.propagated_update:
            raise UserError(
                f"precision.{key}=fp32, but precision.update=propagate computes in"
                f" {policy.compute}; set precision.{key}={policy.compute} or narrower"
            )
