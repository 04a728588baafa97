"""NaN diagnosis: the first tensor of the loss or its gradient that is not finite."""

from collections.abc import Callable

import jax

from trainer.step.nonfinite import first_nonfinite_operation
from trainer.step.state import TrainState
from trainer.step.step import Tokens, sequence_keys
from trainer.workload import TrainTask


def make_diagnose(task: TrainTask) -> Callable[[TrainState, Tokens, int], str]:
    """Return `(state, batch, step) -> text` that names the first non-finite tensor."""
    gradient = task.model.differentiate().value_and_grad

    def diagnose(state: TrainState, batch: Tokens, step: int) -> str:
        # The host reads the result of each operation, and a process cannot read an
        # array of which others hold parts.
        if jax.process_count() > 1:
            return (
                "not diagnosed: several processes; replay the batch in skipped/ on one"
            )
        # The keys of the step, so that dropout masks are those with which it failed.
        keys_AxB = sequence_keys(jax.random.fold_in(state.key, step), batch)
        for i, keys_B in enumerate(keys_AxB):
            micro_batch: Tokens = jax.tree.map(lambda x, i=i: x[i], batch)
            args = (state.params, state.scaling, *micro_batch, keys_B)
            # Trace outside `task.tracing()`. Inside it an FP8 matmul folds a constant
            # from the preceding operation, and here XLA compiles each operation alone.
            bad_tensor = first_nonfinite_operation(
                gradient, *args, compiler_options=task.compiler_options
            )
            if bad_tensor is not None:
                return f"micro-batch {i}: {bad_tensor}"
        return "the batch gives finite values with the parameters as they are now"

    return diagnose
