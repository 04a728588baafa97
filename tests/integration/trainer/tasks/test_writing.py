"""Continuations of a batch: those of each prompt alone."""

import dataclasses
import functools

import jax
import numpy as np
from precisions import SPEC, workload

from scalify_core import asarray
from trainer.models.llama.spec import LlamaSpec
from trainer.models.sampling import Generator
from trainer.tasks.writing import DecodingParams, Writer
from trainer.workload import first_state

LONG = dataclasses.replace(SPEC, context=64, n_layer=2)
LLAMA = LlamaSpec(
    vocab_size=64, context=64, n_layer=2, n_head=2, n_kv_head=1, d_model=32
)
never = lambda ids: False


@functools.cache
def sharp(spec):
    """Larger kernels make the likeliest token depend on those before it."""
    task = workload("fp32", 1, spec)
    params = asarray(first_state(task, 1).params)
    params["h"] = jax.tree.map(lambda p: 20 * p, params["h"])
    return task, params


def prompts(count=7):
    rng = np.random.default_rng(0)
    return [
        rng.integers(0, 64, int(rng.integers(1, 30))).tolist() for _ in range(count)
    ]


def test_each_row_is_continued_as_if_alone():
    task, params = sharp(LLAMA)
    one = Generator(task.model.sampling.bind, LLAMA)
    actual = Writer(task, 4)(params, prompts(), max_new_tokens=21, ended=never)
    assert actual == [
        one(params, prompt, max_new_tokens=21, temperature=0) for prompt in prompts()
    ]
    assert len({tuple(ids) for ids in actual}) == len(actual)


def test_nothing_is_written_behind_what_has_ended():
    task, params = sharp(LONG)
    requests = []
    actual = Writer(task, 4)(
        params,
        prompts(3),
        max_new_tokens=30,
        ended=lambda ids: not requests.append(len(ids)),
    )
    assert [len(ids) for ids in actual] == [16, 16, 16]
    assert set(requests) == {16}


def test_a_seed_gives_each_prompt_a_text_of_its_own_whatever_the_batch():
    task, _ = sharp(LONG)
    params = asarray(first_state(task, 1).params)

    def write(batch, seed):
        decoding = DecodingParams(1.0, seed=seed)
        writer = Writer(task, batch)
        given = {"max_new_tokens": 20, "ended": never, "decoding": decoding}
        return writer(params, [[5, 6, 7]] * 3, **given)

    first, other = write(4, 0), write(4, 1)
    assert first == write(2, 0)
    assert len({tuple(ids) for ids in (*first, *other)}) == 6
