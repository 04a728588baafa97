"""Build the objects of a run from the parts of a checked configuration."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from trainer.assembly.data import CustomData, build_data
from trainer.compiled.fp8 import (
    Gpu,
    StepReport,
    check_attention_device,
    check_device,
    check_step,
)
from trainer.compiled.hlo import Program
from trainer.compiled.sync_bytes import sync_bytes_of
from trainer.config import inherited, schema
from trainer.config.combinations import check_micro_batch
from trainer.config.phases import phases_of
from trainer.data import Batch, prefetch
from trainer.data.files import column_names_hidden
from trainer.data.mixture import Mixture
from trainer.errors import UserError
from trainer.model import Model
from trainer.models.custom import MakeModel, custom_spec
from trainer.models.fp8_attention import check_fp8_attention
from trainer.models.model_functions import Params
from trainer.models.registry import family_of
from trainer.observe.peaks import peak_flops
from trainer.observe.throughput import Throughput
from trainer.parallel.diloco import DiLoCoSettings
from trainer.parallel.distribute import GradReduceConfig
from trainer.parallel.mesh import abstract_batch, batch_shards, make_mesh, place_batch
from trainer.parallel.replicas import DiLoCoStep
from trainer.precision.fields import DTYPES
from trainer.precision.methods import METHODS
from trainer.precision.policy import Policy
from trainer.run.initial_weights import initial_weights
from trainer.run.phases import Phases, TrainingPhase
from trainer.run.totals import Totals
from trainer.run.vocabulary import weights_for_tokenizer
from trainer.run.watchdog import Bounds, Watchdog
from trainer.step.schedule import LearningRates, learning_rates
from trainer.step.state import TrainState
from trainer.step.step import Tokens
from trainer.step.xla_flags import KernelChoice, check_deterministic
from trainer.tasks.choose import choose_tasks
from trainer.workload import TrainTask, Workload, first_state


def build_model(
    config: schema.ModelConfig,
    policy: Policy,
    vocab_size: int,
    matmul_rows: int | None = None,
    custom_model: MakeModel | None = None,
) -> Model:
    """Build the model for a tokenizer of `vocab_size` ids.

    `matmul_rows`: `Model.rows`. `custom_model` replaces the layers that `config`
    describes.
    """
    # More rows than ids are allowed: published models pad their tables.
    if config.vocab_size is not None and config.vocab_size < vocab_size:
        if config.name == inherited.FROM_INIT:
            raise UserError(
                f"model.vocab_size={config.vocab_size}, the vocabulary of the weights,"
                f" is smaller than the tokenizer's {vocab_size} ids; choose the"
                " tokenizer of the weights by data.tokenizer; if this is theirs, it has"
                " tokens without rows, such as one for padding, and"
                " init.embeddings=copy adds rows for them; for weights of another"
                " tokenizer set init.embeddings=focus, mean, gaussian or copy"
            )
        raise UserError(
            f"model.vocab_size={config.vocab_size} is smaller than the tokenizer's"
            f" {vocab_size} ids; valid: {vocab_size} or more, or null for the"
            " tokenizer's; for weights of another tokenizer set"
            " init.embeddings=focus, mean, gaussian or copy"
        )
    if custom_model is None:
        return Model.make(config.spec(vocab_size), policy, matmul_rows)
    spec = custom_spec(
        custom_model,
        vocab_size=config.vocab_size or vocab_size,
        context=config.context,
        # The presets of all families have this key; those of custom models may not.
        keep_fp8_weights=getattr(config, "keep_fp8_weights", True),
    )
    return Model.make(spec, policy, matmul_rows)


def build_task(
    c: schema.Config,
    model: Model,
    mesh: Mesh,
    diloco: DiLoCoSettings | None,
    *,
    cached: bool,
) -> TrainTask:
    """Return the task of training a model on a mesh.

    `cached`: whether compiled programs are kept between runs.
    """
    if mesh.devices.flat[0].platform == "gpu":
        check_deterministic(c.deterministic, model.policy)
    task = TrainTask(
        model,
        c.optimizer,
        mesh,
        GradReduceConfig(c.parallel.reduce, c.parallel.deterministic_reduce),
        KernelChoice.chosen(c.deterministic, cached=cached),
        c.train.trainable or (),
        diloco,
    )
    check_task(task)
    check_fragments(task)
    return task


def check_task(task: TrainTask) -> None:
    """Raise UserError for a model that does not fit the mesh or its devices.

    Also raise it for an unknown name in `train.trainable`.
    """
    check_split(task.model, task.mesh)
    device = task.mesh.devices.flat[0]
    # The mesh of a plan has devices of a description, on which nothing runs.
    is_plan_target = device not in jax.devices()
    check_attention_device(device, task.model.policy, is_described=is_plan_target)
    try:
        _ = task.trained_roles  # raises for a name that matches no parameter
    except UserError as error:
        # Roles know no keys of a configuration.
        raise UserError(f"train.trainable: {error}") from None


def build_diloco(c: schema.Config) -> DiLoCoSettings | None:
    """Return the settings of DiLoCo's replicas; None without replicas."""
    d = c.diloco
    if d.replicas is None:
        return None
    # `config.combinations.validate` refuses nulls beside replicas.
    assert d.sync_every is not None
    assert d.outer_grad is not None
    assert d.outer_lr is not None
    assert d.outer_momentum is not None
    assert d.fragments is not None
    return DiLoCoSettings(
        num_replicas=d.replicas,
        sync_every=d.sync_every,
        format=d.outer_grad,
        lr=d.outer_lr,
        momentum=d.outer_momentum,
        # FP32 has no rounding error to feed back.
        feedback=bool(d.error_feedback) and d.outer_grad != "fp32",
        fragments=d.fragments,
        participants=d.participants or d.replicas,
        # After it all fragments are synced, or the replicas would end with different
        # weights.
        last_step=c.train.steps,
    )


def check_split(model: Model, mesh: Mesh) -> None:
    """Raise UserError for a mesh over which the model cannot be split."""
    spec, fsdp, tensor = model.spec, mesh.shape["fsdp"], mesh.shape["tensor"]
    # Most weights have an axis of this length, which the mesh splits.
    if spec.d_model % (fsdp * tensor):
        raise UserError(
            f"parallel.fsdp={fsdp} x parallel.tensor={tensor} does not divide"
            f" model.d_model={spec.d_model}: most of the state could not be sharded;"
            " valid: a product that divides it"
        )
    if tensor > 1:
        # Each device multiplies its part, which must be a multiple that FP8 takes, too.
        family_of(spec).check_tensor(
            spec, tensor, model.policy.method.multiple if model.policy.in_fp8 else 1
        )


def check_fragments(task: TrainTask) -> None:
    """Raise UserError for more DiLoCo fragments than arrays: some would be empty."""
    if task.diloco is None:
        return
    # Frozen parameters are equal in all replicas and are not sent.
    arrays = len(jax.tree.leaves(task.select_trained(task.model.training.shapes)))
    if task.diloco.fragments > arrays:
        raise UserError(
            f"diloco.fragments={task.diloco.fragments}: there are {arrays} arrays of"
            f" parameters, and a fragment has at least one; valid: 1..{arrays}"
        )


def build_mesh(c: schema.Config) -> Mesh:
    """Build the mesh; UserError if a micro-batch cannot be split over it."""
    mesh = make_mesh(*c.parallel.sizes, num_replicas=c.diloco.replicas)
    shards = shards_of_batch(c, mesh)
    check_micro_batch(
        c,
        shards,
        f"{shards} parts (diloco.replicas x parallel.data x parallel.fsdp)",
        ", or another number of parts",
    )
    return mesh


def shards_of_batch(c: schema.Config, mesh: Mesh) -> int:
    """Return the number of parts into which each micro-batch is split."""
    return batch_shards(mesh, c.diloco.replicas or 1)


def tokens_per_device(c: schema.Config, mesh: Mesh) -> int:
    """Return the tokens of a micro-batch on each device."""
    return c.train.batch_tokens // (c.train.grad_accum_steps * shards_of_batch(c, mesh))


def build_workload(
    c: schema.Config,
    custom_data: CustomData | None = None,
    custom_model: MakeModel | None = None,
    *,
    is_saved: bool = False,
) -> Workload:
    """Prepare the data, and build model, optimizer and mesh.

    Args:
      c: the configuration.
      custom_data: the program's data, instead of the configuration's.
      custom_model: see `build_model`.
      is_saved: whether a checkpoint has the configuration. Somebody else may have
        written it, as the settings of `resume=RUN`: no data set of the hub is fetched
        for them, and no names of columns are shown.

    Raises:
      UserError: parts of the configuration do not fit together.
    """
    mesh = build_mesh(c)
    # Before the data are prepared, which may take hours.
    if c.precision.require_fp8:
        check_device(mesh.devices.flat[0], c.precision.policy)
    if custom_model is None:  # before data is prepared
        check_fp8_attention(c.model.spec(vocab_size=1), c.precision)
    # A validation text shorter than a batch is cut into fewer rows, which must still be
    # split into all parts.
    batch_parts = c.train.grad_accum_steps * shards_of_batch(c, mesh)
    # resume=RUN takes the settings of a run, which somebody else may have written.
    is_saved = is_saved or c.resume.source not in ("auto", "none")
    with column_names_hidden() if is_saved else contextlib.nullcontext():
        data = build_data(c, custom_data, batch_parts, may_fetch=not is_saved)
    # After the data, whose tokenizer may give the vocabulary.
    model = build_model(
        c.model,
        c.precision.policy,
        data.tokenizer.vocab_size,
        tokens_per_device(c, mesh),
        custom_model,
    )
    # Null means true.
    if c.data.boundary_loss is False:
        if custom_model is not None:
            raise UserError(
                "data.boundary_loss=false needs a model of the configuration; leave it"
                " out for your own"
            )
        model = model._replace(loss_boundary_id=data.tokenizer.eot)
    # Read from JAX rather than from `compile_cache`: the cache stays off if its
    # directory cannot be written.
    cached = jax.config.jax_compilation_cache_dir is not None
    task = build_task(c, model, mesh, build_diloco(c), cached=cached)
    # Raises UserError for an unknown task, before anything is compiled.
    choose_tasks(c.eval.tasks or (), data.first_documents, limit=c.eval.limit)
    return Workload(task, data, c.seed)


def build_phases(
    c: schema.Config,
    custom_data: CustomData | None = None,
    custom_model: MakeModel | None = None,
) -> Phases:
    """Build the phases of a run, each with a task in its precision.

    Arguments are those of `build_workload`.

    Raises:
      UserError: a phase does not fit the model or the mesh.
    """
    workload = build_workload(c, custom_data, custom_model)
    phases = []
    for start, until, config in phases_of(c):
        task = workload.task
        policy, trainable = config.precision.policy, config.train.trainable or ()
        # Phases that differ in the schedule alone share one task.
        if (policy, trainable) != (task.model.policy, task.trainable):
            task = task.in_precision(policy)._replace(trainable=trainable)
            check_task(task)
        phase = TrainingPhase(start, until, workload._replace(task=task), config)
        phases.append(phase)
    return Phases(tuple(phases))


def build_batch(c: schema.Config, mesh: Mesh, rows: int | None = None) -> Tokens:
    """Return shapes, dtypes and shardings of a step's batch.

    `rows`: instead of the configuration's number of sequences.
    """
    return abstract_batch(
        c.train.grad_accum_steps,
        rows or c.batch_size,
        c.model.context,
        document_mask=c.data.document_mask,
        mesh=mesh,
    )


def first_micro_batch(
    c: schema.Config, w: Workload, step: int
) -> tuple[jax.Array, jax.Array | None]:
    """Return tokens and segments [B, T+1] of a training batch's first micro-batch."""
    batch = place_batch(
        w.data.train.batch(step), accum=c.train.grad_accum_steps, mesh=w.mesh
    )
    micro_batch: tuple[Any, Any] = jax.tree.map(lambda x: x[0], batch)
    return micro_batch


def build_state(
    c: schema.Config, w: Workload, log: Callable[[str], None]
) -> TrainState:
    """Return the state before step 0, with the weights of `init_from` if given.

    `log` gets a line about those weights.
    """
    if c.init_from is None:
        return first_state(w.task, w.seed)
    source, method, spec = Path(c.init_from), c.init.embeddings, w.model.spec

    # Called by `first_state` once the FP32 parameters exist, whose places on the mesh
    # it takes.
    def load(like: Params) -> Params:
        if method is None:
            params, line = initial_weights(source, spec, w.data.tokenizer, like)
        else:
            params, line = weights_for_tokenizer(
                source, spec, w.data, method, c.seed, like
            )
        log(line)
        return params

    return first_state(w.task, w.seed, load)


def build_learning_rates(c: schema.Config) -> LearningRates:
    """Return the learning rates of a run.

    Each phase has its schedule over its own steps. The last phase's goes on.
    """
    phases = phases_of(c)
    ends = [phase.until for phase in phases[:-1]]

    def rates_of(step: np.ndarray) -> np.ndarray:
        # Steps arrive in ascending blocks, which may reach beyond the last phase.
        rates = [
            learning_rates(
                step=part - start,
                steps=until - start,
                peak=config.optimizer.lr,
                **dataclasses.asdict(config.schedule),
            )
            for part, (start, until, config) in zip(
                np.split(step, np.searchsorted(step, ends)), phases, strict=True
            )
            if part.size
        ]
        return np.concatenate(rates)

    return LearningRates(rates_of, c.train.steps)


def build_totals(c: schema.Config, w: Workload) -> Callable[[int], Totals]:
    """Return a function from a number of steps to their totals.

    It counts all steps as if they had these settings.
    """
    sync_bytes = sync_bytes_of(w.task) if w.task.diloco else None
    train_data = w.data.train

    def totals(step: int) -> Totals:
        samples: tuple[int, ...] = ()
        if isinstance(train_data, Mixture):
            counts = train_data.sampler.samples_per_source(step)
            # A replica that sits out a round skips its part of each batch. On average
            # all replicas sit out equally often.
            trained = counts * c.trained_tokens // c.train.batch_tokens
            samples = tuple(trained.tolist())
        return Totals(
            tokens=step * c.trained_tokens,
            exchanged=sync_bytes.up_to(step) if sync_bytes else 0.0,
            fp32_gradients=sync_bytes.every_step * step if sync_bytes else 0.0,
            samples=samples,
        )

    return totals


def build_throughput(c: schema.Config, w: Workload) -> Throughput:
    """Return the meter of tokens/s and MFU."""
    return Throughput(
        tokens_per_step=c.trained_tokens,
        flops_per_token=w.task.flops_per_token,
        # The peak of the compute format, so that MFU compares precisions; in FP8 it may
        # exceed 1.
        peak_flops=peak_flops(
            w.mesh.devices.flat[0].device_kind, DTYPES[c.precision.compute]
        ),
        devices=w.mesh.size,
    )


def check_fp8(
    c: schema.Config, task: TrainTask, step: jax.stages.Compiled | DiLoCoStep
) -> StepReport | None:
    """Check the FP8 matmuls of a step that was compiled for a GPU.

    Returns:
      The FP8 matmuls of the compiled program; None without a GPU, or where nothing is
      FP8.

    Raises:
      UserError: `precision.require_fp8` does not allow it.
    """
    gpu = Gpu.from_device(task.mesh.devices.flat[0])
    policy = c.precision.policy
    # Other platforms emulate FP8, and their programs have no FP8 kernels to count.
    if gpu is None or (policy.forward is None and not policy.has_fp8_attention):
        return None
    return check_step(
        task.model,
        Program(step.as_text() or ""),
        tokens_per_device(c, task.mesh),
        gpu,
        require=c.precision.require_fp8,
        # Their weight gradients are not in the program, so fewer matmuls are expected.
        frozen=task.frozen_layers,
        tensor=task.mesh.shape["tensor"],
    )


def train_batches(
    c: schema.Config, w: Workload, until: int
) -> Callable[[int], Iterator[tuple[int, Batch]]]:
    """Return `start -> iterator` over the batches from step `start` to before `until`.

    A background thread reads ahead.
    """
    # A function of the start, because a rollback reads from another step.
    return lambda start: prefetch(w.data.train, start, until, depth=c.data.prefetch)


def build_watchdog(
    c: schema.WatchdogConfig,
    scaling: str,
    leaves: list[str],
    state: Mapping[str, Any] | None,
) -> Watchdog:
    """Return the watchdog.

    Its bound on skipped steps includes the steps that find the initial loss scale.

    Args:
      c: the watchdog's configuration.
      scaling: the method of `precision.scaling`.
      leaves: names of the trained parameters.
      state: the watchdog's, from the checkpoint; None for a new run.
    """
    loss_scale_skips = METHODS[scaling].loss_scale_skips
    bounds = Bounds(
        # A dynamic loss scale starts too high and skips steps until it fits.
        max_skips=c.max_skips + loss_scale_skips,
        spike_zscore=c.spike_zscore,
        spike_window=c.spike_window,
        spike_steps=c.spike_steps,
        max_rollbacks=c.max_rollbacks,
        loss_scale_skips=loss_scale_skips,
    )
    return Watchdog(bounds, leaves, state)
