import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import initial

from trainer.errors import UserError
from trainer.models.gpt2.model import build_functions
from trainer.models.gpt2.spec import GPT2Spec
from trainer.models.llama.model import build_functions as llama
from trainer.models.llama.spec import LlamaSpec
from trainer.models.sampling import Generator, sample

SPEC = GPT2Spec(vocab_size=50, context=16, n_layer=2, n_head=2, d_model=16)
PROMPT = [3, 1, 4, 1, 5]


@functools.cache
def make(spec=SPEC):
    """Random weights hardly tell tokens apart; larger kernels make the likeliest one
    depend on those before it."""
    model = build_functions(spec)
    params = jax.device_get(initial(model, seed=1))
    params["h"] = jax.tree.map(lambda p: p * np.float32(20), params["h"])
    return Generator(model.bind, spec), jax.device_put(params)


def likeliest(generate, params, prompt, count=1):
    return generate(params, prompt, max_new_tokens=count, temperature=0)


# test_transformers_families.py compares the cache with one pass.
def test_tokens_are_those_of_the_prompt_and_the_tokens_before_them():
    generate, params = make(dataclasses.replace(SPEC, scan_layers=True))
    tokens, ids = likeliest(generate, params, PROMPT, 12), list(PROMPT)
    for _ in tokens:
        ids += likeliest(generate, params, ids[-16:])
    assert tokens == ids[len(PROMPT) :]
    assert len(set(tokens)) > 5
    assert likeliest(generate, params, PROMPT, 0) == []


def test_past_the_context_the_later_half_is_read_again():
    generate, params = make()
    ids = PROMPT + likeliest(generate, params, PROMPT, 20)
    # 16 positions hold 16 tokens and show the 17th; the 18th is sampled after the last
    # 8 of them.
    for start, i in ((0, 16), (9, 17), (9, 18)):
        assert likeliest(generate, params, ids[start:i]) == [ids[i]]


def test_every_token_has_a_key_of_its_own_also_past_the_context():
    generate, params = make()
    indifferent = jax.tree.map(jnp.zeros_like, params)
    ids = generate(indifferent, PROMPT, max_new_tokens=30, seed=5)
    keys = [jax.random.fold_in(jax.random.key(5), i) for i in range(30)]
    assert ids == drawn(jnp.zeros(50), jnp.stack(keys)).tolist()


def test_prompt_longer_than_the_context_keeps_its_end():
    generate, params = make()
    long = [i % 50 for i in range(40)]
    texts = [likeliest(generate, params, ids, 3) for ids in (long, long[-16:])]
    assert texts[0] == texts[1]


def test_a_cache_is_no_longer_than_the_text_whatever_the_context():
    """A configuration from somebody else may name any context."""
    sizes = {"vocab_size": 50, "n_layer": 1, "n_head": 2, "n_kv_head": 1, "d_model": 16}
    texts = []
    for context in (64, 2**40):
        spec = LlamaSpec(**sizes, context=context)
        model = llama(spec)
        generate = Generator(model.bind, spec)
        params = initial(model)
        texts.append(generate(params, [1, 2], max_new_tokens=20))
    assert texts[0] == texts[1]


@jax.jit
def sampled(logits, keys, *controls):
    return jax.vmap(lambda key: sample(logits, key, *controls))(keys)


def drawn(logits, keys, temperature=1.0, top_k=0, top_p=1.0):
    controls = jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p)
    return np.asarray(sampled(logits, keys, *controls))


def keys(count):
    return jax.random.split(jax.random.key(0), count)


LOGITS = jnp.log(jnp.array([0.1, 0.4, 0.05, 0.3, 0.15]))


@pytest.mark.parametrize(
    ("choice", "allowed"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.35}, {1}),
        ({"top_p": 0.65}, {1, 3}),
        ({"top_p": 0.75}, {1, 3, 4}),
        # Among {0.4, 0.3} the likeliest has 4/7 = 0.571.
        ({"top_k": 2, "top_p": 0.56}, {1}),
        ({"top_k": 2, "top_p": 0.6}, {1, 3}),
        ({"temperature": 0}, {1}),
    ],
)
def test_the_likeliest_are_kept(choice, allowed):
    assert set(drawn(LOGITS, keys(400), **choice)) == allowed


def test_frequencies_are_the_tempered_probabilities():
    p = np.array([0.1, 0.4, 0.05, 0.3, 0.15]) ** 2
    p /= p.sum()
    counts = np.bincount(drawn(LOGITS, keys(4000), temperature=0.5), minlength=5)
    # Five standard deviations of a binomial count.
    assert np.all(np.abs(counts - 4000 * p) < 5 * np.sqrt(4000 * p * (1 - p)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": []}, "prompt"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"max_new_tokens": 10**9}, "max_new_tokens=1000000000"),
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"top_k": -2}, "top_k=-2"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
    ],
)
def test_wrong_numbers_are_named(arguments, message):
    generate, params = make()
    with pytest.raises(UserError, match=message):
        generate(params, **{"prompt": PROMPT, "max_new_tokens": 1, **arguments})


def test_a_stop_between_two_windows_ends_a_long_text():
    generate, params = make()
    windows = []

    def before_window():
        windows.append(len(windows))
        if len(windows) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(params, PROMPT, max_new_tokens=10**6, before_window=before_window)
    assert windows == [0, 1, 2]
