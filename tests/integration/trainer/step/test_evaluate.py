"""Validation: the figures of the dashboard, and the one that checkpoints are compared
by."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from trainer.step.evaluate import evaluate, make_eval_step, xz_bits_per_byte
from trainer.step.step import Tokens

EPS = np.finfo(np.float32).eps


def batches(losses):
    return [Tokens(jnp.full((2, 1, 3), loss, jnp.int32), None) for loss in losses]


def mean_token(state, tokens, segments):
    assert segments is None
    return state * jnp.mean(tokens)


def validated(step, losses, common, bytes_per_token=1.0):
    return evaluate(
        step,
        jnp.float32(1),
        batches(losses),
        common_batches=common,
        bytes_per_token=bytes_per_token,
        should_stop=lambda: False,
    )


def test_a_validation_is_broken_off_between_two_batches():
    seen = []
    actual = evaluate(
        lambda state, batch: seen.append(batch) or jnp.float32(1),
        None,
        batches([1, 2, 3]),
        common_batches=1,
        bytes_per_token=1.0,
        should_stop=lambda: len(seen) == 2,
    )
    assert actual is None
    assert len(seen) == 2


def test_the_figures_are_means_over_batches_perplexity_and_bits_per_byte():
    step = jax.jit(make_eval_step(mean_token))
    row = validated(step, [1, 2, 6], 3, bytes_per_token=2.0).row
    for name, expected, roundings in (
        ("val/loss", 3.0, 4),
        ("val/perplexity", math.exp(3.0), 16),
        ("val/bits_per_byte", 3 / math.log(2) / 2, 8),
    ):
        np.testing.assert_allclose(row[name], expected, rtol=roundings * EPS)
    # A longer validation stays comparable with the others.
    short, long = (validated(step, losses, 2) for losses in ([1, 2], [1, 2, 30, 40]))
    assert short.common_loss == long.common_loss == short.row["val/loss"]
    assert long.row["val/loss"] > short.row["val/loss"]


def test_micro_batches_are_evaluated_one_by_one_and_averaged():
    tokens = Tokens(jnp.array([[[1, 1]], [[4, 4]]], jnp.int32), None)
    assert float(make_eval_step(mean_token)(jnp.float32(2), tokens)) == 5.0


def test_a_text_of_one_letter_takes_hardly_a_bit_and_random_bytes_take_them_all():
    assert xz_bits_per_byte("a" * 100_000) < 0.02
    noise = np.random.default_rng(0).integers(0, 128, 100_000).astype(np.uint8)
    noise = noise.tobytes().decode()
    assert 7 <= xz_bits_per_byte(noise) < 7.2
    assert math.isnan(xz_bits_per_byte(""))
