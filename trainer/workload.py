"""A training task, its data, and the functions that follow from the task: the state,
the compiled step.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from scalify_core.numerics import compiler_hints
from trainer.model import Model
from trainer.models.flops import flops_per_token, param_count
from trainer.models.model_functions import Params
from trainer.models.roles import select_roles
from trainer.parallel.diloco import DiLoCoSettings
from trainer.parallel.distribute import (
    CommConfig,
    GradReduceConfig,
    LossOfState,
    amax_over,
    gradient_over,
    loss_over,
    squared_norms_over,
)
from trainer.parallel.layerwise import fsdp_layer_comm
from trainer.parallel.leafwise import evaluate_leafwise
from trainer.parallel.mesh import replicated
from trainer.parallel.replicas import (
    DiLoCoStep,
    OuterOptimizer,
    Storage,
    make_inner_step,
    make_sync,
    with_outer_state,
    with_replica_count,
    with_replicas,
)
from trainer.parallel.sharding import abstract_arrays, shardings
from trainer.precision.arrays import (
    ASSUMED_SCALE,
    abstract_weights,
    kahan_compensation,
    store_weights,
)
from trainer.precision.fields import DTYPES
from trainer.precision.policy import Policy
from trainer.step.clip_and_decay import optimizer_chain
from trainer.step.evaluate import make_eval_step
from trainer.step.moments import stacks_of, with_moment_storage
from trainer.step.optimizers import Optimizer
from trainer.step.packing import pack
from trainer.step.stacking import NO_STACKS, Stacks
from trainer.step.state import TrainState
from trainer.step.state_tree import subtree_like
from trainer.step.step import (
    OptimizerSetup,
    StepInputs,
    Tokens,
    make_train_step,
)
from trainer.step.xla_flags import (
    KernelChoice,
    gpu_options,
    has_constant_fp8_scales,
    marked_attention,
    takes_any_layout,
)

if TYPE_CHECKING:  # its tokenizers take long to import
    from trainer.data.dataset import Dataset


class JittedAsStep:
    """A jitted function that is traced and compiled in a task's context."""

    def __init__(
        self, task: "TrainTask", fun: Callable[..., Any], settings: dict[str, Any]
    ) -> None:
        """Use `TrainTask.jit`."""

        # A function of its own: its name can be set without changing `fun`.
        def traced(*args: Any) -> Any:
            return fun(*args)

        # The name of the program in profiles; a partial has none.
        traced.__name__ = getattr(fun, "func", fun).__name__
        self._jitted: Any = jax.jit(
            traced, compiler_options=task.compiler_options, **settings
        )
        self._tracing = task.tracing

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        # At each call, because a batch of another shape is traced anew.
        with self._tracing():
            return self._jitted(*args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Trace and lower the function."""
        with self._tracing():
            return self._jitted.lower(*args)


class TrainTask(NamedTuple):
    """The inputs of the compiled step: model, optimizer, mesh; not the data.

    Attributes:
      model: in its precision.
      optimizer_settings: the optimizer; its learning rate is not read.
      mesh: of the devices that the step is compiled for.
      reduce: how gradients are reduced over them.
      kernels: how XLA chooses GPU kernels.
      trainable: names of what is trained, see `roles.select_roles`; empty: all. The
        rest has neither gradient nor moments.
      diloco: settings of the replicas; None: there is one, and no sync.
    """

    model: Model
    optimizer_settings: Optimizer
    mesh: Mesh
    reduce: GradReduceConfig = GradReduceConfig()
    kernels: KernelChoice = KernelChoice.CACHED
    trainable: tuple[str, ...] = ()
    diloco: DiLoCoSettings | None = None

    @property
    def trained_roles(self) -> Params:
        """The roles of what is trained. UserError: a name of `trainable` matches
        nothing.
        """
        if not self.trainable:
            return self.model.roles
        return select_roles(self.model.roles, self.trainable)

    def select_trained(self, params: Params) -> Params:
        """Return the trained part of parameters, or of a tree like them."""
        return subtree_like(params, self.trained_roles)

    def optimizer(
        self, seed: Any = 0, stacks: Stacks = NO_STACKS
    ) -> optax.GradientTransformationExtraArgs:
        """Return the optimizer, with its moments stored as the precision says.

        Args:
          seed: of stochastic rounding; the first state needs none.
          stacks: of the parameters that it is given.
        """
        settings = self.optimizer_settings
        plain = optimizer_chain(settings, stacks.stack(self.trained_roles))
        return with_moment_storage(plain, settings.name, self.model.policy, seed)

    def stacks(self, params: Params) -> Stacks:
        """Return the small parameters that a step updates together.

        There are none where devices hold parts. `params` may be shapes.
        """
        if self.mesh.shape["fsdp"] * self.mesh.shape["tensor"] > 1:
            return NO_STACKS
        return stacks_of(
            self.select_trained(params),
            self.trained_roles,
            self.optimizer_settings.name,
            self.model.policy,
        )

    def in_precision(self, policy: Policy) -> "TrainTask":
        """Return the task in another precision."""
        model = self.model
        return self._replace(
            model=Model.make(
                model.spec, policy, model.rows, loss_boundary_id=model.loss_boundary_id
            )
        )

    @property
    def comm(self) -> CommConfig:
        """The formats of what the devices send each other."""
        return CommConfig(self.reduce, self.model.cast_for_all_gather, self.model.roles)

    @property
    def gathers_by_layer(self) -> bool:
        """Whether devices gather the layers' weights one by one: scanned layers that
        the backward pass recomputes.
        """
        spec = self.model.spec
        is_split = self.mesh.shape["fsdp"] > 1
        # Only a scan reuses the memory of a layer's weights, and only recomputation
        # gathers them again for the backward pass.
        return is_split and spec.scan_layers and spec.remat == "block"

    def on_mesh(self, micro_batches: int | None = None) -> tuple[Model, CommConfig]:
        """Return the model for this mesh, and what its devices send each other.

        `micro_batches`: see `Model.on`.
        """
        model, comm = self.model.on(self.mesh, micro_batches), self.comm
        if not self.gathers_by_layer:
            return model, comm
        comm = comm._replace(gathers_by_layer=True)
        layer_comm = fsdp_layer_comm(
            self.model.training.shapes,
            self.mesh,
            comm,
            is_scaled=self.model.policy.scaled,
        )
        return model._replace(layer_comm=layer_comm), comm

    @property
    def compiler_options(self) -> dict[str, Any] | None:
        """XLA's options for all programs of the task; None: the defaults."""
        is_gpu = self.mesh.devices.flat[0].platform == "gpu"
        if is_gpu:
            return gpu_options(self.model.policy, self.kernels)
        return None

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Enter the context in which programs are traced and compiled with
        `compiler_options`.

        Equal FP8 products become one kernel, and attention sums in one order.
        """
        with contextlib.ExitStack() as contexts:
            if has_constant_fp8_scales(self.model.policy):
                contexts.enter_context(compiler_hints.scales_in_products(True))
            if self.mesh.devices.flat[0].platform == "gpu":
                # XLA would mark only the first of equal calls as deterministic, and the
                # first step would fail.
                contexts.enter_context(marked_attention(self.kernels))
            if takes_any_layout(self.mesh.devices.flat[0]):
                # On such GPUs a transposed operand needs no copy.
                contexts.enter_context(compiler_hints.products_in_any_layout(True))
            yield

    def jit(self, fun: Callable[..., Any], **settings: Any) -> "JittedAsStep":
        """Return `jax.jit(fun, **settings)`, traced and compiled as the step is."""
        return JittedAsStep(self, fun, settings)

    @property
    def outer_optimizer(self) -> OuterOptimizer:
        """DiLoCo's optimizer. Its state is stored as the weights are."""
        assert self.diloco is not None
        policy = self.model.policy
        storage = Storage(DTYPES[policy.weights], policy.scaled)
        return OuterOptimizer(self.diloco, storage, self.trained_roles, policy.rounding)

    def with_replicas(self, state: TrainState) -> TrainState:
        """Return the state of this task's replicas before the first step, from that of
        the task without DiLoCo.
        """
        # Without replicas the state has no such axis.
        if self.diloco is None:
            return state
        return with_replicas(state, self.outer_optimizer)

    def convert_replicas(self, state: TrainState) -> TrainState:
        """Return a state for this task's replicas, from one of another DiLoCo run."""
        outer = self.outer_optimizer
        state = with_replica_count(state, outer.settings.num_replicas)
        return with_outer_state(state, outer)

    @property
    def frozen_layers(self) -> frozenset[str]:
        """Paths of the linear layers whose kernels are not trained."""

        def layers(roles: Params) -> set[str]:
            leaves = jax.tree.leaves(roles)
            return {role.layer for role in leaves if role.is_kernel and role.layer}

        # Their weight gradients are not computed, so they count fewer FLOPs.
        return frozenset(layers(self.model.roles) - layers(self.trained_roles))

    @property
    def flops_per_token(self) -> int:
        """FLOPs of a token's training step, see `flops`."""
        return flops_per_token(self.model.spec, self.frozen_layers)

    @property
    def parameters(self) -> int:
        """The number of parameters, without padding rows."""
        return param_count(self.model.spec)


class Workload(NamedTuple):
    """A task, the data that it is trained on, and the seed of both."""

    task: TrainTask
    data: "Dataset"
    seed: int

    @property
    def model(self) -> Model:
        """The model that the task trains."""
        return self.task.model

    @property
    def mesh(self) -> Mesh:
        """The mesh that the task is compiled for."""
        return self.task.mesh


def jitted_eval_step(task: TrainTask) -> Any:
    """Return `(state, batch) -> loss` on the mesh; see `evaluate.make_eval_step`."""
    model, comm = task.on_mesh()
    loss: LossOfState = model.eval_loss
    # One device needs no shard_map.
    if task.mesh.size > 1:
        loss = loss_over(task.mesh, comm, loss)
    # Every process reads the loss, so each has a copy.
    return task.jit(make_eval_step(loss), out_shardings=replicated(task.mesh))


def first_state(
    task: TrainTask,
    seed: int,
    replace: Callable[[Params], Params] = lambda params: params,
) -> TrainState:
    """Return the first state on the mesh.

    Args:
      task: what is trained.
      seed: of the parameters and of the state's key.
      replace: takes the FP32 parameters, and may return others, placed alike.
    """

    def initial() -> tuple[Params, jax.Array]:
        # The step's key is stored in the state: dropout and rounding repeat after a
        # resume.
        init_key, step_key = jax.random.split(jax.random.key(seed))
        return task.model.training.init(init_key), step_key

    place = functools.partial(shardings, mesh=task.mesh, roles=task.model.roles)
    # One jitted program took 67 s of processor time for the random numbers of a GPT-2
    # 774M on a GPU.
    params, key = evaluate_leafwise(initial, place=place)
    # Not inside jit: given weights are read from files, and scales from the device.
    exact = replace(params)
    policy = task.model.policy
    params = store_weights(exact, policy)
    # From the FP32 weights: what their storage rounds off is the first error to feed
    # back.
    compensation = kahan_compensation(
        task.select_trained(exact), task.select_trained(params), policy
    )

    def with_moments(params: Params, key: jax.Array, compensation: Any) -> TrainState:
        moments = task.optimizer().init(task.select_trained(params))
        scaling = task.model.differentiate().init()
        return task.with_replicas(
            TrainState(params, moments, key, scaling, kahan_compensation=compensation)
        )

    state: TrainState = evaluate_leafwise(
        with_moments, params, key, compensation, place=place
    )
    return state


def abstract_state(task: TrainTask, scale: float | None = None) -> TrainState:
    """Return shapes, dtypes and shardings of the state; nothing is allocated.

    `scale`: of all parameters, in the form for training. None: in the form for
    checkpoints, where scales are arrays.
    """

    def initial() -> TrainState:
        # Any seed: shapes alone are computed.
        params, key = task.model.training.init(jax.random.key(0)), jax.random.key(0)
        return TrainState(params, None, key, task.model.differentiate().init())

    state = jax.eval_shape(initial)
    params = abstract_weights(state.params, task.model.policy, scale)
    compensation = jax.eval_shape(
        lambda p: kahan_compensation(p, p, task.model.policy),
        task.select_trained(state.params),
    )
    init = task.optimizer().init
    # In training the scales of moments are one array.
    opt_state = jax.eval_shape(
        lambda p: pack(init(p)) if scale else init(p), task.select_trained(params)
    )
    state = TrainState(
        params, opt_state, state.key, state.scaling, kahan_compensation=compensation
    )
    with_replicas = jax.eval_shape(task.with_replicas, state)
    return abstract_arrays(with_replicas, task.mesh, task.model.roles)


def compile_step(
    task: TrainTask, batch: Tokens, state: TrainState | None = None
) -> jax.stages.Compiled | DiLoCoStep:
    """Compile the train step for batches like `batch`; it donates the state.

    `state`: see `lower_step`.
    """
    options = task.compiler_options
    with task.tracing():  # of several devices, the parts of a kernel are lowered here
        step = lower_step(task, batch, state).compile(compiler_options=options)
    if task.diloco is None:
        return step
    syncs = [
        lower_sync(task, fragment, state).compile(compiler_options=options)
        for fragment in range(task.diloco.fragments)
    ]
    return DiLoCoStep(step, syncs, task.diloco)


def lower_sync(
    task: TrainTask, fragment: int, state: TrainState | None = None
) -> jax.stages.Lowered:
    """Trace the sync of a DiLoCo fragment; see `make_sync`."""
    like = _abstract_for_training(task, state)
    sync = make_sync(fragment, task.mesh, task.outer_optimizer)
    scalars = (jax.ShapeDtypeStruct((), dtype) for dtype in (np.int32, np.uint32))
    placed = jax.tree.map(lambda x: x.sharding, like)
    return jax.jit(sync, donate_argnums=0, out_shardings=placed).lower(like, *scalars)


def lower_step(
    task: TrainTask, batch: Tokens, state: TrainState | None = None
) -> jax.stages.Lowered:
    """Trace the train step.

    The scales of the parameters of `state` are constants of the program; without a
    state a scale is assumed.
    """
    # With a state, its scales: they are constants of the program, and another scale is
    # another program.
    like = _abstract_for_training(task, state)
    stacks = task.stacks(like.params)
    model, comm = task.on_mesh(len(batch.tokens_AxBxT1))
    step = make_train_step(
        model.differentiate(),
        OptimizerSetup(
            make_optimizer=lambda seed: task.optimizer(seed, stacks),
            select_trained=task.select_trained,
            store_gradients=task.model.store_gradients,
            rounding=task.model.policy.rounding,
            stacks=stacks,
        ),
        accumulate_gradients=gradient_over(task.mesh, comm),
        squared_norms=squared_norms_over(task.mesh, task.trained_roles),
        amax=amax_over(task.mesh, comm.roles),
    )
    if task.diloco is not None:
        assert like.diloco is not None
        step, like = make_inner_step(step, task.mesh, task.diloco), like.diloco.states
    # The same shardings out as in, or the next step could not take the state.
    placed = jax.tree.map(lambda x: x.sharding, like)
    # Donated: two states would need twice the memory.
    jitted = jax.jit(
        step, donate_argnums=0, out_shardings=(placed, replicated(task.mesh))
    )
    # Shapes, not values: a rate that was a constant would compile every step anew.
    scalars: Any = [
        jax.ShapeDtypeStruct((), dtype) for dtype in (np.float32, np.int32, np.uint32)
    ]
    with task.tracing():
        return jitted.lower(like, batch, StepInputs(*scalars))


def _abstract_for_training(task: TrainTask, state: TrainState | None) -> TrainState:
    if state is None:
        return abstract_state(task, ASSUMED_SCALE)
    return abstract_arrays(state, task.mesh, task.model.roles)
