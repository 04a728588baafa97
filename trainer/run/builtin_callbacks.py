"""The built-in callbacks: numerics, evaluation, mixture, tasks, exchanged bytes,
samples, rescale, pictures, checkpoint.
"""

import logging
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

from trainer.errors import UserError
from trainer.files import well_formed
from trainer.observe.records import read_rows
from trainer.parallel.replicas import with_rescaled_params
from trainer.run.callbacks import Callback, CallbackKind, Interrupted, StepContext
from trainer.run.totals import Totals
from trainer.step.evaluate import Evaluation
from trainer.step.state import TrainState
from trainer.step.step import StepFn, Tokens
from trainer.step.weight_rescale import (
    rescale_factors,
    rescale_params,
    rms_of_params,
)
from trainer.workload import TrainTask, compile_step

# All weights are rescaled if |log2| of one weight's scale error is this large. Matrices
# are cast to FP8 at that scale, and in gated layers two such errors multiply; gains and
# biases are computed in 16 bits.
MATRIX_MAX_LOG2_ERROR = 2
VECTOR_MAX_LOG2_ERROR = 9

logger = logging.getLogger(__name__)


def numerics(
    every: int, measure: Callable[[TrainState, Tokens, int], Mapping[str, float]]
) -> Callback:
    """Return the callback of per-layer numerics.

    `measure` takes the state, a batch, and its step as in `StepInputs`.
    """
    return Callback(
        "numerics",
        every,
        # Compiled functions count steps from 0, and callbacks from 1.
        lambda context: measure(context.state, context.tokens, context.step - 1),
    )


def evaluation(
    every: int,
    evaluate: Callable[[TrainState, bool, Callable[[], bool]], Evaluation | None],
) -> Callback:
    """Return the callback of the validation loss.

    `evaluate` takes the state, whether it is the evaluation after the last step, and a
    function that returns whether to stop. It returns None if it was stopped.
    """

    def run(context: StepContext) -> Mapping[str, float]:
        result = evaluate(
            context.state,
            context.last,
            lambda: context.should_stop(f"in the validation after step {context.step}"),
        )
        if result is None:
            raise Interrupted
        # The row's loss is the mean of all batches, of which the last validation may
        # have more. Checkpoints are compared on the batches that every validation has.
        context.val_loss = result.common_loss
        return result.row

    return Callback("evaluation", every, run)


def mixture(
    every: int, source_metrics: Callable[[int], Mapping[str, Mapping[str, float]]]
) -> Callback:
    """Return the callback of each source's share and epochs so far.

    Its metrics are `data/NAME/share` and `data/NAME/epochs`; `source_metrics` takes the
    step.
    """

    def run(context: StepContext) -> Mapping[str, float]:
        row = {}
        for name, metrics in source_metrics(context.step).items():
            for metric, value in metrics.items():
                row[f"data/{name}/{metric}"] = value
        return row

    return Callback("mixture", every, run)


def tasks(every: int, scores: Callable[[TrainState], Mapping[str, float]]) -> Callback:
    """Return the callback of the tasks' metrics, `tasks/NAME/METRIC`; `scores` takes
    the state.
    """
    return Callback("tasks", every, lambda context: scores(context.state))


def exchanged_bytes(every: int, totals: Callable[[int], Totals]) -> Callback:
    """Return the callback of the bytes that DiLoCo's replicas have sent.

    Its metrics are `wire/exchanged_mib`, and `wire/times_fewer`: the bytes that FP32
    gradients would have taken in every step, divided by those that were sent.
    """

    def run(context: StepContext) -> Mapping[str, float]:
        run_totals = totals(context.step)
        sent = run_totals.exchanged
        row = {"wire/exchanged_mib": sent / 2**20}
        # Nothing is sent before the first outer step.
        if sent:
            row["wire/times_fewer"] = run_totals.fp32_gradients / sent
        return row

    return Callback("exchanged", every, run)


def samples(every: int, sample: Callable[[Any, Callable[[], object]], str]) -> Callback:
    """Return the callback of text samples.

    `sample` takes the parameters, and a function that it calls before each window of
    tokens. The function raises Interrupted after a stop request.
    """

    def run(context: StepContext) -> None:
        # A sample may have a million tokens, which no stop request should wait for.
        def check_stop() -> None:
            context.raise_if_stopped(f"sampling after step {context.step}")

        context.text("samples", sample(context.params, check_stop))

    return Callback("samples", every, run)


def rescale(every: int, task: TrainTask, batch: Tokens) -> Callback:
    """Return the callback that gives weights new scales when their data is far from RMS
    1.

    `batch`: the shapes of a batch, for which the step is compiled again.
    """

    def run(context: StepContext) -> None:
        rescaled = with_new_scales(context.state, task, batch)
        if rescaled is not None:
            context.set_state(*rescaled)

    return Callback("rescale", every, run, CallbackKind.UPDATE)


def with_new_scales(
    state: TrainState, task: TrainTask, batch: Tokens
) -> tuple[TrainState, StepFn, str] | None:
    """Return the state with new scales, the step compiled for it, and a message.

    None: no weight needs a new scale. The scales depend on the state alone, so that
    resumed runs agree. One weight with an error of `MATRIX_MAX_LOG2_ERROR` or
    `VECTOR_MAX_LOG2_ERROR` triggers a rescale of all, because the step is compiled
    again anyway.
    """
    roles = jax.tree_util.tree_leaves_with_path(task.model.roles)
    matrices = {jax.tree_util.keystr(path) for path, role in roles if role.is_matrix}

    def is_off(path: str, factor: float) -> bool:
        limit = MATRIX_MAX_LOG2_ERROR if path in matrices else VECTOR_MAX_LOG2_ERROR
        return abs(math.log2(factor)) >= limit

    factors = rescale_factors(rms_of_params(state.params), task.model.roles)
    if not any(is_off(path, factor) for path, factor in factors.items()):
        return None
    # A factor of 1 would count as a new scale in the message.
    changed = {path: factor for path, factor in factors.items() if factor != 1}
    params = rescale_params(state.params, changed)
    rescaled = with_rescaled_params(state, params)
    changes = [
        f"{'.'.join(re.findall(r'\w+', path))} 2^{math.log2(factor):g}"
        for path, factor in changed.items()
    ]
    # A model has hundreds of weights.
    if len(changes) > 4:
        changes = [*changes[:4], "..."]
    text = (
        f"new scales for {len(changed)} weights, larger by {', '.join(changes)};"
        " the step is compiled again"
    )
    return rescaled, compile_step(task, batch, rescaled), text


def pictures(every: int, format_name: Callable[[str, str], str]) -> Callback:
    """Return the callback that draws heat maps of all numerics so far.

    They go to `numerics/KIND.png` and to the trackers, with the rows before a resume.
    `format_name`: see `heatmap.draw_all`.
    """

    def run(context: StepContext) -> None:
        # Process 0 alone has trackers, and all share the run directory.
        if jax.process_index() > 0:
            return
        # Matplotlib takes half a second to import.
        from trainer.observe.heatmap import draw_all

        log = context.run_dir / "metrics.jsonl"
        try:
            with well_formed(log, "repair the file, or move it away"):
                paths = draw_all(
                    read_rows(log), context.run_dir / "numerics", format_name
                )
        # Rows that somebody edited must not prevent the checkpoint that follows.
        except UserError as error:
            logger.warning("no heat maps after step %d: %s", context.step, error)
            return
        for kind, path in paths.items():
            context.picture(f"numerics/{kind}/picture", path)

    return Callback("pictures", every, run, CallbackKind.SAVE)


def checkpoint(every: int) -> Callback:
    """Return the callback that saves a checkpoint.

    It must be the last callback, so that everything before the checkpoint is logged.
    """
    return Callback(
        "checkpoint", every, lambda context: context.save(), CallbackKind.SAVE
    )
