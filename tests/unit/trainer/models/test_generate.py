import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.errors import UserError
from trainer.models.gpt2.model import functional
from trainer.models.gpt2.spec import GPT2Spec
from trainer.models.llama.model import functional as llama
from trainer.models.llama.spec import LlamaSpec
from trainer.models.sampling import Generator, sample

SPEC = GPT2Spec(vocab_size=50, context=16, n_layer=2, n_head=2, d_model=16)
PROMPT = [3, 1, 4, 1, 5]


@functools.cache
def make(spec=SPEC, sharpness=20.0):
    """Random weights hardly tell tokens apart; larger kernels make the likeliest one
    depend on those before it."""
    init, bind, *_ = functional(spec)
    params = init(jax.random.key(1))
    params["h"] = jax.tree.map(lambda p: p * sharpness, params["h"])
    return Generator(bind, spec), bind, params


def likeliest(bind, params):
    """From some ids to the likeliest next one, without a cache. One program: causal, so
    padding is free."""
    logits = jax.jit(lambda ids_T, n: bind(params)(ids_T[None])[0, n - 1].argmax())
    return lambda ids: int(logits(np.pad(ids, (0, SPEC.context - len(ids))), len(ids)))


# Unrolled layers decode as one pass in test_every_model.py.
def test_cache_equals_no_cache():
    generate, bind, params = make(dataclasses.replace(SPEC, scan_layers=True))
    got = generate(params, PROMPT, max_new_tokens=12, temperature=0)
    after, ids = likeliest(bind, params), list(PROMPT)
    for _ in got:
        ids.append(after(ids))
    assert got == ids[len(PROMPT) :]
    assert len(set(got)) > 5


def test_a_text_follows_its_seed_and_begins_with_the_shorter_one():
    generate, _, params = make(sharpness=1.0)
    first, second, other = (
        generate(params, PROMPT, max_new_tokens=30, seed=seed) for seed in (0, 0, 1)
    )
    assert first == second != other
    assert first[:9] == generate(params, PROMPT, max_new_tokens=9)


def test_past_the_context_the_later_half_is_read_again():
    generate, bind, params = make()
    ids = PROMPT + generate(params, PROMPT, max_new_tokens=20, temperature=0)
    after = likeliest(bind, params)
    # 16 positions hold 16 tokens and show the 17th; the 18th is sampled after the last
    # 8 of them.
    assert [ids[16], ids[17], ids[18]] == [
        after(ids[:16]),
        after(ids[9:17]),
        after(ids[9:18]),
    ]


def test_every_token_has_a_key_of_its_own_also_past_the_context():
    generate, _, params = make()
    indifferent = jax.tree.map(jnp.zeros_like, params)
    key = jax.random.key(5)
    one = lambda i: sample(
        jnp.zeros(50),
        jax.random.fold_in(key, i),
        jnp.float32(1),
        jnp.int32(0),
        jnp.float32(1),
    )
    assert (
        generate(indifferent, PROMPT, max_new_tokens=30, seed=5)
        == jax.vmap(one)(jnp.arange(30)).tolist()
    )


def test_prompt_longer_than_the_context_keeps_its_end():
    generate, _, params = make()
    long = [i % 50 for i in range(40)]
    assert generate(params, long, max_new_tokens=3, temperature=0) == generate(
        params, long[-16:], max_new_tokens=3, temperature=0
    )


def test_a_cache_is_no_longer_than_the_text_whatever_the_context():
    """A configuration from somebody else may name any context."""
    sizes = {"vocab_size": 50, "n_layer": 1, "n_head": 2, "n_kv_head": 1, "d_model": 16}
    texts = []
    for context in (64, 2**40):
        spec = LlamaSpec(**sizes, context=context)
        model = llama(spec)
        generate = Generator(model.bind, spec)
        params = model.init(jax.random.key(0))
        texts.append(generate(params, [1, 2], max_new_tokens=20))
    assert texts[0] == texts[1]


def drawn(logits, count=400, temperature=1.0, top_k=0, top_p=1.0):
    keys = jax.random.split(jax.random.key(0), count)
    draw = jax.vmap(
        lambda key: sample(
            logits, key, jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p)
        )
    )
    return np.asarray(draw(keys))


LOGITS = jnp.log(jnp.array([0.1, 0.4, 0.05, 0.3, 0.15]))


@pytest.mark.parametrize(
    ("choice", "kept"),
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
def test_the_likeliest_are_kept(choice, kept):
    assert set(drawn(LOGITS, **choice)) == kept


def test_frequencies_are_the_tempered_probabilities():
    p = np.array([0.1, 0.4, 0.05, 0.3, 0.15]) ** 2
    p /= p.sum()
    counts = np.bincount(drawn(LOGITS, count=4000, temperature=0.5), minlength=5)
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
    generate, _, params = make()
    with pytest.raises(UserError, match=message):
        generate(params, **{"prompt": PROMPT, "max_new_tokens": 1, **arguments})


def test_a_stop_between_two_windows_ends_a_long_text():
    generate, _, params = make()
    windows = []

    def before_window():
        windows.append(len(windows))
        if len(windows) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(params, PROMPT, max_new_tokens=10**6, before_window=before_window)
    assert windows == [0, 1, 2]
