"""Both sharpnesses: the box's vertex against a numerical optimiser, the critical rate
against steps that are taken."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from precisions import SPEC, batch, copied, hyper, workload
from scipy.optimize import minimize

from scalify_core import asarray
from trainer.data import Batch
from trainer.models.llama.spec import LlamaSpec
from trainer.observe.numerics import stored_gradients
from trainer.observe.sharpness import (
    MAX_PASSES,
    RATE_TOLERANCE,
    critical_rate,
    cross_entropies,
    make_sharpness,
    worst_logits,
)
from trainer.parallel.mesh import make_mesh, place_batch, replicated
from trainer.step.state import from_checkpoint_form
from trainer.workload import compile_step, first_state

LLAMA = LlamaSpec(
    vocab_size=64,
    context=16,
    n_layer=2,
    n_head=2,
    n_kv_head=1,
    d_model=32,
    tied=False,
    scan_layers=True,
)
SPLIT = dataclasses.replace(LLAMA, n_kv_head=2)
LR = 1e-2


@pytest.mark.parametrize("radius", [5e-4, 0.3])
@pytest.mark.parametrize("seed", range(4))
def test_no_point_of_the_box_that_an_optimiser_finds_is_above_the_vertex(seed, radius):
    random = np.random.default_rng(seed)
    z, target = random.normal(scale=3.0, size=6), int(random.integers(6))
    room = radius * (np.abs(z) + 1)

    def loss(x):
        return float(np.log(np.sum(np.exp(x))) - x[target])

    def gradient(x):
        return np.exp(x) / np.sum(np.exp(x)) - np.eye(6)[target]

    bounds = list(zip(z - room, z + room, strict=True))
    starts = [z, *(random.uniform(z - room, z + room) for _ in range(4))]
    settings = {
        "bounds": bounds,
        "method": "L-BFGS-B",
        "options": {"ftol": 1e-15, "gtol": 1e-12},
    }
    actual = [
        minimize(lambda x: -loss(x), x, jac=lambda x: -gradient(x), **settings)
        for x in starts
    ]
    best = max(-result.fun for result in actual)
    with jax.enable_x64(True):
        vertex = np.asarray(
            worst_logits(jnp.asarray(z)[None], jnp.asarray([target]), radius)
        )[0]
    assert loss(vertex) >= best - 1e-12
    assert loss(vertex) == pytest.approx(best, rel=1e-9)
    assert np.all(np.abs(vertex - z) <= room * (1 + 1e-12))


def counted(rise):
    requests = []

    def of(eta):
        requests.append(eta)
        return rise(eta)

    return of, requests


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
    requests, etas = counted(rise)
    actual = critical_rate(requests, start)
    assert len(etas) <= MAX_PASSES
    # Far from the start some halvings of the bracket are left out.
    tolerance = 2 * RATE_TOLERANCE if start == 1.0 else 0.25
    assert actual == pytest.approx(right, rel=tolerance)


def test_a_loss_that_never_rises_has_the_largest_rate_tried_and_one_that_only_rises_none():
    requests, etas = counted(lambda eta: -eta)
    assert critical_rate(requests, 1.0) == max(etas)
    assert len(etas) == MAX_PASSES
    assert critical_rate(lambda eta: eta, 1.0) == 0
    # no pass is taken without need
    requests, etas = counted(lambda eta: eta - 0.98)
    critical_rate(requests, 1.0)
    assert len(etas) < MAX_PASSES


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
        state, metrics = step(state, batch(w, step=number), hyper(number, 3e-3))
        assert bool(metrics["finite"])
    eta = 2 / figures(w, state, tokens, 4)["sharpness/critical"]

    def after(rate):
        moved, _ = step(copied(state), tokens, hyper(4, rate))
        return float(step(moved, tokens, hyper(5, 0.0))[1]["loss"])

    assert after(1.2 * eta) > after(0.0) > after(eta / 1.2)


def test_the_logits_are_those_of_the_last_token_of_the_whole_model():
    w = workload("fp32")
    state, tokens = first_state(w, seed=0), batch(w)
    ids = tokens.tokens_AxBxT1[0]
    logits = w.model.training.bind(asarray(state.params))(ids[:, :-1])[:, -1]
    before = cross_entropies(logits, ids[:, -1]).mean()
    worst = cross_entropies(worst_logits(logits, ids[:, -1], 5e-4), ids[:, -1]).mean()
    actual = figures(w, state, tokens, 0)["sharpness/logits"]
    # The difference of two losses near ln 64, each of which is known to FP32's last
    # place.
    assert actual == pytest.approx(
        100 * float((worst - before) / (1 + before)), rel=1e-2
    )


@pytest.mark.slow  # sums over devices: parallel/test_distribute.py
@pytest.mark.parametrize(
    ("spec", "sizes"),
    [(SPEC, (1, 4)), (SPLIT, (2, 2, 2))],
    ids=["gpt2-fsdp", "llama-tensor"],
)
def test_a_split_state_is_as_sharp_as_a_whole_one(spec, sizes):
    rows = []
    for mesh in (make_mesh(1), make_mesh(*sizes)):
        w = workload("fp32", spec=spec)._replace(mesh=mesh)
        ids = np.random.default_rng(0).integers(
            0, 64, (16, spec.context + 1), dtype=np.int32
        )
        tokens, state = (
            place_batch(Batch(ids, None), accum=1, mesh=mesh),
            first_state(w, seed=0),
        )
        whole = dataclasses.replace(
            state, params=jax.device_put(state.params, replicated(mesh))
        )
        grads = jax.jit(functools.partial(stored_gradients, w))(
            whole, tokens, np.int32(0)
        )[0]
        rows.append(make_sharpness(w, LR)(state, grads, tokens, 0))
    for name in ("sharpness/logits", "sharpness/critical"):
        assert rows[1][name] == pytest.approx(rows[0][name], rel=1e-2), name
