"""Targets across the border of two documents: neither their nats nor their gradients
count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from precisions import SPEC, workload

from scalify_core import asarray
from trainer.models.llama.spec import LlamaSpec
from trainer.workload import first_state

END = 7
LLAMA = LlamaSpec(
    vocab_size=64, context=16, n_layer=1, n_head=2, n_kv_head=1, d_model=32
)


def tokens(seed=0):
    actual = np.random.default_rng(seed).integers(
        0, 64, (16, SPEC.context + 1), dtype=np.int32
    )
    actual[:, 5] = actual[3:, 11] = END
    return actual


def bordered(preset, spec=SPEC):
    task = workload(preset, 1, spec)
    return task._replace(model=task.model._replace(loss_boundary_id=END))


def nats(task, params):
    """The loss of each target, FP32, and which ones count."""
    logits = task.model.training.bind(params)(tokens()[:, :-1])
    logp = jax.nn.log_softmax(logits)
    actual = -jnp.take_along_axis(logp, tokens()[:, 1:, None], axis=2)[..., 0]
    return actual, tokens()[:, :-1] != END


@pytest.mark.parametrize("spec", [SPEC, LLAMA])
def test_the_loss_counts_those_targets_as_zero(spec):
    task = bordered("fp32", spec)
    state = first_state(task, 0)
    actual = float(jax.jit(task.model.eval_loss)(state, tokens(), None))
    losses, inside = jax.jit(lambda p: nats(task, p))(asarray(state.params))
    assert 16 < (~inside).sum() < 60
    assert actual == pytest.approx(float(losses[inside].sum()) / losses.size, rel=1e-5)


def test_gradients_are_those_of_the_sum_over_the_other_targets():
    task = bordered("fp32")
    params = asarray(first_state(task, 0).params)

    def plain(params):
        losses, inside = nats(task, params)
        return jnp.sum(jnp.where(inside, losses, 0)) / losses.size

    loss = lambda p: task.model.loss(p, tokens(), None, None)
    actual, expected = (jax.jit(jax.grad(fun))(params) for fun in (loss, plain))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max()))
