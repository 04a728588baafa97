"""Measure the speed of training steps against others, interleaved.

On a machine with a GPU the trainer's steps in several precisions and Hugging Face's
GPT-2 in compiled PyTorch take turns, a few steps each, so that other load affects all
alike; see `scripts/bench/compare.py`. Figures are medians over the rounds, with
extremes. `platform=cpu` rehearses; `compile_only=true` only fills the compilation
cache.
"""

from dataclasses import dataclass
from typing import Literal

from scripts.bench.cases import parse_case
from scripts.bench.compare import Comparison, Results, Settings
from scripts.bench.interleave import torch_interpreter
from trainer.cli.arguments import argument
from trainer.errors import UserError

PEERS = ("scalify_fp8_fp16", "bf16", "torch", "fp8_delayed", "fp8_current")
ON_A_GPU = ",".join(
    f"gpt2_{size}:{peer}" for size in ("124m", "774m", "1558m") for peer in PEERS
)


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    cases: str = argument(
        "model:precision[:batch=8][:remat=none][:scan=false][:deterministic=auto]"
        "[:logits=auto][:attention=null], separated by commas; torch is a precision;"
        " gpu: all peers at three sizes",
        "gpu",
    )
    rounds: int = argument("turns of each case", 7)
    steps: int = argument("steps in a turn", 20)
    profile: int = argument(
        "steps of each case whose time is shown by class of kernel, compared with the"
        " roofline, instead; 0: none",
        0,
    )
    torch_python: str = argument(
        "an interpreter that has torch and transformers; empty: this one, if it has", ""
    )
    out: str = argument("also write the figures to this JSON file", "")
    platform: Literal["gpu", "cpu"] = argument(
        "what JAX must run on; cpu: to rehearse", "gpu"
    )
    compile_only: bool = argument(
        "only compile the cases, into the compilation cache", False
    )
    compile_cache: str = argument(
        "the directory of compiled programs; empty: none",
        "~/.cache/scalify-trainer/xla",
    )
    sequence: int = argument("tokens per sequence; 0: the model's", 0)
    minutes: float = argument("no further case starts after these", 8.0)


def compare(args: Arguments) -> Results:
    """Time, profile or only compile the cases in worker processes."""
    texts = ON_A_GPU if args.cases == "gpu" else args.cases
    cases = [parse_case(text) for text in texts.split(",")]
    rounds, steps = args.rounds, args.steps
    if args.profile:
        rounds, steps = 1, args.profile
    settings = Settings(rounds, steps, args.sequence or None, args.platform)
    comparison = Comparison(
        settings,
        Results.open("" if args.compile_only else args.out, settings),
        minutes=args.minutes,
        python=torch_interpreter(args.torch_python),
        cache=args.compile_cache or None,
    )
    if args.compile_only:
        comparison.compile_only(cases)
    elif args.profile:
        comparison.profile(cases)
    else:
        comparison.run(cases)
    return comparison.results


def main(args: Arguments) -> None:
    """Compare full steps; UserError names those that failed."""
    results = compare(args)
    if results.failed:
        listed = "; ".join(f"{name}: {why}" for name, why in results.failed.items())
        raise UserError(
            f"{len(results.failed)} of the cases failed, the others are as above:"
            f" {listed}"
        )
