"""From the parts of a checked configuration to the objects that they stand for."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from scalify_core.matmul import MULTIPLE
from trainer.assembly.data import CustomData, build_data
from trainer.compiled.exchange import exchanges_of
from trainer.compiled.fp8 import Found, Gpu, check_device, check_step
from trainer.compiled.hlo import Program
from trainer.config import schema
from trainer.config.phases import phases_of
from trainer.data import Batch, Loader, prefetch
from trainer.data.mixture import Mixture
from trainer.errors import UserError
from trainer.models.custom import MakeModel, custom_spec
from trainer.observe.metrics import Throughput
from trainer.observe.numerics import make_numerics
from trainer.observe.peaks import peak_flops
from trainer.observe.progress import log_first_duration
from trainer.observe.sampling import make_sample, on_one_device
from trainer.parallel.diloco import DiLoCoSettings
from trainer.parallel.distribute import Reduce
from trainer.parallel.mesh import (
    Sizes,
    abstract_batch,
    batch_devices,
    make_mesh,
    place_batch,
)
from trainer.parallel.replicas import DiLoCoStep, with_moments_of_first
from trainer.precision.methods import METHODS
from trainer.precision.policy import DTYPES, Policy
from trainer.run import builtin_callbacks
from trainer.run.callbacks import Callback
from trainer.run.phases import Phases, Stage
from trainer.run.start import initial_weights
from trainer.run.vocabulary import weights_for_tokenizer
from trainer.run.watchdog import Bounds, Watchdog
from trainer.step.evaluate import Evaluation, evaluate, xz_bits_per_byte
from trainer.step.kernels import Kernels
from trainer.step.optimizer import OptimizerFor, make_optimizer
from trainer.step.optimizers import Optimizer
from trainer.step.schedule import learning_rates
from trainer.step.state import TrainState
from trainer.step.step import Tokens
from trainer.tasks.choose import BATCH, choose
from trainer.tasks.eval_model import EvalModel
from trainer.workload import (
    Model,
    TrainTask,
    Workload,
    first_state,
    jitted_eval_step,
)

# Bytes of text between which the compressor is a yardstick: with less it has hardly
# begun, with more it takes long.
YARDSTICK = (100_000, 2**22)
NUMERICS = "compiling per-layer numerics"
TASKS = "compiling the tasks, and their first scores"
SAMPLING = "compiling the sampling, and the first sample"


def build_policy(c: schema.Precision) -> Policy:
    """What the preset, or what became of it, means."""
    return c.policy


def build_model(
    c: schema.Model,
    policy: Policy,
    vocab_size: int,
    rows: int | None = None,
    own: MakeModel | None = None,
) -> Model:
    """The model for a tokenizer of `vocab_size` ids; for `rows` see `Model`. `own`
    takes the place of `c`'s layers.
    """
    if c.vocab_size is not None and c.vocab_size < vocab_size:
        raise UserError(
            f"model.vocab_size={c.vocab_size} is smaller than the tokenizer's"
            f" {vocab_size} ids; valid: {vocab_size} or more, or null for the"
            " tokenizer's; or, for weights of another tokenizer,"
            " init.embeddings=focus, mean, gaussian or copy"
        )
    if own is not None:
        size = c.vocab_size or vocab_size
        # a key of the families whose layers can
        keep = getattr(c, "keep_fp8_weights", True)
        made = custom_spec(
            own, vocab_size=size, context=c.context, keep_fp8_weights=keep
        )
        return Model.make(made, policy, rows)
    return Model.make(c.spec(vocab_size), policy, rows)


def build_optimizer(c: Optimizer) -> OptimizerFor:
    """The optimiser at unit learning rate, of parameters of given roles."""
    settings = dataclasses.asdict(c)
    del settings["lr"]
    return make_optimizer(**settings)


def build_sizes(c: schema.Parallel) -> Sizes:
    """The mesh's axis sizes from the configuration."""
    return Sizes(c.data, c.fsdp, c.tensor)


def build_reduce(c: schema.Parallel) -> Reduce:
    """The format and the order in which gradients are reduced."""
    return Reduce(c.reduce, c.deterministic_reduce)


def build_diloco(c: schema.Config) -> DiLoCoSettings | None:
    """How replicas train apart; None where there is one."""
    d = c.diloco
    if d.replicas is None:
        return None
    assert d.sync_every is not None  # validated, as the others are
    assert d.outer_grad is not None
    assert d.outer_lr is not None
    assert d.outer_momentum is not None
    assert d.fragments is not None
    return DiLoCoSettings(
        replicas=d.replicas,
        steps=d.sync_every,
        format=d.outer_grad,
        lr=d.outer_lr,
        momentum=d.outer_momentum,
        # which loses nothing
        feedback=bool(d.error_feedback) and d.outer_grad != "fp32",
        fragments=d.fragments,
        participants=d.participants or d.replicas,
        last=c.train.steps,
    )


def build_kernels(c: schema.Config) -> Kernels:
    """How the compiler for GPUs chooses kernels."""
    # Not whether the key names a directory: one that cannot be written is none.
    return Kernels.of(
        c.deterministic, cached=jax.config.jax_compilation_cache_dir is not None
    )


def check_split(model: Model, mesh: Mesh) -> None:
    """Refuse a mesh that the model's sizes cannot be split over."""
    spec, fsdp, tensor = model.spec, mesh.shape["fsdp"], mesh.shape["tensor"]
    if spec.d_model % (fsdp * tensor):
        raise UserError(
            f"parallel.fsdp={fsdp} x parallel.tensor={tensor} does not divide"
            f" model.d_model={spec.d_model}: most of the state would stay whole; valid:"
            " a product that divides it"
        )
    of_8_bits = model.policy.forward is not None and not model.policy.simulate
    if tensor > 1:
        spec.family().check_tensor(spec, tensor, MULTIPLE if of_8_bits else 1)


def build_mesh(c: schema.Config) -> Mesh:
    """The mesh, checked against the batch."""
    mesh = make_mesh(*build_sizes(c.parallel), replicas=c.diloco.replicas)
    micro_batch, devices = (
        c.batch_size // c.train.grad_accum_steps,
        batch_devices(mesh, c.diloco.replicas or 1),
    )
    if micro_batch % devices:
        raise UserError(
            f"a micro-batch of {micro_batch} sequences"
            f" (train.batch_tokens={c.train.batch_tokens} /"
            f" model.context={c.model.context} /"
            f" train.grad_accum_steps={c.train.grad_accum_steps}) cannot be split over"
            f" {devices} devices; valid: parallel.data x parallel.fsdp that divides"
            f" {micro_batch}, or train.batch_tokens a multiple of"
            f" {devices * c.train.grad_accum_steps * c.model.context}"
        )
    return mesh


def build_workload(
    c: schema.Config,
    own: CustomData | None = None,
    custom_model: MakeModel | None = None,
) -> Workload:
    """Prepare the data if need be, build model, optimiser and mesh. Raises UserError
    for what does not fit together.
    """
    mesh = build_mesh(c)
    if c.precision.require_fp8:
        check_device(mesh.devices.flat[0])
    data = build_data(c, own)
    policy = build_policy(c.precision)
    rows = c.train.batch_tokens // (
        c.train.grad_accum_steps * batch_devices(mesh, c.diloco.replicas or 1)
    )
    model = build_model(c.model, policy, data.tokenizer.vocab_size, rows, custom_model)
    if c.data.boundary_loss is False:
        if custom_model is not None:
            raise UserError(
                "data.boundary_loss=false needs a model of the configuration; leave it"
                " out for your own"
            )
        model = model._replace(border=data.tokenizer.eot)
    check_split(model, mesh)
    optimizer, kernels = build_optimizer(c.optimizer), build_kernels(c)
    trainable, diloco = c.train.trainable or (), build_diloco(c)
    task = TrainTask(
        model,
        c.optimizer.name,
        optimizer,
        mesh,
        build_reduce(c.parallel),
        kernels,
        trainable,
        diloco,
    )
    check_trainable(task)
    check_fragments(task)
    choose(c.eval.tasks or (), data.beginning, limit=c.eval.limit)
    return Workload(task, data, c.seed)


def build_phases(c: schema.Config, w: Workload) -> Phases:
    """The phases of a run: the workload's task with what each trains, in its precision.
    Raises UserError.
    """
    stages = []
    for start, until, of in phases_of(c):
        policy = build_policy(of.precision)
        task = w.task if policy == w.model.policy else w.task.in_precision(policy)
        stages.append(
            Stage(start, until, task._replace(trainable=of.train.trainable or ()), of)
        )
        check_trainable(stages[-1].task)
        check_split(stages[-1].task.model, w.mesh)
    return Phases(tuple(stages), w.seed)


def check_trainable(task: TrainTask) -> None:
    """UserError where `train.trainable` names what the model does not have."""
    try:
        _ = task.trained_roles
    except UserError as error:
        raise UserError(f"train.trainable: {error}") from None


def check_fragments(task: TrainTask) -> None:
    """UserError for more parts of the parameters than there are parameters: some would
    exchange nothing.
    """
    if task.diloco is None:
        return
    most = len(
        jax.tree.leaves(
            task.trained(jax.eval_shape(task.model.training.init, jax.random.key(0)))
        )
    )
    if task.diloco.fragments > most:
        raise UserError(
            f"diloco.fragments={task.diloco.fragments}: there are {most} arrays of"
            f" parameters, and a fragment has at least one; valid: 1..{most}"
        )


def build_batch(c: schema.Config, mesh: Mesh) -> Tokens:
    """Shapes, dtypes and shardings of a step's batch."""
    return abstract_batch(
        c.train.grad_accum_steps,
        c.batch_size,
        c.model.context,
        document_mask=c.data.document_mask,
        mesh=mesh,
    )


def build_state(c: schema.Config, w: Workload) -> TrainState:
    """The state before step 0, with the weights of `init_from` where that is given."""
    if c.init_from is None:
        return first_state(w.task, w.seed)
    source, method = Path(c.init_from), c.init.embeddings
    if method is None:
        given = functools.partial(
            initial_weights, source, w.model.spec, w.data.tokenizer
        )
    else:
        given = functools.partial(
            weights_for_tokenizer, source, w.model.spec, w.data, method, c.seed
        )
    return first_state(w.task, w.seed, given)


def build_learning_rates(c: schema.Config) -> np.ndarray:
    """The learning rate of every step, FP32 `[train.steps]`: of each phase the schedule
    over its own steps.
    """
    return np.concatenate(
        [
            learning_rates(
                steps=until - start,
                peak=of.optimizer.lr,
                **dataclasses.asdict(of.schedule),
            )
            for start, until, of in phases_of(c)
        ]
    )


def decides_rates(key: str) -> bool:
    """Return whether `build_learning_rates` reads a dotted key."""
    return key in ("train.steps", "train.phases", "optimizer.lr") or key.startswith(
        "schedule."
    )


def build_throughput(c: schema.Config, w: Workload) -> Throughput:
    """The counter of tokens/s and MFU."""
    return Throughput(
        tokens_per_step=c.train.batch_tokens,
        flops_per_token=w.task.flops_per_token,
        peak_flops=peak_flops(
            w.mesh.devices.flat[0].device_kind, DTYPES[c.precision.compute]
        ),
        devices=w.mesh.size,
    )


def check_fp8(
    c: schema.Config, task: TrainTask, step: jax.stages.Compiled | DiLoCoStep
) -> Found | None:
    """What a step compiled for a GPU is, where the precision has FP8 matmuls; None
    elsewhere.

    Raises UserError for what `precision.require_fp8` does not allow.
    """
    gpu = Gpu.of(task.mesh.devices.flat[0])
    if gpu is None or c.precision.forward is None:
        return None
    tokens = c.train.batch_tokens // (
        c.train.grad_accum_steps * batch_devices(task.mesh, c.diloco.replicas or 1)
    )
    program, require = Program(step.as_text() or ""), c.precision.require_fp8
    return check_step(
        task.model, program, tokens, gpu, require=require, frozen=task.frozen_layers
    )


def build_callbacks(
    c: schema.Config,
    w: Workload,
    batch: Tokens,
    say: Callable[[str], None],
    more: Sequence[Callback] = (),
    *,
    tracked: bool = True,
) -> list[Callback]:
    """What happens between two steps: what every run has, with `more` of the user's
    before the checkpoint.

    Without anybody who keeps them (not `tracked`) nobody looks at the numerics.
    """
    measure, alone = (
        make_numerics(w.task, c.optimizer.lr),
        jax.jit(with_moments_of_first),
    )
    look = (
        measure
        if w.task.diloco is None
        else lambda state, tokens, step: measure(alone(state), tokens, step)
    )
    numerics_every = c.metrics.numerics_every if tracked else 0
    rescale_every = c.precision.rescale_every if c.precision.scaled else 0
    entries = [
        (
            builtin_callbacks.numerics(
                numerics_every, log_first_duration(look, NUMERICS, say)
            )
            if numerics_every
            else None
        ),
        builtin_callbacks.evaluation(c.train.eval_every, make_evaluate(c, w, say)),
        (
            builtin_callbacks.mixture(c.train.eval_every, w.data.train.seen)
            if isinstance(w.data.train, Mixture)
            else None
        ),
        (
            builtin_callbacks.tasks(
                c.eval.tasks_every or 0,
                log_first_duration(build_tasks(c, w), TASKS, say),
            )
            if c.eval.tasks
            else None
        ),
        make_exchanged(c, w) if w.task.diloco else None,
        builtin_callbacks.samples(
            c.sample.every, log_first_duration(build_sample(c, w), SAMPLING, say)
        ),
        (
            builtin_callbacks.rescale(
                rescale_every, builtin_callbacks.make_rescale(w.task, batch)
            )
            if rescale_every
            else None
        ),
        *more,
        builtin_callbacks.pictures(c.checkpoint.every) if numerics_every else None,
        builtin_callbacks.checkpoint(c.checkpoint.every),
    ]
    made = [callback for callback in entries if callback is not None]
    for name, times in Counter(callback.name for callback in made).items():
        if times > 1:
            raise UserError(
                f"two callbacks are called {name!r}; give yours another name"
            )
    return made


def make_exchanged(c: schema.Config, w: Workload) -> Callback:
    """Return the callback that reports what replicas have sent each other."""
    found = exchanges_of(w.task)
    return builtin_callbacks.exchanged(
        c.train.eval_every, found.up_to, found.every_step
    )


def train_batches(
    c: schema.Config, w: Workload, until: int
) -> Callable[[int], Iterator[tuple[int, Batch]]]:
    """The training batches from a step on, up to the last one before `until`, read
    ahead in the background.
    """
    return lambda start: prefetch(w.data.train, start, until, depth=c.data.prefetch)


def make_evaluate(
    c: schema.Config, w: Workload, say: Callable[[str], None]
) -> Callable[[TrainState, bool, Callable[[], bool]], Evaluation | None]:
    """`(state, final, broken_off) -> found`: validation on the first batches of that
    part, on more at the end.

    Of a mixture each source is validated alone as well, on as many batches as in every
    validation.
    """
    eval_step = log_first_duration(
        jitted_eval_step(w.task), "compiling the validation", say
    )

    def mean_of(
        loader: Loader, state: TrainState, most: int, broken_off: Callable[[], bool]
    ) -> Evaluation | None:
        count = min(loader.steps_per_epoch, most)
        batches = (
            place_batch(loader.batch(i), accum=c.train.grad_accum_steps, mesh=w.mesh)
            for i in range(count)
        )
        per_token = loader.bytes_per_token("val")
        first = c.train.eval_batches
        return evaluate(
            eval_step,
            state,
            batches,
            first=first,
            bytes_per_token=per_token,
            broken_off=broken_off,
        )

    def run_evaluation(
        state: TrainState, final: bool, broken_off: Callable[[], bool]
    ) -> Evaluation | None:
        most = c.train.final_eval_batches if final else c.train.eval_batches
        found = mean_of(w.data.val, state, most, broken_off)
        for name, loader in w.data.sources.items():
            part = (
                mean_of(loader, state, c.train.eval_batches, broken_off)
                if found
                else None
            )
            if found is None or part is None:
                return None
            found.row.update(
                {
                    key.replace("val/", f"val/{name}/"): value
                    for key, value in part.row.items()
                }
            )
        if final and found:
            validated = (
                min(w.data.val.steps_per_epoch, most)
                * w.data.val.batch_size
                * w.data.val.context
            )
            text = w.data.validation_text(
                min(validated, int(YARDSTICK[1] / w.data.bytes_per_token))
            )
            if len(text) >= YARDSTICK[0]:
                found.row["val/xz_bits_per_byte"] = xz_bits_per_byte(text)
        return found

    return run_evaluation


def build_watchdog(
    c: schema.WatchdogConfig,
    scaling: str,
    leaves: list[str],
    state: Mapping[str, Any] | None,
) -> Watchdog:
    """The watchdog over losses; to the skips in a row it adds those in which the method
    `scaling` finds its place.
    """
    calibration = METHODS[scaling].calibration
    max_skips = c.max_skips + calibration
    bounds = Bounds(
        max_skips,
        c.spike_zscore,
        c.spike_window,
        c.spike_steps,
        c.max_rollbacks,
        calibration,
    )
    return Watchdog(bounds, leaves, state)


def build_tasks(
    c: schema.Config, w: Workload
) -> Callable[[TrainState], dict[str, float]]:
    """`state -> figures` of the tasks of the configuration, computed on one device.
    UserError for what is no task.
    """
    assert c.eval.tasks is not None
    chosen = choose(c.eval.tasks, w.data.beginning, limit=c.eval.limit)
    eval_model = EvalModel(w.task, w.data.tokenizer, c.eval.batch_size or BATCH)
    gather = on_one_device(w.task)

    def figures(state: TrainState) -> dict[str, float]:
        scores = chosen.scores(eval_model.at(*gather((state.params, state.scaling))))
        return {
            f"tasks/{name}/{metric}": score.value
            for name, of in scores.items()
            for metric, score in of.items()
        }

    return figures


def build_sample(c: schema.Config, w: Workload) -> Callable[[Any], str]:
    """`params -> text`: the prompt of the configuration and its continuation."""
    settings = dataclasses.asdict(c.sample)
    del settings["every"]
    return make_sample(w.task, w.data.tokenizer, **settings, seed=c.seed)
