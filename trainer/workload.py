"""What is trained, on what, and the functions that follow from that alone: the state, the compiled step, samples."""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from scalify_core import asarray, lowering, tree, weights
from scalify_core.stacks import NONE as NO_STACKS
from scalify_core.stacks import Stacks
from trainer.models.family import Family, LanguageModel, Spec, param_count
from trainer.models.flops import flops_per_token
from trainer.models.functional import Functional, Params
from trainer.models.roles import Role, chosen, role_of
from trainer.models.sampling import Generator
from trainer.parallel.distribute import LossOfState, Reduce, Wire, gradient_over, largest_over, loss_over, squares_over
from trainer.parallel.mesh import on_one_device, replicated
from trainer.parallel.sharding import abstract, shardings
from trainer.precision.arrays import (
    ASSUMED_SCALE,
    abstract_weights,
    dot_general_for,
    in_transit,
    skipped_matmuls,
    store_weights,
)
from trainer.precision.gradients import Differentiate, store_gradients
from trainer.precision.policy import Policy
from trainer.step.evaluate import make_eval_step
from trainer.step.kernels import Kernels, gpu_options, takes_scales
from trainer.step.leaves import part_of
from trainer.step.moments import convert_moments, stacks_of, store_moments
from trainer.step.nonfinite import first_nonfinite
from trainer.step.optimizer import OptimizerFor
from trainer.step.state import TrainState
from trainer.step.step import Gradient, Hyper, Tokens, make_train_step, mean_gradient, sequence_keys

if TYPE_CHECKING:  # whose tokenizers a plan and a benchmark can do without
    from trainer.data import Tokenizer
    from trainer.data.dataset import Dataset


class Model(NamedTuple):
    """A model in a precision.

    Attributes:
      training: with the matmuls of the policy.
      sampling: the same parameters, every matmul in `policy.logical`: products of one token are too small for FP8. What
        only serves to round well is folded away.
      narrow: paths of the linear layers whose matmuls are narrower than the rest.
      skipped: why the other linear layers are not, by path.
      rows: tokens that a device's linear layers take at once in training; None: some multiple of 16.
      border: the id after which a document begins, whose first token is then no target; None: every token is one.
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
        """The model of a precision. UserError for a pattern of layers that matches none.

        `split`: the mesh axis over which the training model's heads and hidden channels are; see `Family.build`.
        `store_gradients`: see `dot_general_for`.
        """
        family = spec.family()
        sizes = family.linear_sizes(spec)
        skipped = skipped_matmuls(policy, sizes, rows)
        narrow = [path for path in sizes if path not in skipped]
        dots = dot_general_for(policy, narrow, keep_weights=spec.keep_fp8_weights, store_gradients=store_gradients)
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
        """Mean next-token loss of `tokens` [B, T+1] in nats, of logical values; dropout with `keys`, none without."""
        segments = None if segments is None else segments[:, :-1]
        model = self.training.bind(params, histories)
        dropout = {"dropout_keys_B": keys_B} if self.spec.dropout else {}
        if self.border is None:
            return model.loss(tokens[:, :-1], tokens[:, 1:], segments, **dropout)
        inside = tokens[:, :-1] != self.border
        loss = model.loss(tokens[:, :-1], jnp.where(inside, tokens[:, 1:], -1), segments, masked=True, **dropout)
        # A token's gradient is the same on every device and in every batch; the value is the mean of what is counted.
        return loss + jax.lax.stop_gradient(loss * (1 / jnp.maximum(jnp.mean(inside, dtype=jnp.float32), 1e-9) - 1))

    def on(self, mesh: Mesh, micro_batches: int | None = None) -> "Model":
        """What each device of the mesh computes with its parameters, in a step of so many micro-batches, or else."""
        if mesh.size == micro_batches == 1 and self.spec.scan_layers:
            # Gradients that nothing is added to are rounded in the loop over the layers, which then stacks bytes.
            return Model.make(self.spec, self.policy, self.rows, store_gradients=True, border=self.border)
        split = mesh.shape["tensor"] > 1
        return Model.make(self.spec, self.policy, self.rows, "tensor", border=self.border) if split else self

    def eval_loss(self, state: TrainState, tokens: jax.Array, segments: jax.Array | None) -> jax.Array:
        """The loss in the run's precision, without dropout, of the weights in a state."""
        method = self.policy.method
        loss = method.through(self.loss, self.policy)
        return asarray(loss(state.params, tokens, segments, None, **method.arguments(state.scaling)))

    def differentiate(self) -> Differentiate:
        """The loss and its gradient in the run's precision."""
        return self.policy.method.differentiate(self.loss, self.policy, self.training.init_histories)

    @property
    def family(self) -> Family:
        """The family that the model's spec is of."""
        return self.spec.family()

    @property
    def roles(self) -> Params:
        """The roles of the parameters, in their nested dictionaries."""
        return self.training.roles

    def is_narrow(self, role: Role | None) -> bool:
        """Whether a role is that of the kernel of a layer whose matmuls are narrower than the rest."""
        return role is not None and role.is_kernel and role.layer in self.narrow

    def in_transit(self, role: Role, p: Any) -> Any:
        """A parameter in the form in which devices send it each other."""
        kernel, narrow = role.is_kernel, self.is_narrow(role)
        return in_transit(p, self.policy, kernel=kernel, narrow=narrow, factor=role.scaled_rows)

    def store_gradients(self, grads: Any) -> Any:
        """The gradients as they go to the optimiser."""
        return store_gradients(grads, self.policy, lambda path: self.is_narrow(role_of(self.roles, path)))


class Task(NamedTuple):
    """What is trained, without what it is trained on: all that the compiled step follows from.

    Attributes:
      model: in its precision.
      optimizer_name: of `step.optimizers.ENTRIES`.
      plain_optimizer: makes it from the parameters' roles, at a learning rate of one.
      mesh: of the devices that the step is compiled for.
      reduce: how gradients are reduced over them.
      kernels: how the compiler chooses them on a GPU.
      trainable: what is trained, see `roles.chosen`; empty: all. The rest has neither gradient nor moments.
    """

    model: Model
    optimizer_name: str
    plain_optimizer: OptimizerFor
    mesh: Mesh
    reduce: Reduce = Reduce()
    kernels: Kernels = Kernels.KEPT
    trainable: tuple[str, ...] = ()

    @property
    def trained_roles(self) -> Params:
        """The roles of what is trained. UserError where a name of `trainable` stands for nothing."""
        return chosen(self.model.roles, self.trainable) if self.trainable else self.model.roles

    def trained(self, params: Params) -> Params:
        """The part of parameters, or of a tree like them, that is trained."""
        return part_of(params, self.trained_roles)

    def optimizer(self, seed: Any = 0, stacks: Stacks = NO_STACKS) -> optax.GradientTransformationExtraArgs:
        """The optimiser of what is trained, its moments stored as the precision says; first states need no seed.

        `stacks`: of the parameters that it is given.
        """
        plain = self.plain_optimizer(stacks.gather(self.trained_roles))
        return store_moments(plain, self.optimizer_name, self.model.policy, seed)

    def stacks(self, params: Params) -> Stacks:
        """The small parameters (or their shapes) that a step updates together; none where devices have parts."""
        if self.mesh.shape["fsdp"] * self.mesh.shape["tensor"] > 1:
            return NO_STACKS
        return stacks_of(self.trained(params), self.trained_roles, self.optimizer_name, self.model.policy)

    def in_precision(self, policy: Policy) -> "Task":
        """The same in another precision."""
        return self._replace(model=Model.make(self.model.spec, policy, self.model.rows, border=self.model.border))

    @property
    def compiler_options(self) -> dict[str, Any] | None:
        """What the compiler is told of every program of this task, of the step as of the validation; None: nothing."""
        is_gpu = self.mesh.devices.flat[0].platform == "gpu"
        return gpu_options(self.model.policy, self.kernels) if is_gpu else None

    def traced_as_the_step(self) -> contextlib.AbstractContextManager[None]:
        """Inside, FP8 products are traced as `compiler_options` wants them: equal ones become one kernel."""
        return lowering.scales_in_products() if takes_scales(self.model.policy) else contextlib.nullcontext()

    def jit(self, fun: Callable[..., Any], **settings: Any) -> Any:
        """`jax.jit(fun, **settings)` for what is computed beside the step: traced and compiled as the step is."""

        def traced(*args: Any) -> Any:
            with self.traced_as_the_step():
                return fun(*args)

        traced.__name__ = getattr(fun, "func", fun).__name__  # the program's, in profiles
        return jax.jit(traced, compiler_options=self.compiler_options, **settings)

    @property
    def frozen_layers(self) -> frozenset[str]:
        """The linear layers whose kernels are not trained, by path."""
        every, trained = ({role.layer for role in jax.tree.leaves(r)} for r in (self.model.roles, self.trained_roles))
        return frozenset(every - trained)

    @property
    def flops_per_token(self) -> int:
        """FLOPs of a token's training step, see `flops`."""
        return flops_per_token(self.model.spec, self.frozen_layers)

    @property
    def parameters(self) -> int:
        """How many parameters there are, without rows that nothing reads."""
        return param_count(self.model.spec)


class Workload(NamedTuple):
    """A task, the data that it is trained on, and the seed of both: everything but the run directory."""

    task: Task
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


class Trained(NamedTuple):
    """A run's model as it was saved: parameters on the first device."""

    spec: Spec
    bind: Callable[[Params], LanguageModel]
    params: Params
    tokenizer: "Tokenizer"


def wire_of(task: Task) -> Wire:
    """What the devices of a task send each other."""
    return Wire(*task.reduce, task.model.in_transit, task.model.roles)


def gradient_of(task: Task) -> Gradient:
    """The gradient of micro-batches on the mesh."""
    return mean_gradient if task.mesh.size == 1 else gradient_over(task.mesh, wire_of(task))


def eval_loss_of(task: Task) -> LossOfState:
    """`Model.eval_loss` on the mesh."""
    loss = task.model.on(task.mesh).eval_loss
    return loss if task.mesh.size == 1 else loss_over(task.mesh, wire_of(task), loss)


def jitted_eval_step(task: Task) -> Any:
    """`(state, batch) -> loss` on the mesh, compiled as the step is; see `evaluate.make_eval_step`."""
    step = make_eval_step(eval_loss_of(task))
    return task.jit(step, out_shardings=replicated(task.mesh))


def first_state(task: Task, seed: int, replace: Callable[[Params], Params] = lambda params: params) -> TrainState:
    """The first state on the mesh, from the seed alone; `replace` may give other FP32 parameters, placed alike."""

    def initial() -> tuple[Params, jax.Array]:
        init_key, step_key = jax.random.split(jax.random.key(seed))
        return task.model.training.init(init_key), step_key

    params, key = jax.jit(initial, out_shardings=shardings(jax.eval_shape(initial), task.mesh, task.model.roles))()
    params = store_weights(replace(params), task.model.policy)

    def rest(params: Params, key: jax.Array) -> TrainState:
        moments = task.optimizer().init(task.trained(params))
        return TrainState(params, moments, key, task.model.differentiate().init())

    placed = shardings(jax.eval_shape(rest, params, key), task.mesh, task.model.roles)
    return jax.jit(rest, out_shardings=placed)(params, key)


def abstract_state(task: Task, scale: float | None = None) -> TrainState:
    """Shapes, dtypes and shardings of the state; nothing is allocated.

    `scale`: of all parameters, in the form for training; None: in that for checkpoints, where scales are arrays.
    """

    def initial() -> TrainState:
        params, key = task.model.training.init(jax.random.key(0)), jax.random.key(0)
        return TrainState(params, None, key, task.model.differentiate().init())

    state = jax.eval_shape(initial)
    params = abstract_weights(state.params, task.model.policy, scale)
    init = task.optimizer().init
    opt_state = jax.eval_shape(lambda p: tree.pack(init(p)) if scale else init(p), task.trained(params))
    return abstract(TrainState(params, opt_state, state.key, state.scaling), task.mesh, task.model.roles)


def convert_state(task: Task, state: TrainState, source: Policy, seed: int) -> TrainState:
    """A state that was stored for the precision `source`, for that of the task; every value is rounded once."""
    policy = task.model.policy
    params = store_weights(weights.wide(state.params), policy)
    opt_state = jax.jit(lambda s: convert_moments(s, task.optimizer_name, source, policy, seed))(state.opt_state)
    converted = TrainState(params, opt_state, state.key, task.model.differentiate().init())
    return jax.device_put(converted, shardings(converted, task.mesh, task.model.roles))


def compile_step(task: Task, batch: Tokens, state: TrainState | None = None) -> jax.stages.Compiled:
    """The train step for batches like `batch`, compiled once; the state is donated."""
    return lower_step(task, batch, state).compile(compiler_options=task.compiler_options)


def lower_step(task: Task, batch: Tokens, state: TrainState | None = None) -> jax.stages.Lowered:
    """The train step, traced; the scales of the parameters of `state` are constants of it, without one assumed."""
    policy = task.model.policy
    like = abstract_state(task, ASSUMED_SCALE) if state is None else abstract(state, task.mesh, task.model.roles)
    stacks = task.stacks(like.params)
    step = make_train_step(
        task.model.on(task.mesh, len(batch.tokens_AxBxT1)).differentiate(),
        lambda seed: task.optimizer(seed, stacks),
        store_gradients=task.model.store_gradients,
        rounding=policy.weights_rounding,
        gradient=gradient_of(task),
        squares_of=squares_over(task.mesh, task.trained_roles),
        largest_of=largest_over(task.mesh, task.model.roles),
        stacks=stacks,
        trained=task.trained,
    )
    placed = jax.tree.map(lambda x: x.sharding, like)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(placed, replicated(task.mesh)))
    scalars: Any = [jax.ShapeDtypeStruct((), dtype) for dtype in (np.float32, np.int32, np.uint32)]
    with task.traced_as_the_step():
        return jitted.lower(like, batch, Hyper(*scalars))


def make_sample(task: Task, tokenizer: "Tokenizer", prompt: str, **controls: Any) -> Callable[[Any], str]:
    """`params -> text`: the prompt and its continuation; `controls` are those of `Generator`."""
    from trainer.data.tokenizer import continuation

    generator = Generator(task.model.sampling.bind, task.model.spec)
    ids, local = tokenizer.encode(prompt), on_one_device(task.mesh)

    def sample(params: Any) -> str:
        return prompt + continuation(tokenizer, ids, generator(asarray(local(params)), ids, **controls))

    return sample


def make_diagnose(task: Task) -> Callable[[TrainState, Tokens, int], str]:
    """`(state, batch, step) -> text`: the first tensor of the loss or its gradient that is not finite on that batch."""
    gradient = task.model.differentiate().value_and_grad

    def diagnose(state: TrainState, batch: Tokens, step: int) -> str:
        if jax.process_count() > 1:
            return "several processes: run the batch in skipped/ on one to find the first bad tensor"
        keys_AxB = sequence_keys(jax.random.fold_in(state.key, step), batch)
        for i in range(batch.tokens_AxBxT1.shape[0]):
            segments = None if batch.segments_AxBxT1 is None else batch.segments_AxBxT1[i]
            args = (state.params, state.scaling, batch.tokens_AxBxT1[i], segments, keys_AxB[i])
            # Not traced as the step: one by one, no operation finds the constant that its product would take.
            found = first_nonfinite(gradient, *args, compiler_options=task.compiler_options)
            if found is not None:
                return f"micro-batch {i}: {found}"
        return "the batch gives finite values with the parameters as they are now"

    return diagnose
