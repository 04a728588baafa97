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
)
from trainer.errors import UserError
from trainer.step.optimizers import check_moments

MAX_STEPS = 10**8


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise UserError(message)


def check_micro_batch(c: Config, parts: int, over: str, alternative: str = "") -> None:
    """Raise UserError if a micro-batch cannot be split into `parts` equal parts.

    The message names what the batch is split `over`, and an `alternative` to changing
    the batch.
    """
    context = c.model.context
    accum = c.train.grad_accum_steps
    micro_batch = c.batch_size // accum
    _require(
        micro_batch % parts == 0,
        f"a micro-batch of {micro_batch} sequences cannot be split over {over}; choose"
        f" train.batch_tokens, a multiple of {parts * accum * context}{alternative}. A"
        f" micro-batch has train.batch_tokens={c.train.batch_tokens} /"
        f" model.context={context} / train.grad_accum_steps={accum} sequences",
    )


def validate(c: Config) -> None:
    """Raise UserError for a configuration that cannot run."""
    _check_data(c.data)
    # The spec checks itself; any vocabulary does, as the tokenizer is not known yet.
    c.model.spec(vocab_size=1)
    _require(
        c.precision.attention is None or not c.data.document_mask,
        f"precision.attention={c.precision.attention} with data.document_mask=true: FP8"
        " attention has no mask of documents; set data.document_mask=false, or leave"
        " precision.attention out",
    )
    check_moments(c.optimizer.name, c.precision)
    tokens = c.model.context * c.train.grad_accum_steps
    _require(
        c.train.batch_tokens % tokens == 0,
        f"train.batch_tokens={c.train.batch_tokens} is not a multiple of model.context"
        f" x train.grad_accum_steps = {c.model.context} x {c.train.grad_accum_steps} ="
        f" {tokens}; nearest valid:"
        f" {max(1, round(c.train.batch_tokens / tokens)) * tokens}",
    )
    _require(
        c.train.steps <= MAX_STEPS,
        f"train.steps={c.train.steps}; valid: at most {MAX_STEPS}, as the learning"
        " rate of each step is kept",
    )
    _require(
        c.train.final_eval_batches >= c.train.eval_batches,
        f"train.final_eval_batches={c.train.final_eval_batches} is less than"
        f" train.eval_batches={c.train.eval_batches}; set it to"
        f" {c.train.eval_batches} or more. The final validation must include the"
        " batches of every other validation, because step=best compares their losses",
    )
    for stage in c.data.stages or ():
        _require(
            not stage or stage[0] < c.train.steps,
            f"data.stages: a stage begins after step {stage[0]:g}, but"
            f" train.steps={c.train.steps}; give an earlier step, or more steps",
        )
    shares = c.schedule.warmup_fraction + c.schedule.decay_fraction
    _require(
        c.schedule.name != "wsd" or shares <= 1 + 1e-9,
        f"schedule.warmup_fraction={c.schedule.warmup_fraction} and"
        f" schedule.decay_fraction={c.schedule.decay_fraction} are more than all steps:"
        " the learning rate would never come down; make them at most 1 together",
    )
    mesh = {name: getattr(c.parallel, name) for name in ("data", "fsdp", "tensor")}
    _require(
        list(mesh.values()).count(-1) <= 1,
        f"{', '.join(f'parallel.{n}=-1' for n, size in mesh.items() if size == -1)}:"
        " only one axis can be -1 (all remaining devices); set parallel.data=1 to shard"
        " the state over all devices",
    )
    _require(
        not c.parallel.deterministic_reduce or c.parallel.reduce == "fp32",
        "parallel.deterministic_reduce=true sums in FP32, but"
        f" parallel.reduce={c.parallel.reduce}; choose one of them",
    )
    _check_diloco(c)
    _check_launcher(c)
    _require(
        not c.precision.require_fp8
        or c.precision.forward is not None
        or c.precision.has_fp8_attention,
        f"precision.require_fp8=true, but precision={c.precision.name} has no FP8"
        " matmuls; choose one that has, such as precision=scalify_fp8_fp16, or leave"
        " require_fp8 out",
    )
    _require(
        c.init.embeddings is None or c.init_from is not None,
        f"init.embeddings={c.init.embeddings} needs init_from, which is null; add"
        " init_from=DIRECTORY, or leave init.embeddings out",
    )
    if c.profile.steps is not None:
        ok = (
            len(c.profile.steps) == 2
            and 1 <= c.profile.steps[0] <= c.profile.steps[1] <= c.train.steps
        )
        _require(
            ok,
            f"profile.steps={list(c.profile.steps)}: expected [first,last] within"
            f" 1..{c.train.steps}",
        )


# Keys that may be null with replicas, too.
OPTIONAL_DILOCO_KEYS = ("participants", "quorum", "bandwidth_gbps")


def _non_null_keys(group: str, values: DiLoCo | Launcher) -> str:
    """Return text of the keys that are not null, such as `diloco.data=split`."""
    keys = []
    for field in fields(values):
        value = getattr(values, field.name)
        if value is not None:
            keys.append(f"{group}.{field.name}={value}")
    return ", ".join(keys)


def _check_diloco(c: Config) -> None:
    """Refuse DiLoCo keys without replicas, replicas without DiLoCo keys, and keys that
    contradict each other.
    """
    d = c.diloco
    if d.replicas is None:
        ignored = _non_null_keys("diloco", d)
        _require(
            not ignored,
            f"{ignored} would be ignored: diloco.replicas, the number of"
            " replicas, is null; choose parallel=diloco, or leave it out",
        )
        return
    missing = []
    for field in fields(d):
        key = field.name
        if getattr(d, key) is None and key not in OPTIONAL_DILOCO_KEYS:
            missing.append(f"diloco.{key}")
    _require(
        not missing,
        f"{', '.join(missing)} is null; choose parallel=diloco, which has values, or"
        " give it one",
    )
    _check_replicas(c, d.replicas)
    _check_rounds(d, d.replicas)
    _check_replica_data(c, d.replicas)


def _check_replicas(c: Config, replicas: int) -> None:
    """Refuse settings that change the form of the state, and too few replicas."""
    conversion = ""
    if c.train.phases is not None:
        conversion = "train.phases"
    elif c.resume.convert:
        conversion = "resume.convert=true"
    _require(
        not conversion,
        f"{conversion} is not supported with diloco.replicas={replicas}; leave one of"
        " them out, or start from weights by init_from",
    )
    _require(
        c.precision.weights_rounding != "kahan",
        "precision.weights_rounding=kahan keeps the rounding error of one set of"
        f" weights, not of diloco.replicas={replicas} replicas; choose stochastic",
    )
    quorum = c.diloco.quorum or 1
    _require(
        quorum <= replicas,
        f"diloco.replicas={replicas} is less than diloco.quorum={quorum}; valid: at"
        " least as many, or a smaller quorum",
    )
    _require(
        c.diloco.bandwidth_gbps != 0,
        "diloco.bandwidth_gbps=0: expected gigabits a second of the network, or null",
    )


def _check_rounds(d: DiLoCo, replicas: int) -> None:
    """Refuse fragments and participants that do not fit a round."""
    steps = d.sync_every or 1
    fragments = d.fragments or 1
    participants = d.participants or replicas
    _require(
        fragments <= steps,
        f"diloco.fragments={fragments} is more than diloco.sync_every={steps}: a step"
        f" exchanges one; valid: 1..{steps}",
    )
    _require(
        participants <= replicas,
        f"diloco.participants={participants}: there are diloco.replicas={replicas};"
        " choose fewer",
    )
    _require(
        participants == replicas or fragments == 1,
        f"diloco.participants={participants} needs diloco.fragments=1, this is"
        f" {fragments}: participants are drawn for a whole round, and fragments are"
        " exchanged at different steps",
    )


def _check_replica_data(c: Config, replicas: int) -> None:
    """Refuse batches that cannot be split, and sources that replicas cannot share."""
    data = c.data
    if c.diloco.data == "sources":
        _require(
            data.source == "mix" and len(data.sources or ()) == replicas,
            f"diloco.data=sources gives each of diloco.replicas={replicas} replicas a"
            " source of its own; choose data=mix with as many data.sources, or"
            " diloco.data=split",
        )
        _require(
            len(set(data.weights or ())) <= 1 and not data.stages,
            "diloco.data=sources uses all sources equally; leave out"
            f" data.weights={list(data.weights or ())} and"
            f" data.stages={[list(stage) for stage in data.stages or ()]}, or choose"
            " diloco.data=split",
        )
    check_micro_batch(c, replicas, f"diloco.replicas={replicas} replicas")


def with_workers(c: Config, count: int) -> Config:
    """Return the configuration for `count` workers.

    Each worker has its share of the DiLoCo replicas; those of lost workers are left
    out.
    """
    if c.launcher.workers is None or c.diloco.replicas is None:
        return c
    replicas = c.diloco.replicas // c.launcher.workers[-1] * count
    return replace(c, diloco=replace(c.diloco, replicas=replicas))


def _check_launcher(c: Config) -> None:
    """Refuse launcher keys without a launcher, and numbers of workers for which the run
    cannot be split.
    """
    launcher = c.launcher
    if launcher.kind is None:
        ignored = _non_null_keys("launcher", launcher)
        _require(
            not ignored,
            f"{ignored} would be ignored: the command itself trains; choose"
            " launcher=ray, or leave it out",
        )
        return
    workers = launcher.workers or ()
    _require(
        len(workers) == 2 and workers[0] <= workers[1],
        f"launcher.workers={list(workers) or 'null'}: expected the fewest and the most"
        " workers, such as launcher.workers=[2,4]",
    )
    least, most = workers
    _require(
        launcher.restarts is not None and launcher.resize_seconds is not None,
        "launcher.restarts or launcher.resize_seconds is null; choose launcher=ray,"
        " which has values",
    )
    if c.diloco.replicas is None:
        gpus = launcher.worker_gpus or 1
        _check_device_counts(c, [count * gpus for count in range(least, most + 1)])
    else:
        _check_worker_replicas(c, c.diloco.replicas, least, most)


def _check_device_counts(c: Config, devices: list[int]) -> None:
    """Refuse a batch or a mesh that some number of devices cannot split."""
    fixed = math.prod(
        size
        for size in (c.parallel.data, c.parallel.fsdp, c.parallel.tensor)
        if size != -1
    )
    unfit = [n for n in devices if n % fixed]
    _require(
        not unfit,
        f"launcher.workers: {unfit[0] if unfit else 0} devices cannot be split by the"
        f" fixed axes of parallel.data x fsdp x tensor, {fixed} in product; choose"
        " other sizes, or other numbers of workers",
    )
    shards = math.lcm(*(n // c.parallel.tensor for n in devices))
    counts = ", ".join(map(str, devices))
    check_micro_batch(
        c,
        shards,
        f"each of {counts} devices, which launcher.workers allows",
        ", or other launcher.workers",
    )


def _check_worker_replicas(c: Config, replicas: int, least: int, most: int) -> None:
    """Refuse replicas that the workers cannot share, and too few of them for the quorum
    with the minimum number of workers.
    """
    _require(
        replicas % most == 0,
        f"diloco.replicas={replicas} is not a multiple of launcher.workers[1]={most};"
        f" nearest valid: {max(1, round(replicas / most)) * most}",
    )
    quorum = c.diloco.quorum or replicas
    share = replicas // most
    needed = -(-quorum // share)
    _require(
        least >= needed,
        f"launcher.workers=[{least},{most}] would go on with {least * share} of"
        f" {replicas} replicas, but diloco.quorum is {quorum}; choose"
        f" launcher.workers=[{needed},{most}], or diloco.quorum={least * share}",
    )
    participants = c.diloco.participants or 1
    _require(
        participants <= least * share,
        f"launcher.workers=[{least},{most}] would go on with {least * share} of"
        f" {replicas} replicas, but diloco.participants is {participants}; choose at"
        f" most {least * share}, or leave it out",
    )
    for count in range(least, most):
        _check_replica_data(c, count * share)


def _check_data(data: Data) -> None:
    """Refuse keys that the chosen source does not use, and keys that it lacks."""
    for key, users in DATA_KEYS.items():
        value = getattr(data, key)
        if value in (None, (), False):
            continue
        text = f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else value
        valid = " or ".join(f"data={name}" for name in users)
        _require(
            data.source in users,
            f"data.{key}={text} is not used by data={data.source}, and would be"
            f" ignored; it belongs to {valid}: add {valid}, or leave data.{key} out",
        )
    for key in NOT_NULL_KEYS:
        missing = data.source in DATA_KEYS[key] and getattr(data, key) is None
        _require(
            not missing,
            f"data.{key} is null; choose the group, data={data.source}, or give it a"
            " value",
        )
    _require(
        data.val_fraction != 0,
        "data.val_fraction=0: a validation part is needed; give it a small share, such"
        " as 0.01",
    )
    _require(
        data.source != "text" or bool(data.paths),
        "data=text needs data.paths=[FILE,...]; texts of a program are given to"
        " train(config, data=TEXTS), without data=text",
    )
    _require(
        data.source != "hf" or bool(data.name),
        "data=hf needs data.name=ORGANIZATION/DATASET",
    )
    _require(
        data.source != "prepared" or bool(data.prepared_dir),
        "data=prepared needs data.prepared_dir=DIRECTORY",
    )
    _require(
        data.source != "mix" or bool(data.sources),
        "data=mix needs data.sources=[DIRECTORY,...]",
    )
    _require(
        data.source in ("prepared", "mix") or bool(data.tokenizer),
        "data.tokenizer is null; valid: byte, gpt2, cl100k_base, a file",
    )
