"""NaN diagnosis: the first tensor of the loss or its gradient that is not finite."""

from collections.abc import Callable

import jax

from trainer.step.nonfinite import first_nonfinite
from trainer.step.state import TrainState
from trainer.step.step import Tokens, sequence_keys
from trainer.workload import TrainTask


def make_diagnose(task: TrainTask) -> Callable[[TrainState, Tokens, int], str]:
    """Return `(state, batch, step) -> text`, which names the first tensor that is not
    finite on that batch.
    """
    gradient = task.model.differentiate().value_and_grad

    def diagnose(state: TrainState, batch: Tokens, step: int) -> str:
        if jax.process_count() > 1:
            return (
                "several processes: run the batch in skipped/ on one to find the first"
                " bad tensor"
            )
        keys_AxB = sequence_keys(jax.random.fold_in(state.key, step), batch)
        for i in range(batch.tokens_AxBxT1.shape[0]):
            segments = (
                None if batch.segments_AxBxT1 is None else batch.segments_AxBxT1[i]
            )
            args = (
                state.params,
                state.scaling,
                batch.tokens_AxBxT1[i],
                segments,
                keys_AxB[i],
            )
            # Not traced as the step: one by one, no operation finds the constant that
            # its product would take.
            found = first_nonfinite(
                gradient, *args, compiler_options=task.compiler_options
            )
            if found is not None:
                return f"micro-batch {i}: {found}"
        return "the batch gives finite values with the parameters as they are now"

    return diagnose
