"""Plan a configuration's train step on GPUs that this machine lacks.

    scalify-trainer plan model=gpt2_1558m model.vocab_size=50257 \\
        precision=scalify_fp8_fp16 gpus=8

Takes the keys of training, and those below. The vocabulary is that of the data's
tokenizer, by default 256 bytes: give model.vocab_size, or the planned model is smaller
than the one you mean.

No GPU is needed: XLA's GPU compiler runs on this machine; `pip install '.[plan]'`
installs it.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.cli.arguments import argument, check_at_least
from trainer.cli.training_keys import split_arguments
from trainer.config.combinations import check_micro_batch
from trainer.config.composition import compose_config, expand_arguments
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.plan.targets import GPUS_PER_HOST, TARGETS, get_target
from trainer.text import note, show

if TYPE_CHECKING:
    from trainer.compiled.fp8 import Layer
    from trainer.plan.plan import BatchSizeBounds, Plan

GIB = 2**30
MAX_GPUS = 4096
DEFAULT_SEQUENCES = 8


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    target: str = argument(f"the GPU: {', '.join(TARGETS)}", "h200")
    gpus: int = argument("how many, over all hosts", 1)
    hosts: int = argument(
        f"number of hosts with equal numbers of GPUs; 0: one per {GPUS_PER_HOST} GPUs",
        0,
    )
    micro_batch: int = argument(
        "sequences of a device in one micro-batch; 0: as train.batch_tokens gives them,"
        f" else {DEFAULT_SEQUENCES}",
        0,
    )
    memory_fraction: float = argument(
        "fraction of the memory that JAX takes; default:"
        " XLA_PYTHON_CLIENT_MEM_FRACTION",
        float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")),
    )
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
    if args.json:
        show(json.dumps(make_plan(args, overrides).as_json(), indent=1))
        return
    # Print the first figures while the rest is compiled.
    plan = make_plan(args, overrides, lambda plan: print_lines(lines_of(plan)))
    print_lines(later_lines(plan))
    if args.predict:
        print_lines(predicted_lines(plan))


def print_lines(lines: Sequence[str]) -> None:
    """Print lines at once, also into a pipe."""
    if lines:
        show("\n".join(lines))


def plan_of(argv: Sequence[str]) -> "Plan":
    """Return the plan of a command line."""
    return make_plan(*split_arguments(Arguments, argv))


def make_plan(
    args: Arguments,
    overrides: Sequence[str],
    on_first_plan: "Callable[[Plan], None]" = lambda plan: None,
) -> "Plan":
    """Return the plan; `on_first_plan` gets it after the first compilation."""
    check_at_least(args, micro_batch=0)
    target = get_target(args.target)
    hosts = args.hosts or -(-args.gpus // GPUS_PER_HOST)
    if not 1 <= args.gpus <= MAX_GPUS or hosts < 1 or args.gpus % hosts:
        raise UserError(
            f"gpus={args.gpus} hosts={hosts}: expected 1 to {MAX_GPUS} GPUs, a"
            " multiple of the hosts"
        )
    if not 0 < args.memory_fraction <= 1:
        raise UserError(
            f"memory_fraction={args.memory_fraction}: expected a share in (0, 1]"
        )
    has_batch = sets_batch(overrides)
    config = planned_config(overrides, has_batch)
    sequences = args.micro_batch or DEFAULT_SEQUENCES
    if has_batch and not args.micro_batch:
        sequences = sequences_of(config, args.gpus // max(config.parallel.tensor, 1))
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


def sets_batch(overrides: Sequence[str]) -> bool:
    """Return whether the user, a file or an experiment sets train.batch_tokens."""
    command_line = expand_arguments(overrides)
    return "train.batch_tokens" in command_line.saved or any(
        override.startswith(("train.batch_tokens=", "experiment="))
        for override in command_line.overrides
    )


def planned_config(overrides: Sequence[str], has_batch: bool) -> Config:
    """Return the configuration.

    If the user sets no batch, train.batch_tokens is one sequence: the plan does not
    read it, and its default may be shorter than the model's context.
    """
    if has_batch or any(
        override.startswith("train.grad_accum_steps=") for override in overrides
    ):
        return compose_config(overrides)
    return compose_config([*overrides, "train.batch_tokens=${model.context}"])


def sequences_of(config: Config, gpus: int) -> int:
    """Return the sequences of a device's micro-batch by the configuration."""
    alternative = ", or give micro_batch=, the sequences of one GPU, instead"
    check_micro_batch(config, gpus, f"gpus={gpus}", alternative)
    return config.batch_size // config.train.grad_accum_steps // gpus


def not_fp8_lines(layers: "Sequence[Layer]", max_layers: int = 4) -> list[str]:
    """Return a line for each reason not to use FP8, with up to `max_layers` layers.

    `json=yes` prints all layers.
    """
    by_reason: dict[str, list[str]] = {}
    for layer in layers:
        by_reason.setdefault(layer.reason, []).append(layer.path)
    lines = []
    for reason, paths in by_reason.items():
        hidden = len(paths) - max_layers
        more = f" and {hidden} more" if hidden > 0 else ""
        lines.append(f"  not FP8: {', '.join(paths[:max_layers])}{more}: {reason}")
    return lines


def lines_of(plan: "Plan") -> list[str]:
    """Return lines about what the step needs: memory, kernels, FLOPs and time."""
    figures, hardware, m = plan.as_json(), plan.hardware, plan.measured
    state = f"{plan.state_bytes / GIB:.2f} GiB of it weights and optimizer"
    usable_memory = (
        f"{hardware.usable / GIB:.1f} GiB ({hardware.memory_fraction:.0%} of"
        f" {hardware.target.memory / GIB:.1f}, what JAX takes)"
    )
    hosts = "1 host" if hardware.hosts == 1 else f"{hardware.hosts} hosts"
    lines = [
        (
            f"{plan.parameters:,} parameters, {plan.spec.n_layer} layers of width"
            f" {plan.spec.d_model}, vocabulary {plan.spec.vocab_size:,};"
            f" {hardware.gpus} x {hardware.target.device} on"
            f" {hosts}; {plan.sequences} sequences of"
            f" {plan.spec.context} a device and micro-batch, {plan.tokens:,} tokens a"
            " step"
        ),
        (
            f"memory: {m.peak / GIB:.2f} GiB a device, {state};"
            f" {hardware.verdict(m.peak)} in {usable_memory}"
        ),
        *([] if plan.fits else [f"  to try: {', '.join(plan.smaller)}"]),
        *(
            f"  {kind:<12} {size / GIB:8.2f} GiB"
            for kind, size in m.group("memory").items()
            if size
        ),
        (
            "  not counted: CUDA context, cuDNN's workspaces, NCCL's buffers (1 to"
            " 2 GiB together)"
        ),
    ]
    if plan.is_extrapolated:
        lines.insert(
            1,
            f"extrapolated from {figures['continued_from_layers']} layers; exact=yes"
            " compiles all of them",
        )
    lines.append(
        "matmuls:"
        f" {', '.join(f'{n} {key}' for key, n in figures['gemm_kernels'].items())}"
    )
    attentions = ", ".join(f"{n} {dtype}" for dtype, n in figures["attentions"].items())
    lines.append(
        f"fused attentions (cuDNN; no T x T matrix in memory): {attentions or 'none'}"
    )
    narrow = "FP4" if "fp4" in figures["gemms"] else "FP8"
    lines.append(
        f"{narrow}: {plan.fp8_flop_share:.1%} of the FLOPs of matmuls and attentions"
    )
    lines += not_fp8_lines(plan.layers)
    kinds = ", ".join(
        f"{n} {kind}"
        for kind, n in sorted(figures["kernels_by_kind"].items(), key=lambda x: -x[1])
    )
    lines.append(f"kernels: {figures['kernels']} a step: {kinds}")
    for c in figures["collectives"]:
        sent = f"{c['sent_bytes_per_device'] / GIB:.3f} sent by each device"
        lines.append(
            f"collective: {c['count']} {c['op']} of {c['dtype']},"
            f" {c['bytes'] / GIB:.3f} GiB a step, {sent}"
        )
    lines.append(
        f"{figures['flops_per_token']:.3e} FLOPs a token; roofline"
        f" {1e3 * plan.roofline_seconds:.1f} ms a step,"
        f" {plan.tokens / plan.roofline_seconds:,.0f} tokens/s, MFU"
        f" {figures['mfu']:.1%} of the peak in {plan.compute}"
        f"{explain_mfu(figures['mfu'])}"
    )
    return lines


def explain_mfu(mfu: float) -> str:
    """Explain an MFU above 100%; "" if it is not above."""
    if mfu > 1:
        return " (above 100%: FP8 matmuls have a higher peak)"
    return ""


def later_lines(plan: "Plan") -> list[str]:
    """Return the lines of further compilations: the comparison, and the search."""
    lines, figures = [], plan.as_json()
    if plan.bf16 is not None:
        extra = ", ".join(
            f"{n:+} {kind}" for kind, n in figures["extra_kernels"].items() if n
        )
        lines.append(
            f"{figures['kernels']} kernels a step, against {figures['kernels_bf16']} in"
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


def predicted_lines(plan: "Plan") -> list[str]:
    """Return the predicted times as a Markdown table, beside bf16's if compiled."""
    from trainer.compiled.classes import CLASSES, GAPS

    figures = plan.as_json()["predicted"]
    planned, bf16 = figures["classes"], figures["classes_bf16"] or {}
    names = [name for name in (*CLASSES, GAPS) if name in planned or name in bf16]
    text = (
        f"predicted, not measured: {1e3 * figures['seconds']:.2f} ms a step,"
        f" {figures['tokens_per_s']:,.0f} tokens/s"
    )
    text += f", MFU {figures['mfu']:.1%}{explain_mfu(figures['mfu'])}"
    if bf16:
        text += f"; {figures['times_as_fast_as_bf16']:.3f} times as fast as bf16"
    tables = [planned]
    header, rule = "| class | ms | kernels |", "|---|---|---|"
    if bf16:
        tables.append(bf16)
        header, rule = f"{header} bf16: ms | kernels |", f"{rule}---|---|"
    lines = [text]
    hidden = 1e3 * figures["hidden_collective_seconds"]
    if hidden:
        lines.append(
            f"collectives behind other kernels, not in the sum: {hidden:.2f} ms"
        )
    lines += ["", header, rule]
    for name in names:
        cells = [name]
        for classes in tables:
            row = classes.get(name, {"seconds": 0.0, "launches": 0})
            cells += [f"{1e3 * row['seconds']:.2f}", f"{row['launches']}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def describe_largest(found: "BatchSizeBounds") -> str:
    """Describe the largest number of sequences that fits."""
    if found.bound is None:
        return f"at least {found.fits} sequences (the search ended there)"
    if found.bound > found.fits:
        return f"{found.fits} to {found.bound} sequences"
    return f"{found.fits} sequences"
