"""Gradients outside of scalify of arguments with run-time scales: what JAX adds leaf by leaf is right, or NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from scalify_core import PrecisionWarning, ScaledArray, as_scaled_array, asarray, optim, scalify, weights
from scalify_core.cotangents import OF_ONE, marked, number

HALF = jnp.float16
told_elsewhere = pytest.mark.filterwarnings("ignore:.*reads as NaN:scalify_core.PrecisionWarning")
X = jax.random.normal(jax.random.key(0), (4, 8))
XS = jnp.stack([X, 2 * X, 3 * X])
W = 0.01 * jax.random.normal(jax.random.key(1), (8, 8))
ROUNDINGS = {jnp.float32: 1e-6, jnp.bfloat16: 2.0**-6, HALF: 2.0**-9}


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w))


def outside(w, x, scales="auto"):
    return asarray(scalify(loss, scales=scales)(w, x))


def single(f, value):
    return lambda w: f(w, X)


def two_calls(f, value):
    return lambda w: f(w, X) + f(w, 2 * X)


def scan_over_micro_batches(f, value):
    return lambda w: lax.scan(lambda total, x: (total + f(w, x), None), 0.0, XS)[0]


def mean_over_vmap(f, value):
    return lambda w: jnp.mean(jax.vmap(f, (None, 0))(w, XS))


def with_l2(f, value):
    return lambda w: f(w, X) + jnp.sum(value(w) ** 2)


USES = [two_calls, scan_over_micro_batches, mean_over_vmap, with_l2]


def both(use, w, scales="auto"):
    found = jax.jit(jax.grad(use(lambda w, x: outside(w, x, scales), asarray)))(w)
    return np.asarray(asarray(found)), np.asarray(jax.grad(use(loss, lambda w: w))(asarray(w)))


def run(fun, *args):
    jax.block_until_ready(fun(*args))
    jax.effects_barrier()


def relative(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("scales", ["auto", "static"])
@pytest.mark.parametrize("dtype", ROUNDINGS)
def test_one_use_is_right(dtype, scales):
    assert relative(*both(single, as_scaled_array(W, dtype=dtype), scales)) < ROUNDINGS[dtype]


@pytest.mark.parametrize("scales", ["auto", "static"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("use", USES)
def test_several_uses_add_up_where_data_has_the_range_of_float32(use, dtype, scales):
    assert relative(*both(use, as_scaled_array(W, dtype=dtype), scales)) < ROUNDINGS[dtype]


@told_elsewhere
@pytest.mark.parametrize("dtype", [HALF, jnp.float8_e5m2])
@pytest.mark.parametrize("use", USES)
def test_several_uses_of_narrow_data_are_not_a_number(use, dtype):
    found, _ = both(use, as_scaled_array(W, dtype=dtype))
    assert np.isnan(found).all()


def test_a_use_without_gradient_counts_for_nothing():
    w = as_scaled_array(W, dtype=HALF)
    found = jax.grad(lambda w: outside(w, X) + outside(w, 0 * X))(w)
    assert relative(asarray(found), jax.grad(loss)(asarray(w), X)) < ROUNDINGS[HALF]


@pytest.mark.parametrize("dtype", ROUNDINGS)
def test_an_argument_that_is_given_twice_is_one(dtype):
    w = as_scaled_array(W, dtype=dtype)
    tied = scalify(lambda p, x: loss(p["a"], x) + loss(p["b"], 2 * x))
    found = jax.jit(jax.grad(lambda w: asarray(tied({"a": w, "b": w}, X))))(w)
    expected = jax.grad(lambda w: loss(w, X) + loss(w, 2 * X))(asarray(w))
    assert relative(asarray(found), expected) < ROUNDINGS[dtype]


@pytest.mark.parametrize("dtype", ROUNDINGS)
def test_steps_with_a_gradient_each_in_a_scan_are_right(dtype):
    w = as_scaled_array(W, dtype=dtype)
    update = scalify(lambda w, g: w - 0.01 * g)
    found, _ = lax.scan(lambda w, x: (update(w, jax.grad(outside)(w, x)), None), w, XS)
    plain = asarray(w)
    for x in XS:
        plain = plain - 0.01 * jax.grad(loss)(plain, x)
    assert relative(asarray(found), plain) < 4 * ROUNDINGS[dtype]


def test_a_chain_of_scalified_functions_whose_middle_is_used_twice_is_right():
    chain = scalify(jnp.tanh), scalify(lambda y: jnp.sum(y**2)), scalify(lambda y: jnp.sum(jnp.sin(y)))

    def found(w):
        y = chain[0](w)
        return asarray(chain[1](y)) + asarray(chain[2](y))

    w = as_scaled_array(W)
    expected = jax.grad(lambda w: jnp.sum(jnp.tanh(w) ** 2) + jnp.sum(jnp.sin(jnp.tanh(w))))(W)
    np.testing.assert_allclose(asarray(jax.grad(found)(w)), expected, rtol=1e-5)


def test_gradients_can_be_averaged_leaf_by_leaf_where_they_add_up():
    w = as_scaled_array(W)
    total = jax.tree.map(jnp.zeros_like, w)
    for x in XS:
        total = jax.tree.map(jnp.add, total, jax.grad(outside)(w, x))
    mean = jax.tree.map(lambda g: g / len(XS), total)
    expected = sum(jax.grad(loss)(W, x) for x in XS) / len(XS)
    np.testing.assert_allclose(asarray(mean), expected, rtol=1e-5)


@told_elsewhere
@pytest.mark.parametrize("dtype", [jnp.float32, HALF])
def test_other_arithmetic_on_leaves_is_not_a_number(dtype):
    w = as_scaled_array(W, dtype=dtype)
    gradient = jax.grad(outside)(w, X)
    descent = jax.tree.map(lambda p, g: p - 0.1 * g, w, gradient)
    adam = optax.adam(1e-3)
    updates, _ = adam.update(gradient, adam.init(w), w)
    for wrong in (descent, optax.apply_updates(w, updates), jax.tree.map(lambda g: 0.1 * g, gradient)):
        assert np.isnan(asarray(wrong)).all()
        assert np.isnan(asarray(scalify(lambda x: 2 * x)(wrong))).all()
    assert float(optax.global_norm(gradient)) > 2.0**39  # so that it is seen


@told_elsewhere
def test_leaves_of_arguments_that_became_no_powers_of_two_are_not_a_number():
    a, b = as_scaled_array(W, jnp.float32(2)), as_scaled_array(W, jnp.float32(0.5))
    assert np.isnan(asarray(jax.tree.map(lambda x, y: (x + y) / 2, a, b))).all()


@pytest.mark.parametrize("dtype", [jnp.float32, HALF])
def test_optimisers_and_norms_inside_take_gradients_from_outside(dtype):
    w = as_scaled_array(W, dtype=dtype)
    gradient, plain = jax.grad(outside)(w, X), jax.grad(loss)(asarray(w), X)
    norm = asarray(scalify(optax.global_norm)(gradient))
    np.testing.assert_allclose(norm, optax.global_norm(plain), rtol=ROUNDINGS[dtype])
    found = scalify(optax.apply_updates)(w, gradient)
    np.testing.assert_allclose(asarray(found), asarray(w) + plain, rtol=0, atol=4 * ROUNDINGS[dtype])


def test_gradients_through_casts_and_indices_are_of_the_format_of_what_they_are_of():
    for dtype, other in ((HALF, jnp.float32), (jnp.float32, HALF)):
        w = as_scaled_array(W, dtype=dtype)
        found = jax.grad(lambda w, to=other: jnp.sum(asarray(w.astype(to)) ** 2))(w)
        np.testing.assert_allclose(asarray(found), 2 * asarray(w), rtol=2.0**-9)
    layers = ScaledArray(jnp.stack([W, W]).astype(HALF), jnp.asarray([1.0, 2.0]))
    found = jax.grad(lambda p: jnp.sum(asarray(p[0])) + jnp.sum(3 * asarray(p[1])))(layers)
    np.testing.assert_array_equal(asarray(found)[:, 0, 0], [1, 3])


def test_marks_say_their_scales_and_no_sum_or_mean_of_them_is_one():
    scales = 2.0 ** np.arange(-125, 127, dtype=np.float32)
    marks = marked(jnp.asarray(scales))
    for dtype in (jnp.float32, HALF):
        np.testing.assert_array_equal(number(marks, np.dtype(dtype)), scales)
        np.testing.assert_array_equal(number(jnp.asarray(scales), np.dtype(dtype)), scales)
    assert float(marked(jnp.float32(1))) == OF_ONE
    narrow, wide = np.dtype(HALF), np.dtype(np.float32)
    marks = np.asarray(marks)
    assert np.isnan(number(marks[:, None] + marks[None], narrow)).all()
    means = np.asarray(number(marks[:, None] / 2 + marks[None] / 2, narrow))
    assert (np.isnan(means) | np.eye(len(scales), dtype=bool)).all()
    assert (number(OF_ONE * np.arange(1.0, 1000, dtype=np.float32), wide) == 1).all()
    assert np.isnan(number(marks[marks != OF_ONE] * 2, wide)).all()


@pytest.mark.parametrize("count", [3, 4, 5, 8, 16, 64])
def test_a_long_mean_of_marks_is_none_though_it_is_rounded(count):
    """Two marks an octave above and below the others: what a smooth check would differ by is less than the rounding."""
    scales = np.full((200, count), 2.0 ** np.arange(-100, 100, dtype=np.float32)[:, None])
    scales[:, 0], scales[:, 1] = scales[:, 0] * 2, scales[:, 1] / 2
    marks, narrow = np.asarray(marked(jnp.asarray(scales))), np.dtype(HALF)
    for mean in (marks.sum(axis=1) / np.float32(count), (marks / np.float32(count)).sum(axis=1)):
        assert np.isnan(number(jnp.asarray(mean), narrow)).all()


AT_ZERO = {
    "difference": lambda g, h: jax.tree.map(jnp.subtract, g, h),
    "maximum": lambda g, h: jax.tree.map(lambda x: jnp.maximum(x, 0), g),
    "relu": lambda g, h: jax.tree.map(jax.nn.relu, g),
    "clip": lambda g, h: jax.tree.map(lambda x: jnp.clip(x, 0, 1e9), g),
    "where": lambda g, h: jax.tree.map(lambda x: jnp.where(x > 0, x, 0), g),
    "product with zero": lambda g, h: ScaledArray.tree_unflatten(None, (g.data, 0 * g.tree_flatten()[0][1])),
}
READ = {
    "asarray": asarray,
    "scalify": lambda x: asarray(scalify(lambda x: x * 1.0)(x)),
    "static": lambda x: asarray(scalify(lambda x: x * 1.0, scales="static")(x)),
    "product": lambda x: asarray(scalify(lambda x: jnp.eye(8) @ x)(x)),
    "scale": lambda x: x.data * x.scale,
    "rescale": lambda x: asarray(x.rescale(1.0)),
    "astype": lambda x: asarray(x.astype(jnp.float32)),
    "elements": lambda x: asarray(x[:]),
    "jit": lambda x: jax.jit(asarray)(x),
    "update": lambda x: weights.apply_updates(jnp.zeros((8, 8)), x, rounding="nearest", seed=0, step=0),
}


@told_elsewhere
@pytest.mark.parametrize("kind", AT_ZERO)
@pytest.mark.parametrize("way", READ)
@pytest.mark.parametrize("dtype", [jnp.float32, HALF])
def test_data_beside_a_leaf_that_became_zero_is_no_number(kind, way, dtype):
    w = as_scaled_array(W, dtype=dtype)
    wrong = AT_ZERO[kind](jax.grad(outside)(w, X), jax.grad(outside)(w, 1.01 * X))
    found, left = np.asarray(READ[way](wrong), np.float32), np.asarray(wrong.data) != 0
    assert left.any()
    assert np.isnan(found[left]).all()


@pytest.mark.parametrize("shape", [(), (4,), (4, 1, 1), (1, 4, 1)])
def test_each_leaf_is_beside_its_own_data(shape):
    data, leaf = jnp.ones((4, 4, 2)).at[:, 1].set(0).at[2].set(0), jnp.zeros(shape)
    x = ScaledArray.tree_unflatten(None, (data, leaf))
    found = np.isnan(jax.jit(asarray)(x))
    np.testing.assert_array_equal(found | (np.asarray(data) == 0), True)
    if len(shape) == 3 or shape == (4,):
        axes = tuple(axis for axis in range(3) if axis >= len(shape) or shape[axis] == 1)
        np.testing.assert_array_equal(found.any(axes), (np.asarray(data) != 0).any(axes))
    assert np.isnan(x.scale).any()
    assert (np.asarray(jax.jit(asarray)(ScaledArray.tree_unflatten(None, (0 * data, leaf)))) == 0).all()


def test_zeros_are_zeros():
    zeros = jax.tree.map(jnp.zeros_like, as_scaled_array({"w": W}, dtype=HALF))
    for way in (asarray, lambda x: asarray(scalify(lambda x: jax.tree.map(jnp.sin, x))(x))):
        np.testing.assert_array_equal(way(zeros)["w"], np.zeros_like(W))


def test_who_reads_what_is_no_number_is_told_by_name():
    gradient = {"layer": {"w": jax.grad(outside)(as_scaled_array(W, dtype=HALF), X)}}
    assert np.isfinite(asarray(gradient)["layer"]["w"]).all()  # warnings are errors in these tests
    for wrong in (jax.tree.map(lambda g: 0.1 * g, gradient), jax.tree.map(lambda g: jnp.maximum(g, 0), gradient)):
        with pytest.warns(PrecisionWarning, match=r"asarray: \['layer'\]\['w'\] reads as NaN.*scalify\(jax.grad"):
            asarray(wrong)
        checked = jax.jit(scalify(lambda tree: jnp.sum(tree["layer"]["w"] * 2), check=True))
        with pytest.warns(PrecisionWarning, match=r"argument: tree\['layer'\]\['w'\] reads as NaN"):
            run(checked, wrong)
    run(checked, gradient)
    assert np.isnan(asarray(as_scaled_array(jnp.full(3, jnp.nan)))).all()  # a number that is none is not told


@pytest.mark.parametrize("dtype", [jnp.float32, HALF])
def test_weights_that_optax_has_updated_leaf_by_leaf_are_told_where_they_are_used_next(dtype):
    params = {"w": as_scaled_array(W, dtype=dtype)}
    loss_of = scalify(jax.value_and_grad(lambda params: jnp.sum(params["w"] ** 2)))
    _, gradient = loss_of(params)
    sgd = optax.sgd(0.1)
    updates, _ = sgd.update(gradient, sgd.init(params))
    updated = optax.apply_updates(params, updates)
    with pytest.warns(
        PrecisionWarning, match=r"argument: params\['w'\] reads as NaN.*use weights.apply_updates and optim"
    ):
        loss, _ = loss_of(updated)
    assert np.isnan(asarray(loss))
    assert "callback" not in str(jax.make_jaxpr(loss_of)(updated))  # at no cost where it is compiled
    updates, _ = sgd.update(asarray(gradient), sgd.init(params))
    right = scalify(optax.apply_updates)(params, updates)
    assert np.isfinite(asarray(loss_of(right)[0]))


@pytest.mark.parametrize("way", [lambda f: f, jax.jit])
def test_who_forgets_the_scaled_state_is_told_also_inside_of_jit(way):
    params = {"w": as_scaled_array(W, dtype=HALF), "b": as_scaled_array(W[:1], dtype=HALF)}
    gradient_of = scalify(jax.grad(lambda params: jnp.sum((params["w"] + params["b"]) ** 2)))

    def step(tx, params, state):
        updates, state = tx.update(gradient_of(params), state, params)
        return weights.apply_updates(params, updates, rounding="stochastic", seed=0, step=0), state

    adam = optax.adam(1e-2)
    with pytest.warns(PrecisionWarning, match=r"the update: \['b'\] \(and 1 more\) reads as NaN.*optim.scaled_state"):
        run(way(functools.partial(step, adam)), params, adam.init(params))
    scaled = optim.scaled_state(adam, mu=HALF, nu=HALF, seed=0)
    for tx in (scaled, adam._replace(update=scalify(adam.update))):  # as it is meant: without a callback
        assert "callback" not in str(jax.make_jaxpr(functools.partial(step, tx))(params, tx.init(params)))


@pytest.mark.parametrize("way", [lambda f: f, jax.jit])
@pytest.mark.parametrize("dtype", [jnp.float32, HALF])
def test_a_gradient_that_is_built_anew_from_its_leaves_is_the_same(way, dtype):
    w = as_scaled_array(W, dtype=dtype)
    for x in (X, 1e-4 * X):
        gradient = jax.grad(outside)(w, x)
        anew = way(lambda g: asarray(ScaledArray(*jax.tree.leaves(g))))(gradient)
        np.testing.assert_array_equal(anew, asarray(gradient))
        np.testing.assert_allclose(anew, jax.grad(loss)(asarray(w), x), atol=2 * ROUNDINGS[dtype] * jnp.abs(anew).max())


def test_a_scale_on_a_device_that_is_no_power_of_two_is_not_a_number():
    x = ScaledArray(X, jnp.float32(3))
    assert np.isnan(x.scale)
    assert np.isnan(jax.jit(asarray)(x)).all()
