"""A model with FP8 attention: its gradients beside those with BF16 attention, its
training, and the checks of its compiled step."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import slow
from precisions import abstract, batch, copied, policy, step_inputs, workload
from small_models import initial

from scalify_core.numerics.formats import E4M3
from trainer.compiled.fp8 import Gpu, check_step
from trainer.compiled.operations import FusedAttention
from trainer.errors import UserError
from trainer.models.llama.spec import LlamaSpec
from trainer.plan.targets import get_target
from trainer.workload import Model, first_state, lower_step

SPEC = LlamaSpec(
    vocab_size=64,
    context=128,
    n_layer=1,
    n_head=2,
    n_kv_head=1,
    d_model=64,
    head_dim=128,
)
H100 = get_target("h100")


def gradients(chosen, tokens):
    model = Model.make(SPEC, chosen)
    params = initial(model.training)
    return jax.jit(jax.grad(lambda p: model.loss(p, tokens, None, None)))(params)


def test_gradients_are_those_of_wide_attention_but_for_the_roundings():
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 129)))
    wide, narrow = (
        gradients(policy("bf16", attention=chosen), tokens) for chosen in (None, "e4m3")
    )
    attention = [block["attn"] for block in narrow["h"].values()]
    for one, other in zip(
        jax.tree.leaves(attention),
        jax.tree.leaves([block["attn"] for block in wide["h"].values()]),
        strict=True,
    ):
        error = np.linalg.norm(one - other) / np.linalg.norm(other)
        # Each gradient is a sum over products of rounded numbers, four roundings deep.
        assert 0.01 < error < 4 * E4M3.epsilon / 2


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        slow("fp8_current", {}),  # its attention: the gradients above
        slow("mxfp8", {}),
        slow("scalify_fp8_fp16", {}),
        ("scalify_fp8_fp16", {"n_layer": 2, "scan_layers": True, "remat": "block"}),
    ],
)
def test_it_trains_beside_fp8_matmuls(preset, changes):
    spec = dataclasses.replace(SPEC, **changes)
    task = workload(preset, spec=spec, attention="e4m3")
    state = copied(first_state(task, seed=0))
    step = lower_step(task, abstract(task), state).compile()
    losses = []
    for n in range(8):
        state, metrics = step(state, batch(task, 0), step_inputs(n, 1e-2))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.5


def test_a_step_whose_attention_is_not_fp8_is_refused_on_a_gpu_that_has_it():
    model = Model.make(SPEC, policy("bf16", attention="e4m3"))
    gpu = Gpu(H100.device, H100.capability)
    call = FusedAttention("fp8", False, True, (1, 2, 128, 128, 128), "a", 1)
    program = SimpleNamespace(gemms=[], attentions=[call, call])
    report = check_step(model, program, 128, gpu, require=None)
    assert report.share == 1
    assert report.lines[0].startswith("compiled step: 0 FP8 products and 2 FP8 attent")
    for attentions, named in (
        ([call, call._replace(dtype="bf16")], "bf16"),
        ([], "matmuls and a softmax"),
    ):
        program.attentions = attentions
        message = f"attention is not FP8 but {named}; leave precision.attention out"
        with pytest.raises(UserError, match=message):
            check_step(model, program, 128, gpu, require=None)
        assert check_step(model, program, 128, gpu, require=False)
