"""Targets across the border of two documents: neither their nats nor their gradients
count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import slow
from precisions import SPEC, abstract, batch, copied, hyper, workload

from scalify_core import asarray
from trainer.models.llama.spec import LlamaSpec
from trainer.workload import compile_step, first_state

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


@pytest.mark.parametrize("spec", [SPEC, LLAMA])
def test_the_loss_counts_those_targets_as_zero(spec):
    task = bordered("fp32", spec)
    state = first_state(task, 0)
    actual = float(jax.jit(task.model.eval_loss)(state, tokens(), None))
    inside = tokens()[:, :-1] != END
    assert 16 < (~inside).sum() < 60
    params = asarray(state.params)
    logits = jax.jit(lambda t: task.model.training.bind(params)(t))(tokens()[:, :-1])
    nats = -np.take_along_axis(
        np.asarray(jax.nn.log_softmax(logits)), tokens()[:, 1:, None], axis=2
    )[..., 0]
    assert actual == pytest.approx(nats[inside].sum() / nats.size, rel=1e-5)


def test_gradients_are_those_of_the_sum_over_the_other_targets():
    task = bordered("fp32")
    params = asarray(first_state(task, 0).params)
    count = np.prod(tokens()[:, 1:].shape)

    def plain(params):
        logits = task.model.training.bind(params)(tokens()[:, :-1])
        nats = -jnp.take_along_axis(
            jax.nn.log_softmax(logits), tokens()[:, 1:, None], axis=2
        )[..., 0]
        return jnp.sum(jnp.where(tokens()[:, :-1] != END, nats, 0)) / count

    ours = jax.jit(jax.grad(lambda p: task.model.loss(p, tokens(), None, None)))(params)
    for a, b in zip(
        jax.tree.leaves(ours),
        jax.tree.leaves(jax.jit(jax.grad(plain))(params)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("preset", ["fp32", slow("scalify_fp8_fp16")])
def test_a_step_is_the_same_whatever_stands_behind_a_border(preset):
    """Where documents do not see each other; here all of the rest is one token."""
    task = bordered(preset)
    step = compile_step(task, abstract(task), first_state(task, 0))
    after = []
    for last in (3, 9):
        some = batch(task)
        rows = np.array(some.tokens_AxBxT1)
        rows[..., -2:] = END, last
        state, metrics = step(
            copied(first_state(task, 0)),
            some._replace(tokens_AxBxT1=jnp.asarray(rows)),
            hyper(0, 1e-2),
        )
        after.append([np.asarray(x).tobytes() for x in jax.tree.leaves(state.params)])
        assert metrics["finite"]
    assert after[0] == after[1]
