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
    SyncResult,
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
from trainer.step.packing import pack
from trainer.step.state import Replicas, TrainState
from trainer.step.state_tree import subtree_like, with_subtree
from trainer.step.step import Metrics, StepFn, StepInputs, Tokens

OUTER_STREAM = 0x165667B1  # keeps apart the random bits that round outer weights


class Storage(NamedTuple):
    """The storage of residuals and outer momentum: a dtype, with a scale or without."""

    dtype: np.dtype
    scaled: bool

    def quantize(self, x: jax.Array, scale: Any = None) -> Any:
        """Round FP32 `x` at a scale; None: that of its RMS."""
        if self.scaled:
            return as_scaled_array(x, scale, self.dtype)
        return x.astype(self.dtype)


class OuterOptimizer(NamedTuple):
    """The outer optimizer and the parameters that it updates.

    Attributes:
      settings: settings of the replicas and of the optimizer.
      storage: storage of residuals and momentum.
      roles: roles of the trained parameters, in nested dictionaries.
      rounding: rounding of narrow outer weights.
    """

    settings: DiLoCoSettings
    storage: Storage
    roles: Any
    rounding: weights.Rounding

    def select_trained(self, params: Any) -> Any:
        """Return the trained part of parameters, or of a tree like them."""
        return subtree_like(params, self.roles)


def select(accept: jax.Array, new: Any, old: Any) -> Any:
    """Return the stored array `new` if `accept` is true, else `old`, bit-exactly."""
    # Not arithmetic: a rejected NaN, multiplied by zero, would still be NaN.
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
    # The first key is unchanged, so that one replica that syncs after every step trains
    # as a run without DiLoCo does.
    keys = [key, *(jax.random.fold_in(key, k) for k in range(1, count))]
    return jnp.stack(keys)


def with_replicas(state: TrainState, outer: OuterOptimizer) -> TrainState:
    """Return the initial state of replicas, from that of a run without DiLoCo.

    All replicas have its weights; their random keys differ.
    """
    num_replicas = outer.settings.num_replicas
    opt_state, scaling = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (num_replicas, *x.shape)),
        # Packed before the replica axis is added: `pack` takes scalar scales, and
        # afterwards each would be [K].
        (pack(state.opt_state), state.scaling),
    )
    states = TrainState(
        repeat_for_replicas(state.params, num_replicas),
        opt_state,
        replica_keys(state.key, num_replicas),
        scaling,
    )
    replicas = Replicas(states, *initial_outer_state(state.params, outer))
    # The optimizer state is empty here: each replica has its moments in `states`.
    return TrainState(state.params, (), state.key, state.scaling, replicas)


def initial_outer_state(params: Any, outer: OuterOptimizer) -> tuple[Any, Any]:
    """Return the residuals and the outer momentum before the first sync.

    They are () if the run does not use them.
    """
    settings, params = outer.settings, outer.select_trained(params)
    # Zeros have no RMS to choose a scale by; a sync gives them this one, too.
    scale = jnp.float32(2.0**-126)

    def zeros(p: Any, *axes: int) -> Any:
        return outer.storage.quantize(jnp.zeros((*axes, *p.shape), jnp.float32), scale)

    residuals, momentum = (), ()
    if settings.feedback:
        residuals = tree.map_arrays(lambda p: zeros(p, settings.num_replicas), params)
    if settings.momentum:
        momentum = tree.map_arrays(zeros, params)
    return residuals, momentum


def with_outer_state(state: TrainState, outer: OuterOptimizer) -> TrainState:
    """Return a state with the residuals and the momentum that `outer` uses.

    Missing ones start at zero, unused ones are dropped. The state must already have the
    number of replicas of `outer.settings`.
    """
    replicas = state.diloco
    assert replicas is not None
    residuals, momentum = initial_outer_state(state.params, outer)
    # An unused part is (), which has no leaves.
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
    replicas = state.diloco
    assert replicas is not None
    old_count = replicas.states.key.shape[0]
    new_indices = np.arange(count)
    old_indices = new_indices % old_count
    is_new = new_indices >= old_count

    def select_replicas(x: jax.Array) -> jax.Array:
        # Scalars are the scales of parameters, which all replicas share.
        if x.ndim:
            return x[old_indices]
        return x

    def replace_new(x: jax.Array, value: Any) -> jax.Array:
        if not x.ndim:
            return x
        return jnp.where(np.expand_dims(is_new, tuple(range(1, x.ndim))), value, x)

    states = jax.tree.map(select_replicas, replicas.states)
    states = dataclasses.replace(
        states,
        params=jax.tree.map(
            lambda x, outer: replace_new(x, outer[None]), states.params, state.params
        ),
        # A replica's key follows from the state's key and its index, so replicas that
        # stay keep their random bits.
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
    if state.diloco is None:
        return dataclasses.replace(state, params=params)
    states = state.diloco.states

    def rescaled(x: Any, y: Any) -> Any:
        if not is_scaled_array(x):
            return x
        return x.rescale(y.scale).astype(y.dtype)

    states = dataclasses.replace(
        states, params=tree.map_arrays(rescaled, states.params, params)
    )
    return dataclasses.replace(
        state, params=params, diloco=dataclasses.replace(state.diloco, states=states)
    )


def without_replicas(state: TrainState) -> TrainState:
    """Return the state of a run without replicas: the outer weights, with the first
    replica's optimizer state.
    """
    if state.diloco is None:
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
        # Contiguous rows for each replica: where every replica has its devices, they
        # have these rows already, and nothing is sent.
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
        *,
        inputs: StepInputs,
    ) -> Any:
        replica_inputs = inputs._replace(
            # The first replica keeps the seed: index 0 gives 0.
            seed=inputs.seed ^ (index * jnp.uint32(REPLICA_STREAM))
        )
        if settings.participants == num_replicas:
            return step(state, batch, replica_inputs)
        # A branch of `cond` without a step must return the same metrics, so their
        # shapes come from a trace without computation.
        _, shapes = jax.eval_shape(step, state, batch, replica_inputs)
        zeros = {name: jnp.zeros(s.shape, s.dtype) for name, s in shapes.items()}
        # A branch, not a selection, so that a replica that rests computes nothing. The
        # devices of a replica take the same branch, so they meet in its collectives.
        return lax.cond(
            participates,
            lambda: step(state, batch, replica_inputs),
            lambda: (state, zeros),
        )

    def inner_step(
        states: Any, batch: Tokens, inputs: StepInputs
    ) -> tuple[Any, Metrics]:
        def on_device(replicas: tuple[Any, ...], inputs: StepInputs) -> Any:
            if num_replicas > mesh.shape[REPLICA]:
                # One after the other, so that the activations of one replica at a time
                # are in memory; `vmap` would hold those of all.
                return lax.map(
                    lambda replica: replica_step(*replica, inputs=inputs), replicas
                )
            only_replica = jax.tree.map(lambda x: x[0], replicas)
            result = replica_step(*only_replica, inputs=inputs)
            return jax.tree.map(lambda x: x[None], result)

        rows = jax.tree.map(rows_of_replicas, batch)
        indices = jnp.arange(num_replicas, dtype=jnp.uint32)
        participating = settings.participating(inputs.seed, inputs.step)
        states, metrics = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(PartitionSpec(REPLICA), REPLICATED),
            out_specs=PartitionSpec(REPLICA),
            # The axes of a replica stay automatic: the step maps them itself
            # (`over_devices`), as it does without DiLoCo.
            axis_names={REPLICA},
            check_vma=False,
        )((states, rows, indices, participating), inputs)
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
        # Added one by one, in the order of the replicas: the order of a sum over the
        # axis depends on their devices, by an ulp with four replicas.
        total = functools.reduce(jnp.add, list(jnp.where(participating, x, 0)))
        return total / jnp.sum(participating)

    combined = {name: mean(x) for name, x in metrics.items()}
    return combined | {
        # A replica that rests reports zeros, which would read as a step that is not
        # finite.
        "finite": jnp.all(metrics["finite"] | ~participating),
        "bad_leaf": jnp.max(jnp.where(participating, metrics["bad_leaf"], -1)),
    }


def sync_over(
    mesh: Mesh,
    specs: list[PartitionSpec],
    settings: DiLoCoSettings,
    tensor_indices: Sequence[int],
) -> Callable[..., SyncResult]:
    """Return `diloco.sync` over a mesh: `(tensors, seed, step) -> SyncResult`.

    `specs` are those of the outer weights.
    """
    replica_specs = [PartitionSpec(REPLICA, *spec) for spec in specs]
    residual_specs = replica_specs if settings.feedback else [None] * len(specs)
    return over_devices(
        lambda tensors, seed, step: sync(tensors, settings, seed, step, tensor_indices),
        mesh,
        in_specs=(replica_specs, REPLICATED, REPLICATED),
        out_specs=SyncResult._make((specs, residual_specs, REPLICATED)),
    )


def outer_update(
    outer: OuterOptimizer,
    accept: jax.Array,
    mean: jax.Array,
    new_residual: jax.Array | None,
    scale: jax.Array,
    residual: Any,
    momentum: Any,
) -> tuple[jax.Array, Any, Any]:
    """Return the update of a tensor, and the residual and momentum to store.

    Args:
      outer: the optimizer.
      accept: whether the means of all tensors are finite.
      mean: the mean outer gradient, FP32.
      new_residual: FP32 [K, ...]; None without feedback.
      scale: the scale of the new residual.
      residual: the stored residual, or None.
      momentum: the stored momentum; None: the optimizer has none.
    """
    update, storage = mean, outer.storage
    if momentum is not None:  # Nesterov
        factor = outer.settings.momentum
        velocity = factor * weights.wide(momentum) + mean
        update = mean + factor * velocity
        momentum = select(accept, storage.quantize(velocity), momentum)
    if new_residual is not None:
        # At the scale of the sync, which all replicas share: there is one scale for the
        # residuals [K, ...] of a tensor.
        stored = storage.quantize(new_residual, scale)
        residual = select(accept, stored, zero_nonfinite(residual))
    return update, residual, momentum


class Fragment(NamedTuple):
    """The tensors that a sync exchanges, by their indices in trees like the trained
    parameters.
    """

    indices: list[int]

    def take(self, values: Any) -> list[Any]:
        """Return the tensors of a tree; None for each if the tree is empty."""
        # Residuals and momentum that the run does not use are ().
        leaves = tree.leaves(values)
        return [leaves[i] if leaves else None for i in self.indices]

    def put(self, values: Any, new: Sequence[Any]) -> Any:
        """Return a tree with new tensors; an empty one is returned unchanged."""
        leaves = tree.leaves(values)
        if not leaves:
            return values
        for i, x in zip(self.indices, new, strict=True):
            leaves[i] = x
        return tree.structure_of(values).unflatten(leaves)


def outer_gradient(p: Any, replica_p: Any, residual: Any) -> jax.Array:
    """Return the outer gradients of a tensor, FP32 [K, ...].

    Args:
      p: the outer weights.
      replica_p: the replicas' weights [K, ...].
      residual: their earlier rounding errors [K, ...], or None.
    """
    gradient = weights.wide(p)[None] - weights.wide(replica_p)
    if residual is None:
        return gradient
    return gradient + weights.wide(residual)


def make_sync(
    index: int, mesh: Mesh, outer: OuterOptimizer
) -> Callable[[TrainState, jax.Array, jax.Array], TrainState]:
    """Return the sync of a fragment and the outer update: `(state, steps taken, seed)
    -> state`.

    Args:
      index: index of the fragment.
      mesh: the device mesh.
      outer: the outer optimizer, and the parameters of which this is a fragment.
    """
    settings = outer.settings

    def sync_fragment(
        state: TrainState, step: jax.Array, seed: jax.Array
    ) -> TrainState:
        replicas = state.diloco
        assert replicas is not None
        states = replicas.states
        params = outer.select_trained(state.params)
        replica_params = outer.select_trained(states.params)
        # The same function of the sizes as in `compiled.sync_bytes`, which counts the
        # bytes of each fragment.
        sizes = [p.size for p in tree.leaves(params)]
        fragment = Fragment(fragments_of(sizes, settings.fragments)[index])
        residuals = fragment.take(replicas.residuals)
        outer_gradients = [
            outer_gradient(p, replica_p, residual)
            for p, replica_p, residual in zip(
                fragment.take(params),
                fragment.take(replica_params),
                residuals,
                strict=True,
            )
        ]
        specs = fragment.take(param_specs(params, mesh, outer.roles))
        result = sync_over(mesh, specs, settings, fragment.indices)(
            outer_gradients, seed, step
        )
        # A mean that is not finite changes nothing: the replicas continue from the
        # outer weights, and keep their earlier residuals.
        finite = [jnp.all(jnp.isfinite(mean)) for mean in result.means]
        accept = jnp.all(jnp.stack(finite))
        new = [
            outer_update(outer, accept, mean, new_residual, scale, residual, momentum)
            for mean, new_residual, scale, residual, momentum in zip(
                result.means,
                result.residuals,
                result.scales,
                residuals,
                fragment.take(replicas.momentum),
                strict=True,
            )
        ]
        updates, new_residuals, new_momenta = zip(*new, strict=True)
        new_params = weights.apply_updates(
            fragment.take(params),
            [-settings.lr * update for update in updates],
            rounding=outer.rounding,
            seed=seed ^ jnp.uint32(OUTER_STREAM),
            step=step,
            accept=accept,
            leaf_indices=fragment.indices,
        )
        # Replicas that did not take part in the round get the outer weights, too.
        new_replica_params = repeat_for_replicas(new_params, settings.num_replicas)
        states = dataclasses.replace(
            states,
            params=with_subtree(
                states.params, fragment.put(replica_params, new_replica_params)
            ),
        )
        # `scaling` is for readers of the outer weights, such as an evaluation; each
        # replica keeps its own in `states`.
        return dataclasses.replace(
            state,
            params=with_subtree(state.params, fragment.put(params, new_params)),
            scaling=jax.tree.map(lambda x: jnp.max(x, axis=0), states.scaling),
            diloco=Replicas(
                states,
                fragment.put(replicas.residuals, new_residuals),
                fragment.put(replicas.momentum, new_momenta),
            ),
        )

    return sync_fragment


@dataclasses.dataclass(frozen=True, eq=False)
class DiLoCoStep:
    """A step of all replicas and the syncs that are due after it; a `StepFn`.

    Attributes:
      inner_step: the compiled step of all replicas; see `make_inner_step`.
      syncs: the compiled syncs of the fragments; see `make_sync`.
      settings: the settings, which determine when a fragment is due.
    """

    inner_step: jax.stages.Compiled
    syncs: Sequence[jax.stages.Compiled]
    settings: DiLoCoSettings

    def __call__(
        self, state: TrainState, batch: Tokens, inputs: StepInputs
    ) -> tuple[TrainState, Metrics]:
        """Return the state after the step and its syncs, and the metrics.
        `inputs.step` is on the host.
        """
        replicas = state.diloco
        assert replicas is not None
        states, metrics = self.inner_step(replicas.states, batch, inputs)
        state = dataclasses.replace(
            state, diloco=dataclasses.replace(replicas, states=states)
        )
        # On the device, the number of the step would make the host wait here at each
        # step.
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
