"""Both sharpnesses: the box's vertex against a numerical optimiser, the critical rate
against steps that are taken."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from precisions import batch, copied, step_inputs, workload

from scalify_core import asarray
from trainer.observe.numerics import stored_gradients
from trainer.observe.sharpness import (
    MAX_PASSES,
    RATE_TOLERANCE,
    critical_rate,
    cross_entropies,
    make_sharpness,
    worst_logits,
)
from trainer.step.state import from_checkpoint_form
from trainer.workload import compile_step, first_state

LR = 1e-2


@pytest.mark.parametrize("radius", [5e-4, 0.3])
def test_no_corner_of_the_box_has_a_larger_loss_than_the_one_found(radius):
    """The loss is convex, so that none of its other points has one either."""
    random = np.random.default_rng(0)
    logits = random.normal(scale=3.0, size=(4, 6))
    targets = random.integers(6, size=4)
    with jax.enable_x64(True):
        worst = np.asarray(
            worst_logits(jnp.asarray(logits), jnp.asarray(targets), radius)
        )
    signs = np.array(list(itertools.product((-1, 1), repeat=6)))
    for z, target, worst_z in zip(logits, targets, worst, strict=True):
        room = radius * (np.abs(z) + 1)
        corners = z + signs * room
        losses = np.log(np.exp(corners).sum(1)) - corners[:, target]
        np.testing.assert_allclose(worst_z, corners[losses.argmax()], rtol=1e-12)


def counted(rise):
    """A function that notes each rate at which it is asked for the rise."""
    rates = []
    return lambda eta: rates.append(eta) or rise(eta), rates


@pytest.mark.parametrize("start", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize(
    ("rise", "right"),
    [
        (lambda eta: -3 * eta + 2 * eta**2, 1.5),
        (lambda eta: -eta + eta**4, 1.0),
        (lambda eta: 2 * math.tanh(4 * eta**2) - min(eta, 1.0), 0.1253),
        (lambda eta: math.inf if eta > 0.5 else -eta, 0.5),
    ],
)
def test_the_critical_rate_is_where_the_loss_is_what_it_was(rise, right, start):
    rise_at, rates = counted(rise)
    actual = critical_rate(rise_at, start)
    assert len(rates) <= MAX_PASSES
    # Far from the start some halvings of the bracket are left out.
    tolerance = 2 * RATE_TOLERANCE if start == 1.0 else 0.25
    assert actual == pytest.approx(right, rel=tolerance)


def test_a_loss_that_never_rises_has_the_largest_rate_tried_and_one_that_only_rises_none():
    rise_at, rates = counted(lambda eta: -eta)
    assert critical_rate(rise_at, 1.0) == max(rates)
    assert len(rates) == MAX_PASSES
    assert critical_rate(lambda eta: eta, 1.0) == 0


def figures(w, state, tokens, step):
    """Those of the sharpness alone: without numerics, whose compilation takes most of a
    test."""
    grads, _, _ = jax.jit(functools.partial(stored_gradients, w))(
        state, tokens, np.int32(step)
    )
    return make_sharpness(w, LR)(state, grads, tokens, step)


def test_a_step_beyond_the_critical_rate_raises_the_loss_of_its_batch_and_one_below_lowers_it():
    w = workload("fp32")
    state, tokens = from_checkpoint_form(first_state(w, seed=0)), batch(w)
    step = compile_step(w, tokens, state)
    for number in range(4):  # with moments, and scales that were measured
        state, metrics = step(state, batch(w, step=number), step_inputs(number, 3e-3))
        assert bool(metrics["finite"])
    eta = 2 / figures(w, state, tokens, 4)["sharpness/critical"]

    def after(rate):
        moved, _ = step(copied(state), tokens, step_inputs(4, rate))
        return float(step(moved, tokens, step_inputs(5, 0.0))[1]["loss"])

    assert after(1.2 * eta) > after(0.0) > after(eta / 1.2)


def test_the_logits_are_those_of_the_last_token_of_the_whole_model():
    w = workload("fp32")
    state, tokens = first_state(w, seed=0), batch(w)
    ids = tokens.tokens_AxBxT1[0]
    logits = w.model.training.bind(asarray(state.params))(ids[:, :-1])[:, -1]
    last_loss = cross_entropies(logits, ids[:, -1]).mean()
    worst_loss = cross_entropies(
        worst_logits(logits, ids[:, -1], 5e-4), ids[:, -1]
    ).mean()
    actual = figures(w, state, tokens, 0)["sharpness/logits"]
    # The difference of two losses near ln 64, each of which is known to FP32's last
    # place.
    assert actual == pytest.approx(
        100 * float((worst_loss - last_loss) / (1 + last_loss)), rel=1e-2
    )
