"""Each function and its hand-written gradient against the textbook formula
differentiated by JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import F32, normal
from numpy.testing import assert_allclose, assert_array_equal

import scalify_core as sc
from scalify_core.ops.functional import attention, losses, norms
from scalify_core.ops.functional.embedding import _embedding_bwd, _embedding_bwd_cuda

HALF = jnp.float16
EPS = float(jnp.finfo(F32).eps)


def layer_norm(x, w, b):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * w[
        None, None
    ] + b[None, None]


def rms_norm(x, w):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w[None, None]


def full_attention(causal=True, segments=None, window=1000):
    def fun(q, k, v):
        # as many heads as queries
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        logits = jnp.einsum("bthk,bshk->bhts", q, k) / np.sqrt(q.shape[-1])
        query, key = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None]
        mask = ((key <= query) & (key > query - window) | (not causal))[None, None]
        if segments is not None:
            mask = mask & (segments[:, None, :, None] == segments[:, None, None, :])
        weights = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf))
        return jnp.einsum("bhts,bshk->bthk", weights, v)

    return fun


def rotated(x):
    """Each pair of channels as a complex number, times one of size 1."""
    half = x.shape[-1] // 2
    z = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * ANGLES)[None, :, None]
    return jnp.concatenate([z.real, z.imag], axis=-1)


def cross_entropy(vocab_size):
    def fun(logits, targets):
        log_p = jax.nn.log_softmax(logits[:, :vocab_size])
        return -log_p[jnp.arange(len(targets)), targets].mean()

    return fun


X, W, B = normal(0, 3, 5, 8), normal(1, 8), normal(2, 8)
QKV = tuple(normal(i, 2, 150, 2, 8) for i in range(3))
GROUPED = normal(0, 2, 150, 6, 8), *(normal(i, 2, 150, 2, 8) for i in (1, 2))
# NumPy: both workers import this file, and one of them runs it.
ANGLES = np.float32(np.arange(150)[:, None] * 100 ** -(np.arange(4)[None] / 4))
SEGMENTS = np.int32(np.repeat([[0, 1, 2], [3, 3, 1]], 50, axis=1))
LOGITS, TARGETS = normal(3, 30, 24) * 3, np.arange(30, dtype=np.int32) % 20
HIDDEN, HEAD = normal(4, 30, 8), normal(5, 24, 8)
IDS = np.int32([[0, 3, 3], [7, 3, 0]])

CASES = {
    "layer_norm": (sc.functional.layer_norm, layer_norm, (X, W, B)),
    "rms_norm": (sc.functional.rms_norm, rms_norm, (X, W)),
    "gelu": (sc.functional.gelu, lambda x: jax.nn.gelu(x, approximate=True), (X,)),
    "gelu_biased": (
        sc.functional.gelu,
        lambda x, b: jax.nn.gelu(x + b[None, None], approximate=True),
        (X, B),
    ),
    "swiglu": (sc.functional.swiglu, lambda g, u: jax.nn.silu(g) * u, (X, X[::-1])),
    "attention_more_keys": (
        lambda *a: sc.functional.attention(*a, causal=False),
        full_attention(causal=False),
        (QKV[0][:, :7], *QKV[1:]),
    ),
    "attention_segments": (
        lambda *a: sc.functional.attention(*a, segments=SEGMENTS),
        full_attention(segments=SEGMENTS),
        QKV,
    ),
    "attention_window": (
        lambda *a: sc.functional.attention(*a, window=3),
        full_attention(window=3),
        GROUPED,
    ),
    "rope": (
        lambda x: sc.functional.rope(x, jnp.cos(ANGLES), jnp.sin(ANGLES)),
        rotated,
        QKV[:1],
    ),
    "cross_entropy": (
        sc.functional.cross_entropy,
        cross_entropy(24),
        (LOGITS, TARGETS),
    ),
    **{
        f"linear_cross_entropy_chunk_{chunk}": (
            lambda *a, chunk=chunk: sc.functional.linear_cross_entropy(
                *a, vocab_size=20, chunk=chunk
            ),
            lambda x, head, targets: cross_entropy(20)(x @ head.T, targets),
            (HIDDEN, HEAD, TARGETS),
        )
        # one chunk, five unrolled with none left over, a scan of 15
        for chunk in (None, 7, 2)
    },
    "embedding": (
        sc.functional.embedding,
        lambda table, ids: table[ids],
        (HIDDEN, IDS),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_equal_the_textbook_formula(name):
    """The values in FP32; results and gradients of FP16 operands are FP16."""
    fun, reference, args = CASES[name]
    argnums = [i for i, x in enumerate(args) if x.dtype == F32]

    def both(f, *args):
        def loss(*args):
            out = f(*args)
            weights = jnp.cos(jnp.arange(out.size, dtype=F32)).reshape(out.shape)
            return jnp.sum(out * weights), out

        grads, out = jax.grad(loss, argnums, has_aux=True)(*args)
        return out, *grads

    actual, expected = (
        jax.jit(functools.partial(both, f))(*args) for f in (fun, reference)
    )
    for a, b in zip(actual, expected, strict=True):
        # Sums of up to 150 products of terms of the size of the largest: a random walk
        # of rounding errors, doubled.
        limit = EPS * 2 * np.sqrt(150) * max(1.0, np.abs(b).max())
        assert_allclose(a, b, rtol=0, atol=limit)
    narrow = [a.astype(HALF) if a.dtype == F32 else a for a in args]
    out, *grads = jax.eval_shape(functools.partial(both, fun), *narrow)
    assert out.dtype == (F32 if "cross_entropy" in name else HALF)
    assert {grad.dtype.type for grad in grads} == {HALF}


@pytest.mark.parametrize("scales", [None, "auto", "static"])
@pytest.mark.parametrize("name", ["gelu", "linear_cross_entropy_chunk_2"])
def test_a_composite_runs_while_jit_is_disabled(name, scales):
    fun, _, (x, *rest) = CASES[name]
    both = jax.value_and_grad(lambda x, *rest: jnp.sum(jnp.sin(fun(x, *rest))))
    if scales is not None:
        both, x = sc.scalify(both, scales=scales), sc.as_scaled_array(x)
    with jax.disable_jit():
        actual = sc.asarray(both(x, *rest))
    for a, b in zip(actual, sc.asarray(jax.jit(both)(x, *rest)), strict=True):
        # Alone, an operation is not fused with the next.
        assert_allclose(a, b, rtol=0, atol=32 * EPS * max(1.0, float(jnp.abs(b).max())))


def test_linear_cross_entropy_never_holds_the_logits_of_the_batch():
    n, d, v = 512, 16, 1024
    args = normal(0, n, d), normal(1, v, d), jnp.zeros(n, jnp.int32)
    loss = lambda x, head, t: sc.functional.linear_cross_entropy(x, head, t, chunk=32)
    temp = (
        jax.jit(jax.grad(loss, (0, 1)))
        .lower(*args)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
    )
    assert temp < n * v * 4 / 2


@pytest.mark.parametrize(("tokens", "chunk"), [(60, 7), (1009, 10), (1009, 200)])
def test_no_chunk_of_a_loss_has_more_tokens_than_asked_for(tokens, chunk):
    """1009 is a prime: no number of equal chunks takes all of its tokens."""
    sizes = []

    def step(total, x, targets):
        sizes.append(len(x))
        return total + jnp.sum(targets), x

    x, targets = normal(0, tokens, 1), jnp.arange(tokens)
    total, y = losses._over_chunks(step, jnp.int32(0), x, targets, chunk)
    assert max(sizes) <= chunk
    assert total == tokens * (tokens - 1) // 2
    assert_array_equal(y, x)


def test_narrow_logits_beyond_the_format_are_its_largest_number():
    x = jnp.full((4, 16), 300, HALF)
    head = jnp.full((24, 16), -300, HALF).at[0].set(300)
    fun = lambda x, head: sc.functional.linear_cross_entropy(
        x, head, jnp.arange(4), narrow_logits=True
    )
    loss, gradients = jax.value_and_grad(fun, (0, 1))(x, head)
    assert float(loss) == pytest.approx(2 * 65504 * 3 / 4)
    assert all(jnp.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize(("mean", "eps"), [(0.0, 1e-5), (100.0, 2.0**-126)])
def test_layer_norm_for_cuda_equals_that_of_other_programs(mean, eps):
    x, g = normal(0, 6, 96) + mean, normal(1, 6, 96)
    weight, bias = normal(2, 96), normal(3, 96)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def both(forward, backward, x, weight, bias, g):
        out, residuals = forward(x, weight, bias, eps=eps)
        return out, *backward(residuals, g, eps=eps)

    args = x, weight, bias, g
    of_cuda = both(norms._layer_norm_fwd_cuda, norms._layer_norm_bwd_cuda, *args)
    of_others = both(norms._layer_norm_fwd, norms._layer_norm_bwd, *args)
    for a, b in zip(of_cuda, of_others, strict=True):
        # Means of 96 numbers of the size of the mean, before they are subtracted.
        assert_allclose(a, b, rtol=0, atol=EPS * 96 * (1 + mean) * np.abs(b).max())


def test_layer_norm_of_equal_elements_of_16_bits_is_exactly_zero_for_cuda_too():
    x = jnp.asarray(np.float16([[0], [-10.7], [100], [9e3]])) * jnp.ones(
        (1, 1280), HALF
    )
    for fwd in (norms._layer_norm_fwd_cuda, norms._layer_norm_fwd):
        assert_array_equal(fwd(x, jnp.ones(1280), None, eps=1e-5)[0], 0)


def test_embedding_gradient_for_cuda_equals_the_scatter_add():
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 30, (4, 16)), jnp.int32)
    g = normal(1, 4, 16, 8)
    (expected, _), (actual, _) = (
        jax.jit(f)((HIDDEN, ids), g) for f in (_embedding_bwd, _embedding_bwd_cuda)
    )
    assert_allclose(actual, expected, atol=64 * EPS)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8])
def test_ids_of_one_row_add_up_in_it_and_those_outside_the_table_nowhere(dtype):
    """-1 and 29 are one row; so are -30 and 0. Of bytes, most are outside."""
    ids = [-1, 29, 0, -30, -31, 30, 31, 29, -61, 3, -100, *[5] * 300]
    ids = jnp.asarray(ids).astype(dtype)
    table, g = jnp.asarray(HIDDEN), normal(1, 311, 8)
    rows, pullback = jax.vjp(lambda table: jnp.take(table, ids, axis=0), table)
    assert_array_equal(sc.functional.embedding(table, ids), rows)
    for backward in (_embedding_bwd, _embedding_bwd_cuda):
        actual, _ = backward((table, ids), g)
        assert_allclose(actual, *pullback(g), atol=300 * EPS)


def test_gradients_of_attention_saturate_in_fp16():
    """The gradient of the logits, beyond 65504 here, is rounded to FP16 before it meets
    queries and keys."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, g = (
        jax.random.normal(key, (1, 8, 2, 16)).astype(HALF) * scale
        for key, scale in zip(keys, (0.0, 0.0, 2.0**10, 2.0**10), strict=True)
    )
    _, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, causal=True), q, k, v)
    for gradient in pullback(g):
        assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize(("chunk", "masked"), [(None, True), (7, False)])
def test_linear_cross_entropy_of_cuda_programs_is_that_of_others(chunk, masked):
    """The code that is lowered for CUDA, run on a CPU."""
    x = (4 * HIDDEN).at[3].multiply(100)  # a row whose logits are far apart
    targets = np.where(masked & (np.arange(30) == 5), np.int32(-1), TARGETS)
    settings = losses._Settings(20, chunk, masked, narrow=False)
    of_cuda, of_others = (
        jax.jit(functools.partial(fwd, settings=settings, logit_scale=0.5))(
            x, 4 * HEAD, targets
        )
        for fwd in (
            losses._linear_cross_entropy.cuda[1],
            losses._linear_cross_entropy.fwd,
        )
    )
    # Sums of 20 exponentials and of 30 tokens, whose largest term is 1.
    for a, b in zip(jax.tree.leaves(of_cuda), jax.tree.leaves(of_others), strict=True):
        assert_allclose(a, b, rtol=2**-18, atol=2**-18)


REFUSED = {
    "7 queries and 150 keys": lambda f: f.attention(QKV[0][:, :7], *QKV[1:]),
    "3 heads of queries, 2 of keys, 2 of values": lambda f: f.attention(
        *(normal(0, 1, 4, heads, 8) for heads in (3, 2, 2))
    ),
    r"expected \(150, 4": lambda f: f.rope(QKV[0], *[jnp.ones((149, 4))] * 2),
}


@pytest.mark.parametrize("message", REFUSED)
def test_shapes_that_do_not_fit_are_refused(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message](sc.functional)
