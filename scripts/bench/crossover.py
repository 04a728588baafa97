"""Compute the width from which on FP8 pays, from plans of a layer, without a GPU.

A layer's time is predicted from its kernels (`trainer.plan.times`), for the flagship
and for bf16, at 64 channels a head. It is the difference of steps with three layers and
with two. `python -m scripts.bench` measures it on a GPU.
"""

import sys
from dataclasses import dataclass
from typing import NamedTuple

from trainer.cli.arguments import argument, run_script
from trainer.cli.plan import plan_of
from trainer.errors import UserError

DEPTHS = (2, 3)


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    target: str = argument("the kind of GPU", "h100")
    precision: str = argument("the FP8 precision", "scalify_fp8_fp16")
    widths: str = argument(
        "of the model, multiples of 64 separated by commas", "256,512,768,1280"
    )
    context: int = argument("tokens of a sequence", 1024)
    micro_batch: int = argument("sequences a device", 8)


class LayerCost(NamedTuple):
    """The cost that one layer adds to a step."""

    kernels: int
    roofline_us: float
    predicted_us: float


def main(args: Arguments) -> None:
    """Print one row per width, as soon as it is known."""
    widths = widths_of(args)
    print(
        f"| width | kernels: {args.precision} / bf16 | roofline, us | predicted, us |"
        " times as fast |"
    )
    print("|---|---|---|---|---|", flush=True)
    for width in widths:
        narrow, wide = (
            layer_cost(args, width, precision) for precision in (args.precision, "bf16")
        )
        faster = wide.predicted_us / narrow.predicted_us
        print(
            f"| {width} | {narrow.kernels} / {wide.kernels} | {narrow.roofline_us:.0f}"
            f" / {wide.roofline_us:.0f} | {narrow.predicted_us:.0f} /"
            f" {wide.predicted_us:.0f} | {faster:.2f} |",
            flush=True,
        )


def widths_of(args: Arguments) -> list[int]:
    """Return the widths; UserError for an invalid one."""
    widths = [int(text) if text.isdecimal() else 0 for text in args.widths.split(",")]
    if any(width < 64 or width % 64 for width in widths):
        raise UserError(
            f"widths={args.widths}: expected multiples of 64, such as widths=256,768"
        )
    return widths


def layer_cost(args: Arguments, width: int, precision: str) -> LayerCost:
    """Return the cost of a layer, by two compilations."""
    arguments = [
        "model=gpt2_124m",
        f"model.d_model={width}",
        f"model.n_head={width // 64}",
        f"model.context={args.context}",
        f"micro_batch={args.micro_batch}",
        "data.tokenizer=byte",
        "model.vocab_size=512",
        f"precision={precision}",
        f"target={args.target}",
        "search=no",
        "compare=no",
        "predict=yes",
    ]
    few, more = (plan_of([*arguments, f"model.n_layer={n}"]).as_json() for n in DEPTHS)
    return LayerCost(
        more["kernels"] - few["kernels"],
        1e6 * (more["roofline_seconds"] - few["roofline_seconds"]),
        1e6 * (more["predicted"]["seconds"] - few["predicted"]["seconds"]),
    )


if __name__ == "__main__":
    sys.exit(run_script(Arguments, "bench.crossover", __doc__ or "", main))
