"""Continuations of a batch: those of each prompt alone."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from families import slow
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
def sharp(spec, preset="fp32"):
    """Larger kernels make the likeliest token depend on those before it."""
    task = workload(preset, 1, spec)
    params = asarray(first_state(task, 1).params)
    params["h" if "h" in params else "layers"] = jax.tree.map(
        lambda p: 20 * p, params["h" if "h" in params else "layers"]
    )
    return task, params


def prompts(count=7):
    rng = np.random.default_rng(0)
    return [
        rng.integers(0, 64, int(rng.integers(1, 30))).tolist() for _ in range(count)
    ]


@pytest.mark.parametrize(
    "spec", [LLAMA, slow(dataclasses.replace(LONG, scan_layers=True))]
)
def test_each_row_is_continued_as_if_alone(spec):
    task, params = sharp(spec)
    one = Generator(task.model.sampling.bind, spec)
    actual = Writer(task, 4)(params, prompts(), max_new_tokens=21, ended=never)
    assert actual == [
        one(params, prompt, max_new_tokens=21, temperature=0) for prompt in prompts()
    ]
    assert len({tuple(ids) for ids in actual}) == len(actual)


@pytest.mark.slow  # shorter ones: above
def test_the_last_token_fills_the_context():
    task, params = sharp(LONG)
    prompt = prompts(1)[0][:1] * 47
    actual = Writer(task, 2)(
        params, [prompt, prompt[:5]], max_new_tokens=17, ended=never
    )
    one = Generator(task.model.sampling.bind, LONG)
    assert actual == [
        one(params, p, max_new_tokens=17, temperature=0) for p in (prompt, prompt[:5])
    ]
    with pytest.raises(ValueError, match="64 - 17"):
        Writer(task, 2)(params, [[*prompt, 1]], max_new_tokens=17, ended=never)


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
    task, params = (
        workload("fp32", 1, LONG),
        asarray(first_state(workload("fp32", 1, LONG), 1).params),
    )
    same = [[5, 6, 7]] * 3
    write = lambda batch, seed: Writer(task, batch)(
        params,
        same,
        max_new_tokens=20,
        ended=never,
        decoding=DecodingParams(1.0, seed=seed),
    )
    first, second, other = write(4, 0), write(2, 0), write(4, 1)
    assert first == second
    assert len({tuple(ids) for ids in (*first, *other)}) == 6
    assert [ids[:16] for ids in write(4, 0)] == [ids[:16] for ids in first]
