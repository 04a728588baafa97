"""A model is served as it was trained: an export's FP8 weights and scales, multiplied by
a small reader, give the logits of the run's own FP8 matmuls, bit for bit."""

import dataclasses
import json
import shutil
from pathlib import Path

import family_files
import fp8_reader
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import slow
from precisions import policy
from small_models import initial

from scalify_core import asarray
from trainer.assembly.fp8_export import check_exportable, fp8_kernels
from trainer.assembly.saved_model import restore_training
from trainer.cli.commands import run
from trainer.errors import UserError
from trainer.model import Model
from trainer.models.blocks import unstack_layers
from trainer.models.gpt2.huggingface import LAYOUT
from trainer.models.gpt2.spec import GPT2Spec
from trainer.models.huggingface import save
from trainer.models.llama.huggingface import layout_of
from trainer.models.llama.spec import LlamaSpec
from trainer.precision.arrays import store_weights

SAVED = Path(__file__).parents[2] / "data" / "saved_by_7ef3f38" / "flagship"
GPT2 = GPT2Spec(vocab_size=64, context=16, n_layer=1, n_head=2, d_model=32)
LLAMA = LlamaSpec(
    vocab_size=64, context=16, n_layer=1, n_head=2, n_kv_head=1, d_model=32, d_mlp=48
)
SCANNED = dataclasses.replace(LLAMA, n_layer=2, scan_layers=True)


def tokens_of(spec):
    """Sequences of the model's context, at which its input scales are."""
    shape = (16, spec.context)
    return np.random.default_rng(1).integers(0, 64, shape, dtype=np.int32)


def layout(spec):
    if isinstance(spec, LlamaSpec):
        return layout_of(spec)
    return LAYOUT


def trained_logits(model, params, scaling):
    """Those of the run's validation."""
    method = model.policy.method

    def logits(params, tokens, **settings):
        return model.training.bind(params, *settings.values())(tokens)

    forward = method.transform(logits, model.policy)
    tokens = tokens_of(model.spec)
    return asarray(jax.jit(forward)(params, tokens, **method.loss_arguments(scaling)))


def state_of(model):
    """Parameters far from their initial sizes, and amax histories, of which none is a
    power of two."""
    params = initial(model.training)
    random = np.random.default_rng(1)
    params = jax.tree.map(
        lambda p: p * 3 + np.float32(0.02 * random.normal(size=p.shape)), params
    )
    scaling = jax.tree.map(
        lambda x: jnp.asarray(random.uniform(0.1, 2, x.shape), jnp.float32),
        model.differentiate().init(),
    )
    return store_weights(params, model.policy), scaling


@pytest.mark.parametrize(
    ("preset", "spec"),
    [
        slow("scalify_fp8_fp16", GPT2),  # the command's run
        ("scalify_fp8_fp16", SCANNED),
        ("fp8_current", LLAMA),
        ("fp8_delayed", GPT2),
    ],
)
def test_an_export_gives_the_logits_of_the_run_bit_for_bit(preset, spec, tmp_path):
    exclude = () if spec.scan_layers else ("h.0.mlp.*",)
    model = Model.make(spec, policy(preset, exclude=exclude))
    params, scaling = state_of(model)
    kernels = fp8_kernels(model, params, scaling)
    save(tmp_path, spec, asarray(params), fp8=kernels)

    unrolled = dataclasses.replace(spec, scan_layers=False)
    like = unstack_layers(params) if spec.scan_layers else params
    reader = Model.make(unrolled, model.policy)
    read = fp8_reader.logits(tmp_path, reader, layout(spec), like, tokens_of(spec))
    np.testing.assert_array_equal(read, trained_logits(model, params, scaling))

    settings, tensors = fp8_reader.settings_and_tensors(tmp_path)
    narrow = {name for name, x in tensors.items() if x.itemsize == 1}
    assert len(narrow) == len(kernels) == len(reader.narrow)
    ignored = {f"{name}.weight" for name in settings["ignore"]} - {"lm_head.weight"}
    assert ignored | narrow == {name for name, x in tensors.items() if x.ndim == 2}


def test_the_command_writes_what_a_run_multiplied_and_init_from_reads_it(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(SAVED, "run")
    out = tmp_path / "served"
    assert run("export", ["run_dir=run", f"out={out}", "format=fp8"]) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["torch_dtype"] == "float16"  # what the run computed in

    _, w, checkpoint = restore_training(Path("run"))
    model, state = w.model, checkpoint.state

    def as_written(role, p):
        if model.is_narrow(role):
            return p
        wide = asarray(p).astype(np.float16).astype(np.float32)
        return type(p)((wide / p.scale).astype(p.dtype), p.scale)

    written = jax.tree.map(as_written, model.roles, state.params)
    read = fp8_reader.logits(
        out, model, layout(model.spec), state.params, tokens_of(model.spec)
    )
    np.testing.assert_array_equal(read, trained_logits(model, written, state.scaling))

    # which no file says
    trained = dataclasses.replace(model.spec, dropout=0.0, loss_logits="auto")
    assert family_files.read(out)[0] == trained


@pytest.mark.parametrize(
    ("preset", "changes", "model", "words"),
    [
        ("fp32", {}, {}, "no matmul of this run is in FP8: precision.forward=null"),
        ("mxfp8", {}, {}, "scaling: mx, .* has no FP8 matmuls with one scale"),
        ("sim", {}, {}, "simulate: true.* has no FP8 matmuls with one scale"),
        ("fp8_current", {"hadamard": 16}, {}, "hadamard .* change operands"),
        ("fp8_current", {}, {"mlp": "smooth_swiglu"}, "multiply kernels before"),
    ],
)
def test_products_without_one_scale_for_each_operand_are_refused(
    preset, changes, model, words
):
    spec = dataclasses.replace(GPT2, **model)
    with pytest.raises(UserError, match=f"format=fp8: .*{words}.*; leave format out"):
        check_exportable(Model.make(spec, policy(preset, **changes)))
