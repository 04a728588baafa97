"""A gradient taken outside of scalify is that taken inside: its backward pass is handed what it would compute there."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from zoo.measure import Subject, as_numbers, error

from scalify_core import PrecisionWarning, ScaledArray, as_scaled_array, asarray, scalify
from scalify_core.formats import BF16, FP16
from scalify_core.measured.residuals import Logical

HALF = jnp.float16
ROWS = 2.0 ** -jnp.round(jnp.linspace(0, 13, 16))[:, None]  # from 1 to 1e-4
LOUD = jnp.where(jnp.arange(16) == 3, 1e5, 1.0)[:, None]


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def layer_norm(h):
    h = h - h.mean(-1, keepdims=True)
    return h * lax.rsqrt(h.var(-1, keepdims=True) + 1e-12)


def rms_norm(h):
    return h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True))


def l2_norm(h):
    return h / jnp.linalg.norm(h, axis=-1, keepdims=True)


def normed(norm):
    return lambda w, x: jnp.mean((jnp.tanh(norm(x @ w["a"])) @ w["b"]) ** 2)


def info_nce(w, x):
    left, right = l2_norm(x @ w["a"]), l2_norm((x + 0.1 * x[::-1]) @ w["b"])
    return optax.softmax_cross_entropy_with_integer_labels(left @ right.T / 0.07, jnp.arange(16)).mean()


def scanned(w, x):
    def layer(h, w):
        return h + jnp.tanh(rms_norm(h) @ w), None

    return jnp.mean(rms_norm(lax.scan(layer, x, jnp.stack([w["a"], w["b"]]))[0]) ** 4)


def remat(w, x):
    return jnp.mean(jax.checkpoint(lambda w, x: rms_norm(jnp.tanh(rms_norm(x @ w["a"])) @ w["b"]) ** 3)(w, x))


def batched(w, x):
    return jnp.mean(jax.vmap(lambda row: jnp.sum(l2_norm(row @ w["a"]) @ w["b"]) ** 2)(x))


PROGRAMS = {
    "layer norm": normed(layer_norm),
    "rms norm": normed(rms_norm),
    "l2 norm": normed(l2_norm),
    "info_nce": info_nce,
    "scan": scanned,
    "remat": remat,
    "vmap": batched,
    "jit": jax.jit(normed(rms_norm)),
}
WEIGHTS = {"a": normal(0, 32, 32) / 6, "b": normal(1, 32, 32) / 6}


def worst(found, expected):
    found, expected = asarray(found), asarray(expected)
    return max(error(np.asarray(found[k], np.float64), np.asarray(expected[k], np.float64)) for k in expected)


def outside(fun):
    return jax.grad(lambda *args: asarray(scalify(fun)(*args)))


@pytest.mark.parametrize("sizes", [ROWS, LOUD], ids=["rows from 1 to 1e-4", "one loud token"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_far_apart_are_as_right_as_inside(name, sizes):
    fun, x = PROGRAMS[name], normal(2, 16, 32) * sizes
    w = as_scaled_array(WEIGHTS, dtype=HALF)
    found, inside = jax.jit(outside(fun))(w, x), jax.jit(scalify(jax.grad(fun)))(w, x)
    # Both round the gradient once, and may round an operand of its products once more.
    assert worst(found, inside) <= 3 * FP16.epsilon
    assert worst(found, jax.grad(fun)(asarray(w), x)) <= 4 * FP16.epsilon


def test_bf16_is_as_right_as_inside():
    fun, x, w = PROGRAMS["layer norm"], normal(2, 16, 32) * ROWS, as_scaled_array(WEIGHTS, dtype=jnp.bfloat16)
    assert worst(jax.jit(outside(fun))(w, x), jax.jit(scalify(jax.grad(fun)))(w, x)) <= 3 * BF16.epsilon


def test_a_batch_of_gradients_is_as_right_as_inside():
    fun, x, w = PROGRAMS["layer norm"], normal(2, 16, 32) * ROWS, as_scaled_array(WEIGHTS, dtype=HALF)
    xs = jnp.stack([x, -x, x[::-1]])
    each, plain = jax.vmap(outside(fun), (None, 0))(w, xs), jax.vmap(jax.grad(fun), (None, 0))(asarray(w), xs)
    assert worst(each, plain) <= 4 * FP16.epsilon


def test_gradients_of_gradients_are_right():
    """Where nothing cancels: what comes back to a residual in FP16 is FP16, too."""
    x, w = normal(2, 16, 32), as_scaled_array(WEIGHTS, dtype=HALF)

    def fun(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)

    def of_gradient(gradient, value):
        return lambda w, x: jnp.sum(jnp.sin(value(gradient(w, x)["a"])))

    expected = jax.grad(of_gradient(jax.grad(fun), lambda g: g))(asarray(w), x)
    for way in (jax.jit, lambda f: f):
        assert worst(way(jax.grad(of_gradient(outside(fun), asarray)))(w, x), expected) <= 8 * FP16.epsilon


def kept_by(fun, *args):
    _, pullback = jax.vjp(scalify(fun), *args)
    return jax.tree.leaves(pullback)


def test_what_products_alone_read_is_kept_as_they_read_it():
    """The operand of a product, of which nothing else is asked, but not tanh's result, of which 1 - y^2 is; and x."""
    w, x = as_scaled_array(WEIGHTS, dtype=HALF), normal(2, 16, 32)
    two = kept_by(lambda w, x: (x @ w["a"]) @ w["b"], w, as_scaled_array(x, dtype=HALF))
    assert {leaf.dtype for leaf in two if leaf.shape == (16, 32)} == {np.dtype(HALF)}
    one = kept_by(lambda w, x: jnp.tanh(x @ w["a"]) @ w["b"], w, as_scaled_array(x, dtype=HALF))
    assert sorted(leaf.dtype.itemsize for leaf in one if leaf.shape == (16, 32)) == [2, 2, 4]


def test_what_a_scan_keeps_of_its_turns_has_a_scale_for_each():
    def fun(ws, x):
        return jnp.sum(lax.scan(lambda h, w: (h @ w * 2.0**-15, None), x, ws)[0])

    ws = as_scaled_array(normal(3, 4, 8, 8), dtype=HALF)
    found, expected = jax.jit(outside(fun))(ws, normal(4, 8, 8)), jax.grad(fun)(asarray(ws), normal(4, 8, 8))
    assert worst(dict(enumerate(found)), dict(enumerate(expected))) <= 4 * FP16.epsilon
    assert np.dtype(HALF) in {leaf.dtype for leaf in kept_by(fun, ws, normal(4, 8, 8)) if leaf.shape == (4, 8, 8)}


def test_check_sees_in_the_backward_pass_what_it_sees_inside():
    far = 2.0 ** jnp.round(jnp.linspace(-40, 40, 16))[:, None]

    def fun(w, x):
        return jnp.sum(((x * far @ w["a"]) / far) ** 2)

    args = as_scaled_array((WEIGHTS, normal(2, 16, 32)), dtype=HALF)

    def texts(gradient):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            jax.block_until_ready(gradient(*args))
            jax.effects_barrier()
        return {str(w.message) for w in seen if issubclass(w.category, PrecisionWarning)}

    for gradient in (
        scalify(jax.grad(fun), check=True),
        jax.grad(lambda *args: asarray(scalify(fun, check=True)(*args))),
    ):
        assert [text for text in texts(gradient) if "dot_general of the backward pass: in float16" in text]


def test_a_logical_value_is_a_tree_of_one_array():
    x = Logical(jnp.ones(3), np.dtype(HALF))
    leaves, tree = jax.tree.flatten(x)
    assert len(leaves) == 1
    assert jax.tree.unflatten(tree, leaves).dtype == HALF


@pytest.fixture
def _as_users_have_it():
    with jax.numpy_rank_promotion("allow"):
        yield


OTHERS = [pytest.param(name, marks=pytest.mark.whole) for name in ("contrastive", "moe", "rwkv")]


@pytest.mark.usefixtures("_as_users_have_it")
@pytest.mark.parametrize("name", ["llama_scan", *OTHERS])
def test_models_of_the_zoo_are_as_right_as_inside(name):
    subject = Subject(name, {"moe": 1, "rwkv": 1}.get(name))
    params, batch = as_scaled_array((subject.case.params, subject.case.batch), dtype=HALF)
    loss = scalify(subject.case.loss)

    def value(params):
        out = loss(params, batch)
        return asarray(out[0] if subject.case.has_aux else out)

    found, inside = as_numbers(jax.jit(jax.grad(value))(params)), subject.gradient("fp16", "dynamic")
    for path, reference in subject.reference.items():
        own, limit = error(inside[path], reference), 3 * FP16.epsilon
        assert error(found[path], reference) <= 2 * own + limit, path


def test_static_scales_keep_what_they_kept():
    w = {"a": ScaledArray(WEIGHTS["a"].astype(HALF), 1.0)}
    _, pullback = jax.vjp(scalify(lambda w, x: jnp.tanh(x @ w["a"]), scales="static"), w, normal(2, 16, 32))
    kept = [leaf.dtype for leaf in jax.tree.leaves(pullback) if leaf.shape == (16, 32)]
    assert HALF in kept
