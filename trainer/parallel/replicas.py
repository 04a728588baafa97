"""Replicas that train apart: their states, the inner step of all of them, the exchange,
and when each of both happens.

The inner step is the run's own, of each replica on its rows of the batch and its part
of the devices, with random bits of its own; nothing that it computes is sent to another
replica but the figures of the row. The exchange is a program of its own
(`diloco.exchange`), after which all replicas have the outer weights.

Legend: K replicas, R of them on a device, A micro-batches, B sequences of one, b those
of a replica, T tokens.
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
from scalify_core.array import is_scaled_array
from trainer.parallel.diloco import OF_REPLICA, DiLoCoSettings, exchange, fragments_of
from trainer.parallel.mesh import BATCH_AXES, REPLICA, over_devices
from trainer.parallel.sharding import of_parameters
from trainer.step.state import Replicas, TrainState
from trainer.step.state_tree import with_part
from trainer.step.step import Hyper, Metrics, StepFn, Tokens

OF_OUTER = 0x165667B1  # of the rounding of outer weights


class Storage(NamedTuple):
    """How residuals and the outer momentum are kept: in a dtype, as scaled arrays or
    not.
    """

    dtype: np.dtype
    scaled: bool

    def store(self, x: jax.Array, scale: Any = None) -> Any:
        """FP32 `x` as it is kept, at a scale; None: at that of its RMS."""
        return (
            as_scaled_array(x, scale, self.dtype)
            if self.scaled
            else x.astype(self.dtype)
        )


def one_of(accept: jax.Array, new: Any, old: Any) -> Any:
    """An array as it is kept, `new` where `accept` is true, with its scale, else `old`,
    in every bit.
    """
    return jax.tree.map(lambda a, b: jnp.where(accept, a, b), new, old)


def finite_part(kept: Any) -> Any:
    """An array as it is kept, zero where it is not finite: that could never be sent."""

    def of_data(x: jax.Array) -> jax.Array:
        return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))

    return (
        ScaledArray(of_data(kept.data), kept.scale)
        if is_scaled_array(kept)
        else of_data(kept)
    )


def stacked(part: Any, replicas: int) -> Any:
    """A tree, K times: every array [K, ...], scales of ScaledArrays as they are."""

    def of_array(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (replicas, *x.shape))

    return tree.map_arrays(
        lambda x: (
            ScaledArray(of_array(x.data), x.scale)
            if is_scaled_array(x)
            else of_array(x)
        ),
        part,
    )


def with_replicas(
    state: TrainState,
    trained: Callable[[Any], Any],
    diloco: DiLoCoSettings,
    storage: Storage,
) -> TrainState:
    """The first state of replicas, from that of a run without: all begin with its
    weights, and random keys differ.
    """
    packed = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (diloco.replicas, *x.shape)),
        (tree.pack(state.opt_state), state.scaling),
    )
    others = [
        state.key,
        *(jax.random.fold_in(state.key, k) for k in range(1, diloco.replicas)),
    ]
    states = TrainState(
        stacked(state.params, diloco.replicas), packed[0], jnp.stack(others), packed[1]
    )
    residuals_and_momentum = first_residuals(trained(state.params), diloco, storage)
    return TrainState(
        state.params,
        (),
        state.key,
        state.scaling,
        Replicas(states, *residuals_and_momentum),
    )


def first_residuals(
    params: Any, diloco: DiLoCoSettings, storage: Storage
) -> tuple[Any, Any]:
    """Residuals and outer momentum of these parameters before the first exchange, ()
    for what is not kept.
    """

    def zeros(p: Any, *axes: int) -> Any:
        return storage.store(
            jnp.zeros((*axes, *p.shape), jnp.float32), jnp.float32(2.0**-126)
        )

    residuals = (
        tree.map_arrays(lambda p: zeros(p, diloco.replicas), params)
        if diloco.feedback
        else ()
    )
    return residuals, tree.map_arrays(zeros, params) if diloco.momentum else ()


def with_residuals(
    state: TrainState,
    trained: Callable[[Any], Any],
    diloco: DiLoCoSettings,
    storage: Storage,
) -> TrainState:
    """A state of as many replicas, perhaps without feedback or momentum, as that of a
    run that has what `diloco` has.

    What it has not kept so far begins with zeros; what is not kept from now on is gone.
    """
    old: Replicas = state.diloco
    own = zip(
        (old.residuals, old.momentum),
        first_residuals(trained(state.params), diloco, storage),
        strict=True,
    )
    parts = [
        was if jax.tree.leaves(was) and jax.tree.leaves(new) else new
        for was, new in own
    ]
    return dataclasses.replace(state, diloco=Replicas(old.states, *parts))


def resized(state: TrainState, count: int) -> TrainState:
    """A state as checkpoints have it, of another number of replicas: the first ones
    stay as they are.

    One that is new has the outer weights, the optimiser's state of one of the others in
    turn, random keys of its own and nothing that rounding has lost; what that was of
    one that is gone is gone, too.
    """
    old: Replicas = state.diloco
    before = old.states.key.shape[0]
    index, is_new = np.arange(count) % before, np.arange(count) >= before

    def of_replicas(x: jax.Array) -> jax.Array:
        return x[index] if x.ndim else x

    def but_new(x: jax.Array, other: Any) -> jax.Array:
        return (
            jnp.where(is_new.reshape(-1, *(1,) * (x.ndim - 1)), other, x)
            if x.ndim
            else x
        )

    states = jax.tree.map(of_replicas, old.states)
    params = jax.tree.map(
        lambda x, outer: but_new(x, outer[None]) if x.ndim else x,
        states.params,
        state.params,
    )
    keys = [state.key, *(jax.random.fold_in(state.key, k) for k in range(1, count))]
    states = dataclasses.replace(states, params=params, key=jnp.stack(keys))
    residuals = jax.tree.map(
        lambda x: but_new(of_replicas(x), jnp.zeros((), x.dtype)), old.residuals
    )
    return dataclasses.replace(state, diloco=Replicas(states, residuals, old.momentum))


def with_params(state: TrainState, params: Any) -> TrainState:
    """A state with the same weights at other scales; those of its replicas get these
    too.
    """
    if not isinstance(state.diloco, Replicas):
        return dataclasses.replace(state, params=params)
    states = state.diloco.states
    alike = dataclasses.replace(
        states, params=tree.rescaled_like(states.params, params)
    )
    return dataclasses.replace(
        state, params=params, diloco=dataclasses.replace(state.diloco, states=alike)
    )


def with_moments_of_first(state: TrainState) -> TrainState:
    """A state as that of a run without replicas: the outer weights, and the first
    replica's optimiser.
    """
    if not isinstance(state.diloco, Replicas):
        return state
    moments = jax.tree.map(lambda x: x[0], state.diloco.states.opt_state)
    return TrainState(state.params, moments, state.key, state.scaling)


def make_inner(
    step: StepFn, mesh: Mesh, diloco: DiLoCoSettings
) -> Callable[[Any, Tokens, Hyper], tuple[Any, Metrics]]:
    """The step of all replicas: `(states, batch, hyper) -> (states, metrics)`.

    The batch is that of a run without replicas, [A, B, T+1]: replica k has the rows
    that device k of K would have. Metrics are means over the replicas that take part;
    `finite` says of all of them.
    """
    replicas = diloco.replicas
    # Traced into `shard_map` itself, constants that nothing reads become its arguments,
    # on which XLA has crashed.
    step = jax.jit(step)

    def rows_of_replicas(x_AxBxT1: jax.Array) -> jax.Array:
        accum, rows, length = x_AxBxT1.shape
        x = jnp.moveaxis(
            x_AxBxT1.reshape(accum, replicas, rows // replicas, length), 1, 0
        )
        return lax.with_sharding_constraint(
            x, NamedSharding(mesh, PartitionSpec(REPLICA, None, BATCH_AXES))
        )

    def of_replica(
        state: Any,
        batch: Tokens,
        number: jax.Array,
        takes_part: jax.Array,
        hyper: Hyper,
    ) -> Any:
        own = hyper._replace(seed=hyper.seed ^ (number * jnp.uint32(OF_REPLICA)))
        if diloco.participants == replicas:
            return step(state, batch, own)
        _, shapes = jax.eval_shape(step, state, batch, own)
        idle = {name: jnp.zeros(s.shape, s.dtype) for name, s in shapes.items()}
        return lax.cond(
            takes_part, lambda: step(state, batch, own), lambda: (state, idle)
        )

    def inner(states: Any, batch: Tokens, hyper: Hyper) -> tuple[Any, Metrics]:
        def of_device(
            states: Any,
            batch: Tokens,
            numbers: jax.Array,
            drawn: jax.Array,
            hyper: Hyper,
        ) -> Any:
            def turn(_: None, one: tuple[Any, ...]) -> tuple[None, Any]:
                state, rows, number, takes_part = one
                return None, of_replica(state, rows, number, takes_part, hyper)

            each = (states, batch, numbers, drawn)
            if len(numbers) > 1:
                return lax.scan(turn, None, each)[1]
            return jax.tree.map(
                lambda x: x[None], turn(None, jax.tree.map(lambda x: x[0], each))[1]
            )

        places = PartitionSpec(REPLICA)
        numbers, drawn = (
            jnp.arange(replicas, dtype=jnp.uint32),
            diloco.drawn(hyper.seed, hyper.step),
        )
        states, metrics = jax.shard_map(
            of_device,
            mesh=mesh,
            in_specs=(places, places, places, places, PartitionSpec()),
            out_specs=places,
            axis_names={REPLICA},
            check_vma=False,
        )(states, jax.tree.map(rows_of_replicas, batch), numbers, drawn, hyper)
        # added up in the same order wherever replicas lie
        everywhere = NamedSharding(mesh, PartitionSpec())
        return states, of_all(lax.with_sharding_constraint(metrics, everywhere), drawn)

    return inner


def of_all(metrics: Metrics, drawn: jax.Array) -> Metrics:
    """The figures of a row from those of the replicas, [K] each, of which some have
    taken part.
    """
    taking_part = {
        name: jnp.where(drawn, metrics[name], 0) for name in ("loss", "grad_norm")
    }
    figures = {
        name: functools.reduce(jnp.add, list(x)) / jnp.sum(drawn)
        for name, x in taking_part.items()
    }
    bad = jnp.max(jnp.where(drawn, metrics["bad_leaf"], -1))
    return {**figures, "finite": jnp.all(metrics["finite"] | ~drawn), "bad_leaf": bad}


def make_exchange(
    fragment: int,
    mesh: Mesh,
    roles: Any,
    diloco: DiLoCoSettings,
    storage: Storage,
    trained: Callable[[Any], Any],
    rounding: weights.Rounding,
) -> Callable[[TrainState, jax.Array, jax.Array], TrainState]:
    """The exchange of a fragment and what the outer optimiser makes of it:
    `(state, steps taken, seed) -> state`.

    Args:
      fragment: its number.
      mesh, roles: of the parameters that are trained, which say what of each a device
          has.
      diloco: how replicas agree.
      storage: of residuals and momentum.
      trained: the part of the parameters that is.
      rounding: of narrow outer weights.
    """

    def run(state: TrainState, step: jax.Array, seed: jax.Array) -> TrainState:
        old: Replicas = state.diloco
        outer, states = trained(state.params), old.states
        before, own = tree.leaves(outer), tree.leaves(trained(states.params))
        residuals, momenta = tree.leaves(old.residuals), tree.leaves(old.momentum)
        mine = fragments_of([p.size for p in before], diloco.fragments)[fragment]
        deltas = [weights.wide(before[i])[None] - weights.wide(own[i]) for i in mine]
        if diloco.feedback:
            deltas = [
                delta + weights.wide(residuals[i])
                for delta, i in zip(deltas, mine, strict=True)
            ]
        specs = jax.tree.leaves(of_parameters(outer, mesh, roles))
        parts = [specs[i] for i in mine]
        of_replicas = [PartitionSpec(REPLICA, *spec) for spec in parts]
        everywhere = PartitionSpec()
        means, lost, scales = over_devices(
            lambda deltas, seed, step: tuple(
                exchange(deltas, diloco, seed, step, mine)
            ),
            mesh,
            in_specs=(of_replicas, everywhere, everywhere),
            out_specs=(parts, of_replicas if diloco.feedback else [], everywhere),
        )(deltas, seed, step)
        # What is not finite changes nothing: the replicas go on from the outer weights,
        # and still have to send what earlier roundings lost.
        accept = jnp.all(jnp.stack([jnp.all(jnp.isfinite(mean)) for mean in means]))
        updates = means
        if diloco.momentum:
            speeds = [
                diloco.momentum * weights.wide(momenta[i]) + d
                for d, i in zip(means, mine, strict=True)
            ]
            updates = [
                d + diloco.momentum * speed
                for d, speed in zip(means, speeds, strict=True)
            ]
            for i, speed in zip(mine, speeds, strict=True):
                momenta[i] = one_of(accept, storage.store(speed), momenta[i])
        for j, i in enumerate(mine if diloco.feedback else []):
            residuals[i] = one_of(
                accept, storage.store(lost[j], scales[j]), finite_part(residuals[i])
            )
        new = weights.apply_updates(
            [before[i] for i in mine],
            [-diloco.lr * update for update in updates],
            rounding=rounding,
            seed=seed ^ jnp.uint32(OF_OUTER),
            step=step,
            accept=accept,
            numbers=mine,
        )
        for p, i in zip(new, mine, strict=True):
            before[i], own[i] = p, stacked(p, diloco.replicas)
        shape = jax.tree.structure(outer, is_leaf=is_scaled_array)
        build = lambda found: jax.tree.unflatten(shape, found) if found else ()
        states = dataclasses.replace(
            states, params=with_part(states.params, build(own))
        )
        return dataclasses.replace(
            state,
            params=with_part(state.params, build(before)),
            scaling=jax.tree.map(lambda x: jnp.max(x, axis=0), states.scaling),
            diloco=Replicas(states, build(residuals), build(momenta)),
        )

    return run


class DiLoCoStep:
    """A step of all replicas and the exchanges that are due after it; itself a
    `StepFn`.

    Attributes:
      inner: the compiled step of all replicas; see `make_inner`.
      exchanges: those of the fragments, compiled; see `make_exchange`.
      diloco: when which of them is due.
    """

    def __init__(
        self,
        inner: jax.stages.Compiled,
        exchanges: Sequence[jax.stages.Compiled],
        diloco: DiLoCoSettings,
    ) -> None:
        self.inner, self.exchanges, self.diloco = inner, tuple(exchanges), diloco

    def __call__(
        self, state: TrainState, batch: Tokens, hyper: Hyper
    ) -> tuple[TrainState, Metrics]:
        """The state after the step, exchanged where that is due, and its metrics.
        `hyper.step` is on the host.
        """
        replicas, metrics = self.inner(state.diloco.states, batch, hyper)
        state = dataclasses.replace(
            state, diloco=dataclasses.replace(state.diloco, states=replicas)
        )
        taken = int(hyper.step) + 1
        for fragment in self.diloco.due(taken):
            state = self.exchanges[fragment](state, np.int32(taken), hyper.seed)
        return state, metrics

    def as_text(self) -> str | None:
        """The program of the inner step."""
        return self.inner.as_text()

    def memory_analysis(self) -> Any:
        """Of the inner step, beside which the exchange is small: it holds a fragment in
        FP32.
        """
        return self.inner.memory_analysis()
