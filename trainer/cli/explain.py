"""Find where low precision loses numbers in the loss and its gradient.

    scalify-trainer explain run_dir=runs/mine
    scalify-trainer explain precision=scalify_fp8 model.n_layer=2

The first form takes a run's newest checkpoint and a batch of its training data. The
second takes a fresh model and the keys of training.

Where scales propagate, it compares every equation with FP32. It prints the first place
where values are lost, and a table by source line: how many values underflow or
saturate, and how far scales are from the sizes of their values.

Where operands have a scale for each block or row, it prints a table of the operands of
matmuls (weights, inputs, and gradients of outputs): how many octaves the scales of
their blocks spread, the share of blocks that become zeros, and the share of blocks with
a number beyond the largest of the format. The worst tensors come first.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cli.arguments import BATCH_HELP, argument, check_at_least
from trainer.config.composition import compose_config
from trainer.errors import UserError
from trainer.files import write_json
from trainer.text import note, show

if TYPE_CHECKING:
    import jax

    from scalify_core.debug.explanation import Explanation
    from trainer.assembly.build import Workload
    from trainer.config.schema import Config
    from trainer.model import Model
    from trainer.precision.policy import Policy
    from trainer.step.state import TrainState

    Sequences = tuple[jax.Array, jax.Array | None]  # ids and document numbers [B, T+1]

# Figures of a tensor's blocks, by the tensor's name in a row of the numerics.
BlocksByTensor = dict[str, dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    run_dir: str = argument(
        "a run directory with a checkpoint; without it, a fresh model of the other"
        " arguments",
        "",
    )
    batch: int = argument(BATCH_HELP, 0)
    sequences: int = argument("number of sequences of the micro-batch to take", 1)
    top: int = argument("maximum number of rows to print, of each table", 24)
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
    """
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
        # As in training, where weights' scales are constants of the program.
        scales="static",
    )


def measure_blocks(
    workload: "Workload", state: "TrainState", sequences: "Sequences", step: int
) -> BlocksByTensor:
    """Measure the operands that are cast in blocks, in the order of a forward pass."""
    import jax

    from trainer.observe.numerics import make_numerics
    from trainer.precision.blocks import BLOCK_FIGURES
    from trainer.step.step import Tokens

    # A step's batch has an axis of micro-batches, here one.
    batch = Tokens(*jax.tree.map(lambda x: x[None], sequences))
    blocks: BlocksByTensor = {}
    for name, value in make_numerics(workload.task)(state, batch, step).items():
        _, tensor_class, layer, figure = name.split("/")
        if figure in BLOCK_FIGURES:
            blocks.setdefault(f"{tensor_class}/{layer}", {})[figure] = value
    return blocks


def blocks_text(blocks: BlocksByTensor, top: int) -> str:
    """Return the worst tensors as a table."""
    from trainer.precision.blocks import BLOCK_FIGURES

    spread, underflow, saturated = BLOCK_FIGURES

    def badness(tensor: str) -> tuple[float, float]:
        figures = blocks[tensor]
        # Lost blocks first: a wide spread alone loses nothing.
        return figures[underflow] + figures[saturated], figures[spread]

    worst = sorted(blocks, key=badness, reverse=True)[:top]
    width = max(map(len, worst), default=0)
    lines = [
        f"blocks of {len(blocks)} operands; spread of their scales in octaves, share of"
        " blocks that become zeros or saturate",
        "",
        f"  {'':{width}}  spread    zeros  saturated",
    ]
    for tensor in worst:
        figures = blocks[tensor]
        lines.append(
            f"  {tensor:{width}}  {figures[spread]:6.2f}  {figures[underflow]:7.2%}"
            f"  {figures[saturated]:9.2%}"
        )
    return "\n".join(lines)


def load_state(
    arguments: Arguments, overrides: Sequence[str]
) -> "tuple[Config, Workload, TrainState]":
    """Return the configuration, workload and state of a run, or of a fresh model."""
    # A changed precision or model would not be the one whose weights are loaded.
    if arguments.run_dir and overrides:
        raise UserError(
            f"{overrides[0]}: a run has its own configuration; leave out run_dir= for a"
            " fresh model"
        )
    # After the check of the arguments, because JAX takes seconds to import.
    from trainer.assembly.build import build_state, build_workload
    from trainer.assembly.saved_model import restore_training
    from trainer.run.libraries import prepare_jax

    if arguments.run_dir:
        config, workload, restored = restore_training(Path(arguments.run_dir))
        return config, workload, restored.state
    # `restore_training` does this for a run.
    prepare_jax()
    config = compose_config(overrides)
    workload = build_workload(config)
    return config, workload, build_state(config, workload, note)


def few_sequences(
    arguments: Arguments, config: "Config", workload: "Workload"
) -> "Sequences":
    """Return the sequences of the batch that are taken."""
    from trainer.assembly.build import first_micro_batch

    # Of the training data: a gradient's losses depend on what is trained on.
    tokens, segments = first_micro_batch(config, workload, arguments.batch)
    # Slicing would take fewer in silence.
    if arguments.sequences > len(tokens):
        raise UserError(
            f"sequences={arguments.sequences}: a micro-batch of this run has"
            f" {len(tokens)}"
        )
    # Without data.document_mask a batch has no numbers of documents.
    if segments is not None:
        segments = segments[: arguments.sequences]
    return tokens[: arguments.sequences], segments


def explanation_json(explained: "Explanation") -> dict[str, Any]:
    """Return all rows, the place of the first lost values, and the errors."""
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
    return {
        "first_loss": explained.first_loss,
        "errors": explained.errors,
        "rows": rows,
    }


def check_explainable(policy: "Policy") -> None:
    """Raise UserError for a precision that has no scales."""
    from trainer.precision.methods import METHODS

    if policy.scaled or policy.method.has_blocks:
        return
    valid_methods = [
        name for name, method in METHODS.items() if method.scaled or method.has_blocks
    ]
    raise UserError(
        f"precision.scaling={policy.scaling} has no scales to explain; valid:"
        f" {', '.join(valid_methods)}"
    )


def main(arguments: Arguments, overrides: Sequence[str]) -> None:
    """Explain, write and print."""
    check_at_least(arguments, batch=0, sequences=1, top=1)
    out = Path(arguments.out)
    # Checked before minutes of work.
    if arguments.out and (out.is_dir() or not out.parent.is_dir()):
        raise UserError(f"out={out}: expected a file in a directory that exists")
    config, workload, state = load_state(arguments, overrides)
    policy = workload.model.policy
    check_explainable(policy)
    sequences = few_sequences(arguments, config, workload)
    texts: list[str] = []
    document: dict[str, Any] = {}
    if policy.scaled:
        explained = explain_step(workload.model, state.params, *sequences)
        texts.append(explained.text(arguments.top))
        document |= explanation_json(explained)
    # A method may have both: scales that propagate, and blocks.
    if policy.method.has_blocks:
        blocks = measure_blocks(workload, state, sequences, arguments.batch)
        texts.append(blocks_text(blocks, arguments.top))
        document["blocks"] = blocks
    if arguments.out:
        # A broken pipe may end the process while it prints, so write before.
        write_json(out, document)
        texts.append(f"all rows: {out}")
    show("\n\n".join(texts))
