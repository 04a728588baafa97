"""Measure how far matmul operands are from RMS 1, in a fresh model and a checkpoint.

The loss and gradient of RUN's model on its training batches are evaluated equation by
equation, with the scales of a training step. A row is a kind of operand: the matmul,
the operand's position and its shape. It has the least and the largest RMS of all
layers and batches, at initialization and in the newest checkpoint. The aim is 1/4 to 4.
"""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from scalify_core.array.scaled_array import is_scaled_array
from scalify_core.interpreter import evaluator
from scalify_core.interpreter.value import Value, narrow
from trainer.assembly.build import build_state
from trainer.assembly.saved_model import restore_training
from trainer.cli.arguments import argument, run_script
from trainer.errors import UserError
from trainer.models.registry import family_of
from trainer.parallel.mesh import place_batch
from trainer.workload import Model

AIM = 1 / 4, 4.0
# Primitives and composites that multiply matrices, and how many of their first operands
# they multiply.
PRODUCTS = {
    "dot_general": 2,
    "fp8_dot_general": 2,
    "fp8_dot_general.fwd": 2,
    "fp8_dot_general.bwd": 3,
    "attention": 3,
    "attention.fwd": 3,
    "attention.bwd": None,  # all: with its result, and the gradient of that
    "linear_cross_entropy": 2,
    "linear_cross_entropy.fwd": 2,
}
OperandRms = dict[tuple[str, int, tuple[int, ...]], list[float]]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Settings of the measurement; see `--help`."""

    run_dir: str = argument(
        "a run directory with a checkpoint; its precision propagates scales"
    )
    batch: int = argument("number of the first training batch that is taken", 5000)
    batches: int = argument("how many of them", 2)
    sequences: int = argument("how many sequences of each", 8)


@dataclasses.dataclass(frozen=True)
class Observed(evaluator.Evaluator):
    """The evaluation of a program; `see` is shown each equation and its operands."""

    see: Callable[[Any, Sequence[Any]], None] = lambda eqn, operands: None

    def results(self, eqn: Any, operands: Sequence[Any], jaxpr: Any) -> list[Any]:
        """Return the results of one equation."""
        self.see(eqn, operands)
        return super().results(eqn, operands, jaxpr)


def operands_of_products(
    model: Model,
    params: Any,
    tokens: jax.Array,
    segments: jax.Array | None,
    operand_rms: OperandRms,
) -> None:
    """Add the RMS of every matrix that the loss and its gradient multiply.

    `tokens` is [B, T+1]. The model's layers are unrolled and nothing is recomputed, so
    that every operand is evaluated once.
    """

    def see(eqn: Any, operands: Sequence[Any]) -> None:
        name = eqn.params["call"].name if "call" in eqn.params else eqn.primitive.name
        if name in PRODUCTS:
            for i, x in enumerate(operands[: PRODUCTS[name]]):
                if isinstance(x, Value) and len(x.shape) > 1:
                    data = narrow(x).data.astype(jnp.float32)
                    operand_rms.setdefault((name, i, x.shape), []).append(
                        float(jnp.sqrt(jnp.mean(jnp.square(data))))
                    )

    leaves, tree = jax.tree.flatten(params, is_leaf=is_scaled_array)
    abstract = [
        jax.ShapeDtypeStruct(x.shape, jnp.float32 if is_scaled_array(x) else x.dtype)
        for x in leaves
    ]

    def loss(*leaves: Any) -> jax.Array:
        params = jax.tree.unflatten(tree, leaves)
        return model.loss(params, tokens, segments, None)

    program = (
        jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(leaves)))))
        .trace(*abstract)
        .jaxpr
    )
    Observed(measures=False, see=see)(program, list(map(evaluator.entering, leaves)))


def measure(arguments: Arguments) -> tuple[OperandRms, OperandRms, int]:
    """Return the operands' RMS at initialization and in the newest checkpoint, and its
    step. Raises UserError for a precision without scales.
    """
    c, w, restored = restore_training(Path(arguments.run_dir))
    if not w.model.policy.scaled:
        raise UserError(
            f"precision.scaling={w.model.policy.scaling} has no scales; valid:"
            " scaling=propagate"
        )
    spec = w.model.spec
    unstack = (
        family_of(spec).unstack_layers if spec.scan_layers else lambda params: params
    )
    model = Model.make(
        dataclasses.replace(spec, scan_layers=False, remat="none"),
        w.model.policy,
        w.model.rows,
    )
    first: OperandRms = {}
    now: OperandRms = {}
    for number in range(arguments.batch, arguments.batch + arguments.batches):
        batch = place_batch(
            w.data.train.batch(number), accum=c.train.grad_accum_steps, mesh=w.mesh
        )
        tokens, segments = batch.tokens_AxBxT1[0], batch.segments_AxBxT1
        tokens = tokens[: arguments.sequences]
        segments = None if segments is None else segments[0][: arguments.sequences]
        for state, rms in ((build_state(c, w), first), (restored.state, now)):
            operands_of_products(model, unstack(state.params), tokens, segments, rms)
    return first, now, restored.step


def table(first: OperandRms, now: OperandRms, step: int) -> str:
    """Format a row for each kind of operand, and the extremes of all below."""
    low, high = AIM
    lines = [
        f"| operand | shape | RMS at initialization | RMS after {step} steps | |",
        "|---|---|---|---|---|",
    ]
    for (name, i, shape), values in now.items():
        both = [
            f"{min(x):.2f} to {max(x):.2f}" for x in (first[name, i, shape], values)
        ]
        measured = [*first[name, i, shape], *values]
        inside = low <= min(measured) and max(measured) <= high
        sizes = " x ".join(map(str, shape))
        lines.append(
            f"| {name}, {i} | {sizes} | {both[0]} | {both[1]} |"
            f" {'' if inside else 'outside'} |"
        )
    for when, operand_rms in (
        ("at initialization", first),
        (f"after {step} steps", now),
    ):
        every = list(itertools.chain.from_iterable(operand_rms.values()))
        lines.append(
            f"{when}: {min(every):.2f} to {max(every):.2f}, of {len(every)} operands"
        )
    return "\n".join(lines)


def main(arguments: Arguments) -> None:
    """Print the table."""
    for name, least in (("batch", 0), ("batches", 1), ("sequences", 1)):
        if getattr(arguments, name) < least:
            raise UserError(
                f"{name}={getattr(arguments, name)}: expected {least} or more"
            )
    print(table(*measure(arguments)))


if __name__ == "__main__":
    sys.exit(run_script(Arguments, "studies.ranges", __doc__, main))
