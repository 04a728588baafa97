"""Checks of a configuration that need nothing else: settings that cannot run together.

Checks that need the devices or the tokenizer are in `trainer.assembly.build`.
"""

import math
from dataclasses import fields, replace

from trainer.config.schema import (
    DATA_KEYS,
    NOT_NULL_KEYS,
    Config,
    Data,
    DiLoCo,
    Launcher,
    Parallel,
)
from trainer.errors import UserError
from trainer.step.optimizers import check_moments
from trainer.text import as_typed

MAX_STEPS = 10**8


def check_micro_batch(c: Config, parts: int, over: str, alternative: str = "") -> None:
    """Raise UserError if a micro-batch cannot be split into `parts` equal parts.

    The message names what the batch is split `over`, and an `alternative` to changing
    the batch.
    """
    context = c.model.context
    accum = c.train.grad_accum_steps
    micro_batch = c.batch_size // accum
    if micro_batch % parts:
        raise UserError(
            f"a micro-batch of {micro_batch} sequences cannot be split over {over};"
            f" choose train.batch_tokens, a multiple of"
            f" {parts * accum * context}{alternative}. A micro-batch has"
            f" train.batch_tokens={c.train.batch_tokens} / model.context={context} /"
            f" train.grad_accum_steps={accum} sequences"
        )


def validate(c: Config) -> None:
    """Raise UserError for a configuration that cannot run."""
    _check_data(c.data)
    # The tokenizer is not loaded yet, so check the spec with a placeholder vocabulary.
    c.model.spec(vocab_size=1)
    # Each moment's format must suit the optimizer that has it.
    check_moments(c.optimizer.name, c.precision)
    _check_steps(c)
    _check_precision(c)
    _check_parallel(c.parallel)
    _check_diloco(c)
    _check_launcher(c)
    if c.init.embeddings is not None and c.init_from is None:
        raise UserError(
            f"init.embeddings={c.init.embeddings} needs init_from, which is null; add"
            " init_from=DIRECTORY, or leave init.embeddings out"
        )


def _check_steps(c: Config) -> None:
    """Raise UserError for batches or settings that do not fit the numbers of steps."""
    tokens = c.model.context * c.train.grad_accum_steps
    if c.train.batch_tokens % tokens:
        raise UserError(
            f"train.batch_tokens={c.train.batch_tokens} is not a multiple of"
            f" model.context x train.grad_accum_steps = {c.model.context} x"
            f" {c.train.grad_accum_steps} = {tokens}; nearest valid:"
            f" {max(1, round(c.train.batch_tokens / tokens)) * tokens}"
        )
    if c.train.steps > MAX_STEPS:
        raise UserError(f"train.steps={c.train.steps}; valid: at most {MAX_STEPS}")
    if c.train.final_eval_batches < c.train.eval_batches:
        raise UserError(
            f"train.final_eval_batches={c.train.final_eval_batches} is less than"
            f" train.eval_batches={c.train.eval_batches}; set it to"
            f" {c.train.eval_batches} or more. The final validation must include the"
            " batches of every other validation, because step=best compares their"
            " losses"
        )
    # A stage that never begins would leave another mixture, in silence.
    for stage in c.data.stages or ():
        if stage and stage[0] >= c.train.steps:
            raise UserError(
                f"data.stages: a stage begins after step {stage[0]:g}, but"
                f" train.steps={c.train.steps}; give an earlier step, or more steps"
            )
    shares = c.schedule.warmup_fraction + c.schedule.decay_fraction
    if c.schedule.name == "wsd" and shares > 1 + 1e-9:
        raise UserError(
            f"schedule.warmup_fraction={c.schedule.warmup_fraction} and"
            f" schedule.decay_fraction={c.schedule.decay_fraction}: the learning rate"
            " never decays; their sum must be at most 1"
        )
    # Both ends count, and steps are counted from 1 here, as in the log.
    if c.profile.steps is not None:
        steps = c.profile.steps
        if len(steps) != 2 or not 1 <= steps[0] <= steps[1] <= c.train.steps:
            raise UserError(
                f"profile.steps={as_typed(steps)}: expected [first,last] within"
                f" 1..{c.train.steps}"
            )


def _check_precision(c: Config) -> None:
    """Raise UserError for FP8 where it cannot be."""
    # Ignoring the mask would let documents attend to each other in silence.
    if c.precision.attention is not None and c.data.document_mask:
        raise UserError(
            f"precision.attention={c.precision.attention} with data.document_mask=true:"
            " FP8 attention has no mask of documents; set data.document_mask=false, or"
            " leave precision.attention out"
        )
    # `check_fp8` would look for nothing, and the key would be ignored.
    has_fp8 = c.precision.forward is not None or c.precision.has_fp8_attention
    if c.precision.require_fp8 and not has_fp8:
        raise UserError(
            f"precision.require_fp8=true, but precision={c.precision.name} has no FP8"
            " matmuls; choose one that has, such as precision=scalify_fp8_fp16, or"
            " leave require_fp8 out"
        )


def _check_parallel(parallel: Parallel) -> None:
    """Raise UserError for two axes of all remaining devices, or formats of one sum."""
    remaining = []
    for name in ("data", "fsdp", "tensor"):
        if getattr(parallel, name) == -1:
            remaining.append(f"parallel.{name}=-1")
    # The number of devices fixes one size alone.
    if len(remaining) > 1:
        raise UserError(
            f"{', '.join(remaining)}: only one axis can be -1 (all remaining devices);"
            " set parallel.data=1 to shard the state over all devices"
        )
    # Refused rather than one of them ignored: both say in which format gradients are
    # sent.
    if parallel.deterministic_reduce and parallel.reduce != "fp32":
        raise UserError(
            "parallel.deterministic_reduce=true sums in FP32, but"
            f" parallel.reduce={parallel.reduce}; choose one of them"
        )


# Keys that may be null with replicas, too.
OPTIONAL_DILOCO_KEYS = ("participants", "quorum", "bandwidth_gbps")


def _non_null_keys(group: str, values: DiLoCo | Launcher) -> str:
    """Return text of the keys that are not null, such as `diloco.data=split`."""
    keys = []
    for field in fields(values):
        value = getattr(values, field.name)
        if value is not None:
            keys.append(f"{group}.{field.name}={as_typed(value)}")
    return ", ".join(keys)


def _check_diloco(c: Config) -> None:
    """Raise UserError for DiLoCo keys that contradict each other.

    Keys without replicas do, and replicas without their keys.
    """
    d = c.diloco
    if d.replicas is None:
        ignored = _non_null_keys("diloco", d)
        # Ignored keys would leave a user with other training than the command line
        # says.
        if ignored:
            raise UserError(
                f"{ignored} has no effect without diloco.replicas; add parallel=diloco,"
                f" or remove {ignored}"
            )
        return
    missing = []
    for field in fields(d):
        key = field.name
        if getattr(d, key) is None and key not in OPTIONAL_DILOCO_KEYS:
            missing.append(f"diloco.{key}")
    if missing:
        raise UserError(
            f"diloco.replicas is set, but null: {', '.join(missing)}; add"
            " parallel=diloco, which sets defaults, or set each of them"
        )
    _check_replicas(c, d.replicas)
    _check_rounds(d, d.replicas)
    _check_replica_data(c, d.replicas)


def _check_replicas(c: Config, replicas: int) -> None:
    """Raise UserError for too few replicas, or for a change of the state's form."""
    conversion = ""
    if c.train.phases is not None:
        conversion = "train.phases"
    elif c.resume.convert:
        conversion = "resume.convert=true"
    if conversion:
        raise UserError(
            f"{conversion} is not supported with diloco.replicas={replicas}; leave one"
            " of them out, or start from weights by init_from"
        )
    if c.precision.weights_rounding == "kahan":
        raise UserError(
            "precision.weights_rounding=kahan keeps the rounding error of one set of"
            f" weights, not of diloco.replicas={replicas} replicas; choose stochastic"
        )
    # Null means all replicas, which cannot exceed them.
    quorum = c.diloco.quorum or 1
    if quorum > replicas:
        raise UserError(
            f"diloco.quorum={quorum} exceeds diloco.replicas={replicas}; valid: quorum"
            f" 1..{replicas}"
        )
    # The schema allows 0 and more; the time of an exchange is divided by it.
    if c.diloco.bandwidth_gbps == 0:
        raise UserError(
            "diloco.bandwidth_gbps=0: expected gigabits a second of the network, or"
            " null"
        )


def _check_rounds(d: DiLoCo, replicas: int) -> None:
    """Raise UserError for fragments and participants that do not fit a round."""
    steps = d.sync_every or 1
    fragments = d.fragments or 1
    participants = d.participants or replicas
    if fragments > steps:
        raise UserError(
            f"diloco.fragments={fragments} is more than diloco.sync_every={steps}: a"
            f" step exchanges one; valid: 1..{steps}"
        )
    if participants > replicas:
        raise UserError(
            f"diloco.participants={participants} exceeds diloco.replicas={replicas};"
            f" valid: 1..{replicas}"
        )
    if participants < replicas and fragments > 1:
        raise UserError(
            f"diloco.participants={participants} needs diloco.fragments=1, this is"
            f" {fragments}: participants are drawn for a whole round, and fragments are"
            " exchanged at different steps"
        )


def _check_replica_data(c: Config, replicas: int) -> None:
    """Raise UserError for batches or sources that replicas cannot share."""
    data = c.data
    if c.diloco.data == "sources":
        # Replica k reads source k, so there is one for each and none left over.
        if data.source != "mix" or len(data.sources or ()) != replicas:
            raise UserError(
                f"diloco.data=sources gives each of diloco.replicas={replicas} replicas"
                " its own source; choose data=mix with as many data.sources, or"
                " diloco.data=split"
            )
        # Each replica has an equal part of every batch, and all of it is of its source.
        if len(set(data.weights or ())) > 1 or data.stages:
            raise UserError(
                "diloco.data=sources uses all sources equally; leave out data.weights"
                " and data.stages, or choose diloco.data=split"
            )
    # `build_mesh` checks it again with the devices, which are not known here.
    check_micro_batch(c, replicas, f"diloco.replicas={replicas} replicas")


def with_workers(c: Config, count: int) -> Config:
    """Return the configuration for `count` workers.

    Each worker has its share of the DiLoCo replicas; those of lost workers are left
    out.
    """
    if c.launcher.workers is None or c.diloco.replicas is None:
        return c
    # The share of the largest number of workers: a worker that is left takes over
    # nothing.
    replicas = c.diloco.replicas // c.launcher.workers[-1] * count
    return replace(c, diloco=replace(c.diloco, replicas=replicas))


def _check_launcher(c: Config) -> None:
    """Raise UserError for workers over which the run cannot be split.

    Also raise it for launcher keys without a launcher.
    """
    launcher = c.launcher
    if launcher.kind is None:
        ignored = _non_null_keys("launcher", launcher)
        if ignored:
            raise UserError(
                f"{ignored} has no effect without a launcher; add launcher=ray, or"
                f" remove {ignored}"
            )
        return
    workers = launcher.workers or ()
    if len(workers) != 2 or workers[0] > workers[1]:
        raise UserError(
            f"launcher.workers={as_typed(launcher.workers)}: expected the minimum and"
            " maximum number of workers, such as launcher.workers=[2,4]"
        )
    least, most = workers
    if launcher.restarts is None or launcher.resize_seconds is None:
        raise UserError(
            "launcher.restarts or launcher.resize_seconds is null; add launcher=ray,"
            " which sets defaults, or set both"
        )
    if c.diloco.replicas is None:
        # A worker without GPUs has one device, its CPU.
        gpus = launcher.worker_gpus or 1
        _check_device_counts(c, [count * gpus for count in range(least, most + 1)])
    else:
        _check_worker_replicas(c, c.diloco.replicas, least, most)


def _check_device_counts(c: Config, devices: list[int]) -> None:
    """Raise UserError for a batch or mesh that some number of devices cannot split."""
    sizes = (c.parallel.data, c.parallel.fsdp, c.parallel.tensor)
    # -1 takes what the others leave, so it fits any multiple of them.
    fixed = math.prod(size for size in sizes if size != -1)
    for count in devices:
        if count % fixed:
            plural = "s" if count > 1 else ""
            raise UserError(
                f"launcher.workers allows {count} device{plural}, which is not a"
                f" multiple of parallel.data x fsdp x tensor = {fixed}; choose other"
                " sizes, or other launcher.workers"
            )
    # Checked for all numbers at once: a batch that one of them cannot split would end
    # the run in the middle, when a machine is lost. Devices of the axis `tensor` share
    # their rows.
    shards = math.lcm(*(n // c.parallel.tensor for n in devices))
    counts = ", ".join(map(str, devices))
    check_micro_batch(
        c,
        shards,
        f"each of {counts} devices, which launcher.workers allows",
        ", or other launcher.workers",
    )


def _check_worker_replicas(c: Config, replicas: int, least: int, most: int) -> None:
    """Raise UserError for replicas that the workers cannot share.

    Also raise it if the minimum number of workers has too few of them for the quorum.
    """
    if replicas % most:
        raise UserError(
            f"diloco.replicas={replicas} is not a multiple of"
            f" launcher.workers[1]={most}; nearest valid:"
            f" {max(1, round(replicas / most)) * most}"
        )
    quorum = c.diloco.quorum or replicas
    share = replicas // most
    # Rounded up: workers bring their share of the replicas, or none.
    needed = -(-quorum // share)
    left = (
        f"launcher.workers=[{least},{most}] could continue with {least * share} of"
        f" {replicas} replicas"
    )
    if least < needed:
        raise UserError(
            f"{left}, but diloco.quorum is {quorum}; choose"
            f" launcher.workers=[{needed},{most}], or diloco.quorum={least * share}"
        )
    participants = c.diloco.participants or 1
    if participants > least * share:
        raise UserError(
            f"{left}, but diloco.participants is {participants}; choose at most"
            f" {least * share}, or leave it out"
        )
    # `_check_diloco` has checked all replicas, which `most` workers share.
    for count in range(least, most):
        _check_replica_data(c, count * share)


def _check_data(data: Data) -> None:
    """Raise UserError for keys that the chosen source does not use, or lacks."""
    # A key of another source is mostly a forgotten `data=`: it would train on the
    # default text.
    for key, users in DATA_KEYS.items():
        value = getattr(data, key)
        # These are the values of keys that nobody set. 0 passes as False; the check of
        # val_fraction below refuses it.
        if value not in (None, (), False) and data.source not in users:
            valid = " or ".join(f"data={name}" for name in users)
            raise UserError(
                f"data.{key}={as_typed(value)} is not used by data={data.source}, and"
                f" would be ignored; it belongs to {valid}: add {valid}, or leave"
                f" data.{key} out"
            )
    for key in NOT_NULL_KEYS:
        if data.source in DATA_KEYS[key] and getattr(data, key) is None:
            raise UserError(
                f"data.{key} is null; add data={data.source}, which sets a default, or"
                " set it"
            )
    # Reports, keep_best and sweeps need a validation loss.
    if data.val_fraction == 0:
        raise UserError(
            "data.val_fraction=0: a validation set is needed; give a small share, such"
            " as 0.01"
        )
    if data.source == "text" and not data.paths:
        raise UserError(
            "data=text needs data.paths=[FILE,...]; texts of a program are given to"
            " train(config, data=TEXTS), without data=text"
        )
    if data.source == "hf" and not data.name:
        raise UserError("data=hf needs data.name=ORGANIZATION/DATASET")
    if data.source == "prepared" and not data.prepared_dir:
        raise UserError("data=prepared needs data.prepared_dir=DIRECTORY")
    if data.source == "mix" and not data.sources:
        raise UserError("data=mix needs data.sources=[DIRECTORY,...]")
    if data.source not in ("prepared", "mix") and not data.tokenizer:
        raise UserError(
            "data.tokenizer is null; valid: byte, gpt2, cl100k_base, a file"
        )
