"""What is trained, on what, and the functions that follow from that alone: the state,
the compiled step, samples.
"""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from scalify_core import asarray, lowering, tree
from scalify_core.stacks import NONE as NO_STACKS
from scalify_core.stacks import Stacks
from trainer.models.family import Family, Spec, param_count
from trainer.models.flops import flops_per_token
from trainer.models.functional import Functional, Params, of_next_tokens
from trainer.models.roles import Role, chosen, role_of
from trainer.parallel.diloco import DiLoCoSettings
from trainer.parallel.distribute import (
    CommConfig,
    LossOfState,
    Reduce,
    gradient_over,
    largest_over,
    loss_over,
    squares_over,
)
from trainer.parallel.mesh import devices_of_replica, replicated
from trainer.parallel.replicas import (
    DiLoCoStep,
    Kept,
    make_exchange,
    make_inner,
    resized,
    with_kept,
    with_replicas,
)
from trainer.parallel.sharding import abstract, shardings
from trainer.precision.arrays import (
    ASSUMED_SCALE,
    abstract_weights,
    dot_general_for,
    first_lost,
    for_allgather,
    skipped_matmuls,
    store_weights,
)
from trainer.precision.gradients import Differentiate, store_gradients
from trainer.precision.policy import DTYPES, Policy
from trainer.step.evaluate import make_eval_step
from trainer.step.kernels import Kernels, gpu_options, takes_scales
from trainer.step.moments import stacks_of, store_moments
from trainer.step.optimizer import OptimizerFor
from trainer.step.state import TrainState
from trainer.step.state_tree import part_of
from trainer.step.step import Gradient, Hyper, Tokens, make_train_step, mean_gradient

if TYPE_CHECKING:  # whose tokenizers a plan and a benchmark can do without
    from trainer.data.dataset import Dataset


class Model(NamedTuple):
    """A model in a precision.

    Attributes:
      training: with the matmuls of the policy.
      sampling: the same parameters, every matmul in `policy.logical`: products of one
        token are too small for FP8. What only serves to round well is folded away.
      narrow: paths of the linear layers whose matmuls are narrower than the rest.
      skipped: why the other linear layers are not, by path.
      rows: tokens that a device's linear layers take at once in training; None: some
          multiple of 16.
      border: the id after which a document begins, whose first token is then no target;
          None: every token is one.
    """

    spec: Spec
    policy: Policy
    training: Functional
    sampling: Functional
    narrow: list[str]
    skipped: dict[str, str]
    rows: int | None
    border: int | None = None

    @classmethod
    def make(
        cls,
        spec: Spec,
        policy: Policy,
        rows: int | None = None,
        split: str | None = None,
        *,
        store_gradients: bool = False,
        border: int | None = None,
    ) -> Self:
        """The model of a precision. UserError for a pattern of layers that matches
        none.

        `split`: the mesh axis over which the training model's heads and hidden channels
        are; see `Family.build`. `store_gradients`: see `dot_general_for`.
        """
        family = spec.family()
        sizes = family.linear_sizes(spec)
        skipped = skipped_matmuls(policy, sizes, rows)
        narrow = [path for path in sizes if path not in skipped]
        dots = dot_general_for(
            policy,
            narrow,
            keep_weights=spec.keep_fp8_weights,
            store_gradients=store_gradients,
        )
        training = family.build(
            spec,
            compute_dtype=policy.logical,
            dot_general=dots,
            rescale_grads=policy.rescaled_places,
            split=split,
        )
        sampling = family.build(spec.folded(), compute_dtype=policy.logical)
        return cls(spec, policy, training, sampling, narrow, skipped, rows, border)

    def loss(
        self,
        params: Params,
        tokens: jax.Array,
        segments: jax.Array | None,
        keys_B: jax.Array | None,
        histories: Params | None = None,
    ) -> jax.Array:
        """Mean next-token loss of `tokens` [B, T+1] in nats, of logical values; dropout
        with `keys`, none without.
        """
        segments = None if segments is None else segments[:, :-1]
        model = self.training.bind(params, histories)
        dropout = {"dropout_keys_B": keys_B} if self.spec.dropout else {}
        return of_next_tokens(
            lambda *batch, **how: model.loss(*batch, segments, **dropout, **how),
            tokens,
            self.border,
        )

    def again(self, **how: Any) -> "Model":
        """The same model, made in another way; see `make`."""
        return Model.make(self.spec, self.policy, self.rows, border=self.border, **how)

    def on(self, mesh: Mesh, micro_batches: int | None = None) -> "Model":
        """What each device of the mesh computes with its parameters, in a step of so
        many micro-batches, or else.
        """
        if devices_of_replica(mesh) == micro_batches == 1 and self.spec.scan_layers:
            # Gradients that nothing is added to are rounded in the loop over the
            # layers, which then stacks bytes.
            return self.again(store_gradients=True)
        return self if mesh.shape["tensor"] == 1 else self.again(split="tensor")

    def eval_loss(
        self, state: TrainState, tokens: jax.Array, segments: jax.Array | None
    ) -> jax.Array:
        """The loss in the run's precision, without dropout, of the weights in a
        state.
        """
        method = self.policy.method
        loss = method.through(self.loss, self.policy)
        return asarray(
            loss(
                state.params, tokens, segments, None, **method.arguments(state.scaling)
            )
        )

    def differentiate(self) -> Differentiate:
        """The loss and its gradient in the run's precision."""
        return self.policy.method.differentiate(
            self.loss, self.policy, self.training.init_histories
        )

    @property
    def family(self) -> Family:
        """The family that the model's spec is of."""
        return self.spec.family()

    @property
    def roles(self) -> Params:
        """The roles of the parameters, in their nested dictionaries."""
        return self.training.roles

    def is_narrow(self, role: Role | None) -> bool:
        """Return whether a role is that of the kernel of a layer whose matmuls are
        narrower than the rest.
        """
        return role is not None and role.is_kernel and role.layer in self.narrow

    def for_allgather(self, role: Role, p: Any) -> Any:
        """A parameter in the form in which devices send it each other."""
        kernel, narrow = role.is_kernel, self.is_narrow(role)
        return for_allgather(
            p, self.policy, kernel=kernel, narrow=narrow, factor=role.scaled_rows
        )

    def store_gradients(self, grads: Any) -> Any:
        """The gradients as they go to the optimiser."""
        return store_gradients(
            grads, self.policy, lambda path: self.is_narrow(role_of(self.roles, path))
        )


class TrainTask(NamedTuple):
    """Everything that the compiled step depends on: model, optimizer, mesh; not the
    data.

    Attributes:
      model: in its precision.
      optimizer_name: of `step.optimizers.ENTRIES`.
      plain_optimizer: makes it from the parameters' roles, at a learning rate of one.
      mesh: of the devices that the step is compiled for.
      reduce: how gradients are reduced over them.
      kernels: how the compiler chooses them on a GPU.
      trainable: what is trained, see `roles.chosen`; empty: all. The rest has neither
          gradient nor moments.
      diloco: how replicas train apart; None: there is one, and no exchange.
    """

    model: Model
    optimizer_name: str
    plain_optimizer: OptimizerFor
    mesh: Mesh
    reduce: Reduce = Reduce()
    kernels: Kernels = Kernels.KEPT
    trainable: tuple[str, ...] = ()
    diloco: DiLoCoSettings | None = None

    @property
    def trained_roles(self) -> Params:
        """The roles of what is trained. UserError where a name of `trainable` stands
        for nothing.
        """
        return (
            chosen(self.model.roles, self.trainable)
            if self.trainable
            else self.model.roles
        )

    def trained(self, params: Params) -> Params:
        """The part of parameters, or of a tree like them, that is trained."""
        return part_of(params, self.trained_roles)

    def optimizer(
        self, seed: Any = 0, stacks: Stacks = NO_STACKS
    ) -> optax.GradientTransformationExtraArgs:
        """The optimiser of what is trained, its moments stored as the precision says;
        first states need no seed.

        `stacks`: of the parameters that it is given.
        """
        plain = self.plain_optimizer(stacks.gather(self.trained_roles))
        return store_moments(plain, self.optimizer_name, self.model.policy, seed)

    def stacks(self, params: Params) -> Stacks:
        """The small parameters (or their shapes) that a step updates together; none
        where devices have parts.
        """
        if self.mesh.shape["fsdp"] * self.mesh.shape["tensor"] > 1:
            return NO_STACKS
        return stacks_of(
            self.trained(params),
            self.trained_roles,
            self.optimizer_name,
            self.model.policy,
        )

    def in_precision(self, policy: Policy) -> "TrainTask":
        """The same in another precision."""
        return self._replace(
            model=Model.make(
                self.model.spec, policy, self.model.rows, border=self.model.border
            )
        )

    @property
    def compiler_options(self) -> dict[str, Any] | None:
        """What the compiler is told of every program of this task, of the step as of
        the validation; None: nothing.
        """
        is_gpu = self.mesh.devices.flat[0].platform == "gpu"
        return gpu_options(self.model.policy, self.kernels) if is_gpu else None

    def traced_as_the_step(self) -> contextlib.AbstractContextManager[None]:
        """Inside, FP8 products are traced as `compiler_options` wants them: equal ones
        become one kernel.
        """
        return (
            lowering.scales_in_products()
            if takes_scales(self.model.policy)
            else contextlib.nullcontext()
        )

    def jit(self, fun: Callable[..., Any], **settings: Any) -> Any:
        """`jax.jit(fun, **settings)` for what is computed beside the step: traced and
        compiled as the step is.
        """

        def traced(*args: Any) -> Any:
            with self.traced_as_the_step():
                return fun(*args)

        # the program's, in profiles
        traced.__name__ = getattr(fun, "func", fun).__name__
        return jax.jit(traced, compiler_options=self.compiler_options, **settings)

    @property
    def kept(self) -> Kept:
        """How what DiLoCo adds to the state is stored: as the weights are."""
        return Kept(DTYPES[self.model.policy.weights], self.model.policy.scaled)

    def with_replicas(self, state: TrainState) -> TrainState:
        """The first state of this task, from that of a task without DiLoCo."""
        return (
            state
            if self.diloco is None
            else with_replicas(state, self.trained, self.diloco, self.kept)
        )

    def with_replicas_of(self, state: TrainState) -> TrainState:
        """A state of this task, from that of one with other replicas, feedback or
        momentum.
        """
        assert self.diloco is not None
        return with_kept(
            resized(state, self.diloco.replicas), self.trained, self.diloco, self.kept
        )

    @property
    def frozen_layers(self) -> frozenset[str]:
        """The linear layers whose kernels are not trained, by path."""
        every, trained = map(jax.tree.leaves, (self.model.roles, self.trained_roles))
        layers, moved = (
            {role.layer for role in roles if role.is_kernel and role.layer}
            for roles in (every, trained)
        )
        return frozenset(layers - moved)

    @property
    def flops_per_token(self) -> int:
        """FLOPs of a token's training step, see `flops`."""
        return flops_per_token(self.model.spec, self.frozen_layers)

    @property
    def parameters(self) -> int:
        """How many parameters there are, without rows that nothing reads."""
        return param_count(self.model.spec)


class Workload(NamedTuple):
    """A task, the data that it is trained on, and the seed of both: everything but the
    run directory.
    """

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


def comm_config_of(task: TrainTask) -> CommConfig:
    """What the devices of a task send each other."""
    return CommConfig(*task.reduce, task.model.for_allgather, task.model.roles)


def gradient_of(task: TrainTask) -> Gradient:
    """The gradient of micro-batches on the mesh."""
    return (
        mean_gradient
        if devices_of_replica(task.mesh) == 1
        else gradient_over(task.mesh, comm_config_of(task))
    )


def eval_loss_of(task: TrainTask) -> LossOfState:
    """`Model.eval_loss` on the mesh."""
    loss = task.model.on(task.mesh).eval_loss
    return (
        loss
        if task.mesh.size == 1
        else loss_over(task.mesh, comm_config_of(task), loss)
    )


def jitted_eval_step(task: TrainTask) -> Any:
    """`(state, batch) -> loss` on the mesh, compiled as the step is; see
    `evaluate.make_eval_step`.
    """
    step = make_eval_step(eval_loss_of(task))
    return task.jit(step, out_shardings=replicated(task.mesh))


def first_state(
    task: TrainTask,
    seed: int,
    replace: Callable[[Params], Params] = lambda params: params,
) -> TrainState:
    """The first state on the mesh, from the seed alone; `replace` may give other FP32
    parameters, placed alike.
    """

    def initial() -> tuple[Params, jax.Array]:
        init_key, step_key = jax.random.split(jax.random.key(seed))
        return task.model.training.init(init_key), step_key

    params, key = jax.jit(
        initial,
        out_shardings=shardings(jax.eval_shape(initial), task.mesh, task.model.roles),
    )()
    exact = replace(params)
    params = store_weights(exact, task.model.policy)
    lost = first_lost(task.trained(exact), task.trained(params), task.model.policy)

    def rest(params: Params, key: jax.Array, lost: Any) -> TrainState:
        moments = task.optimizer().init(task.trained(params))
        scaling = task.model.differentiate().init()
        return task.with_replicas(
            TrainState(params, moments, key, scaling, kahan_compensation=lost)
        )

    placed = shardings(
        jax.eval_shape(rest, params, key, lost), task.mesh, task.model.roles
    )
    return jax.jit(rest, out_shardings=placed)(params, key, lost)


def abstract_state(task: TrainTask, scale: float | None = None) -> TrainState:
    """Shapes, dtypes and shardings of the state; nothing is allocated.

    `scale`: of all parameters, in the form for training; None: in that for checkpoints,
    where scales are arrays.
    """

    def initial() -> TrainState:
        params, key = task.model.training.init(jax.random.key(0)), jax.random.key(0)
        return TrainState(params, None, key, task.model.differentiate().init())

    state = jax.eval_shape(initial)
    params = abstract_weights(state.params, task.model.policy, scale)
    lost = jax.eval_shape(
        lambda p: first_lost(p, p, task.model.policy), task.trained(state.params)
    )
    init = task.optimizer().init
    opt_state = jax.eval_shape(
        lambda p: tree.pack(init(p)) if scale else init(p), task.trained(params)
    )
    state = TrainState(
        params, opt_state, state.key, state.scaling, kahan_compensation=lost
    )
    whole = jax.eval_shape(task.with_replicas, state)
    return abstract(whole, task.mesh, task.model.roles)


def compile_step(
    task: TrainTask, batch: Tokens, state: TrainState | None = None
) -> jax.stages.Compiled | DiLoCoStep:
    """The train step for batches like `batch`, compiled once; the state is donated."""
    step = lower_step(task, batch, state).compile(
        compiler_options=task.compiler_options
    )
    if task.diloco is None:
        return step
    exchanges = [
        lower_exchange(task, fragment, state).compile(
            compiler_options=task.compiler_options
        )
        for fragment in range(task.diloco.fragments)
    ]
    return DiLoCoStep(step, exchanges, task.diloco)


def lower_exchange(
    task: TrainTask, fragment: int, state: TrainState | None = None
) -> jax.stages.Lowered:
    """The exchange of a fragment of a task with DiLoCo, traced as `lower_step` is; see
    `make_exchange`.
    """
    assert task.diloco is not None
    like = abstract_like(task, state)
    policy, roles = task.model.policy, task.trained_roles
    run = make_exchange(
        fragment,
        task.mesh,
        roles,
        task.diloco,
        task.kept,
        task.trained,
        policy.rounding,
    )
    scalars = (jax.ShapeDtypeStruct((), dtype) for dtype in (np.int32, np.uint32))
    return jax.jit(
        run, donate_argnums=0, out_shardings=jax.tree.map(lambda x: x.sharding, like)
    ).lower(like, *scalars)


def abstract_like(task: TrainTask, state: TrainState | None) -> TrainState:
    """The shapes of a state in the form for training, of which the scales are assumed
    where there is none.
    """
    return (
        abstract_state(task, ASSUMED_SCALE)
        if state is None
        else abstract(state, task.mesh, task.model.roles)
    )


def lower_step(
    task: TrainTask, batch: Tokens, state: TrainState | None = None
) -> jax.stages.Lowered:
    """The train step, traced; the scales of the parameters of `state` are constants of
    it, without one assumed.
    """
    policy, like = task.model.policy, abstract_like(task, state)
    stacks = task.stacks(like.params)
    step = make_train_step(
        task.model.on(task.mesh, len(batch.tokens_AxBxT1)).differentiate(),
        lambda seed: task.optimizer(seed, stacks),
        store_gradients=task.model.store_gradients,
        rounding=policy.rounding,
        gradient=gradient_of(task),
        squares_of=squares_over(task.mesh, task.trained_roles),
        largest_of=largest_over(task.mesh, task.model.roles),
        stacks=stacks,
        trained=task.trained,
    )
    if task.diloco is not None:
        step, like = make_inner(step, task.mesh, task.diloco), like.diloco.states
    placed = jax.tree.map(lambda x: x.sharding, like)
    jitted = jax.jit(
        step, donate_argnums=0, out_shardings=(placed, replicated(task.mesh))
    )
    scalars: Any = [
        jax.ShapeDtypeStruct((), dtype) for dtype in (np.float32, np.int32, np.uint32)
    ]
    with task.traced_as_the_step():
        return jitted.lower(like, batch, Hyper(*scalars))
