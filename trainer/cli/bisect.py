"""Find the layers whose FP8 casts hurt most, by leaving out casts one by one.

    scalify-trainer bisect run_dir=runs/mine

It takes the model of the run's newest checkpoint, one micro-batch of its training data,
and four casts of every FP8 matmul: of activations, weights, the output's gradient, and
the weight gradient for the optimizer. A compiled program with a switch for each cast
computes loss and gradient without one cast, or without all, of one layer and of all
layers. Another program has all casts, and computes in FP32 between the matmuls. Each
loss and gradient is compared with FP32. Master weights are those of the checkpoint; no
wider ones exist.

Prints the remaining errors of the gradient, the lowest first, and writes them as JSON.
"""

import dataclasses
from pathlib import Path

from trainer.cli.arguments import BATCH_HELP, argument, check_at_least
from trainer.files import write_json
from trainer.text import show


@dataclasses.dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    run_dir: str = argument("a run directory with a checkpoint")
    batch: int = argument(BATCH_HELP, 0)
    top: int = argument("maximum number of rows of each table to print", 12)


def main(arguments: Arguments) -> None:
    """Bisect the run, print, and write precision_bisect.json into it."""
    check_at_least(arguments, batch=0, top=1)
    # After the check of the arguments: JAX takes seconds to import.
    from trainer.assembly.build import first_micro_batch
    from trainer.assembly.saved_model import restore_training
    from trainer.observe.precision_bisect import advice, bisect, report, unrolled

    run_dir = Path(arguments.run_dir)
    config, workload, restored = restore_training(run_dir)
    tokens, segments = first_micro_batch(config, workload, arguments.batch)
    # A switch for each layer needs layers that are no loop.
    model, params = unrolled(workload.model, restored.state.params)
    if model.policy.attention is not None:
        # Otherwise the table would seem to cover its casts, too.
        show(
            f"precision.attention={model.policy.attention} has no switch: attention is"
            " in FP32 here"
        )
    findings = bisect(model, params, restored.state.scaling, tokens, segments)
    path = run_dir / "precision_bisect.json"
    # Before printing: a broken pipe may end the process.
    write_json(path, [f.as_json() for f in findings])
    show(report(findings, arguments.top))
    show(advice(findings))
    show(f"all findings: {path}")
