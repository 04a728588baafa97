import dataclasses
import functools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chosen import whole
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from scalify_core import as_scaled_array, asarray, get_data_scale, scalify, swiglu, tree
from scalify_core.array import is_scaled_array
from trainer.models.gated import smooth_swiglu
from trainer.models.layers import RMSNorm
from trainer.models.llama import Llama, functional
from trainer.models.llama_family import LLAMA_FAMILY
from trainer.models.llama_spec import LlamaSpec, RopeScaling, linear_sizes
from trainer.models.sampling import Generator
from trainer.models.spec import REMAT_POLICIES

CONFIGS = Path(__file__).resolve().parents[4] / "configs"
SPEC = LlamaSpec(vocab_size=100, context=16, n_layer=2, n_head=4, n_kv_head=2, d_model=16, tied=True)
TOKENS = np.random.default_rng(0).integers(0, 100, (2, 17)).astype(np.int32)
# Two programs that differ in nothing but the order of sums: a few dozen roundings on values of order 1.
REORDERED = 64 * float(jnp.finfo(jnp.float32).eps)


@functools.cache
def compiled(spec, compute_dtype=jnp.float32):
    """Initial parameters; loss and gradients; logits. Each compiled once for all tests."""
    init, bind, *_ = functional(spec, compute_dtype=compute_dtype)
    loss_and_grads = jax.jit(jax.value_and_grad(lambda p: bind(p).loss(TOKENS[:, :-1], TOKENS[:, 1:])))
    logits = jax.jit(lambda p, tokens, segments=None: bind(p)(tokens, segments))
    return jax.jit(init)(jax.random.key(0)), loss_and_grads, logits


def assert_close(a, b, atol=REORDERED):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol, rtol=0), a, b)


@pytest.mark.parametrize("tied", [True, False])
def test_initial_values_are_normal_and_the_residual_ones_smaller(tied):
    spec = LlamaSpec(1000, context=64, n_layer=8, n_head=4, n_kv_head=2, d_model=64, tied=tied)
    params = functional(spec).init(jax.random.key(0))
    residual = 0.02 / math.sqrt(2 * 8)
    attn, mlp = params["h"][3]["attn"], params["h"][7]["mlp"]
    expected = {"wte": (params["wte"]["embedding"][:1000], 0.02), "o_proj": (attn["o_proj"]["kernel"], residual)}
    expected |= {name: (attn[name]["kernel"], 0.02) for name in ("q_proj", "k_proj", "v_proj")}
    expected |= {name: (mlp[name]["kernel"], 0.02) for name in ("gate_proj", "up_proj")}
    expected |= {"down_proj": (mlp["down_proj"]["kernel"], residual)}
    if not tied:
        expected["lm_head"] = params["lm_head"]["embedding"][:1000], 0.02
    assert ("lm_head" in params) != tied
    for name, (values, std) in expected.items():
        # The standard deviation of n normal samples is known to 1 / sqrt(2 n); five of those.
        assert abs(float(values.std()) / std - 1) < 5 / math.sqrt(2 * values.size), name
    gains = [x for path, x in jax.tree_util.tree_leaves_with_path(params) if path[-1].key == "scale"]
    assert len(gains) == 2 * 8 + 1
    assert all((gain == 1).all() for gain in gains)
    assert {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(params)} == {"kernel", "scale", "embedding"}


@pytest.mark.parametrize("scan_layers", [False, True])
def test_aligned_channels_start_with_one_larger_column_for_both_branches(scan_layers):
    spec = dataclasses.replace(SPEC, scan_layers=scan_layers)
    aligned = dataclasses.replace(spec, align_channels=3, align_gain=50.0)
    before, after = (functional(s).init(jax.random.key(0))["h"] for s in (spec, aligned))
    before, after = (([h] if scan_layers else list(h.values())) for h in (before, after))
    for plain, layer in zip(before, after, strict=True):
        gate, up = (layer["mlp"][name]["kernel"] for name in ("gate_proj", "up_proj"))
        np.testing.assert_array_equal(gate[..., :3], up[..., :3])
        np.testing.assert_array_equal(up[..., :3], plain["mlp"]["up_proj"]["kernel"][..., :3] * 50)
        np.testing.assert_array_equal(up[..., 3:], plain["mlp"]["up_proj"]["kernel"][..., 3:])


def test_first_loss_is_that_of_a_uniform_guess():
    spec = dataclasses.replace(SPEC, vocab_size=5000)
    params, _, _ = compiled(spec)
    loss = functional(spec).bind(params).loss(TOKENS[:, :-1], TOKENS[:, 1:])
    # Logits have a variance of about d_model * 0.02^2 = 0.0064, which moves the expectation by half of that.
    assert abs(float(loss) - math.log(5000)) < 0.05


def test_padding_rows_are_zero_get_no_gradient_and_no_probability():
    params, loss_and_grads, _ = compiled(dataclasses.replace(SPEC, tied=False))
    loss, grads = loss_and_grads(params)
    for table in ("wte", "lm_head"):
        values = params[table]["embedding"]
        assert values.shape[0] == SPEC.padded_vocab == 128
        assert not values[100:].any()
        assert not grads[table]["embedding"][100:].any()
        assert grads[table]["embedding"][:100].any()
        assert loss_and_grads(params | {table: {"embedding": values.at[100:].set(50.0)}})[0] == loss


def test_loss_is_the_cross_entropy_of_the_logits():
    params, loss_and_grads, logits = compiled(SPEC)
    logits = logits(params, TOKENS[:, :-1])
    assert logits.shape == (2, 16, 100)
    expected = -jnp.take_along_axis(jax.nn.log_softmax(logits), TOKENS[:, 1:, None], axis=-1).mean()
    assert_close(loss_and_grads(params)[0], expected)


def test_a_head_of_its_own_is_another_than_the_table():
    params, _, logits = compiled(dataclasses.replace(SPEC, tied=False))
    tied = {name: value for name, value in params.items() if name != "lm_head"}
    same = params | {"lm_head": params["wte"]}
    np.testing.assert_array_equal(compiled(SPEC)[2](tied, TOKENS[:, :16]), logits(same, TOKENS[:, :16]))
    assert (logits(params, TOKENS[:, :16]) != logits(same, TOKENS[:, :16])).all()


@pytest.mark.parametrize("mlp", ["swiglu", whole("smooth_swiglu")])  # unscanned: below
def test_scanned_layers_equal_unrolled_ones_from_the_same_key(mlp):
    spec = dataclasses.replace(SPEC, mlp=mlp)
    params, loss_and_grads, _ = compiled(spec)
    stacked, loss_and_grads_scanned, _ = compiled(dataclasses.replace(spec, scan_layers=True))
    jax.tree.map(np.testing.assert_array_equal, LLAMA_FAMILY.stack_layers(params), stacked)
    jax.tree.map(np.testing.assert_array_equal, LLAMA_FAMILY.unstack_layers(stacked), params)
    loss, grads = loss_and_grads(params)
    assert_close((loss, LLAMA_FAMILY.stack_layers(grads)), loss_and_grads_scanned(stacked))


def test_smoothing_changes_no_more_than_roundings():
    params, plain, _ = compiled(SPEC)
    assert_close(compiled(dataclasses.replace(SPEC, mlp="smooth_swiglu"))[1](params), plain(params))
    gate, linear = (jax.random.normal(jax.random.key(i), (32, 8)) * 2.0 ** jnp.arange(8)[None] for i in (0, 1))
    hidden, size = smooth_swiglu(gate, linear)
    np.testing.assert_array_equal(hidden * size[None], swiglu(gate, linear))
    np.testing.assert_array_equal(jnp.log2(size), jnp.log2(size).round())
    np.testing.assert_allclose(jnp.log2(jnp.abs(linear).max(axis=0) / size), 0, atol=0.5)  # the nearest power of two
    larger, smaller = smooth_swiglu(gate, linear, peak=8.0)
    np.testing.assert_array_equal(larger, hidden * 8)
    np.testing.assert_array_equal(smaller, size / 8)


@pytest.mark.parametrize(
    ("remat", "scan_layers"),
    [("block", False), ("elementwise", True), whole("elementwise", False), whole("block", True)]
    + [whole(remat, True) for remat in REMAT_POLICIES],
)
def test_remat_changes_neither_loss_nor_gradients(remat, scan_layers):
    spec = dataclasses.replace(SPEC, scan_layers=scan_layers)
    params, plain, _ = compiled(spec)
    _, recomputed, _ = compiled(dataclasses.replace(spec, remat=remat))
    assert recomputed(params)[0] == plain(params)[0]
    assert_close(recomputed(params)[1], plain(params)[1])


@pytest.mark.parametrize("scan_layers", [False, True])
def test_remat_keeps_less_for_the_backward_pass(scan_layers):
    tokens = np.zeros((4, 256), np.int32)

    def residual_bytes(remat):
        spec = dataclasses.replace(SPEC, context=256, scan_layers=scan_layers, remat=remat)
        init, bind, *_ = functional(spec)
        params = jax.eval_shape(init, jax.random.key(0))
        forward = lambda p: jax.vjp(lambda p: bind(p).hidden(tokens).sum(), p)[1]
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(forward, params)))

    everything = residual_bytes("none")
    assert residual_bytes("block") < everything / 2
    # Of what a layer keeps a token, the two norms' outputs and the gated product, 5 of 18 widths, are computed again.
    assert residual_bytes("elementwise") < 0.85 * everything


def test_future_tokens_do_not_change_the_past():
    params, _, logits = compiled(SPEC)
    other = TOKENS[:, :16].copy()
    other[:, 9:] = (other[:, 9:] + 1) % 100
    a, b = logits(params, TOKENS[:, :16]), logits(params, other)
    np.testing.assert_array_equal(a[:, :9], b[:, :9])
    assert (a[:, 9:] != b[:, 9:]).any(axis=-1).all()


@pytest.mark.parametrize("scan_layers", [False, True])
def test_documents_do_not_see_each_other_behind_their_segments(scan_layers):
    params, _, logits = compiled(dataclasses.replace(SPEC, scan_layers=scan_layers))
    segments = np.repeat([[0, 1]], 2, axis=0).repeat([7, 9], axis=1).astype(np.int32)
    other = TOKENS[:, :16].copy()
    other[:, :7] = (other[:, :7] + 1) % 100
    a, b = logits(params, TOKENS[:, :16], segments), logits(params, other, segments)
    np.testing.assert_array_equal(a[:, 7:], b[:, 7:])
    # Rotary positions are relative: a document is the same wherever it stands.
    alone = logits(params, TOKENS[:, 7:16])
    np.testing.assert_allclose(a[:, 7:], alone, atol=REORDERED)
    assert (logits(params, TOKENS[:, :16])[:, 7:] != a[:, 7:]).any()


@pytest.mark.parametrize(("scan_layers", "scaling"), [(False, None), (True, RopeScaling(4.0, 1.0, 4.0, 8))])
def test_decoding_in_pieces_equals_one_pass(scan_layers, scaling):
    spec = dataclasses.replace(SPEC, scan_layers=scan_layers, rope_scaling=scaling, head_dim=6)
    params, _, logits = compiled(spec)
    bind = functional(spec).bind
    decode = jax.jit(lambda tokens, cache, position: bind(params).decode(tokens, cache, position))
    cache, pieces = bind(params).init_cache(2), []
    assert cache.k.shape == cache.v.shape == (2, 2, 16, 2, 6)  # heads of keys and values, not of queries
    for start, stop in ((0, 7), (7, 8), (8, 9), (9, 16)):
        piece, cache = decode(TOKENS[:, start:stop], cache, start)
        pieces.append(piece)
    h_NxD = jnp.concatenate(pieces, axis=1).reshape(32, 16)
    assert_close(bind(params).logits(h_NxD), logits(params, TOKENS[:, :16]).reshape(32, 100))


def test_the_generator_continues_with_the_likeliest_tokens():
    params, _, logits = compiled(SPEC)
    found = Generator(functional(SPEC).bind, SPEC)(params, TOKENS[0, :5].tolist(), max_new_tokens=4, temperature=0)
    ids = TOKENS[0, :5].tolist()
    for _ in range(4):
        padded = np.zeros((1, 16), np.int32)
        padded[0, : len(ids)] = ids
        ids.append(int(logits(params, padded)[0, len(ids) - 1].argmax()))
    assert found == ids[5:]


def test_heads_and_channels_split_over_devices_give_the_same_loss_and_gradients():
    """As `distribute` runs it: every device has whole inputs, and its heads and hidden channels of the parameters."""
    params, plain, _ = compiled(SPEC)
    bind = functional(SPEC, split="tensor").bind
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,))
    columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")

    def axes(path, _):
        layer = path[-2].key
        return P(None, "tensor") if layer in columns else P("tensor") if layer in ("o_proj", "down_proj") else P()

    specs = jax.tree_util.tree_map_with_path(axes, params)
    loss = lambda p: bind(p).loss(TOKENS[:, :-1], TOKENS[:, 1:])
    split = jax.shard_map(
        jax.value_and_grad(loss), mesh=mesh, in_specs=(specs,), out_specs=(P(), specs), check_vma=False
    )
    assert_close(jax.jit(split)(params), plain(params))


def test_compute_in_bf16_keeps_fp32_masters_gradients_and_loss():
    init, bind, *_ = functional(SPEC, compute_dtype=jnp.bfloat16)
    params = init(jax.random.key(0))
    loss, grads = compiled(SPEC, jnp.bfloat16)[1](params)
    assert {leaf.dtype for leaf in jax.tree.leaves((params, grads, loss))} == {jnp.dtype(jnp.float32)}
    assert jax.eval_shape(lambda p: bind(p).hidden(TOKENS[:, :16]), params).dtype == jnp.bfloat16
    text = jax.jit(lambda p: bind(p).hidden(TOKENS[:, :16])).lower(params).as_text()
    dots = re.findall(r"dot_general.*: \(tensor<[0-9x]*x(\w+)>, tensor<[0-9x]*x(\w+)>\)", text)
    assert len(dots) >= 7  # equal layers are one function
    assert set(dots) == {("bf16", "bf16")}
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):  # and none is rounded to the compute dtype
        assert (grad != grad.astype(jnp.bfloat16)).mean() > 0.5, path


@pytest.mark.parametrize("scan_layers", [False, True])
def test_each_linear_layer_asks_for_its_dot_general_by_path_and_has_its_sizes(scan_layers):
    asked, used = [], {}

    def choose(path):
        asked.append(path)

        def dot_general(x, kernel, *args, **kwargs):
            used[path] = kernel.shape
            return jax.lax.dot_general(x, kernel, *args, **kwargs)

        return dot_general

    spec = dataclasses.replace(SPEC, n_layer=2, head_dim=6, scan_layers=scan_layers)
    llama = nnx.eval_shape(lambda: Llama(spec, dot_general=choose, rngs=nnx.Rngs(params=0)))
    assert asked == list(linear_sizes(spec))
    assert asked[:1] == ["h.*.attn.q_proj" if scan_layers else "h.0.attn.q_proj"]
    graphdef, params = nnx.split(llama)
    jax.eval_shape(lambda p: nnx.merge(graphdef, p).hidden(TOKENS[:, :16]), params)
    assert used == linear_sizes(spec)


def test_a_norm_divides_by_the_root_of_the_mean_square_and_its_epsilon():
    norm = RMSNorm(8, 0.5, jnp.float32, rescale_grad=False, stacked=False, probes=())
    norm.scale[...] = jnp.arange(8.0)
    x = jax.random.normal(jax.random.key(0), (3, 8))
    expected = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 0.5) * jnp.arange(8.0)[None]
    np.testing.assert_allclose(norm(x), expected, rtol=8 * REORDERED)


@pytest.mark.parametrize("scan_layers", [True, whole(False)])
def test_scales_that_propagate_give_the_same_loss_and_gradients(scan_layers):
    """FP32 data: what is scaled is the plain function, whatever the sizes of its parameters."""
    spec = dataclasses.replace(SPEC, scan_layers=scan_layers)
    params, plain, _ = compiled(spec)
    bind = functional(spec, rescale_grads=("layer_norm", "qkv")).bind
    loss = jax.value_and_grad(lambda p: bind(p).loss(TOKENS[:, :-1], TOKENS[:, 1:]))
    scaled = tree.with_static_scales(as_scaled_array(params))
    found = asarray(jax.jit(scalify(loss, scales="static"))(scaled))
    assert_close(found, plain(params))


def test_data_of_all_gradients_and_of_what_products_read_is_near_one():
    """FP16, at initialisation, with the gain per layer that a width of 768 has."""
    spec = dataclasses.replace(SPEC, d_model=64, context=64, init_std=0.02 * math.sqrt(768 / 64))
    seen = {}

    def choose(path):
        def dot_general(x, kernel, *args, **kwargs):
            data, _ = get_data_scale(x)
            seen[path] = jnp.sqrt(jnp.mean(jnp.square(data)))
            return jax.lax.dot_general(x, kernel, *args, **kwargs)

        return dot_general

    init, bind, *_ = functional(spec, dot_general=choose, rescale_grads=("layer_norm", "qkv"))
    tokens = np.random.default_rng(1).integers(0, 100, (4, 65))

    def loss(params):
        out = bind(params).loss(tokens[:, :-1], tokens[:, 1:])
        return out, dict(seen)

    params = tree.with_static_scales(as_scaled_array(init(jax.random.key(0)), dtype=jnp.float16))
    (_, found), grads = jax.jit(scalify(jax.value_and_grad(loss, has_aux=True), scales="static"))(params)
    assert found.keys() == linear_sizes(spec).keys()
    sizes = {path: float(asarray(x)) for path, x in found.items()}
    assert all(0.25 <= size <= 4 for size in sizes.values()), sizes
    for path, grad in jax.tree_util.tree_leaves_with_path(grads, is_leaf=is_scaled_array):
        assert grad.dtype == jnp.float16
        # Sums over tokens, which are not independent, exceed what the rules expect.
        assert 2.0**-4 <= float(jnp.sqrt(jnp.mean(jnp.square(grad.data.astype(jnp.float32))))) <= 2.0**5, path
