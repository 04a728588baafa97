"""The callbacks of every run: numerics, evaluation, tasks, samples, rescale, pictures,
checkpoint.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from scalify_core import weights
from trainer.observe.records import read_rows
from trainer.parallel.replicas import with_params
from trainer.run.callbacks import Callback, Interrupted, Phase, StepContext
from trainer.step.evaluate import Evaluation
from trainer.step.state import TrainState
from trainer.step.step import StepFn, Tokens
from trainer.step.weight_rescale import rescale_powers
from trainer.workload import TrainTask, compile_step

# the entry by which a rollback knows which checkpoints are regular ones
CHECKPOINT = "checkpoint"


def numerics(
    every: int, figures: Callable[[TrainState, Tokens, int], Mapping[str, float]]
) -> Callback:
    """Figures of every layer; `figures` takes the state, a batch and the number of the
    step that took it.
    """
    return Callback(
        "numerics",
        every,
        lambda context: figures(context.state, context.tokens, context.step - 1),
    )


def evaluation(
    every: int,
    evaluate: Callable[[TrainState, bool, Callable[[], bool]], Evaluation | None],
) -> Callback:
    """The validation loss.

    `evaluate` takes the state, whether it is the final time, and a function that says
    whether to break off, to what it finds; None: broken off.
    """

    def run(context: StepContext) -> Mapping[str, float]:
        found = evaluate(
            context.state,
            context.last,
            lambda: context.ask(f"in the validation after step {context.step}"),
        )
        if found is None:
            raise Interrupted
        context.val_loss = found.comparable
        return found.row

    return Callback("evaluation", every, run)


def mixture(
    every: int, seen: Callable[[int], Mapping[str, Mapping[str, float]]]
) -> Callback:
    """What was trained on so far of each source of a mixture: `data/NAME/share` and
    `epochs`; `seen` takes the step.
    """

    def run(context: StepContext) -> Mapping[str, float]:
        found = seen(context.step)
        return {
            f"data/{name}/{what}": value
            for name, of in found.items()
            for what, value in of.items()
        }

    return Callback("mixture", every, run)


def tasks(every: int, scores: Callable[[TrainState], Mapping[str, float]]) -> Callback:
    """Figures of tasks, `tasks/NAME/METRIC`; `scores` takes the state."""
    return Callback("tasks", every, lambda context: scores(context.state))


def exchanged(
    every: int, bytes_up_to: Callable[[int], float], bytes_of_step: float
) -> Callback:
    """What replicas with local steps have sent each other so far: `wire/exchanged_mib`,
    and `wire/times_fewer`.

    `bytes_up_to` takes the step; `bytes_of_step` are those of FP32 gradients, which
    `times_fewer` compares with.
    """

    def run(context: StepContext) -> Mapping[str, float]:
        sent = bytes_up_to(context.step)
        found = {"wire/exchanged_mib": sent / 2**20}
        return found | (
            {"wire/times_fewer": bytes_of_step * context.step / sent} if sent else {}
        )

    return Callback("exchanged", every, run)


def samples(every: int, sample: Callable[[Any], str]) -> Callback:
    """A text that the model writes; `sample` makes it of the parameters."""
    return Callback(
        "samples",
        every,
        lambda context: context.text("samples", sample(context.params)),
    )


def rescale(
    every: int,
    new_scales: Callable[[TrainState], tuple[TrainState, StepFn, str] | None],
) -> Callback:
    """Weights that have left their place get new scales: a function of step and state,
    so that resumed runs agree.

    `new_scales` gives the state with them, the step compiled for them, and what was
    done, in words; None while every weight's data is near RMS 1.
    """

    def run(context: StepContext) -> None:
        done = new_scales(context.state)
        if done is not None:
            context.replace(*done)

    return Callback("rescale", every, run, Phase.UPDATE)


def make_rescale(
    task: TrainTask, batch: Tokens
) -> Callable[[TrainState], tuple[TrainState, StepFn, str] | None]:
    """State to None while the data of all weights is near RMS 1; else to what `rescale`
    takes.

    Matrices, cast to FP8 as they are, are moved once one is two octaves from its place
    (`rescale_powers`): sizes multiply in gated layers. Gains and biases have eight.
    Then all are moved, the step being compiled anew.
    """
    roles = jax.tree_util.tree_leaves_with_path(task.model.roles)
    matrices = {jax.tree_util.keystr(path) for path, role in roles if role.is_matrix}

    def rescale(state: TrainState) -> tuple[TrainState, StepFn, str] | None:
        found = rescale_powers(weights.rms_of_params(state.params), task.model.roles)
        if all(
            abs(math.log2(power)) < (2 if path in matrices else 9)
            for path, power in found.items()
        ):
            return None
        found = {path: power for path, power in found.items() if power != 1}
        new = with_params(state, weights.rescale_params(state.params, found))
        listed = [f"{path} 2^{math.log2(power):g}" for path, power in found.items()]
        listed[4:] = ["..."] if len(listed) > 4 else []
        text = (
            f"new scales for {len(found)} weights, larger by {', '.join(listed)};"
            " compiled anew"
        )
        return new, compile_step(task, batch, new), text

    return rescale


def pictures(every: int) -> Callback:
    """Heat maps of all numerics so far, those before a resumption too, as
    `numerics/KIND.png` and to the trackers.
    """

    def run(context: StepContext) -> None:
        if jax.process_index() > 0:
            return
        # a plotting library takes half a second to import
        from trainer.observe.heatmap import draw_all

        rows = read_rows(context.run_dir / "metrics.jsonl")
        for kind, path in draw_all(rows, context.run_dir / "numerics").items():
            context.picture(f"numerics/{kind}/picture", path)

    return Callback("pictures", every, run, Phase.SAVE)


def checkpoint(every: int) -> Callback:
    """The state and what else is needed to go on. It is the last entry of the list: all
    that it covers is out.
    """
    return Callback(CHECKPOINT, every, lambda context: context.save(), Phase.SAVE)
