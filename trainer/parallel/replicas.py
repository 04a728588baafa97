"""DiLoCo replicas: their states, the inner step of all of them, the sync, and when
each happens.

The inner step is that of a run without DiLoCo. Each replica takes it on its rows of the
batch and its part of the devices, with different random bits; only its metrics are sent
between replicas. The sync is a separate program (`diloco.sync`), after which
all replicas have the outer weights.

Legend: K replicas, A micro-batches, B sequences of a micro-batch, T tokens.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalify_core import ScaledArray, as_scaled_array, tree, weights
from scalify_core.array.scaled_array import is_scaled_array
from trainer.parallel.diloco import (
    REPLICA_STREAM,
    DiLoCoSettings,
    fragments_of,
    sync,
)
from trainer.parallel.mesh import (
    BATCH_AXES,
    REPLICA,
    REPLICATED,
    over_devices,
    replicated,
)
from trainer.parallel.sharding import param_specs
from trainer.step.state import Replicas, TrainState
from trainer.step.state_tree import with_subtree
from trainer.step.step import Metrics, StepFn, StepInputs, Tokens

OUTER_STREAM = 0x165667B1  # for the random bits that round the outer weights


class Storage(NamedTuple):
    """The storage of residuals and outer momentum: a dtype, with a scale or without."""

    dtype: np.dtype
    scaled: bool

    def quantize(self, x: jax.Array, scale: Any = None) -> Any:
        """Round FP32 `x` at a scale; None: that of its RMS."""
        if self.scaled:
            return as_scaled_array(x, scale, self.dtype)
        return x.astype(self.dtype)


def select(accept: jax.Array, new: Any, old: Any) -> Any:
    """Return the stored array `new` if `accept` is true, else `old`, bit-exactly."""
    return jax.tree.map(lambda a, b: jnp.where(accept, a, b), new, old)


def zero_nonfinite(stored: Any) -> Any:
    """Return a stored array with zeros in place of nonfinite values.

    A nonfinite value in a residual would spoil every later sync.
    """

    def finite(x: jax.Array) -> jax.Array:
        return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))

    if is_scaled_array(stored):
        return ScaledArray(finite(stored.data), stored.scale)
    return finite(stored)


def repeat_for_replicas(params: Any, num_replicas: int) -> Any:
    """Return a tree with every array repeated, [K, ...]; scales are not repeated."""

    def repeat(x: Any) -> Any:
        if is_scaled_array(x):
            return ScaledArray(repeat(x.data), x.scale)
        return jnp.broadcast_to(x, (num_replicas, *x.shape))

    return tree.map_arrays(repeat, params)


def replica_keys(key: jax.Array, count: int) -> jax.Array:
    """Return a key for each replica, [K]; that of the first replica is `key`."""
    keys = [key, *(jax.random.fold_in(key, k) for k in range(1, count))]
    return jnp.stack(keys)


def with_replicas(
    state: TrainState,
    select_trained: Callable[[Any], Any],
    settings: DiLoCoSettings,
    storage: Storage,
) -> TrainState:
    """Return the initial state of replicas, from that of a run without DiLoCo.

    All replicas have its weights; their random keys differ.
    """
    opt_state, scaling = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (settings.num_replicas, *x.shape)),
        (tree.pack(state.opt_state), state.scaling),
    )
    states = TrainState(
        repeat_for_replicas(state.params, settings.num_replicas),
        opt_state,
        replica_keys(state.key, settings.num_replicas),
        scaling,
    )
    residuals, momentum = initial_outer_state(
        select_trained(state.params), settings, storage
    )
    replicas = Replicas(states, residuals, momentum)
    return TrainState(state.params, (), state.key, state.scaling, replicas)


def initial_outer_state(
    params: Any, settings: DiLoCoSettings, storage: Storage
) -> tuple[Any, Any]:
    """Return the residuals and the outer momentum before the first sync.

    They are () if the run does not use them.
    """
    # The scale that `diloco.shared_scales` gives to zeros.
    scale = jnp.float32(2.0**-126)

    def zeros(p: Any, *axes: int) -> Any:
        return storage.quantize(jnp.zeros((*axes, *p.shape), jnp.float32), scale)

    residuals, momentum = (), ()
    if settings.feedback:
        residuals = tree.map_arrays(lambda p: zeros(p, settings.num_replicas), params)
    if settings.momentum:
        momentum = tree.map_arrays(zeros, params)
    return residuals, momentum


def with_outer_state(
    state: TrainState,
    select_trained: Callable[[Any], Any],
    settings: DiLoCoSettings,
    storage: Storage,
) -> TrainState:
    """Return a state with the residuals and the momentum that `settings` need.

    Missing ones start at zero, unused ones are dropped. The state must already have
    `settings.num_replicas` replicas.
    """
    replicas: Replicas = state.diloco
    residuals, momentum = initial_outer_state(
        select_trained(state.params), settings, storage
    )
    if jax.tree.leaves(residuals) and jax.tree.leaves(replicas.residuals):
        residuals = replicas.residuals
    if jax.tree.leaves(momentum) and jax.tree.leaves(replicas.momentum):
        momentum = replicas.momentum
    return dataclasses.replace(
        state, diloco=Replicas(replicas.states, residuals, momentum)
    )


def with_replica_count(state: TrainState, count: int) -> TrainState:
    """Return a state in checkpoint form (see `to_checkpoint_form`) with another number
    of replicas.

    A new replica has the outer weights, the optimizer state of an old replica, a new
    random key and no residual. The last replicas are removed, with their residuals.
    """
    replicas: Replicas = state.diloco
    old_count = replicas.states.key.shape[0]
    new_indices = np.arange(count)
    old_indices = new_indices % old_count
    is_new = new_indices >= old_count

    # Scalars are the scales of parameters, which all replicas share.

    def select_replicas(x: jax.Array) -> jax.Array:
        if x.ndim:
            return x[old_indices]
        return x

    def replace_new(x: jax.Array, value: Any) -> jax.Array:
        if not x.ndim:
            return x
        return jnp.where(is_new.reshape(-1, *(1,) * (x.ndim - 1)), value, x)

    def new_params(x: jax.Array, outer: jax.Array) -> jax.Array:
        if x.ndim:
            return replace_new(x, outer[None])
        return x

    states = jax.tree.map(select_replicas, replicas.states)
    states = dataclasses.replace(
        states,
        params=jax.tree.map(new_params, states.params, state.params),
        key=replica_keys(state.key, count),
    )
    residuals = jax.tree.map(
        lambda x: replace_new(select_replicas(x), jnp.zeros((), x.dtype)),
        replicas.residuals,
    )
    return dataclasses.replace(
        state, diloco=Replicas(states, residuals, replicas.momentum)
    )


def with_rescaled_params(state: TrainState, params: Any) -> TrainState:
    """Return a state whose weights have the scales of `params`, in its replicas too.

    `params` are the same weights at other scales.
    """
    if not isinstance(state.diloco, Replicas):
        return dataclasses.replace(state, params=params)
    states = state.diloco.states
    states = dataclasses.replace(
        states, params=tree.rescaled_like(states.params, params)
    )
    return dataclasses.replace(
        state, params=params, diloco=dataclasses.replace(state.diloco, states=states)
    )


def without_replicas(state: TrainState) -> TrainState:
    """Return the state of a run without replicas: the outer weights, with the first
    replica's optimizer state.
    """
    if not isinstance(state.diloco, Replicas):
        return state
    moments = jax.tree.map(lambda x: x[0], state.diloco.states.opt_state)
    return TrainState(state.params, moments, state.key, state.scaling)


def make_inner_step(
    step: StepFn, mesh: Mesh, settings: DiLoCoSettings
) -> Callable[[Any, Tokens, StepInputs], tuple[Any, Metrics]]:
    """Return the step of all replicas: `(states, batch, inputs) -> (states, metrics)`.

    The batch is that of a run without replicas, [A, B, T+1]: replica k has the rows
    that device k of K would have. `combine_metrics` makes the metrics.
    """
    num_replicas = settings.num_replicas
    # Without this jit, unused constants of the step become arguments of `shard_map`;
    # XLA has crashed on these.
    step = jax.jit(step)

    def rows_of_replicas(x_AxBxT1: jax.Array) -> jax.Array:
        accum, rows, length = x_AxBxT1.shape
        x = jnp.moveaxis(
            x_AxBxT1.reshape(accum, num_replicas, rows // num_replicas, length), 1, 0
        )
        return lax.with_sharding_constraint(
            x, NamedSharding(mesh, PartitionSpec(REPLICA, None, BATCH_AXES))
        )

    def replica_step(
        state: Any,
        batch: Tokens,
        index: jax.Array,
        participates: jax.Array,
        inputs: StepInputs,
    ) -> Any:
        replica_inputs = inputs._replace(
            seed=inputs.seed ^ (index * jnp.uint32(REPLICA_STREAM))
        )
        if settings.participants == num_replicas:
            return step(state, batch, replica_inputs)
        _, shapes = jax.eval_shape(step, state, batch, replica_inputs)
        zeros = {name: jnp.zeros(s.shape, s.dtype) for name, s in shapes.items()}
        return lax.cond(
            participates,
            lambda: step(state, batch, replica_inputs),
            lambda: (state, zeros),
        )

    def inner_step(
        states: Any, batch: Tokens, inputs: StepInputs
    ) -> tuple[Any, Metrics]:
        def on_device(
            states: Any,
            batch: Tokens,
            indices: jax.Array,
            participating: jax.Array,
            inputs: StepInputs,
        ) -> Any:
            def next_replica(_: None, replica: tuple[Any, ...]) -> tuple[None, Any]:
                state, rows, index, participates = replica
                return None, replica_step(state, rows, index, participates, inputs)

            per_replica = (states, batch, indices, participating)
            if len(indices) > 1:
                return lax.scan(next_replica, None, per_replica)[1]
            only_replica = jax.tree.map(lambda x: x[0], per_replica)
            _, result = next_replica(None, only_replica)
            return jax.tree.map(lambda x: x[None], result)

        by_replica = PartitionSpec(REPLICA)
        indices = jnp.arange(num_replicas, dtype=jnp.uint32)
        participating = settings.participating(inputs.seed, inputs.step)
        states, metrics = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(by_replica, by_replica, by_replica, by_replica, PartitionSpec()),
            out_specs=by_replica,
            axis_names={REPLICA},
            check_vma=False,
        )(
            states,
            jax.tree.map(rows_of_replicas, batch),
            indices,
            participating,
            inputs,
        )
        # Every device gets all metrics, so that the order of summation does not depend
        # on which device has which replica.
        metrics = lax.with_sharding_constraint(metrics, replicated(mesh))
        return states, combine_metrics(metrics, participating)

    return inner_step


def combine_metrics(metrics: Metrics, participating: jax.Array) -> Metrics:
    """Return the metrics of a step from those of the replicas, [K] each.

    Only participating replicas count. `finite` is true if it is for all of them,
    `bad_leaf` is the largest index; other metrics are means.
    """

    def mean(x: jax.Array) -> jax.Array:
        total = functools.reduce(jnp.add, list(jnp.where(participating, x, 0)))
        return total / jnp.sum(participating)

    combined = {name: mean(x) for name, x in metrics.items()}
    return combined | {
        "finite": jnp.all(metrics["finite"] | ~participating),
        "bad_leaf": jnp.max(jnp.where(participating, metrics["bad_leaf"], -1)),
    }


def sync_over(
    mesh: Mesh,
    specs: list[PartitionSpec],
    settings: DiLoCoSettings,
    tensor_indices: Sequence[int],
) -> Callable[..., tuple[list[jax.Array], list[jax.Array], jax.Array]]:
    """Return `diloco.sync` over a mesh: `(tensors, seed, step) -> SyncResult`.

    `specs` are those of the outer weights.
    """
    replica_specs = [PartitionSpec(REPLICA, *spec) for spec in specs]
    residual_specs = replica_specs if settings.feedback else []
    return over_devices(
        lambda tensors, seed, step: tuple(
            sync(tensors, settings, seed, step, tensor_indices)
        ),
        mesh,
        in_specs=(replica_specs, REPLICATED, REPLICATED),
        out_specs=(specs, residual_specs, REPLICATED),
    )


def make_sync(
    fragment: int,
    mesh: Mesh,
    roles: Any,
    settings: DiLoCoSettings,
    storage: Storage,
    select_trained: Callable[[Any], Any],
    rounding: weights.Rounding,
) -> Callable[[TrainState, jax.Array, jax.Array], TrainState]:
    """Return the sync of a fragment and the outer update: `(state, steps taken,
    seed) -> state`.

    Args:
      fragment: index of the fragment.
      mesh: the device mesh.
      roles: roles of the trained parameters, which determine their sharding.
      settings: the settings.
      storage: storage of residuals and momentum.
      select_trained: selects the trained parameters.
      rounding: rounding of narrow outer weights.
    """

    def sync_fragment(
        state: TrainState, step: jax.Array, seed: jax.Array
    ) -> TrainState:
        replicas: Replicas = state.diloco
        outer = select_trained(state.params)
        states = replicas.states
        outer_leaves = tree.leaves(outer)
        replica_leaves = tree.leaves(select_trained(states.params))
        residuals = tree.leaves(replicas.residuals)
        momenta = tree.leaves(replicas.momentum)
        sizes = [p.size for p in outer_leaves]
        tensor_indices = fragments_of(sizes, settings.fragments)[fragment]
        outer_gradients = []
        for i in tensor_indices:
            gradient = weights.wide(outer_leaves[i])[None]
            gradient = gradient - weights.wide(replica_leaves[i])
            if settings.feedback:
                gradient = gradient + weights.wide(residuals[i])
            outer_gradients.append(gradient)
        all_specs = jax.tree.leaves(param_specs(outer, mesh, roles))
        means, new_residuals, scales = sync_over(
            mesh, [all_specs[i] for i in tensor_indices], settings, tensor_indices
        )(outer_gradients, seed, step)
        # A mean that is not finite changes nothing: the replicas continue from the
        # outer weights, and keep their earlier residuals.
        accept = jnp.all(jnp.stack([jnp.all(jnp.isfinite(mean)) for mean in means]))
        updates = []
        for local_index, i in enumerate(tensor_indices):
            update = means[local_index]
            if settings.momentum:  # Nesterov
                velocity = settings.momentum * weights.wide(momenta[i]) + update
                update = update + settings.momentum * velocity
                momenta[i] = select(accept, storage.quantize(velocity), momenta[i])
            if settings.feedback:
                residual = storage.quantize(
                    new_residuals[local_index], scales[local_index]
                )
                residuals[i] = select(accept, residual, zero_nonfinite(residuals[i]))
            updates.append(update)
        new_leaves = weights.apply_updates(
            [outer_leaves[i] for i in tensor_indices],
            [-settings.lr * update for update in updates],
            rounding=rounding,
            seed=seed ^ jnp.uint32(OUTER_STREAM),
            step=step,
            accept=accept,
            leaf_indices=tensor_indices,
        )
        for p, i in zip(new_leaves, tensor_indices, strict=True):
            outer_leaves[i] = p
            replica_leaves[i] = repeat_for_replicas(p, settings.num_replicas)
        structure = jax.tree.structure(outer, is_leaf=is_scaled_array)

        def build(leaves: list[Any]) -> Any:
            if leaves:
                return jax.tree.unflatten(structure, leaves)
            return ()

        states = dataclasses.replace(
            states, params=with_subtree(states.params, build(replica_leaves))
        )
        # `scaling` is for readers of the outer weights, such as an evaluation; each
        # replica keeps its own in `states`.
        return dataclasses.replace(
            state,
            params=with_subtree(state.params, build(outer_leaves)),
            scaling=jax.tree.map(lambda x: jnp.max(x, axis=0), states.scaling),
            diloco=Replicas(states, build(residuals), build(momenta)),
        )

    return sync_fragment


class DiLoCoStep:
    """A step of all replicas and the syncs that are due after it; a `StepFn`.

    Attributes:
      inner_step: the compiled step of all replicas; see `make_inner_step`.
      syncs: the compiled syncs of the fragments; see `make_sync`.
      settings: the settings, which determine when a fragment is due.
    """

    def __init__(
        self,
        inner_step: jax.stages.Compiled,
        syncs: Sequence[jax.stages.Compiled],
        settings: DiLoCoSettings,
    ) -> None:
        self.inner_step = inner_step
        self.syncs = tuple(syncs)
        self.settings = settings

    def __call__(
        self, state: TrainState, batch: Tokens, inputs: StepInputs
    ) -> tuple[TrainState, Metrics]:
        """Return the state after the step and its syncs, and the metrics.
        `inputs.step` is on the host.
        """
        states, metrics = self.inner_step(state.diloco.states, batch, inputs)
        state = dataclasses.replace(
            state, diloco=dataclasses.replace(state.diloco, states=states)
        )
        steps_taken = int(inputs.step) + 1
        for fragment in self.settings.due(steps_taken):
            state = self.syncs[fragment](state, np.int32(steps_taken), inputs.seed)
        return state, metrics

    def as_text(self) -> str | None:
        """Return the program of the inner step."""
        return self.inner_step.as_text()

    def memory_analysis(self) -> Any:
        """Return the memory of the inner step; a sync needs less."""
        return self.inner_step.memory_analysis()
