"""Profile training steps: their time by class of kernel, compared with the roofline.

    python -m scripts.bench.profiling cases=gpt2_774m:bf16 out=profile.json

Cases are those of `python -m scripts.bench cases=...`, one after the other, each in a
process of its own.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scripts.bench.cases import TORCH, parse_case
from scripts.bench.compare import Comparison, Results, Settings, say
from scripts.bench.interleave import Failed
from trainer.cli.arguments import argument, run_script
from trainer.errors import UserError


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    cases: str = argument("model:precision[:batch=8] and so on, separated by commas")
    steps: int = argument("steps that are profiled", 3)
    platform: Literal["gpu", "cpu"] = argument(
        "what JAX must run on; cpu: to rehearse", "gpu"
    )
    sequence: int = argument("tokens per sequence; 0: the model's", 0)
    minutes: float = argument("no other case is begun after so many", 8.0)
    compile_cache: str = argument(
        "the directory of compiled programs; empty: none",
        "~/.cache/scalify-trainer/xla",
    )
    out: str = argument(
        "also write the tables to this JSON file; cases that it has are not profiled"
        " again",
        "",
    )


def main(args: Arguments) -> None:
    """Print a table for each case; UserError names the cases that failed."""
    from scripts.bench.kernel_times import lines_of

    cases = [parse_case(text) for text in args.cases.split(",")]
    if any(case.precision == TORCH for case in cases):
        raise UserError("cases: only steps of this trainer are profiled, not torch")
    settings = Settings(1, args.steps, args.sequence or None, args.platform)
    cache = args.compile_cache or None
    comparison = Comparison(
        settings,
        Results(None, settings),
        minutes=args.minutes,
        python=None,
        cache=cache,
    )
    path = Path(args.out) if args.out else None
    tables: dict[str, Any] = {}
    if path is not None and path.exists():
        tables = json.loads(path.read_text())
    for case in cases:
        if case.name in tables:
            say(f"{case.name}: already profiled")
        elif not comparison.is_left_out(case):
            try:
                with comparison.started(case) as running:
                    tables[case.name] = running.ask(profile=args.steps)
            except Failed as error:
                comparison.fails(case, error)
                continue
            say("\n".join(lines_of(case.name, tables[case.name])))
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(tables, indent=1) + "\n")
    if comparison.results.failed:
        raise UserError(
            f"not profiled: {', '.join(comparison.results.failed)}; the reasons are"
            " above"
        )


if __name__ == "__main__":
    sys.exit(run_script(Arguments, "bench.profiling", __doc__ or "", main))
