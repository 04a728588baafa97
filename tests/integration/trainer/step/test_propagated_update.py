"""An optimizer that computes in scaled arrays, as in the Scalify paper."""

import dataclasses

import jax
import numpy as np
from precisions import abstract, batch, step_inputs, workload

from scalify_core.optim.weights import wide
from trainer.step.state import from_checkpoint_form, to_checkpoint_form
from trainer.workload import compile_step, first_state


def moved(update):
    """The change of the weights in three clipped steps, and the norms of gradients."""
    moments = {"mu": "fp16", "nu": "fp16", "moments_rounding": "nearest"}
    w = workload("scalify_fp16", update=update, **moments)
    clipped = dataclasses.replace(w.optimizer_settings, clip_norm=0.5)
    w = w._replace(optimizer_settings=clipped)
    state = from_checkpoint_form(to_checkpoint_form(first_state(w, seed=0)))
    first = jax.tree.map(np.asarray, wide(state.params))
    step, norms = compile_step(w, abstract(w), state), []
    for n in range(3):
        state, metrics = step(state, batch(w, n), step_inputs(n, 1e-3))
        norms.append(float(metrics["grad_norm"]))
    change = jax.tree.map(lambda a, b: np.asarray(a) - b, wide(state.params), first)
    return np.concatenate([x.ravel() for x in jax.tree.leaves(change)]), norms


def test_a_propagated_update_moves_weights_as_that_in_float32_does():
    (actual, norms), (expected, _) = moved("propagate"), moved("fp32")
    assert min(norms) > 0.5  # so gradients are clipped
    cosine = actual @ expected / np.linalg.norm(actual) / np.linalg.norm(expected)
    assert cosine > 0.99
    assert abs(np.linalg.norm(actual) / np.linalg.norm(expected) - 1) < 0.02
