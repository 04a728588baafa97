"""The messages of a run at its start and at its end."""

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from trainer.compiled.hlo import Program
from trainer.compiled.memory import held_bytes
from trainer.compiled.sync_bytes import SyncBytes, sync_bytes_of
from trainer.data import Manifest
from trainer.model import Model
from trainer.models.flops import (
    attention_flops_per_token,
    flop_share,
    forward_flops_per_token,
    param_count,
)
from trainer.observe.throughput import GIB
from trainer.parallel.mesh import devices_of_replica
from trainer.parallel.replicas import DiLoCoStep
from trainer.precision.policy import Policy, without_effect
from trainer.report.run_records import VALIDATION_DIGEST
from trainer.run.session import TrainLoop
from trainer.step.xla_flags import determinism_message
from trainer.text import key_of, override, plural, program_command
from trainer.workload import TrainTask, Workload

MIB = 2**20
# A larger deviation from data.val_fraction, as a share of it, is reported.
# Validation documents are drawn by a hash of each text, so their share of the tokens is
# met only roughly.
MAX_DEVIATION = 0.2
# The types that narrow data is sent as, in HLO's names.
SENT_AS = {"u8": "FP8", "u16": "FP16/BF16"}


def describe(
    w: Workload,
    *,
    model: str,
    precision: str,
    batch_tokens: int,
    accum: int,
    step: Any = None,
    gbps: float | None = None,
) -> list[str]:
    """Return lines that describe the training, with the memory of a compiled step.

    Args:
      w: model, data and task.
      model: name of the model's preset.
      precision: name of the precision's preset.
      batch_tokens: tokens per step, in `accum` micro-batches.
      accum: number of micro-batches.
      step: the compiled step, or None.
      gbps: the bandwidth between replicas in Gbit/s, as in `describe_communication`.
    """
    spec = w.model.spec
    diloco = w.task.diloco
    # Replicas that sit a round out do no work: counting them would give a step of 3 of
    # 8 replicas 2.67 times its FLOPs.
    participation = diloco.participants / diloco.num_replicas if diloco else 1.0
    # A model of the user's program may have no layers to count.
    layers = f"{plural(spec.n_layer, 'layer')}, " if spec.n_layer else ""
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
        determinism_message(
            w.task.kernels,
            w.mesh.devices.flat[0].platform,
            jax.config.jax_compilation_cache_dir,
            has_fp8_attention=w.model.policy.has_fp8_attention,
        ),
        f"precision {precision}: {describe_precision(w.model)}",
        f"{w.task.flops_per_token * batch_tokens * participation:.3e} FLOPs a step",
    ]
    if w.task.trainable:
        # Behind the model, whose count of parameters this line narrows down.
        lines.insert(
            1,
            f"trainable: {param_count(spec, w.task.select_trained):,} parameters,"
            f" {', '.join(w.task.trainable)}",
        )
    # Memory and communication can be read from the compiled step alone.
    if step is None:
        return lines
    lines += describe_memory(step)
    return [*lines, *describe_communication(w.task, step, gbps)]


def describe_memory(step: jax.stages.Compiled | DiLoCoStep) -> list[str]:
    """Return a line about the memory of a compiled step, if its compiler reports it."""
    memory = step.memory_analysis()
    # A backend need not analyze memory; `memory_analysis` then returns None.
    if memory is None:
        return []
    held = held_bytes(memory)
    workspace = memory.temp_size_in_bytes
    return [
        f"memory per device {(held + workspace) / GIB:.2f} GiB:"
        f" state and batch {held / GIB:.2f}, activations and workspace"
        f" {workspace / GIB:.2f}"
    ]


def facts_of(w: Workload) -> dict[str, str]:
    """Return the facts of environment.txt about model, precision and data."""
    manifest = w.data.manifest
    policy = w.model.policy
    # FP8 attention alone is emulated on a CPU, too, also without narrow linear layers.
    narrow = policy.forward is not None or policy.attention is not None
    emulated = "; CPUs emulate FP8: its numbers, not its speed" * (
        narrow and w.mesh.devices.flat[0].platform == "cpu"
    )
    # The report of every saved run looks facts up by these names: with a new name, the
    # fact is unknown in older runs.
    return {
        "parameters": f"{w.task.parameters:,}",
        "vocabulary": f"{w.model.spec.vocab_size:,}",
        "arithmetic": describe_precision(w.model) + emulated,
        # Separated by spaces, which no path of a layer has. `RunRecords.fp8_layers`
        # splits them.
        "FP8 layers": " ".join(w.model.narrow) or "none",
        "text": text_of(manifest.source),
        "tokenizer": w.data.tokenizer.name,
        "training tokens": f"{manifest.token_count('train'):,}",
        "validation tokens": f"{manifest.token_count('val'):,}",
        # `compare` ranks runs only beside those of the same digest, whatever their
        # paths are called.
        VALIDATION_DIGEST: manifest.validation_content,
    }


def text_of(source: Mapping[str, Any]) -> str:
    """Return the name of a manifest's source."""
    if source["kind"] == "embedded":
        return "the King James Bible"
    if source["kind"] == "mix":
        return " + ".join(source["sources"])
    if source["kind"] == "python":
        return (
            f"the standard library of {source['implementation']} {source['version']}"
            # A distributor may patch or leave out files: a version alone names no text.
            f" ({source['files']:,} files, {source['bytes'] / 1e6:.1f} MB, digest"
            f" {source['digest'][:12]})"
        )
    # Hugging Face data sets have a name, files have paths.
    return source.get("name") or ", ".join(source.get("paths", ())) or source["kind"]


def describe_mesh(mesh: jax.sharding.Mesh) -> str:
    """Return the devices, the processes and the mesh in words."""
    devices = mesh.size
    kind = mesh.devices.flat[0].device_kind
    processes = len({device.process_index for device in mesh.devices.flat})
    line = f"{devices} x {kind} in {processes} process{'es' * (processes > 1)}"
    if devices == 1:
        return line
    sizes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    return f"{line}; mesh {sizes}"


def describe_devices(task: TrainTask) -> str:
    """Return a line about devices, processes and mesh."""
    line = f"devices: {describe_mesh(task.mesh)}"
    # One device holds all gradients of a replica, so nothing is reduced in any format.
    if devices_of_replica(task.mesh) == 1:
        return line
    order = ", summed in fixed order" * task.reduce.deterministic
    gathered = "weights gathered layer by layer; " * task.gathers_by_layer
    return f"{line}; {gathered}gradients reduced in {task.reduce.format}{order}"


def describe_communication(
    task: TrainTask, step: jax.stages.Compiled | DiLoCoStep, gbps: float | None = None
) -> list[str]:
    """Return lines about the communication of a compiled step, by type.

    `gbps` is the bandwidth between replicas in Gbit/s, for an estimate of the time of
    a sync.
    """
    if not isinstance(step, DiLoCoStep):
        return describe_collectives(task, step)
    lines = describe_syncs(sync_bytes_of(task, step), gbps)
    # Only devices of one replica exchange gradients in every step.
    if devices_of_replica(task.mesh) > 1:
        lines += describe_collectives(task, step)
    return lines


def describe_syncs(sync_bytes: SyncBytes, gbps: float | None = None) -> list[str]:
    """Return lines about the syncs of DiLoCo's replicas.

    `gbps` is the bandwidth between replicas in Gbit/s, for an estimate of the time.
    """
    settings = sync_bytes.settings
    participants = ""
    if settings.participants < settings.num_replicas:
        participants = f", of which {settings.participants} train in a round"
    parts = f" in {settings.fragments} fragments" if settings.fragments > 1 else ""
    assumption = "" if sync_bytes.are_compiled else " if each is on a separate machine"
    # One replica has no bytes, so the figures below would be zero and infinity.
    if settings.num_replicas == 1:
        return [
            "DiLoCo: one replica, so nothing is sent; the outer optimizer moves it"
            f" every {settings.sync_every} steps"
        ]
    lines = [
        (
            f"DiLoCo: {settings.num_replicas} replicas{participants} exchange outer"
            f" gradients in {settings.format} every {settings.sync_every} steps{parts};"
            f" outer learning rate {settings.lr:g}, momentum"
            f" {settings.momentum:g}{', with error feedback' * settings.feedback}"
        ),
        (
            f"every replica sends {math.fsum(sync_bytes.fragments) / MIB:.3f} MiB a"
            f" round{assumption}, at most {max(sync_bytes.fragments) / MIB:.3f} MiB at"
            f" once and {sync_bytes.mean / MIB:.4f} MiB a step on average,"
            f" {sync_bytes.reduction:.1f} times less than FP32 gradients of every"
            f" step ({sync_bytes.every_step / MIB:.3f} MiB)"
        ),
    ]
    if gbps is not None:
        lines.append(
            f"an exchange takes about {sync_bytes.seconds(gbps):.2g} s at {gbps:g}"
            " Gbit/s (an estimate)"
        )
    return lines


def describe_collectives(
    task: TrainTask, step: jax.stages.Compiled | DiLoCoStep
) -> list[str]:
    """Return a line about the bytes that a device sends per step, by collective."""
    # One device sends nothing, so its step's text need not be written and parsed.
    text = step.as_text() if task.mesh.size > 1 else None
    if text is None:
        return []
    sent: dict[str, float] = {}
    for collective in Program(text).collectives:
        # Narrow floats travel as the bits of integers; see
        # `parallel.reduction.as_bits`.
        dtype = SENT_AS.get(collective.dtype, collective.dtype)
        key = f"{collective.op} {dtype}"
        sent[key] = sent.get(key, 0.0) + collective.sent(task.mesh.size)
    listed = ", ".join(
        f"{key} {size / MIB:.3f} MiB"
        # The largest first: it is the one to shrink.
        for key, size in sorted(sent.items(), key=lambda item: -item[1])
    )
    return [
        f"every device sends {sum(sent.values()) / MIB:.3f} MiB a step (on a ring):"
        f" {listed}"
    ]


def rounding_of(weights: str, rounding: str) -> str:
    """Return a suffix about the rounding of weights; empty for FP32."""
    # FP32 weights take each update as it is, so precision.weights_rounding has no
    # effect.
    if weights == "fp32":
        return ""
    return f" (rounding: {rounding})"


def operand_transforms(policy: Policy) -> str:
    """Return a suffix about the transforms of FP8 operands before their cast."""
    transforms = []
    if policy.clip_outliers is not None:
        transforms.append(f"clipped at {policy.clip_outliers:g} times their RMS")
    if policy.hadamard is not None:
        transforms.append(
            f"Hadamard-transformed in groups of {policy.hadamard} channels"
        )
    if transforms:
        return f", operands {', '.join(transforms)}"
    return ""


def describe_attention(model: Model) -> str:
    """Return a suffix about FP8 attention; empty where it is in the compute dtype."""
    policy, spec = model.policy, model.spec
    if policy.attention is None:
        return ""
    share = attention_flops_per_token(spec) / forward_flops_per_token(spec)
    simulated = " (simulated)" if policy.simulate else ""
    return f", attention in {policy.attention}{simulated}, {share:.0%} of the FLOPs"


def describe_precision(model: Model) -> str:
    """Return the formats of computation and storage, and the FP8 matmuls."""
    policy = model.policy
    skipped = model.skipped
    gradients = policy.describe_gradients(is_narrow=bool(model.narrow))
    layer_count = len(model.narrow) + len(skipped)
    attention = describe_attention(model)
    matmuls = f"matmuls in {policy.compute}{attention}"
    if policy.forward is not None:
        simulated = " (simulated)" if policy.simulate else ""
        narrow = len(model.narrow)
        share = flop_share(model.spec, model.narrow)
        if policy.has_wide_forward:
            share *= 2 / 3  # both gradients of the three matmuls of a layer
        e4m3_note = ""
        if policy.backward_e4m3:
            # The key's patterns may match layers that are not cast, or whose format is
            # e4m3 anyway.
            count = sum(
                policy.backward_of(path) != policy.backward for path in model.narrow
            )
            e4m3_note = f" (gradients of {count} in e4m3)"
        matmuls = (
            f"{narrow} of {layer_count} linear layers in"
            f" {policy.forward}/{policy.backward}{e4m3_note}{simulated}, "
        )
        matmuls += (
            f"{share:.0%} of the FLOPs{operand_transforms(policy)}{attention}; the"
            f" rest{'' if attention else ', attention'} and head in {policy.compute}"
        )
        # One mention for each reason, in the order of the layers: a model skips tens of
        # layers for the same one.
        for why in dict.fromkeys(skipped.values()):
            paths = [path for path, reason in skipped.items() if reason == why]
            listed = ", ".join(paths[:4])
            # No FP8 layer is left, which a list of four names would hide.
            if len(paths) == layer_count:
                listed = "all"
            elif len(paths) > 4:
                listed += f" and {len(paths) - 4} more"
            matmuls += f" ({listed}: {why})"
    return (
        f"{matmuls}; weights"
        f" {policy.weights}{rounding_of(policy.weights, policy.weights_rounding)},"
        f" weight gradients {gradients}, moments {policy.mu}/{policy.nu}, scaling:"
        f" {policy.scaling}"
    )


def describe_data(manifest: Manifest) -> str:
    """Return a line about the text, its tokens, and the share for validation."""
    train, val = manifest.token_count("train"), manifest.token_count("val")
    tokens = f"{train:,} training and {val:,} validation tokens"
    if not manifest.val_fraction:  # batches of the user's program
        return tokens
    share = val / (train + val)
    requested = manifest.val_fraction
    part = f"({share:.1%} for validation)"
    # Few long documents may miss the share by far.
    if abs(share - requested) > MAX_DEVIATION * requested:
        part = (
            f"({share:.1%} for validation, not data.val_fraction={requested:.1%}: whole"
            " documents are chosen for it, by a hash of their text; a single text is"
            " cut by its characters)"
        )
    return f"{describe_read(manifest)}; {tokens} {part}{describe_skipped(manifest)}"


def describe_read(manifest: Manifest) -> str:
    """Return the number of files and documents that hold text."""
    if manifest.source["kind"] in ("embedded", "python"):
        return text_of(manifest.source)
    count = sum(split.documents for split in manifest.splits.values())
    files = len(manifest.source.get("digests", ()))
    # A single text gives each part one document, so 2 documents would be a riddle.
    if files == 1 and all(split.documents == 1 for split in manifest.splits.values()):
        return "1 file, a single text"
    documents = plural(count, "document")
    if not files:
        return documents
    # directories of earlier versions do not name formats
    formats = manifest.source.get("formats", {})
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in formats.items())
    # A glob may take in files that the user did not mean; formats give that away.
    if len(formats) > 1:
        return f"{files:,} files ({kinds}), {documents}"
    return f"{plural(files, 'file')}, {documents}"


def describe_skipped(manifest: Manifest) -> str:
    """Return a suffix about documents without text; empty where all have text."""
    if not manifest.skipped:
        return ""
    skipped = f"{manifest.skipped:,} documents were skipped, which hold"
    if manifest.skipped == 1:
        skipped = "1 document was skipped, which holds"
    return f"; {skipped} no text (an empty or a missing column)"


def describe_idle(policy: Policy, overrides: Sequence[str]) -> list[str]:
    """Return a line for each given override that changes nothing in this precision."""
    given = set(map(key_of, overrides))
    return [
        f"precision.{name} has no effect here: {why}"
        # Presets set many idle fields; only those that the user typed are a likely
        # mistake.
        for name, why in without_effect(policy).items()
        if f"precision.{name}" in given
    ]


def farewell(
    loop: TrainLoop, code: int, *, has_report: bool, has_launcher: bool
) -> None:
    """Show where the results are, and the commands for the next steps.

    `has_launcher`: whether the run has a launcher, which prints how to resume.
    """
    say, run_dir = loop.session.display.message, loop.session.run_dir
    program = program_command()
    resume = f"{program} {override('resume', run_dir)}"
    if code:
        where = f"step {loop.step} of {loop.plan.steps}"
        # Step N of N reads as if nothing were left to resume.
        if loop.unfinished is not None and loop.step == loop.plan.steps:
            where += ", before its final validation was done"
        # The launcher sees whether other workers failed, and prints one command for
        # all.
        if has_launcher:
            say(f"stopped after {where}")
            return
        saved = max(loop.session.checkpointer.steps(), default=0)
        # Without a checkpoint, resume= has nothing to read; the command itself starts
        # again.
        how = f"the same command with {override('run_dir', run_dir)}"
        # A run inside a user's program is resumed by that program, not by our command.
        if not loop.session.owns_process:
            how = "the same call"
        elif saved:
            how = f"{resume}   (or {how})"
        action = f"to resume from step {saved}" if saved else "to start again"
        say(f"stopped after {where}; {action}: {how}")
        return
    names = (
        *(["report.html"] if has_report else []),
        "metrics.jsonl",
        "samples.txt",
        "numerics",
        "tensorboard",
        "checkpoints",
        "config.yaml",
    )
    # samples.txt is empty where nothing was sampled.
    results = ", ".join(
        name
        for name in names
        if (run_dir / name).exists() and (run_dir / name).stat().st_size
    )
    say(f"done: {plural(loop.step, 'step')}. Everything is in {run_dir}: {results}")
    if not loop.session.owns_process:
        return  # the program that called knows what to do next
    # `generate` reads its arguments as they are, without the quotes of `override`.
    run_dir_argument = shlex.quote(f"run_dir={run_dir}")
    say(f"sample more:  {program} generate {run_dir_argument} prompt='And God said'")
    # resume= takes no launcher over, so the full command is needed.
    command = "the same command with" if has_launcher else resume
    say(f"train longer: {command} train.steps={2 * loop.plan.steps}")
