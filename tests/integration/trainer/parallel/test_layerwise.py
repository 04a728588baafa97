"""Scanned layers that are gathered one ahead, and whose gradients are reduced there."""

import jax
import numpy as np
import precisions
import pytest
from families import slow

from trainer.compiled.hlo import Program
from trainer.data import Batch
from trainer.models.gpt2.spec import GPT2Spec
from trainer.models.llama.spec import LlamaSpec
from trainer.parallel.distribute import GradReduceConfig, gradient_over
from trainer.parallel.mesh import abstract_batch, make_mesh, place_batch
from trainer.step.step import sequence_keys
from trainer.workload import first_state, jitted_eval_step, lower_step

SIZES = {"vocab_size": 256, "context": 32, "n_layer": 3, "n_head": 4, "d_model": 64}
LAYERS = {"scan_layers": True, "remat": "block"}
GPT2 = GPT2Spec(**SIZES, **LAYERS, dropout=0.1)
WITHOUT_DROPOUT = GPT2Spec(**SIZES, **LAYERS)  # of which less is compiled
LLAMA = LlamaSpec(**SIZES, **LAYERS, n_kv_head=2, tied=False)
# E4M3 gradients differ by the scales of their arrays: a stack has one, each layer its
# own. Both are rounded to a neighbor, and the top binade has steps of an eighth.
OF_E4M3 = 1 / 8
OF_FP16 = 2.0**-11  # the stack is rounded to FP16, a layer's gradient is not


def task_of(precision, spec, sizes, reduce="fp32"):
    task = precisions.workload(precision, spec=spec)
    return task._replace(mesh=make_mesh(*sizes), reduce=GradReduceConfig(reduce))


def gradients(task, state, accum, *, by_layer):
    """Loss, gradients and statistics of 16 sequences."""
    model, comm = task.on_mesh(accum)
    assert comm.gathers_by_layer
    if not by_layer:
        model, comm = task.model.on(task.mesh, accum), task.comm
    context = model.spec.context
    tokens = np.random.default_rng(0).integers(0, 256, (16, context + 1), np.int32)
    batch = place_batch(Batch(tokens, None), accum=accum, mesh=task.mesh)
    differentiate = model.differentiate()

    @jax.jit
    def step(params, scaling, batch, key):
        keys = sequence_keys(key, batch)
        mean_gradient = gradient_over(task.mesh, comm)
        return mean_gradient(differentiate.value_and_grad, params, scaling, batch, keys)

    return jax.device_get(step(state.params, state.scaling, batch, state.key))


@pytest.mark.parametrize(
    ("precision", "spec", "sizes", "reduce", "tolerance"),
    [
        ("fp32", GPT2, (2, 2, 2), "fp32", 0.0),
        # histories come out as gradients
        slow("fp8_delayed", LLAMA, (1, 8), "fp32", 0.0),
        slow("scalify_fp8_fp16", LLAMA, (2, 2, 2), "fp32", OF_FP16),
        ("scalify_fp8_fp16", WITHOUT_DROPOUT, (1, 8), "fp8", OF_E4M3),
    ],
)
def test_gathering_by_layer_gives_the_gradients_of_gathering_all(
    precision, spec, sizes, reduce, tolerance
):
    task = task_of(precision, spec, sizes, reduce)
    accum = 2 if len(sizes) == 3 else 1
    state = first_state(task, seed=0)
    loss, *all_at_once = gradients(task, state, accum, by_layer=False)
    by_layer_loss, *by_layer = gradients(task, state, accum, by_layer=True)
    assert by_layer_loss == loss
    for a, b in zip(
        jax.tree.leaves(by_layer), jax.tree.leaves(all_at_once), strict=True
    ):
        limit = tolerance * np.max(np.abs(b), initial=0)
        np.testing.assert_allclose(a, b, rtol=0, atol=limit)


def test_no_device_gathers_more_than_a_layer_at_once():
    task = task_of("fp32", LLAMA, (1, 8))
    batch = abstract_batch(1, 16, 32, document_mask=False, mesh=task.mesh)
    program = Program(lower_step(task, batch).compile().as_text())
    gathers = [c for c in program.collectives if c.op == "all-gather"]
    shapes = task.model.training.shapes
    tables = sum(x.size for x in jax.tree.leaves(shapes | {"h": ()}))
    layer = sum(x.size for x in jax.tree.leaves(shapes["h"])) / 3
    once = sum(c.bytes / c.times for c in gathers if c.times == 1) / 4
    # Outside of the loops: tables, and the first layer; sums and maxima of the update.
    assert once <= 1.05 * (tables + layer)
    inside = sum(c.bytes * c.times for c in gathers if c.times == 3) / 4
    assert inside == pytest.approx(2 * 3 * layer)  # forward and backward


def test_a_validation_gathers_by_layer_too():
    by_layer, unrolled = (
        task_of("scalify_fp8_fp16", spec, (1, 8))
        for spec in (GPT2, GPT2Spec(**SIZES, dropout=0.1))
    )
    tokens = np.random.default_rng(1).integers(0, 256, (16, 33), np.int32)
    losses = []
    for task in (by_layer, unrolled):
        batch = place_batch(Batch(tokens, None), accum=1, mesh=task.mesh)
        losses.append(float(jitted_eval_step(task)(first_state(task, seed=0), batch)))
    assert losses[0] == pytest.approx(losses[1], rel=2 * OF_FP16)
