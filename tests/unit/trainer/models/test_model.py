import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from small_models import GPT2 as SPEC
from small_models import TOKENS, assert_close, compiled

from trainer.models.flops import linear_sizes
from trainer.models.gpt2 import block as gpt2_block
from trainer.models.gpt2 import model
from trainer.models.gpt2.model import build_functions, dropout


def test_every_value_gain_is_the_same_function_of_the_same_parameters():
    spec = dataclasses.replace(SPEC, scan_layers=True)
    params, plain, plain_logits = compiled(spec)
    # a zero bias would hide its gain
    biased = jax.tree.map(lambda p: np.asarray(p) + np.float32(0.01), params)
    # by 1 nothing would be multiplied
    loss_and_grads = compiled(dataclasses.replace(spec, value_gain=2.0))[1](biased)
    # values are a product of their own: other orders of sums
    assert_close(loss_and_grads, plain(biased))
    spec = dataclasses.replace(spec, value_gain=2.0**12)
    initial, gained, logits = compiled(spec)
    jax.tree.map(np.testing.assert_array_equal, initial, params)
    # powers of two
    jax.tree.map(np.testing.assert_array_equal, gained(biased), loss_and_grads)
    tokens = TOKENS[:, :16]
    expected = plain_logits(biased, tokens)
    assert_close(logits(biased, tokens), expected)

    @jax.jit
    def decoded(params):
        bound = build_functions(spec).bind(params)
        h, _ = bound.decode(tokens, bound.init_cache(2), 0)
        return bound.logits(h.reshape(32, 16))

    assert_close(decoded(biased), expected.reshape(32, 100))


def test_the_values_and_what_is_projected_are_larger_by_the_gain():
    def operands(gain):
        seen = {}

        def choose(path):
            def dot_general(x, kernel, *args, **kwargs):
                seen[path] = (x, kernel)
                return jax.lax.dot_general(x, kernel, *args, **kwargs)

            return dot_general

        spec = dataclasses.replace(SPEC, n_layer=1, value_gain=gain)
        init, bind, *_ = build_functions(spec, dot_general_for=choose)
        bind(init(jax.random.key(0))).hidden(TOKENS[:, :16])
        assert set(seen) == set(linear_sizes(spec))
        return seen

    one, many = operands(1.0), operands(2.0**12)
    for layer, factors in (
        ("c_attn", (1, 1)),
        ("c_value", (1, 2**12)),
        ("c_proj", (2**12, 2**-12)),
    ):
        path = f"h.0.attn.{layer}"
        for a, b, factor in zip(one[path], many[path], factors, strict=True):
            np.testing.assert_array_equal(factor * a, b)


def keys(seed):
    return jax.random.split(jax.random.key(seed), len(TOKENS))


def test_dropout_needs_a_key_and_follows_it():
    spec = dataclasses.replace(SPEC, scan_layers=True)
    params, _, plain = compiled(spec)
    _, _, logits = compiled(dataclasses.replace(spec, dropout=0.5))
    tokens = TOKENS[:, :16]
    one, repeated, two = (
        logits(params, tokens, dropout_keys_B=keys(i)) for i in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, repeated)
    assert (one != two).any()
    expected = plain(params, tokens)
    np.testing.assert_array_equal(logits(params, tokens), expected)
    ignored = plain(params, tokens, dropout_keys_B=keys(1))
    np.testing.assert_array_equal(ignored, expected)


def test_dropout_keeps_the_mean():
    x = jnp.ones((1000, 100))
    dropped = dropout(x, 0.25, jax.random.split(jax.random.key(0), 4))
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(1) / np.float32(0.75)}
    # One element has variance r / (1 - r); five standard deviations of the mean of 1e5.
    assert abs(float(dropped.mean()) - 1) < 5 * math.sqrt(0.25 / 0.75 / 1e5)


def test_dropout_differs_between_layers_and_places(monkeypatch):
    spec = dataclasses.replace(SPEC, dropout=0.5)
    init, bind, *_ = build_functions(spec)
    given = []

    def spy(x, rate, key):
        given.append(jax.random.key_data(key).tobytes())
        return x

    monkeypatch.setattr(model, "dropout", spy)
    monkeypatch.setattr(gpt2_block, "dropout", spy)
    bind(init(jax.random.key(0))).hidden(TOKENS[:, :16], None, keys(1))
    assert len(given) == len(set(given)) == 1 + 2 * spec.n_layer
