"""A small GPT-2 in every precision preset, for the tests of precisions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from trainer.config.composition import compose_config
from trainer.data import Batch
from trainer.models.gpt2.spec import GPT2Spec
from trainer.parallel.mesh import abstract_batch, make_mesh, place_batch
from trainer.step.optimizers import AdamW
from trainer.step.step import StepInputs
from trainer.workload import (
    Model,
    TrainTask,
)

SPEC = GPT2Spec(vocab_size=64, context=16, n_layer=1, n_head=2, d_model=32)


ADAMW = AdamW(
    name="adamw", lr=1.0, weight_decay=0.1, clip_norm=1.0, b1=0.9, b2=0.99, eps=1e-8
)


PRESETS = (
    "fp32", "bf16", "bf16_pure", "fp16_loss_scaled", "scalify_fp16", "scalify_fp8", "scalify_fp8_fp16",
    "scalify_fp8_fp8", "scalify_mxfp8", "fp8_delayed", "fp8_current", "sim",
)  # fmt: skip


@functools.cache
def composed(preset):
    config = compose_config([f"precision={preset}", "precision.amax_history=16"])
    return config.precision.policy


def policy(preset, **changes):
    return dataclasses.replace(composed(preset), **changes)


@functools.cache
def workload(preset, devices=1, spec=SPEC, **changes):
    """On several devices the state is split: FP8 kernels are gathered as such."""
    model = Model.make(spec, policy(preset, **changes))
    return TrainTask(model, ADAMW, make_mesh(1, devices))


def abstract(w, accum=1):
    return abstract_batch(accum, 16, SPEC.context, document_mask=False, mesh=w.mesh)


def batch(w, step=0, accum=1):
    random = np.random.default_rng(step)
    tokens = random.integers(0, 64, (16, SPEC.context + 1), dtype=np.int32)
    return place_batch(Batch(tokens, None), accum=accum, mesh=w.mesh)


def step_inputs(step, lr, seed=0):
    return StepInputs(np.float32(lr), np.int32(step), np.uint32(seed))


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


def bits(tree):
    raw = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(tree)
    ]
    return [np.asarray(x).tobytes() for x in raw]
