"""Plan a configuration's train step on GPUs that this machine lacks.

    scalify-trainer plan model=gpt2_1558m model.vocab_size=50257 \\
        precision=scalify_fp8_fp16 gpus=8

Takes the keys of training, and those below. The vocabulary is that of the data's
tokenizer, by default 256 bytes: give model.vocab_size, or the planned model is smaller
than the one you mean.

No GPU is needed: XLA's GPU compiler runs on this machine; `make extra-plan`, or
`pip install '.[plan]'`, installs it.
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.cli.arguments import argument, check_at_least
from trainer.cli.training_keys import split_arguments
from trainer.config.combinations import check_micro_batch
from trainer.config.composition import compose_config, expand_arguments
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.plan.targets import GPUS_PER_HOST, TARGETS, get_target
from trainer.text import key_of, note, plural, show

if TYPE_CHECKING:
    from trainer.compiled.fp8 import Layer
    from trainer.plan.plan import BatchSizeBounds, StepPlan

GIB = 2**30
MAX_GPUS = 4096
DEFAULT_SEQUENCES = 8
SHOWN_LAYERS = 4


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    target: str = argument(f"the GPU: {', '.join(TARGETS)}", "h200")
    gpus: int = argument("number of GPUs, over all hosts", 1)
    hosts: int = argument(
        f"number of hosts with equal numbers of GPUs; 0: one per {GPUS_PER_HOST} GPUs",
        0,
    )
    micro_batch: int = argument(
        "sequences of a device in one micro-batch; 0: as train.batch_tokens gives them,"
        f" else {DEFAULT_SEQUENCES}",
        0,
    )
    # JAX reads this variable, too: the plan has the limit of the run.
    memory_fraction: float = argument(
        "fraction of the memory that JAX takes; default:"
        " XLA_PYTHON_CLIENT_MEM_FRACTION",
        float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")),
    )
    # Off, because each size takes a compilation of the step.
    search: bool = argument(
        "search for the largest micro-batch, by compiling several", False
    )
    compare: bool = argument(
        "if it fits, compile the same in precision=bf16 and compare kernels", True
    )
    exact: bool = argument("compile every layer of a deep model", False)
    predict: bool = argument(
        "estimate the time of each class of kernels; not measured", False
    )
    json: bool = argument("print the plan as JSON, with all of its figures", False)


def main(args: Arguments, overrides: Sequence[str]) -> None:
    """Print the plan."""
    # JSON is one document, so no part of it is printed early.
    if args.json:
        show(json.dumps(make_plan(args, overrides).as_json(), indent=1))
        return
    # Print the first figures while the rest is compiled.
    plan = make_plan(args, overrides, lambda plan: show("\n".join(step_lines(plan))))
    lines = later_lines(plan)
    if args.predict:
        lines += predicted_lines(plan)
    show("\n".join(lines))


def plan_of(argv: Sequence[str]) -> "StepPlan":
    """Return the plan of a command line."""
    return make_plan(*split_arguments(Arguments, argv))


def make_plan(
    args: Arguments,
    overrides: Sequence[str],
    on_first_plan: "Callable[[StepPlan], None]" = lambda plan: None,
) -> "StepPlan":
    """Return the plan; `on_first_plan` gets it after the first compilation."""
    check_at_least(args, micro_batch=0)
    # These checks stand before the environment is changed and JAX is imported.
    target = get_target(args.target)
    hosts = check_hardware(args)
    config, sequences = planned_config(args, overrides)
    bf16 = None
    if args.compare and config.precision.name != "bf16":
        bf16 = compose_config(["precision=bf16"]).precision
    # XLA compiles for a description of the planned GPU, not for a GPU of this machine.
    os.environ["JAX_PLATFORMS"] = "cpu"
    # XLA would warn that there is no GPU to measure kernels on.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

    from trainer.assembly.planning import build_plan
    from trainer.plan.figures import Hardware
    from trainer.run.libraries import prepare_jax

    prepare_jax()
    hardware = Hardware(target, args.gpus, hosts, args.memory_fraction)
    return build_plan(
        config,
        hardware,
        sequences=sequences,
        bf16=bf16,
        log=note,
        on_first_plan=on_first_plan,
        search=args.search,
        exact=args.exact,
    )


def check_hardware(args: Arguments) -> int:
    """Return the number of hosts. Raises UserError for numbers that are not valid."""
    # Rounded up: hosts are filled, and the check below refuses a rest.
    hosts = args.hosts or -(-args.gpus // GPUS_PER_HOST)
    # Uneven hosts would have no mesh with an axis inside of a host.
    if not 1 <= args.gpus <= MAX_GPUS or hosts < 1 or args.gpus % hosts:
        raise UserError(
            f"gpus={args.gpus} hosts={hosts}: expected 1 to {MAX_GPUS} GPUs, a"
            " multiple of the hosts"
        )
    if not 0 < args.memory_fraction <= 1:
        raise UserError(
            f"memory_fraction={args.memory_fraction}: expected a share in (0, 1]"
        )
    return hosts


def planned_config(args: Arguments, overrides: Sequence[str]) -> tuple[Config, int]:
    """Return the configuration, and the sequences of a device's micro-batch."""
    # An experiment may set the batch, too.
    has_batch = sets_any(overrides, "train.batch_tokens", "experiment")
    if not has_batch and not sets_any(overrides, "train.grad_accum_steps"):
        # The plan does not read it, and its default may be shorter than the context.
        overrides = [*overrides, "train.batch_tokens=${model.context}"]
    config = compose_config(overrides)
    # Without a batch of the user nothing says how many sequences a GPU should take.
    if args.micro_batch or not has_batch:
        return config, args.micro_batch or DEFAULT_SEQUENCES
    # GPUs of one tensor group share their sequences. -1 takes all GPUs that the other
    # axes leave.
    data, fsdp, tensor = config.parallel.sizes
    # Too large a group is refused when the mesh is made.
    groups = data * fsdp if tensor == -1 else max(args.gpus // tensor, 1)
    return config, sequences_of(config, groups)


def sets_any(overrides: Sequence[str], *keys: str) -> bool:
    """Return whether the overrides, or a file that they name, set one of the keys."""
    line = expand_arguments(overrides)
    return not {*line.settings, *map(key_of, line.overrides)}.isdisjoint(keys)


def sequences_of(config: Config, gpus: int) -> int:
    """Return the sequences of a device's micro-batch by the configuration."""
    alternative = ", or give micro_batch=, the sequences of one GPU, instead"
    check_micro_batch(config, gpus, f"gpus={gpus}", alternative)
    return config.batch_size // config.train.grad_accum_steps // gpus


def not_fp8_lines(layers: "Sequence[Layer]") -> list[str]:
    """Return a line for each reason not to use FP8, with the first few layers.

    `json=yes` prints all layers.
    """
    by_reason: dict[str, list[str]] = {}
    # Reasons are few, layers many: a deep model would print a page.
    for layer in layers:
        by_reason.setdefault(layer.reason, []).append(layer.path)
    lines = []
    for reason, paths in by_reason.items():
        hidden = len(paths) - SHOWN_LAYERS
        more = f" and {hidden} more" if hidden > 0 else ""
        lines.append(f"  not FP8: {', '.join(paths[:SHOWN_LAYERS])}{more}: {reason}")
    return lines


def step_lines(plan: "StepPlan") -> list[str]:
    """Return lines about the memory, kernels, FLOPs and time of the step."""
    from trainer.plan.plan import DEPTHS

    hardware, spec = plan.hardware, plan.spec
    lines = [
        f"{plan.task.parameters:,} parameters, {plural(spec.n_layer, 'layer')} of width"
        f" {spec.d_model}, vocabulary {spec.vocab_size:,};"
        f" {hardware.gpus} x {hardware.target.device} on"
        f" {plural(hardware.hosts, 'host')}; {plural(plan.sequences, 'sequence')} of"
        f" {spec.context} a device and micro-batch,"
        f" {plan.tokens:,} tokens a step"
    ]
    if plan.is_extrapolated:
        lines.append(
            f"extrapolated from {list(DEPTHS)} layers; exact=yes compiles all of them"
        )
    # The peak is that of the compute format, so FP8 may exceed it.
    mfu = plan.mfu_of(plan.roofline_seconds)
    compute = plan.task.model.policy.compute
    return [
        *lines,
        *memory_lines(plan),
        *kernel_lines(plan),
        f"{plan.task.flops_per_token:.3e} FLOPs a token; roofline"
        f" {1e3 * plan.roofline_seconds:.1f} ms a step,"
        f" {plan.tokens / plan.roofline_seconds:,.0f} tokens/s, MFU"
        f" {mfu:.1%} of the peak in {compute}{explain_mfu(mfu)}",
    ]


def memory_lines(plan: "StepPlan") -> list[str]:
    """Return lines about the memory of a device, and about keys that lower it."""
    hardware, peak = plan.hardware, plan.measured.peak
    lines = [
        f"memory: {peak / GIB:.2f} GiB a device,"
        f" {plan.state_bytes / GIB:.2f} GiB of it weights and optimizer;"
        f" {hardware.verdict(peak)} in {hardware.usable / GIB:.1f} GiB"
        f" ({hardware.memory_fraction:.0%} of {hardware.target.memory / GIB:.1f}, what"
        " JAX takes)"
    ]
    if not plan.fits:
        lines.append(f"  to try: {', '.join(plan.keys_to_try)}")
    for kind, size in plan.measured.group("memory").items():
        if size:
            lines.append(f"  {kind:<12} {size / GIB:8.2f} GiB")
    lines.append(
        # XLA reports its own buffers alone.
        "  not counted: CUDA context, cuDNN's workspaces, NCCL's buffers (1 to 2 GiB"
        " together)"
    )
    return lines


def kernel_lines(plan: "StepPlan") -> list[str]:
    """Return lines about matmuls, attentions, other kernels and collectives."""
    m = plan.measured
    narrow = "FP4" if "fp4" in m.group("gemms") else "FP8"
    kernels = sorted(m.counts("kernels").items(), key=lambda item: -item[1])
    lines = [
        f"matmuls: {counted(m.counts('gemm kernels').items())}",
        "fused attentions (cuDNN; no T x T matrix in memory):"
        f" {counted(m.counts('attentions').items()) or 'none'}",
        f"{narrow}: {plan.fp8_flop_share:.1%} of the FLOPs of matmuls and attentions",
        *not_fp8_lines(plan.layers),
        f"kernels: {m.kernels} a step: {counted(kernels)}",
    ]
    for c in m.collectives:
        lines.append(
            f"collective: {c.count} {c.op} of {c.dtype}, {c.bytes / GIB:.3f} GiB a"
            f" step, {c.sent_bytes_per_device / GIB:.3f} sent by each device"
        )
    return lines


def counted(counts: Iterable[tuple[str, int]]) -> str:
    """Return counts as text, such as `12 fp8, 3 bf16`."""
    return ", ".join(f"{n} {name}" for name, n in counts)


def explain_mfu(mfu: float) -> str:
    """Explain an MFU above 100%; "" if it is not above."""
    if mfu > 1:
        return " (above 100%: FP8 matmuls have a higher peak)"
    return ""


def later_lines(plan: "StepPlan") -> list[str]:
    """Return the lines of further compilations: the comparison, and the search."""
    lines = []
    # bf16 is compiled only if asked for, and if the step fits.
    if plan.bf16 is not None:
        extra = ", ".join(
            f"{n:+} {kind}" for kind, n in plan.extra_kernels().items() if n
        )
        lines.append(
            f"{plan.measured.kernels} kernels a step, against {plan.bf16.kernels} in"
            f" bf16: {extra or 'the same'}"
        )
        peak = plan.bf16.peak
        lines.append(
            f"memory in bf16: {peak / GIB:.2f} GiB a device;"
            f" {plan.hardware.verdict(peak)}"
        )
    if plan.largest is not None:
        lines.append(
            f"largest micro-batch that fits: {describe_largest(plan.largest)} a device"
        )
    else:
        lines.append("search=yes compiles further sizes for the largest micro-batch")
    return lines


def predicted_lines(plan: "StepPlan") -> list[str]:
    """Return the predicted times as a Markdown table, with bf16's if compiled."""
    from trainer.compiled.classes import CLASSES, GAPS

    seconds = plan.measured.seconds
    mfu = plan.mfu_of(seconds)
    text = (
        f"predicted, not measured: {1e3 * seconds:.2f} ms a step,"
        f" {plan.tokens / seconds:,.0f} tokens/s, MFU {mfu:.1%}{explain_mfu(mfu)}"
    )
    tables = [plan.measured.classes]
    header, rule = "| class | ms | kernels |", "|---|---|---|"
    if plan.bf16 is not None:
        text += f"; {plan.predicted_ratio:.3f} times as fast as bf16"
        tables.append(plan.bf16.classes)
        header, rule = f"{header} bf16: ms | kernels |", f"{rule}---|---|"
    lines = [text]
    # They run beside the kernels above; in the sum they would count twice.
    if plan.hidden_seconds:
        lines.append(
            "collectives behind other kernels, not in the sum:"
            f" {1e3 * plan.hidden_seconds:.2f} ms"
        )
    lines += ["", header, rule]
    for name in (*CLASSES, GAPS):
        if not any(name in classes for classes in tables):
            continue
        cells = [name]
        for classes in tables:
            # A class that one of the two programs lacks.
            row = classes.get(name, {"seconds": 0.0, "launches": 0})
            cells += [f"{1e3 * row['seconds']:.2f}", f"{row['launches']}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def describe_largest(bounds: "BatchSizeBounds") -> str:
    """Describe the largest number of sequences that fits."""
    if bounds.bound is None:
        return f"at least {plural(bounds.fits, 'sequence')} (the search ended there)"
    if bounds.bound > bounds.fits:
        return f"{bounds.fits} to {bounds.bound} sequences"
    return plural(bounds.fits, "sequence")
