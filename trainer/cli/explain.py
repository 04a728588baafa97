"""Find where scales go wrong: loss and gradient of each equation, compared with FP32.

    scalify-trainer explain run_dir=runs/mine
    scalify-trainer explain precision=scalify_fp8 model.n_layer=2

The first form takes a run's newest checkpoint and a batch of its training data. The
second takes a fresh model and the keys of training.

Prints for each source line how many values underflow or saturate, and how far scales
are from the sizes of their values. Then prints the first place where values are lost.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cli.arguments import argument, check_at_least
from trainer.config.composition import compose_config
from trainer.errors import UserError
from trainer.files import write_json
from trainer.text import note, show

if TYPE_CHECKING:
    import jax

    from scalify_core.debug.explanation import Explanation
    from trainer.model import Model


@dataclasses.dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    run_dir: str = argument(
        "a run directory with a checkpoint; without it, a fresh model of the other"
        " arguments",
        "",
    )
    batch: int = argument("number of the training batch", 0)
    sequences: int = argument("number of its sequences that are taken", 1)
    top: int = argument("maximum number of rows to print", 24)
    out: str = argument("a file that all rows are written to, as JSON", "")


def explain_step(
    model: "Model", params: Any, tokens: "jax.Array", segments: "jax.Array | None"
) -> "Explanation":
    """Explain the loss and its gradient in the model's precision, without dropout.

    Args:
      model: the model, whose policy is the precision.
      params: parameters as the run stores them.
      tokens: ids [B, T+1].
      segments: document numbers [B, T+1], or None.

    Raises:
      UserError: the precision propagates no scales.
    """
    if not model.policy.scaled:
        raise UserError(
            f"precision.scaling={model.policy.scaling} has no scales to explain; valid:"
            " scaling=propagate"
        )
    import jax

    from scalify_core import explain
    from scalify_core.array.tree import map_arrays
    from trainer.precision.fields import DTYPES

    dtype = DTYPES[model.policy.compute]
    params = map_arrays(lambda p: p.astype(dtype), params)
    return explain(
        jax.value_and_grad(model.loss),
        params,
        tokens,
        segments,
        None,  # no dropout keys
        scales="static",
    )


def load_inputs(
    arguments: Arguments, overrides: Sequence[str]
) -> "tuple[Model, Any, jax.Array, jax.Array | None]":
    """Return the arguments of `explain_step`, from a run or for a fresh model."""
    if arguments.run_dir and overrides:
        raise UserError(
            f"{overrides[0]}: a run has its own configuration; leave out run_dir= for a"
            " fresh model"
        )
    from trainer.assembly.build import build_state, build_workload, first_micro_batch
    from trainer.assembly.saved_model import restore_training
    from trainer.run.libraries import prepare_jax

    if arguments.run_dir:
        config, workload, restored = restore_training(Path(arguments.run_dir))
        state = restored.state
    else:
        prepare_jax()
        config = compose_config(overrides)
        workload = build_workload(config)
        state = build_state(config, workload, note)
    tokens, segments = first_micro_batch(config, workload, arguments.batch)
    if arguments.sequences > len(tokens):
        raise UserError(
            f"sequences={arguments.sequences}: a micro-batch of this run has"
            f" {len(tokens)}"
        )
    if segments is not None:
        segments = segments[: arguments.sequences]
    return workload.model, state.params, tokens[: arguments.sequences], segments


def write(path: Path, explained: "Explanation") -> None:
    """Write all rows and their summary as JSON."""
    rows = [
        {
            **dataclasses.asdict(row.place),
            "primitive": row.primitive,
            "shape": row.shape,
            "dtype": row.dtype,
            "turns": row.turns,
            "lost": row.lost_at is not None,
            **row.figures._asdict(),
            "astray": row.figures.astray,
        }
        for row in explained.rows
    ]
    document = {
        "first_loss": explained.first_loss,
        "errors": explained.errors,
        "rows": rows,
    }
    write_json(path, document)


def main(arguments: Arguments, overrides: Sequence[str]) -> None:
    """Explain, print and write."""
    check_at_least(arguments, batch=0, sequences=1, top=1)
    out = Path(arguments.out)
    if arguments.out and (out.is_dir() or not out.parent.is_dir()):
        raise UserError(f"out={out}: expected a file in a directory that exists")
    explained = explain_step(*load_inputs(arguments, overrides))
    if arguments.out:
        # A broken pipe may end the process while it prints, so write before.
        write(out, explained)
    show(explained.text(arguments.top))
    if arguments.out:
        show(f"\nall rows: {out}")
