"""Text sampling: the model of a training state continues a prompt."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from scalify_core import asarray
from trainer.models.sampling import Generator
from trainer.parallel.mesh import replicated
from trainer.workload import TrainTask

if TYPE_CHECKING:  # the benchmark image lacks the tokenizers
    from trainer.data import Tokenizer


def make_sample(
    task: TrainTask, tokenizer: "Tokenizer", prompt: str, **controls: Any
) -> Callable[[Any, Callable[[], object]], str]:
    """Return `(params, before_window) -> text`, the prompt and its continuation.

    `controls` and `before_window` are arguments of a `Generator`'s call.
    """
    from trainer.data.tokenizer import continuation

    generator = Generator(task.model.sampling.bind, task.model.spec)
    ids = tokenizer.encode(prompt)
    # Gathered first: the generator is a program of one device.
    gather = on_one_device(task)

    def sample(params: Any, before_window: Callable[[], object]) -> str:
        new_ids = generator(
            asarray(gather(params)), ids, before_window=before_window, **controls
        )
        return prompt + continuation(tokenizer, ids, new_ids)

    return sample


def on_one_device(task: TrainTask) -> Callable[[Any], Any]:
    """Return a function that gathers a tree of arrays on the process's first device."""
    gather = jax.jit(lambda arrays: arrays, out_shardings=replicated(task.mesh))
    # Only this process's copy: an array of several processes cannot be read as a whole
    # by one.
    return lambda arrays: jax.tree.map(lambda x: x.addressable_data(0), gather(arrays))
