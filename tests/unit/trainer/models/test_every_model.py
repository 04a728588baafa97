"""The model of every family: its loss, scanned and recomputed layers,
documents, decoding, formats."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import (
    GPT2,
    LLAMA,
    REORDERED,
    TOKENS,
    assert_close,
    build_functions,
    compiled,
    initial,
)

from scalify_core import asarray, scalify
from scalify_core.optim.weights import scaled_params
from trainer.models.blocks import stack_layers, unstack_layers

FAMILIES = {"gpt2": GPT2, "llama": LLAMA}
UNTIED = dataclasses.replace(LLAMA, tied=False)
scanned_or_not = pytest.mark.parametrize(
    "scan_layers", [False, True], ids=["unrolled", "scanned"]
)


@pytest.fixture(params=FAMILIES)
def spec(request):
    return FAMILIES[request.param]


@pytest.mark.parametrize("spec", [GPT2, LLAMA, UNTIED], ids=["gpt2", "llama", "untied"])
def test_initial_values_are_normal_and_the_residual_ones_smaller(spec):
    sizes = {"vocab_size": 1000, "n_layer": 3, "d_model": 64, "init_std": 0.005}
    model = build_functions(dataclasses.replace(spec, **sizes))
    params = jax.tree.map(np.asarray, initial(model))
    assert ("lm_head" in params) == (spec is UNTIED)
    roles = jax.tree.leaves(model.roles)
    stds = {"row": 0.005 / math.sqrt(2 * 3), "gain": 0, "bias": 0}
    for (path, values), role in zip(
        jax.tree_util.tree_leaves_with_path(params), roles, strict=True
    ):
        std = stds.get(role.kind, 0.005)
        values = values[: len(values) - role.padding]
        if not std:
            assert (values == (role.kind == "gain")).all(), path
            continue
        # The standard deviation of n normal samples is known to 1 / sqrt(2 n); five of
        # those.
        error = abs(float(values.std()) / std - 1)
        assert error < 5 / math.sqrt(2 * values.size), path


@pytest.mark.parametrize("spec", [GPT2, UNTIED], ids=["gpt2", "llama"])
def test_padding_rows_are_zero_get_no_gradient_and_no_probability(spec):
    params, loss_and_grads, _ = compiled(spec)
    loss, grads = loss_and_grads(params)
    for table in {"wte", "lm_head"} & params.keys():
        values, gradient = params[table]["embedding"], grads[table]["embedding"]
        assert values.shape[0] == spec.padded_vocab == 128
        assert not values[100:].any()
        assert not gradient[100:].any()
        assert gradient[:100].any()
        padded = {table: {"embedding": values.at[100:].set(50.0)}}
        assert loss_and_grads(params | padded)[0] == loss


def test_loss_is_the_cross_entropy_of_the_logits(spec):
    params, loss_and_grads, logits = compiled(spec)
    logits = logits(params, TOKENS[:, :-1])
    assert logits.shape == (2, 16, 100)
    expected = -jnp.take_along_axis(
        jax.nn.log_softmax(logits), TOKENS[:, 1:, None], axis=-1
    ).mean()
    assert_close(loss_and_grads(params)[0], expected)


@pytest.mark.parametrize(("spec", "mlp"), [(GPT2, "gelu"), (LLAMA, "smooth_swiglu")])
def test_scanned_layers_equal_unrolled_ones_from_the_same_key(spec, mlp):
    spec = dataclasses.replace(spec, mlp=mlp)
    params, loss_and_grads, _ = compiled(spec)
    stacked, loss_and_grads_scanned, _ = compiled(
        dataclasses.replace(spec, scan_layers=True)
    )
    jax.tree.map(np.testing.assert_array_equal, stack_layers(params), stacked)
    jax.tree.map(np.testing.assert_array_equal, unstack_layers(stacked), params)
    loss, grads = loss_and_grads(params)
    assert_close((loss, stack_layers(grads)), loss_and_grads_scanned(stacked))


@pytest.mark.parametrize(
    ("spec", "remat", "scan_layers"),
    [
        (GPT2, "block", True),
        (GPT2, "dots_saveable", True),
        (LLAMA, "block", False),
        (LLAMA, "elementwise", True),
    ],
)
def test_remat_changes_neither_loss_nor_gradients(spec, remat, scan_layers):
    spec = dataclasses.replace(spec, scan_layers=scan_layers)
    params, plain, _ = compiled(spec)
    _, recomputed, _ = compiled(dataclasses.replace(spec, remat=remat))
    assert recomputed(params)[0] == plain(params)[0]
    assert_close(recomputed(params)[1], plain(params)[1])


def test_remat_keeps_less_for_the_backward_pass(spec):
    tokens = np.zeros((4, 256), np.int32)

    def residual_bytes(remat):
        sizes = {"context": 256, "scan_layers": True, "remat": remat}
        model = build_functions(dataclasses.replace(spec, **sizes))
        forward = lambda p: jax.vjp(lambda p: model.bind(p).hidden(tokens).sum(), p)[1]
        leaves = jax.tree.leaves(jax.eval_shape(forward, model.shapes))
        return sum(x.size * x.dtype.itemsize for x in leaves)

    everything = residual_bytes("none")
    assert residual_bytes("block") < everything / 2
    # Of what a layer keeps a token, the two norms' outputs and that of GELU, 6 of 20
    # widths, or of the gated product, 5 of 18, are computed again.
    assert residual_bytes("elementwise") < (0.8 if spec is GPT2 else 0.85) * everything


@scanned_or_not
def test_documents_do_not_see_each_other_behind_their_segments(spec, scan_layers):
    params, _, logits = compiled(dataclasses.replace(spec, scan_layers=scan_layers))
    tokens, other = TOKENS[:, :16], TOKENS[:, :16].copy()
    other[:, :7] = (other[:, :7] + 1) % 100
    segments = (np.indices(tokens.shape)[1] >= 7).astype(np.int32)
    a, b = logits(params, tokens, segments), logits(params, other, segments)
    np.testing.assert_array_equal(a[:, 7:], b[:, 7:])
    assert (logits(params, tokens)[:, 7:] != a[:, 7:]).any()
    # rotary positions are relative: a document is the same wherever it stands
    if spec is LLAMA:
        alone = logits(params, tokens[:, 7:])
        np.testing.assert_allclose(a[:, 7:], alone, atol=REORDERED)


def test_compute_in_bf16_keeps_fp32_masters_gradients_and_loss(spec):
    bind = build_functions(spec, compute_dtype=jnp.bfloat16).bind
    params, loss_and_grads, _ = compiled(spec, jnp.bfloat16)
    loss, grads = jax.tree.map(np.asarray, loss_and_grads(params))
    dtypes = {leaf.dtype for leaf in jax.tree.leaves((params, grads, loss))}
    assert dtypes == {jnp.dtype(jnp.float32)}
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        is_rounded = grad == grad.astype(jnp.bfloat16)
        assert is_rounded.mean() < 0.5, path
    hidden = jax.jit(lambda p: bind(p).hidden(TOKENS[:, :16]))
    assert hidden.eval_shape(params).dtype == jnp.bfloat16
    tensor = r"tensor<[0-9x]*x(\w+)>"
    text = hidden.lower(params).as_text()
    dots = re.findall(rf"dot_general.*: \({tensor}, {tensor}\)", text)
    assert len(dots) >= (4 if spec is GPT2 else 7)  # equal layers are one function
    assert set(dots) == {("bf16", "bf16")}


def test_aligned_channels_start_with_one_larger_column_for_both_branches(spec):
    spec = dataclasses.replace(spec, mlp="swiglu", scan_layers=True)
    aligned = dataclasses.replace(spec, align_channels=3, align_gain=50.0)
    plain_params, aligned_params = (
        initial(build_functions(s)) for s in (spec, aligned)
    )
    names = ("c_fc", "c_gate") if "wpe" in plain_params else ("up_proj", "gate_proj")
    column = 50 * plain_params["h"]["mlp"][names[0]]["kernel"][..., :3]
    assert len(np.unique(column[..., 0, :])) == column[..., 0, :].size
    for name in names:
        kernel = plain_params["h"]["mlp"][name]["kernel"]
        plain_params["h"]["mlp"][name]["kernel"] = kernel.at[..., :3].set(column)
    jax.tree.map(np.testing.assert_array_equal, aligned_params, plain_params)


# of two sequences of 16 tokens, of a padded vocabulary
LOGITS = r":(\w+)\[32,128\][^=]*= dot_general"


def loss_of(spec, how, dtype):
    spec = dataclasses.replace(spec, n_layer=1, loss_logits=how)
    model = build_functions(spec, compute_dtype=dtype)
    loss = lambda p: model.bind(p).loss(TOKENS[:, :-1], TOKENS[:, 1:])
    return initial(model), loss


@pytest.mark.parametrize(("how", "dtype"), [(None, "f32"), ("compute", "bf16")])
def test_logits_of_the_loss_have_the_dtype_of_the_matmuls_on_demand(spec, how, dtype):
    params, loss = loss_of(spec, how, jnp.bfloat16)
    text = str(jax.make_jaxpr(jax.grad(loss))(params))
    assert re.findall(LOGITS, text)[0] == dtype


@pytest.mark.parametrize(
    ("how", "platform", "dtype"),
    [
        ("auto", "cuda", "bf16"),
        ("auto", "cpu", "f32"),
        ("float32", "cuda", "f32"),
        (None, "cuda", "f32"),  # as runs before "auto" saved it
    ],
)
def test_logits_of_the_loss_are_narrow_on_gpus_unless_asked_otherwise(
    how, platform, dtype
):
    params, loss = loss_of(UNTIED, how, jnp.bfloat16)
    lowered = (
        jax.jit(jax.grad(loss)).trace(params).lower(lowering_platforms=(platform,))
    )
    products = re.findall(r"dot_general.*-> tensor<32x128x(\w+)>", lowered.as_text())
    assert products == [dtype]


# The test above shows that GPT-2's head is asked alike.
def test_logits_are_in_the_format_of_the_data_where_scales_propagate():
    params, loss = loss_of(UNTIED, "compute", jnp.float32)
    step = scalify(jax.value_and_grad(loss), scales="static")
    scaled = scaled_params(params, jnp.float16)
    text = str(jax.make_jaxpr(lambda p: asarray(step(p)))(scaled))
    assert re.findall(LOGITS, text)[0] == "f16"
    narrow, wide = jax.jit(step)(scaled)[0], jax.jit(loss)(params)
    # The weights are rounded to 11 bits, and so are values and logits: a fresh model's
    # loss is log(100).
    np.testing.assert_allclose(asarray(narrow), wide, rtol=2**-11)
