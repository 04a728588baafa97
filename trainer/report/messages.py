"""What a run says of itself at its start and at its end."""

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from trainer.compiled.exchange import Exchanges, exchanges_of
from trainer.compiled.hlo import Program
from trainer.data import Manifest
from trainer.models.family import param_count
from trainer.models.flops import flop_share
from trainer.observe.metrics import GIB
from trainer.parallel.mesh import devices_of_replica
from trainer.parallel.replicas import DiLoCoStep
from trainer.precision.policy import Policy, without_effect
from trainer.run.loop import Run
from trainer.step.kernels import promise
from trainer.text import interpreter
from trainer.workload import Model, TrainTask, Workload

MIB = 2**20
# share of data.val_fraction that the validation part may be off, before a reader is
# told
FAR = 0.2


def describe(
    w: Workload,
    *,
    model: str,
    precision: str,
    batch_tokens: int,
    accum: int,
    step: Any = None,
) -> list[str]:
    """What is about to be trained, a line each; with the memory that a compiled step
    needs.

    Args:
      w: the objects.
      model, precision: names of the presets.
      batch_tokens: tokens a step, in `accum` micro-batches.
      step: the compiled step.
    """
    spec, flops = w.model.spec, w.task.flops_per_token
    layers = (
        f"{spec.n_layer} layer{'s' * (spec.n_layer != 1)}, " if spec.n_layer else ""
    )
    lines = [
        (
            f"model {model}: {w.task.parameters:,} parameters, {layers}width"
            f" {spec.d_model}, context {spec.context}, vocabulary {spec.vocab_size:,}"
        ),
        f"data {w.data.directory}: {describe_data(w.data.manifest)}",
        (
            f"batch {batch_tokens // spec.context} x {spec.context} = {batch_tokens:,}"
            f" tokens; micro-batches: {accum}"
        ),
        describe_devices(w.task),
        promise(
            w.task.kernels,
            w.mesh.devices.flat[0].platform,
            jax.config.jax_compilation_cache_dir,
        ),
        f"precision {precision}: {describe_precision(w.model)}",
        f"{flops * batch_tokens:.3e} FLOPs a step",
    ]
    if w.task.trainable:
        lines.insert(
            1,
            f"trained of it: {param_count(spec, w.task.trained):,} parameters,"
            f" {', '.join(w.task.trainable)}",
        )
    memory = step.memory_analysis() if step is not None else None
    if memory is not None:
        held = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
        )
        lines.append(
            f"memory per device {(held + memory.temp_size_in_bytes) / GIB:.2f} GiB:"
            f" state and batch {held / GIB:.2f}, activations and workspace"
            f" {memory.temp_size_in_bytes / GIB:.2f}"
        )
    return lines if step is None else [*lines, *describe_wire(w.task, step)]


def facts_of(w: Workload) -> dict[str, str]:
    """What neither the configuration nor the machine says of what is trained."""
    manifest, narrow = w.data.manifest, w.model.policy.forward is not None
    emulated = "; CPUs emulate FP8: its numbers, not its speed" * (
        narrow and w.mesh.devices.flat[0].platform == "cpu"
    )
    return {
        "parameters": f"{w.task.parameters:,}",
        "vocabulary": f"{w.model.spec.vocab_size:,}",
        "arithmetic": describe_precision(w.model) + emulated,
        "wide layers": (" ".join(w.model.skipped) or "none") if narrow else "all",
        "text": text_of(manifest.source),
        "tokenizer": w.data.tokenizer.name,
        "training tokens": f"{manifest.tokens('train'):,}",
        "validation tokens": f"{manifest.tokens('val'):,}",
    }


def text_of(source: Mapping[str, Any]) -> str:
    """What a manifest's source names, for a reader."""
    if source["kind"] == "embedded":
        return "the King James Bible"
    if source["kind"] == "mix":
        return " + ".join(source["sources"])
    if source["kind"] == "python":
        return (
            f"the standard library of {source['implementation']} {source['version']}"
            f" ({source['files']:,} files, {source['bytes'] / 1e6:.1f} MB, digest"
            f" {source['digest'][:12]})"
        )
    return source.get("name") or ", ".join(source.get("paths", ())) or source["kind"]


def describe_devices(task: TrainTask) -> str:
    """Devices, processes and mesh."""
    devices, processes = (
        task.mesh.size,
        len({device.process_index for device in task.mesh.devices.flat}),
    )
    kind = task.mesh.devices.flat[0].device_kind
    line = f"devices: {devices} x {kind} in {processes} process{'es' * (processes > 1)}"
    if devices == 1:
        return line
    mesh = " x ".join(f"{axis} {size}" for axis, size in task.mesh.shape.items())
    if devices_of_replica(task.mesh) == 1:
        return f"{line}; mesh {mesh}"
    order = ", summed in fixed order" * task.reduce.deterministic
    return f"{line}; mesh {mesh}; gradients reduced in {task.reduce.format}{order}"


def describe_wire(
    task: TrainTask, step: jax.stages.Compiled | DiLoCoStep, gbps: float | None = None
) -> list[str]:
    """What the devices of a compiled step send each other, by type (`u8` is FP8, `u16`
    FP16 or BF16).

    `gbps`: of the network between replicas, for an estimate of the time of an exchange.
    """
    if isinstance(step, DiLoCoStep):
        exchanged = describe_exchanges(exchanges_of(task, step), gbps)
        return [
            *exchanged,
            *(describe_sent(task, step) if devices_of_replica(task.mesh) > 1 else []),
        ]
    return describe_sent(task, step)


def describe_exchanges(found: Exchanges, gbps: float | None = None) -> list[str]:
    """What replicas with DiLoCo send each other, and how long it takes at so many
    gigabits a second.
    """
    diloco = found.diloco
    some = (
        f", of which {diloco.participants} train in a round"
        if diloco.participants < diloco.replicas
        else ""
    )
    parts = f" in {diloco.fragments} fragments" if diloco.fragments > 1 else ""
    read = "" if found.read else " if each is on a machine of its own"
    if diloco.replicas == 1:
        return [
            "DiLoCo: one replica, so nothing is sent; the outer optimizer moves it"
            f" every {diloco.steps} steps"
        ]
    lines = [
        (
            f"DiLoCo: {diloco.replicas} replicas{some} exchange outer gradients in"
            f" {diloco.format} every {diloco.steps} steps{parts}; outer learning rate"
            f" {diloco.lr:g}, momentum"
            f" {diloco.momentum:g}{', with error feedback' * diloco.feedback}"
        ),
        (
            f"every replica sends {math.fsum(found.fragments) / MIB:.3f} MiB a"
            f" round{read}, at most {max(found.fragments) / MIB:.3f} MiB at once and"
            f" {found.mean / MIB:.4f} MiB a step on average, {found.fewer:.1f} times"
            f" less than FP32 gradients of every step ({found.every_step / MIB:.3f}"
            " MiB)"
        ),
    ]
    if gbps is not None:
        lines.append(
            f"an exchange takes about {found.seconds(gbps):.2g} s at {gbps:g} Gbit/s"
            " (an estimate)"
        )
    return lines


def describe_sent(task: TrainTask, step: jax.stages.Compiled | DiLoCoStep) -> list[str]:
    """What the devices of a compiled step send each other in that step."""
    text = step.as_text() if task.mesh.size > 1 else None
    if text is None:
        return []
    sent: dict[str, float] = {}
    for collective in Program(text).collectives:
        key = f"{collective.op} {collective.dtype}"
        sent[key] = sent.get(key, 0.0) + collective.sent(task.mesh.size)
    listed = ", ".join(
        f"{key} {size / MIB:.3f}"
        for key, size in sorted(sent.items(), key=lambda item: -item[1])
    )
    return [
        f"every device sends {sum(sent.values()) / MIB:.3f} MiB a step (on a ring):"
        f" {listed}"
    ]


def rounding_of(weights: str, rounding: str) -> str:
    """How weights of a format are rounded, to be appended; nothing of FP32, which are
    not.
    """
    return "" if weights == "fp32" else f" (rounding: {rounding})"


def before_the_cast(policy: Policy) -> str:
    """What happens to operands of the chosen matmuls, in order, to be appended; nothing
    where nothing does.
    """
    clipped = (
        [f"clipped at {policy.clip_outliers:g} times their RMS"]
        if policy.clip_outliers is not None
        else []
    )
    mixed = (
        [f"mixed in groups of {policy.hadamard} channels"]
        if policy.hadamard is not None
        else []
    )
    return f", operands {', '.join(clipped + mixed)}" if clipped + mixed else ""


def describe_precision(model: Model) -> str:
    """What is computed and stored in what, and which matmuls are narrow."""
    policy, skipped = model.policy, model.skipped
    gradients = policy.weight_gradients if model.narrow else policy.wide_gradients
    every = len(model.narrow) + len(skipped)
    matmuls = f"matmuls in {policy.compute}"
    if policy.forward is not None:
        simulated = " (simulated)" if policy.simulate else ""
        narrow, share = len(model.narrow), flop_share(model.spec, model.narrow)
        fine = sum(policy.backward_of(path) != policy.backward for path in model.narrow)
        gradients_of = f" (gradients of {fine} in e4m3)" if policy.backward_e4m3 else ""
        matmuls = (
            f"{narrow} of {every} linear layers in"
            f" {policy.forward}/{policy.backward}{gradients_of}{simulated}, "
        )
        matmuls += (
            f"{share:.0%} of the FLOPs{before_the_cast(policy)}; the rest, attention"
            f" and head in {policy.compute}"
        )
        for why in dict.fromkeys(skipped.values()):
            paths = [path for path, reason in skipped.items() if reason == why]
            shown = ", ".join(paths[:4]) + (
                f" and {len(paths) - 4} more" if len(paths) > 4 else ""
            )
            shown = "all" if len(paths) == every else shown
            matmuls += f" ({shown}: {why})"
    return (
        f"{matmuls}; weights"
        f" {policy.weights}{rounding_of(policy.weights, policy.weights_rounding)},"
        f" weight gradients {gradients}, moments {policy.mu}/{policy.nu}, scaling:"
        f" {policy.scaling}"
    )


def describe_data(manifest: Manifest) -> str:
    """What was read, how much of it is for training and for validation, and where that
    is not what was asked for.
    """
    train, val = manifest.tokens("train"), manifest.tokens("val")
    tokens = f"{train:,} training and {val:,} validation tokens"
    if not manifest.val_fraction:  # batches of a program's own
        return tokens
    share, asked = val / (train + val), manifest.val_fraction
    part = f"({share:.1%} for validation)"
    if abs(share - asked) > FAR * asked:
        part = (
            f"({share:.1%} for validation, not data.val_fraction={asked:.1%}: whole"
            " documents are chosen for it, by a hash of their text)"
        )
    return f"{describe_read(manifest)}; {tokens} {part}{describe_skipped(manifest)}"


def describe_read(manifest: Manifest) -> str:
    """The files and documents that hold text."""
    if manifest.source["kind"] in ("embedded", "python"):
        return text_of(manifest.source)
    count, files = (
        sum(s.documents for s in manifest.splits.values()),
        len(manifest.source.get("digests", ())),
    )
    if files == 1 and all(split.documents == 1 for split in manifest.splits.values()):
        return "1 file, a single text"
    documents = f"{count:,} document{'s' * (count != 1)}"
    # which directories of earlier versions do not have
    formats = manifest.source.get("formats", {})
    kinds = (
        f" ({', '.join(f'{count:,} {kind}' for kind, count in formats.items())})"
        if len(formats) > 1
        else ""
    )
    return (
        f"{files:,} file{'s' * (files != 1)}{kinds}, {documents}"
        if files
        else documents
    )


def describe_skipped(manifest: Manifest) -> str:
    """How many documents hold no text, to be appended; nothing where all do."""
    if not manifest.skipped:
        return ""
    what = "1 document was skipped, which holds" if manifest.skipped == 1 else ""
    what = what or f"{manifest.skipped:,} documents were skipped, which hold"
    return f"; {what} no text (an empty or a missing column)"


def describe_idle(policy: Policy, overrides: Sequence[str]) -> list[str]:
    """A line for each override of the command line that changes nothing in this
    precision.
    """
    given = {override.lstrip("+").partition("=")[0] for override in overrides}
    found = {f"precision.{name}": why for name, why in without_effect(policy).items()}
    return [
        f"{key} has no effect here: {why}" for key, why in found.items() if key in given
    ]


def schedule_change(
    step: int,
    before: np.ndarray,
    now: np.ndarray,
    changed: Mapping[str, tuple[Any, Any]],
) -> list[str]:
    """A line where the last of `step` steps would have had another learning rate under
    the schedule of the rest.

    Args:
      step: steps taken, at least 1.
      before: learning rates of the run up to here, by step.
      now: of the run from here on.
      changed: the keys that decide them and are not what they were: their value then,
          and now.
    """
    if before[step - 1] == now[step - 1] or step == len(now):
        return []
    why = "; ".join(f"{key}={new}, was {old}" for key, (old, new) in changed.items())
    return [
        f"the learning-rate schedule changed ({why}): the learning rate goes from"
        f" {before[step - 1]:.2e} in step {step} to {now[step]:.2e} in step {step + 1}"
    ]


def farewell(run: Run, code: int) -> None:
    """Where everything is, and what to do next: the run's directory knows all its
    settings.
    """
    say, where, python = (
        run.display.message,
        shlex.quote(str(run.run_dir)),
        interpreter(),
    )
    again = f"{python} -m trainer resume={where}"
    if code:
        saved = max(run.checkpointer.steps(), default=0)
        how = f"the same command with run_dir={where}"
        if not run.own_process:
            how = "the same call"
        elif saved:
            how = f"{again}   (or {how})"
        say(
            f"stopped after step {run.step} of {run.steps}; to go on from {saved}:"
            f" {how}"
        )
        return
    names = (
        "report.html",
        "metrics.jsonl",
        "samples.txt",
        "numerics",
        "tensorboard",
        "checkpoints",
        "config.yaml",
    )
    found = ", ".join(name for name in names if (run.run_dir / name).exists())
    say(f"done: {run.step} steps. Everything is in {where}: {found}")
    if not run.own_process:
        return  # the program that called knows what to do next
    say(
        f"sample more:  {python} -m scripts.generate run_dir={where} prompt='And God"
        " said'"
    )
    say(f"train longer: {again} train.steps={2 * run.steps}")
