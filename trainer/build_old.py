"""From a checked configuration to objects: the only module that reads it."""

import contextlib
import dataclasses
import errno
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from scalify_core.matmul import MULTIPLE
from trainer import config as schema
from trainer.aot import make_target_mesh
from trainer.checkpoint import Checkpointer, Restored
from trainer.data import (
    Batch,
    EmbeddedSource,
    HubSource,
    Manifest,
    PreparedSource,
    Source,
    TextSource,
    prefetch,
    prepare,
    shown,
)
from trainer.data.tokenizer import get_tokenizer, load_saved
from trainer.display import Display, Output
from trainer.errors import UserError
from trainer.evaluate import Evaluation, evaluate, make_eval_step
from trainer.fields import from_tree, to_tree
from trainer.flops import flops_per_token, peak_flops
from trainer.fp8_check import Found, Gpu, check_device, check_step
from trainer.gradients import CALIBRATION
from trainer.guard import Patience, leave_within
from trainer.hlo import Program
from trainer.leaves import parameter_names
from trainer.libraries import hide_missing_gpu, use_compilation_cache
from trainer.loop import Cadence, Run, train
from trainer.messages import describe, describe_wire, farewell, schedule_change
from trainer.metrics import Throughput
from trainer.numerics import make_numerics
from trainer.optimizer import learning_rates, make_optimizer
from trainer.parallel import (
    Agreement,
    Sizes,
    abstract_batch,
    batch_devices,
    make_mesh,
    place_batch,
    refused_together,
    replicated,
    start_processes,
)
from trainer.plan import Aim, Plan, make_plan
from trainer.precision import DTYPES, Policy
from trainer.report import write_report
from trainer.rundir import RunDir, write_environment
from trainer.spec import GPT2Spec
from trainer.start import architecture, check_same_run, initial_weights, restore_logical, starting_point
from trainer.state import TrainState, from_stored
from trainer.step import StepFn, Tokens
from trainer.tracking import MAKE_ROOM, make_tracker
from trainer.watchdog import Bounds, Watchdog
from trainer.workload import (
    Dataset,
    Model,
    Reduce,
    Task,
    Trained,
    Unfed,
    Workload,
    abstract_state,
    compile_step,
    eval_loss_of,
    first_state,
    make_diagnose,
    make_rescale,
    make_sample,
)

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def build_policy(c: schema.Precision) -> Policy:
    """What the preset, or what became of it, means."""
    settings = dataclasses.asdict(c)
    del settings["name"], settings["rescale_every"], settings["require_fp8"]
    return Policy(**settings)


def build_model(c: schema.Model, policy: Policy, vocab_size: int) -> Model:
    """The model for a tokenizer of `vocab_size` ids."""
    if c.vocab_size is not None and c.vocab_size < vocab_size:
        raise UserError(
            f"model.vocab_size={c.vocab_size} is smaller than the tokenizer's {vocab_size} ids; "
            f"valid: {vocab_size} or more, or null for the tokenizer's"
        )
    spec = GPT2Spec(
        vocab_size=c.vocab_size or vocab_size,
        context=c.context,
        n_layer=c.n_layer,
        n_head=c.n_head,
        d_model=c.d_model,
        mlp=c.mlp,
        d_mlp=c.d_mlp,
        dropout=c.dropout,
        scan_layers=c.scan_layers,
        remat=c.remat,
        init_std=c.init_std,
        value_gain=c.value_gain,
        align_channels=c.align_channels,
        align_gain=c.align_gain,
    )
    return Model.make(spec, policy)


def build_optimizer(c: schema.Optimizer) -> optax.GradientTransformation:
    """The optimiser at unit learning rate."""
    settings = dataclasses.asdict(c)
    del settings["lr"]
    return make_optimizer(**settings)


def build_sizes(c: schema.Parallel) -> Sizes:
    """Of the mesh's axes."""
    return Sizes(c.data, c.fsdp, c.tensor)


def build_reduce(c: schema.Parallel) -> Reduce:
    """How gradients are reduced."""
    return Reduce(c.reduce, c.deterministic_reduce)


def check_split(model: Model, mesh: Mesh) -> None:
    """Refuse a mesh that the model's sizes cannot be split over."""
    spec, fsdp, tensor = model.spec, mesh.shape["fsdp"], mesh.shape["tensor"]
    if spec.d_model % (fsdp * tensor):
        raise UserError(
            f"parallel.fsdp={fsdp} x parallel.tensor={tensor} does not divide model.d_model={spec.d_model}: most of "
            f"the state would stay whole; valid: a product that divides it"
        )
    of_8_bits = model.policy.forward is not None and not model.policy.simulate
    multiple = tensor * (MULTIPLE if of_8_bits else 1)
    if tensor > 1 and (spec.n_head % tensor or spec.mlp_width % multiple or spec.d_model % multiple):
        raise UserError(
            f"parallel.tensor={tensor} does not divide model.n_head={spec.n_head} heads, width {spec.d_model} and "
            f"{spec.mlp_width} hidden channels into{f' multiples of {MULTIPLE}' * of_8_bits or ' equal parts'}; "
            f"valid: a divisor of all"
        )
    if tensor > 1 and spec.value_gain is not None:
        raise UserError(f"model.value_gain={spec.value_gain} needs parallel.tensor=1, not {tensor}; or set it to null")


def build_mesh(c: schema.Config) -> Mesh:
    """The mesh, checked against the batch."""
    mesh = make_mesh(*build_sizes(c.parallel))
    micro_batch, devices = c.batch_size // c.train.accum, batch_devices(mesh)
    if micro_batch % devices:
        raise UserError(
            f"a micro-batch of {micro_batch} sequences (train.batch_tokens={c.train.batch_tokens} / model.context="
            f"{c.model.context} / train.accum={c.train.accum}) cannot be split over {devices} devices; "
            f"valid: parallel.data x parallel.fsdp that divides {micro_batch}, or train.batch_tokens a multiple of "
            f"{devices * c.train.accum * c.model.context}"
        )
    return mesh


def build_source(c: schema.Data) -> Source:
    """What the text is read from."""
    match c.source:
        case "embedded":
            return EmbeddedSource()
        case "text":
            return TextSource(c.paths, c.format, c.column, c.max_documents)
        case "hf":
            assert c.name is not None  # validated
            return HubSource(
                c.name,
                config=c.config,
                split=c.split,
                column=c.column,
                revision=c.revision,
                streaming=c.streaming,
                max_documents=c.max_documents,
                max_tokens=c.max_tokens,
            )
        case "prepared":
            assert c.prepared_dir is not None  # validated
            return PreparedSource(Path(c.prepared_dir))


def build_data(c: schema.Config) -> Dataset:
    """Prepare the data unless it is prepared already, and open both parts."""
    with shown() as progress:
        directory = prepare(
            build_source(c.data),
            c.data.tokenizer,
            Path(c.data.cache_dir),
            val_fraction=c.data.val_fraction,
            workers=c.data.workers,
            progress=progress,
        )
    return Dataset.open(
        directory,
        context=c.model.context,
        batch_size=c.batch_size,
        seed=c.seed,
        document_mask=c.data.document_mask,
    )


def build_workload(c: schema.Config) -> Workload:
    """Prepare the data if need be, build model, optimiser and mesh. Raises UserError for what does not fit together."""
    mesh = build_mesh(c)
    if c.precision.require_fp8:
        check_device(mesh.devices.flat[0])
    data = build_data(c)
    policy = build_policy(c.precision)
    model = build_model(c.model, policy, data.tokenizer.vocab_size)
    check_split(model, mesh)
    optimizer = build_optimizer(c.optimizer)
    return Workload(model, data, c.optimizer.name, optimizer, mesh, c.seed, build_reduce(c.parallel))


def vocabulary(c: schema.Config) -> int:
    """How many ids there are, the data not read."""
    if c.model.vocab_size is not None:
        return c.model.vocab_size
    if c.data.source == "prepared":
        return Manifest.load(Path(c.data.prepared_dir or "")).vocab_size
    return get_tokenizer(c.data.tokenizer or "").vocab_size


def build_plan(
    c: schema.Config,
    aim: Aim,
    *,
    sequences: int,
    bf16: schema.Precision | None,
    search: bool,
    exact: bool,
    say: Callable[[str], None],
) -> Plan:
    """What the step of a configuration needs and does on GPUs that are not there; see `plan.make_plan`.

    `bf16`: the configuration of what it is compared with; None: not compared.
    """
    mesh = make_target_mesh(aim.target, aim.gpus, aim.hosts, *build_sizes(c.parallel))
    model = build_model(c.model, build_policy(c.precision), vocabulary(c))
    check_split(model, mesh)
    task = Unfed(model, c.optimizer.name, build_optimizer(c.optimizer), mesh, build_reduce(c.parallel))
    other = None if bf16 is None else task._replace(model=Model.make(model.spec, build_policy(bf16)))

    def batches(sequences: int) -> Tokens:
        rows = sequences * batch_devices(mesh) * c.train.accum
        return abstract_batch(c.train.accum, rows, c.model.context, document_mask=c.data.document_mask, mesh=mesh)

    return make_plan(
        task,
        batches,
        aim,
        sequences=sequences,
        accum=c.train.accum,
        bf16=other,
        search=search,
        exact=exact,
        say=say,
    )


def build_batch(c: schema.Config, mesh: Mesh) -> Tokens:
    """Shapes, dtypes and shardings of a step's batch."""
    return abstract_batch(c.train.accum, c.batch_size, c.model.context, document_mask=c.data.document_mask, mesh=mesh)


def build_state(c: schema.Config, w: Workload) -> TrainState:
    """The state before step 0, with the weights of `init_from` where that is given."""
    if c.init_from is None:
        return first_state(w)
    source = Path(c.init_from)
    return first_state(w, lambda params: initial_weights(source, w.model.spec, params))


def build_learning_rates(c: schema.Config) -> np.ndarray:
    """FP32 `[train.steps]`."""
    return learning_rates(steps=c.train.steps, peak=c.optimizer.lr, **dataclasses.asdict(c.schedule))


def build_throughput(c: schema.Config, w: Workload) -> Throughput:
    """The counter of tokens/s and MFU."""
    return Throughput(
        tokens_per_step=c.train.batch_tokens,
        flops_per_token=flops_per_token(w.model.spec),
        peak_flops=peak_flops(w.mesh.devices.flat[0].device_kind, DTYPES[c.precision.compute]),
        devices=w.mesh.size,
    )


def describe_run(c: schema.Config, w: Workload, step: jax.stages.Compiled | None = None) -> list[str]:
    """What is about to be trained, a line each; with the memory that a compiled step needs."""
    return describe(
        w,
        model=c.model.name,
        precision=c.precision.name,
        batch_tokens=c.train.batch_tokens,
        accum=c.train.accum,
        step=step,
    )


def check_fp8(c: schema.Config, w: Task, step: jax.stages.Compiled) -> Found | None:
    """What a step compiled for a GPU is, where the precision has FP8 matmuls; None elsewhere.

    Raises UserError for what `precision.require_fp8` does not allow.
    """
    gpu = Gpu.of(w.mesh.devices.flat[0])
    if gpu is None or c.precision.forward is None:
        return None
    tokens = c.train.batch_tokens // (c.train.accum * batch_devices(w.mesh))
    return check_step(w.model, Program(step.as_text() or ""), tokens, gpu, require=c.precision.require_fp8)


def describe_change(c: schema.Config, found: Restored) -> list[str]:
    """What a resumed run does otherwise from here on."""
    if not found.step:
        return []
    before = build_learning_rates(from_tree(schema.Config, found.meta["config"]))
    return schedule_change(found.step, before, build_learning_rates(c))


def build_cadence(c: schema.Config) -> Cadence:
    """How often what happens."""
    scaled = c.precision.scaling == "propagate"
    return Cadence(
        log=c.train.log_every,
        evaluate=c.train.eval_every,
        checkpoint=c.checkpoint.every,
        sample=c.sample.every,
        rescale=c.precision.rescale_every if scaled else 0,
        numerics=0 if c.tracker.kind == "none" else c.metrics.numerics_every,
    )


def train_batches(c: schema.Config, w: Workload) -> Callable[[int], Iterator[tuple[int, Batch]]]:
    """The training batches from a step on, read ahead in the background."""
    return lambda start: prefetch(w.data.train, start, c.train.steps, depth=c.data.prefetch)


def make_evaluate(c: schema.Config, w: Workload) -> Callable[[TrainState, bool, Callable[[], bool]], Evaluation | None]:
    """`(state, final, broken_off) -> found`: validation on the first batches of that part, on more at the end."""
    eval_step = jax.jit(make_eval_step(eval_loss_of(w)), out_shardings=replicated(w.mesh))
    available = w.data.val.steps_per_epoch

    def run_evaluation(state: TrainState, final: bool, broken_off: Callable[[], bool]) -> Evaluation | None:
        count = min(available, c.train.final_eval_batches if final else c.train.eval_batches)
        batches = (place_batch(w.data.val.batch(i), accum=c.train.accum, mesh=w.mesh) for i in range(count))
        return evaluate(
            eval_step,
            state,
            batches,
            first=c.train.eval_batches,
            bytes_per_token=w.data.bytes_per_token,
            broken_off=broken_off,
        )

    return run_evaluation


def make_restore(
    w: Workload, batch: Tokens, checkpointer: Checkpointer
) -> Callable[[TrainState, list[int]], tuple[TrainState, int, StepFn | None]]:
    """`(state in use, steps) -> (state, step, compiled)`: see `Run.restore`."""

    def restore(state: TrainState, order: list[int]) -> tuple[TrainState, int, StepFn | None]:
        structure: Any = jax.tree.structure(state)
        jax.tree.map(lambda x: x.delete(), state)  # two would need twice the memory
        found = checkpointer.restore(abstract_state(w), order=order)
        new = from_stored(found.state)
        # The scales of weights are constants of the compiled step, and part of the structure.
        same = jax.tree.structure(new) == structure
        return new, found.step, None if same else compile_step(w, batch, new)

    return restore


def build_watchdog(c: schema.Watchdog, scaling: str, leaves: list[str], state: Mapping[str, Any] | None) -> Watchdog:
    """What looks at losses. `scaling`: `precision.scaling`; a loss scale may halve to 1 beside what is allowed."""
    max_skips = c.max_skips + (CALIBRATION if scaling == "loss_scale" else 0)
    bounds = Bounds(max_skips, c.spike_zscore, c.spike_window, c.spike_steps, c.max_rollbacks)
    return Watchdog(bounds, leaves, state)


def build_sample(c: schema.Config, w: Workload) -> Callable[[Any], str]:
    """`params -> text`: the prompt of the configuration and its continuation."""
    settings = dataclasses.asdict(c.sample)
    del settings["every"]
    return make_sample(w, **settings, seed=c.seed)


def report_on(run_dir: Path, display: Display) -> None:
    """Write report.html, where there is something to report. Of the processes of a run the first does it."""
    if jax.process_index() == 0 and (run_dir / "metrics.jsonl").exists():
        try:
            write_report(run_dir)
        except UserError as error:
            display.message(f"no report.html: {error}")


def restore_run(run_dir: Path) -> Trained:
    """The model of a run directory's newest checkpoint, and the tokenizer of its data. Raises UserError."""
    hide_missing_gpu()
    if not (run_dir / "checkpoints").is_dir():
        raise UserError(f"{run_dir} is not a run directory: it has no checkpoints; give the run_dir of a training run")
    with Checkpointer.reading(run_dir / "checkpoints") as checkpointer:
        meta = checkpointer.meta()
        c = from_tree(schema.Config, meta["config"])
        tokenizer = load_saved(meta["tokenizer"], run_dir)
        model = build_model(c.model, build_policy(c.precision), tokenizer.vocab_size)
        like = jax.eval_shape(model.sampling.init, jax.random.key(0))
        params = restore_logical(checkpointer, like)
    return Trained(model.spec, model.sampling.bind, params, tokenizer)


def run(c: schema.Config) -> int:
    """Train, or only describe what would be trained. The exit code."""
    hide_missing_gpu()
    if c.parallel.distributed:
        start_processes()
    console = Output(soft_wrap=True, quiet=jax.process_index() > 0)
    warning = use_compilation_cache(c.compile_cache)
    if warning is not None:
        console.print(warning, highlight=False)
    if c.dry_run:
        w = build_workload(c)
        step = compile_step(w, build_batch(c, w.mesh))
        fp8 = check_fp8(c, w, step)
        for line in [*describe_run(c, w, step), *(fp8.lines if fp8 else [])]:
            console.print(line, highlight=False)
        return 0
    with RunDir(Path(c.run_dir)) as directory, said_in_a_line(directory.path):
        directory.check(to_tree(c))
        return train_in(directory, c, build_workload(c), Display(c.train.steps, console=console))


@contextlib.contextmanager
def said_in_a_line(run_dir: Path) -> Iterator[None]:
    """Turns the error of a full disk into a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise UserError(f"cannot write {error.filename or run_dir}: {error.strerror}; {MAKE_ROOM}") from error


@contextlib.contextmanager
def not_for_ever(seconds: float) -> Iterator[None]:
    """After an error, ends a process of several in so many seconds: in opening and closing they wait for each other."""
    try:
        yield
    except BaseException as error:
        if jax.process_count() > 1:
            leave_within(seconds, error)
        raise


def train_in(directory: RunDir, c: schema.Config, w: Workload, display: Display) -> int:
    """Train in a run directory, from where it stands. The exit code."""
    tree = to_tree(c)
    with display:
        with not_for_ever(c.watchdog.stop_seconds):
            checkpointer = Checkpointer(
                directory.path / "checkpoints", keep=c.checkpoint.keep, keep_best=c.checkpoint.keep_best
            )
            found = starting_point(
                c.resume.source,
                directory.path,
                checkpointer,
                w,
                lambda: build_state(c, w),
                convert=c.resume.convert,
            )
        fork = found.step not in [0, *checkpointer.steps()]
        unfinished = None if fork else found.meta.get("unfinished")
        check_same_run(found, c.train.steps, w.data.manifest.fingerprint, fork=fork)
        with refused_together(), said_in_a_line(directory.path):
            directory.adopt(tree)
            write_environment(directory.path)
            if jax.process_index() == 0:
                w.data.tokenizer.save(directory.path)  # what `restore_run` needs besides the checkpoint
        for line in [*describe_run(c, w), *describe_change(c, found)]:
            display.message(line)
        tracker = make_tracker(
            c.tracker.kind,
            directory.path,
            start=found.step,
            again=unfinished is not None,
            config=tree,
            run_id=found.meta.get("tracker_id"),
            init={k: v for k, v in dataclasses.asdict(c.tracker).items() if k != "kind" and v is not None}
            | {"name": c.tracker.name or directory.path.name},
        )
        code = 1
        with contextlib.ExitStack() as closing:  # each, even if the one before it fails
            closing.callback(checkpointer.close)
            closing.callback(report_on, directory.path, display)
            closing.callback(lambda: tracker.close(code))
            closing.enter_context(not_for_ever(c.watchdog.stop_seconds))
            try:
                # Before the compilation, which processes may end minutes apart: its first question joins their devices.
                agree = Agreement(w.mesh)
                state = from_stored(found.state)
                step = compile_step(w, build_batch(c, w.mesh), state)
                for line in describe_wire(w, step):
                    display.message(line)
                fp8 = check_fp8(c, w, step)
                for line in fp8.lines if fp8 else []:
                    display.message(line)
                    tracker.event(found.step, line)
                if fp8:
                    tracker.summary({"fp8_flop_share": fp8.share})
                training = Run(
                    state=state,
                    step=found.step,
                    steps=c.train.steps,
                    seed=np.uint32(c.seed),
                    batch_tokens=c.train.batch_tokens,
                    learning_rates=build_learning_rates(c),
                    train_step=step,
                    batches=train_batches(c, w),
                    place=functools.partial(place_batch, accum=c.train.accum, mesh=w.mesh),
                    agree=agree,
                    evaluate=make_evaluate(c, w),
                    numerics=make_numerics(w.model, w.optimizer_name, replicated(w.mesh)),
                    rescale=make_rescale(w, build_batch(c, w.mesh)),
                    restore=make_restore(w, build_batch(c, w.mesh), checkpointer),
                    sample=build_sample(c, w),
                    diagnose=make_diagnose(w),
                    checkpointer=checkpointer,
                    meta={
                        "config": tree,
                        "model": architecture(w.model.spec),
                        "precision": dataclasses.asdict(w.model.policy),
                        "data": w.data.manifest.fingerprint,
                        "tokenizer": w.data.tokenizer.name,
                        "tracker_id": tracker.id,
                    },
                    tracker=tracker,
                    display=display,
                    watchdog=build_watchdog(
                        c.watchdog, c.precision.scaling, parameter_names(state.params), found.meta.get("watchdog")
                    ),
                    throughput=build_throughput(c, w),
                    cadence=build_cadence(c),
                    run_dir=directory.path,
                    profile=(c.profile.steps[0], c.profile.steps[1]) if c.profile.steps else None,
                    patience=Patience(c.watchdog.stop_seconds, c.watchdog.stall_seconds, c.watchdog.hang_seconds),
                    unfinished=unfinished,
                    recorded=found.step,
                )
                code = train(training)
            except UserError as error:
                code = error.exit_code
                raise
            except OSError as error:
                if error.errno in NO_ROOM:
                    code = UserError.exit_code
                raise
        farewell(training, code, sys.argv[1:])
        return code
