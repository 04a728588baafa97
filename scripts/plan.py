"""What a configuration's train step needs and does on a GPU, without having one.

python -m scripts.plan model=gpt2_1558m precision=scalify_fp8_fp16 target=h200 gpus=8
[--json]

Takes the overrides of `python -m trainer`, and the arguments below. The step is
compiled for the target by the same compiler that a machine with that GPU uses;
`pip install '.[plan]'` brings it.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from scripts.arguments import argument, read, usage
from trainer.config.composition import compose_or_explain
from trainer.config.schema import Config
from trainer.errors import UserError, run_and_flush
from trainer.plan.targets import GPUS_PER_HOST, TARGETS, get_target
from trainer.text import refuse_twice

if TYPE_CHECKING:
    from trainer.compiled.fp8 import Layer
    from trainer.plan.plan import Fitting, Plan

GIB = 2**30


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    target: str = argument(f"the GPU: {', '.join(TARGETS)}", "h200")
    gpus: int = argument("how many, over all hosts", 1)
    hosts: int = argument(
        f"hosts that share them evenly; 0: one for each {GPUS_PER_HOST}", 0
    )
    micro_batch: int = argument(
        "sequences of a device; 0: those of train.batch_tokens where that is given,"
        " else 8",
        0,
    )
    memory_fraction: float = argument(
        "share of the memory that JAX takes; its own XLA_PYTHON_CLIENT_MEM_FRACTION",
        float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")),
    )
    search: str = argument("yes or no: search for the largest micro-batch", "yes")
    compare: str = argument(
        "yes or no: compile the same in precision=bf16 and compare kernels", "yes"
    )
    exact: str = argument("yes or no: compile every layer of a deep model", "no")
    predict: str = argument(
        "yes or no: how long each class of kernels is expected to take, a guess", "no"
    )


def main(argv: Sequence[str]) -> int:
    """The exit code: 0, or that of a UserError after its one line on stderr."""
    if "--help" in argv or "-h" in argv:
        print(usage(Arguments, "plan", __doc__ or ""))
        return 0
    try:
        refuse_twice(argv)
        own = [a for a in argv if a.startswith("predict=")]
        predict = yes("predict", read(Arguments, own).predict)
        plan = plan_of([a for a in argv if a not in ("--json", *own)])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    lines = lines_of(plan) + (predicted_lines(plan) if predict else [])
    print(
        json.dumps(plan.as_json(), indent=1) if "--json" in argv else "\n".join(lines)
    )
    return 0


def plan_of(argv: Sequence[str]) -> "Plan":
    """The plan of a command line. Raises UserError."""
    own = {field.name for field in fields(Arguments)}
    args = read(Arguments, [a for a in argv if a.partition("=")[0] in own])
    overrides = [a for a in argv if a.partition("=")[0] not in own]
    target, flags = (
        get_target(args.target),
        {name: yes(name, getattr(args, name)) for name in ("search", "exact")},
    )
    hosts = args.hosts or -(-args.gpus // GPUS_PER_HOST)
    if not 1 <= args.gpus <= 64 or hosts < 1 or args.gpus % hosts:
        raise UserError(
            f"gpus={args.gpus} hosts={hosts}: expected 1 to 64 GPUs, as many on every"
            " host"
        )
    if not 0 < args.memory_fraction <= 1:
        raise UserError(
            f"memory_fraction={args.memory_fraction}: expected a share in (0, 1]"
        )
    config = composed(overrides)
    sequences = args.micro_batch or sequences_of(
        config, overrides, args.gpus // max(config.parallel.tensor, 1)
    )
    bf16 = (
        compose_or_explain(["precision=bf16"]).precision
        if yes("compare", args.compare)
        else None
    )
    # whatever GPU is in this machine, the one that is planned for is not
    os.environ["JAX_PLATFORMS"] = "cpu"
    # XLA's warnings: that there is no GPU to measure kernels on
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

    from trainer.assembly.planning import build_plan
    from trainer.plan.figures import Aim
    from trainer.run.libraries import hide_missing_gpu

    hide_missing_gpu()
    aim = Aim(target, args.gpus, hosts, args.memory_fraction)
    say = lambda text: print(text, file=sys.stderr, flush=True)
    if bf16 is not None and config.precision.name == "bf16":
        bf16 = None
    return build_plan(config, aim, sequences=sequences, bf16=bf16, say=say, **flags)


def yes(name: str, value: str) -> bool:
    """A flag. UserError names it."""
    if value not in ("yes", "no"):
        raise UserError(f"{name}={value}: expected yes or no")
    return value == "yes"


def gives_batch(overrides: Sequence[str]) -> bool:
    """Return whether the batch is the command line's own, and not the default of a
    configuration.
    """
    return any(
        override.startswith(("train.batch_tokens=", "experiment="))
        for override in overrides
    )


def composed(overrides: Sequence[str]) -> Config:
    """The configuration. A default batch does not count in a plan, so any model's
    context may exceed it.
    """
    if gives_batch(overrides) or any(
        override.startswith("train.grad_accum_steps=") for override in overrides
    ):
        return compose_or_explain(overrides)
    return compose_or_explain([*overrides, "train.batch_tokens=${model.context}"])


def sequences_of(config: Config, overrides: Sequence[str], gpus: int) -> int:
    """Of a device's micro-batch, where the command line does not say it."""
    if not gives_batch(overrides):
        return 8
    micro_batch = config.batch_size // config.train.grad_accum_steps
    if micro_batch % gpus:
        raise UserError(
            f"a micro-batch of {micro_batch} sequences (train.batch_tokens /"
            " model.context / train.grad_accum_steps) cannot be split over"
            f" gpus={gpus}; give micro_batch=, sequences of one GPU, instead"
        )
    return micro_batch // gpus


def not_fp8_lines(layers: "Sequence[Layer]", most: int = 4) -> list[str]:
    """A line for each reason, which names `most` of its layers at most; `--json` has
    them all.
    """
    by_reason: dict[str, list[str]] = {}
    for layer in layers:
        by_reason.setdefault(layer.reason, []).append(layer.path)
    lines = []
    for reason, paths in by_reason.items():
        more = f" and {len(paths) - most} more" if len(paths) > most else ""
        lines.append(f"  not FP8: {', '.join(paths[:most])}{more}: {reason}")
    return lines


def lines_of(plan: "Plan") -> list[str]:
    """The plan as text."""
    figures, aim, m = plan.as_json(), plan.aim, plan.measured
    state = f"{plan.state_bytes / GIB:.2f} GiB of it weights and optimizer"
    room = (
        f"{aim.usable / GIB:.1f} GiB ({aim.memory_fraction:.0%} of"
        f" {aim.target.memory / GIB:.1f}, what JAX takes)"
    )
    lines = [
        (
            f"{plan.spec.n_layer} layers of width {plan.spec.d_model}, vocabulary"
            f" {plan.spec.vocab_size:,}; {aim.gpus} x {aim.target.device} on"
            f" {aim.hosts} host{'s' * (aim.hosts > 1)}; {plan.sequences} sequences of"
            f" {plan.spec.context} a device and micro-batch, {plan.tokens:,} tokens a"
            " step"
        ),
        (
            f"memory: {m.peak / GIB:.2f} GiB a device, {state};"
            f" {'fits' if plan.fits else 'DOES NOT FIT'} in {room}"
        ),
        *(
            f"  {kind:<12} {size / GIB:8.2f} GiB"
            for kind, size in m.group("memory").items()
            if size
        ),
        (
            "  not counted: the CUDA context, cuDNN's workspaces, NCCL's buffers (1 to"
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
        "matrix products:"
        f" {', '.join(f'{n} {key}' for key, n in figures['gemm_kernels'].items())}"
    )
    attentions = ", ".join(f"{n} {dtype}" for dtype, n in figures["attentions"].items())
    lines.append(
        f"fused attentions (cuDNN; no T x T matrix is held): {attentions or 'none'}"
    )
    lines.append(
        f"FP8: {plan.fp8_flop_share:.1%} of the FLOPs of matrix products and attentions"
    )
    lines += not_fp8_lines(plan.layers)
    kinds = ", ".join(
        f"{n} {kind}"
        for kind, n in sorted(figures["kernels_by_kind"].items(), key=lambda x: -x[1])
    )
    lines.append(f"kernels: {figures['kernels']} a step: {kinds}")
    if plan.bf16 is not None:
        extra = ", ".join(
            f"{n:+} {kind}" for kind, n in figures["extra_kernels"].items() if n
        )
        lines.append(
            f"  against {figures['kernels_bf16']} in bf16: {extra or 'the same'}"
        )
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
    )
    if plan.largest is not None:
        lines.append(
            f"largest micro-batch that fits: {describe_fitting(plan.largest)} a device"
        )
    return lines


def predicted_lines(plan: "Plan") -> list[str]:
    """The time model's table as Markdown, that of bf16 beside it where it was
    compiled.
    """
    from trainer.compiled.classes import CLASSES, GAPS

    figures = plan.as_json()["predicted"]
    ours, theirs = figures["classes"], figures["classes_bf16"] or {}
    names = [name for name in (*CLASSES, GAPS) if name in ours or name in theirs]
    text = (
        f"predicted, not measured: {1e3 * figures['seconds']:.2f} ms a step,"
        f" {figures['tokens_per_s']:,.0f} tokens/s"
    )
    text += f", MFU {figures['mfu']:.1%}"
    if theirs:
        text += f"; {figures['times_as_fast_as_bf16']:.3f} times as fast as bf16"
    lines = [
        text,
        "",
        "| class | ms | kernels |" + " bf16: ms | kernels |" * bool(theirs),
    ]
    lines.append("|---" * (5 if theirs else 3) + "|")
    for name in names:
        cells = [name]
        for classes in (ours, theirs) if theirs else (ours,):
            found = classes.get(name, {"seconds": 0.0, "launches": 0})
            cells += [f"{1e3 * found['seconds']:.2f}", f"{found['launches']}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def describe_fitting(found: "Fitting") -> str:
    """A number of sequences, or what is known of it."""
    if found.bound is None:
        return f"at least {found.fits} sequences (the search went no further)"
    return f"{found.fits} sequences" + (
        f", or up to {found.bound}," if found.bound > found.fits else ""
    )


if __name__ == "__main__":
    sys.exit(run_and_flush(lambda: main(sys.argv[1:])))
