"""Measure the memory of precisions: train state in buffers and on disk, and backward.

The state's bytes are those of a real state's buffers, and of its checkpoint's files.
Values saved for the backward pass are counted in the traced program, before the
compiler fuses anything: those computed before the loss is known and read after it. No
step is taken.
"""

import gc
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.extend import core as jex

from scalify_core.array.scaled_array import is_scaled_array
from scalify_core.array.tree import leaves
from scripts.bench.cases import without_data
from scripts.studies.runs import overrides
from trainer.cli.arguments import argument, run_script, split
from trainer.parallel.mesh import abstract_batch
from trainer.run.checkpoint import Checkpointer
from trainer.run.libraries import hide_missing_gpu
from trainer.step.state import TrainState, to_checkpoint_form
from trainer.workload import TrainTask, first_state


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    presets: str = argument(
        "precisions, separated by commas, each with `+key=value` for further overrides",
        "fp32,bf16,bf16_pure,fp16_loss_scaled,scalify_fp16,scalify_fp8,scalify_fp8_fp16,scalify_fp8_fp8,fp8_delayed",
    )
    model: str = argument("the model", "gpt2_124m")
    vocab: int = argument("ids of the tokenizer", 50257)
    batch: int = argument("sequences", 8)
    json: str = argument("a file for the figures; empty: none", "")


def main(args: Arguments) -> None:
    """Print one row per precision, as soon as it is known."""
    hide_missing_gpu()
    rows = []
    print(
        "| precision | state, bytes per parameter | of it scales | on disk | saved for"
        " backward, MiB by format |"
    )
    print("|---|---|---|---|---|", flush=True)
    for item in split(args.presets):
        rows.append({"precision": item} | measure(args, item))
        print(table_row(rows[-1]), flush=True)
        gc.collect()  # one state at a time
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def measure(args: Arguments, item: str) -> dict[str, Any]:
    """Return the figures of one precision.

    Parameters are the elements of the weights, vocabulary padding included.
    """
    w = without_data([f"model={args.model}", *overrides(item)], args.vocab)
    state = filled(first_state(w, seed=0))
    parameters = sum(x.size for x in leaves(state.params))
    held = jax.tree.leaves((state.params, state.opt_state))
    scales = sum(
        x.scale.nbytes if hasattr(x.scale, "nbytes") else 4
        for x in leaves(state)
        if is_scaled_array(x)
    )
    batch = abstract_batch(
        1, args.batch, w.model.spec.context, document_mask=False, mesh=w.mesh
    )
    return {
        "state_bytes_per_parameter": sum(x.nbytes for x in held) / parameters,
        "scale_share": scales / sum(x.nbytes for x in held),
        "disk_bytes_per_parameter": bytes_on_disk(state) / parameters,
        "saved_bytes": saved_for_backward(w, state, batch.tokens_AxBxT1.shape[1:]),
    }


def filled(state: TrainState) -> TrainState:
    """Return the state with random moments: files of zeros compress to nothing."""

    def fill(x: jax.Array) -> jax.Array:
        if not x.ndim:
            return x
        return jax.random.normal(jax.random.key(x.size), x.shape).astype(x.dtype)

    return replace(state, opt_state=jax.tree.map(fill, state.opt_state))


def bytes_on_disk(state: TrainState) -> int:
    """Return the bytes of all files of a checkpoint."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpointer(Path(folder)) as checkpointer,
    ):
        checkpointer.save(1, to_checkpoint_form(state), {})
        checkpointer.wait()
        return sum(
            path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()
        )


def saved_for_backward(
    w: TrainTask, state: TrainState, shape: tuple[int, ...]
) -> dict[str, int]:
    """Return the bytes by dtype that the gradient needs of the loss's computation."""
    tokens = jax.ShapeDtypeStruct(shape, "int32")
    differentiate = w.model.differentiate()

    def program(tokens: jax.Array) -> Any:
        # Parameters are constants here, so that they do not count.
        keys = jax.random.split(state.key, len(tokens))
        return differentiate.value_and_grad(
            state.params, state.scaling, tokens, None, keys
        )

    return alive_at_the_loss(jax.make_jaxpr(program)(tokens).jaxpr)


def alive_at_the_loss(jaxpr: jex.Jaxpr) -> dict[str, int]:
    """Return bytes by dtype of the values computed before the loss and read after it.

    The loss, the first output, is known once the last equation that it depends on has
    read an array. Inputs and outputs of the program do not count, and neither do values
    inside loops and custom calls.
    """
    steps, outputs = unrolled(jaxpr, {})
    needed = {outputs[0]}
    known = 0
    for i, (reads, writes) in reversed(list(enumerate(steps))):
        if needed.intersection(writes):
            needed |= set(reads)
            known = max(known, i if any(v.aval.shape for v in reads) else 0)
    written = {v for _, writes in steps[: known + 1] for v in writes}
    read = {v for reads, _ in steps[known + 1 :] for v in reads}
    total = Counter[str]()
    for v in (written & read).difference(v for v in outputs if isinstance(v, jex.Var)):
        # Flax's dtype of amax histories has no itemsize; it is FP32.
        total[str(v.aval.dtype)] += v.aval.size * getattr(v.aval.dtype, "itemsize", 4)
    return dict(total)


CALLED = {
    "jit": "jaxpr",
    "custom_vjp_call": "call_jaxpr",
}  # the parameter with the body


def unrolled(
    jaxpr: jex.Jaxpr, names: dict[Any, Any]
) -> tuple[list[tuple[list[Any], list[Any]]], list[Any]]:
    """Return reads and writes of each equation, calls inlined, and the outputs.

    `names` maps the inputs to their names outside. A function may be called twice, so
    its values get new names each time.
    """

    def renamed(atoms: Sequence[Any]) -> list[Any]:
        return [v if isinstance(v, jex.Literal) else names.get(v, v) for v in atoms]

    steps: list[tuple[list[Any], list[Any]]] = []
    for equation in jaxpr.eqns:
        inner = equation.params.get(CALLED.get(equation.primitive.name, ""))
        if inner is None:
            names |= {v: jex.Var(v.aval) for v in equation.outvars}
            reads = [v for v in renamed(equation.invars) if isinstance(v, jex.Var)]
            steps.append((reads, renamed(equation.outvars)))
        else:
            arguments = renamed(equation.invars)
            nested, outputs = unrolled(
                inner.jaxpr, dict(zip(inner.jaxpr.invars, arguments, strict=True))
            )
            steps += nested
            names |= dict(zip(equation.outvars, outputs, strict=True))
    return steps, renamed(jaxpr.outvars)


def table_row(row: Mapping[str, Any]) -> str:
    """Return the figures of a precision as a row of the table."""
    saved = sorted(row["saved_bytes"].items(), key=lambda item: -item[1])
    formats = ", ".join(
        f"{name} {count / 2**20:.0f}" for name, count in saved if count >= 2**20
    )
    return (
        f"| {row['precision']} | {row['state_bytes_per_parameter']:.4f} |"
        f" {row['scale_share']:.4%} | {row['disk_bytes_per_parameter']:.3f} |"
        f" {formats} |"
    )


if __name__ == "__main__":
    sys.exit(run_script(Arguments, "bench.memory", __doc__ or "", main))
