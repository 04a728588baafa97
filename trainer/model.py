"""A model in a precision: its loss, and how that is differentiated."""

from typing import Any, NamedTuple, Self

import jax
from jax.sharding import Mesh

from scalify_core import asarray
from trainer.models.family import Family, Spec
from trainer.models.flops import linear_sizes
from trainer.models.fp8_attention import check_fp8_attention
from trainer.models.model_functions import ModelFunctions, Params, next_token_loss
from trainer.models.registry import family_of
from trainer.models.roles import Role, role_of
from trainer.parallel.distribute import rounding_seed
from trainer.parallel.layerwise import FsdpLayerComm
from trainer.parallel.mesh import devices_of_replica
from trainer.precision.arrays import (
    attention_of,
    cast_for_all_gather,
    dot_general_for,
    skipped_matmuls,
    store_gradients,
)
from trainer.precision.gradients import LossGradient
from trainer.precision.policy import Policy
from trainer.step.state import TrainState


class Model(NamedTuple):
    """A model in a precision.

    Attributes:
      spec: of the model.
      policy: the precision.
      training: the model with the matmuls of the policy.
      sampling: the model of the same parameters with every matmul in
        `policy.model_dtype`: products of one token are too small for FP8. Rescaling is
        left out.
      narrow: paths of the linear layers with FP8 matmuls.
      skipped: why the other linear layers have none, by path.
      rows: tokens that a device's linear layers take at once in training; None: some
        multiple of 16.
      loss_boundary_id: the end-of-text id: the token after it is no target. None: every
        token is a target.
      layer_comm: gathers the blocks' weights layer by layer; None: they are whole.
    """

    spec: Spec
    policy: Policy
    training: ModelFunctions
    sampling: ModelFunctions
    narrow: list[str]
    skipped: dict[str, str]
    rows: int | None
    loss_boundary_id: int | None = None
    layer_comm: FsdpLayerComm | None = None

    @classmethod
    def make(
        cls,
        spec: Spec,
        policy: Policy,
        rows: int | None = None,
        tensor_axis: str | None = None,
        *,
        narrow_gradients: bool = False,
        loss_boundary_id: int | None = None,
    ) -> Self:
        """Make the model of a precision.

        Args:
          spec: of the model.
          policy: the precision.
          rows: see the class.
          tensor_axis: the mesh axis over which the training model's heads and hidden
            channels are split; see `Family.build`.
          narrow_gradients: see `dot_general_for`.
          loss_boundary_id: see the class.

        Raises:
          UserError: a pattern of the precision matches no layer, or the model's
            attention cannot be that of the precision.
        """
        # Here, where every model is built: evaluate composes a precision with the
        # default model, whose heads do not count.
        check_fp8_attention(spec, policy)
        family = family_of(spec)
        sizes = linear_sizes(spec)
        # By rows, too: FP8 matmuls take multiples, so a small batch may keep a layer
        # wide.
        skipped = skipped_matmuls(policy, sizes, rows)
        narrow = [path for path in sizes if path not in skipped]
        dots = dot_general_for(
            policy,
            narrow,
            keep_weights=spec.keep_fp8_weights,
            narrow_gradients=narrow_gradients,
        )
        training = family.build(
            spec,
            compute_dtype=policy.model_dtype,
            dot_general_for=dots,
            attention=attention_of(policy),
            rescale_grads=policy.rescaled_places,
            tensor_axis=tensor_axis,
        )
        sampling = family.build(spec.for_sampling(), compute_dtype=policy.model_dtype)
        return cls(
            spec, policy, training, sampling, narrow, skipped, rows, loss_boundary_id
        )

    def loss(
        self,
        params: Params,
        tokens: jax.Array,
        segments: jax.Array | None,
        keys_B: jax.Array | None,
        histories: Params | None = None,
    ) -> jax.Array:
        """Return the mean next-token loss in nats of `tokens` [B, T+1].

        Dropout needs `keys_B`; without them there is none.
        """
        # Of the inputs: the last token is only a target.
        segments = None if segments is None else segments[:, :-1]
        model = self.training.bind(params, histories)
        settings: dict[str, Any] = {}
        # Models without dropout take no such setting.
        if self.spec.dropout:
            settings["dropout_keys_B"] = keys_B
        if self.layer_comm is not None:
            seed = None if keys_B is None else rounding_seed(keys_B)
            settings["layer_comm"] = self.layer_comm._replace(seed=seed)
        return next_token_loss(
            lambda *batch, **how: model.loss(*batch, segments, **settings, **how),
            tokens,
            self.loss_boundary_id,
        )

    def remade(self, **settings: Any) -> "Model":
        """Return the model made with other settings of `make`."""
        return Model.make(
            self.spec,
            self.policy,
            self.rows,
            loss_boundary_id=self.loss_boundary_id,
            **settings,
        )

    def on(self, mesh: Mesh, micro_batches: int | None = None) -> "Model":
        """Return the model for this mesh and number of micro-batches.

        `micro_batches`: None outside of a training step.
        """
        if devices_of_replica(mesh) == micro_batches == 1 and self.spec.scan_layers:
            # Gradients that nothing is added to are rounded inside the loop over the
            # layers, which then stacks bytes.
            return self.remade(narrow_gradients=True)
        if mesh.shape["tensor"] == 1:
            return self
        return self.remade(tensor_axis="tensor")

    def eval_loss(
        self, state: TrainState, tokens: jax.Array, segments: jax.Array | None
    ) -> jax.Array:
        """Return the loss in the run's precision, without dropout."""
        method = self.policy.method
        # The method's own forward pass, so that validation has the run's FP8 casts.
        loss = method.transform(self.loss, self.policy)
        arguments = method.loss_arguments(state.scaling)
        # The values of a ScaledArray, which a loss may be where scales propagate.
        return asarray(loss(state.params, tokens, segments, None, **arguments))

    def differentiate(self) -> LossGradient:
        """Return the loss and its gradient in the run's precision."""
        return self.policy.method.differentiate(
            self.loss, self.policy, self.training.init_histories
        )

    @property
    def family(self) -> Family:
        """The family of the model's spec."""
        return family_of(self.spec)

    @property
    def roles(self) -> Params:
        """The roles of the parameters, in their nested dictionaries."""
        return self.training.roles

    def is_narrow(self, role: Role | None) -> bool:
        """Return whether a role is that of the kernel of an FP8 matmul."""
        return role is not None and role.is_kernel and role.layer in self.narrow

    def cast_for_all_gather(self, role: Role, p: Any) -> Any:
        """Return a parameter in the format of its all-gather."""
        return cast_for_all_gather(
            p,
            self.policy,
            is_kernel=role.is_kernel,
            is_narrow=self.is_narrow(role),
            scaled_rows=role.scaled_rows,
        )

    def store_gradients(self, grads: Any) -> Any:
        """Return the gradients in the formats in which the optimizer gets them."""
        return store_gradients(
            grads, self.policy, lambda path: self.is_narrow(role_of(self.roles, path))
        )
