"""What is asked of a state now and then: a text that its model writes, and the first tensor that is not finite."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from scalify_core import asarray
from trainer.models.sampling import Generator
from trainer.parallel.mesh import replicated
from trainer.step.nonfinite import first_nonfinite
from trainer.step.state import TrainState
from trainer.step.step import Tokens, sequence_keys
from trainer.workload import Task

if TYPE_CHECKING:  # which a benchmark can do without
    from trainer.data import Tokenizer


def make_sample(task: Task, tokenizer: "Tokenizer", prompt: str, **controls: Any) -> Callable[[Any], str]:
    """`params -> text`: the prompt and its continuation; `controls` are those of `Generator`."""
    from trainer.data.tokenizer import continuation

    generator = Generator(task.model.sampling.bind, task.model.spec)
    ids, local = tokenizer.encode(prompt), on_one_device(task)

    def sample(params: Any) -> str:
        return prompt + continuation(tokenizer, ids, generator(asarray(local(params)), ids, **controls))

    return sample


def on_one_device(task: Task) -> Callable[[Any], Any]:
    """Takes arrays on the mesh to the same arrays, whole, on this process's first device."""
    everywhere = jax.jit(lambda arrays: arrays, out_shardings=replicated(task.mesh))
    return lambda arrays: jax.tree.map(lambda x: x.addressable_data(0), everywhere(arrays))


def make_diagnose(task: Task) -> Callable[[TrainState, Tokens, int], str]:
    """`(state, batch, step) -> text`: the first tensor of the loss or its gradient that is not finite on that batch."""
    gradient = task.model.differentiate().value_and_grad

    def diagnose(state: TrainState, batch: Tokens, step: int) -> str:
        if jax.process_count() > 1:
            return "several processes: run the batch in skipped/ on one to find the first bad tensor"
        keys_AxB = sequence_keys(jax.random.fold_in(state.key, step), batch)
        for i in range(batch.tokens_AxBxT1.shape[0]):
            segments = None if batch.segments_AxBxT1 is None else batch.segments_AxBxT1[i]
            args = (state.params, state.scaling, batch.tokens_AxBxT1[i], segments, keys_AxB[i])
            # Not traced as the step: one by one, no operation finds the constant that its product would take.
            found = first_nonfinite(gradient, *args, compiler_options=task.compiler_options)
            if found is not None:
                return f"micro-batch {i}: {found}"
        return "the batch gives finite values with the parameters as they are now"

    return diagnose
