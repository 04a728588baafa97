"""The promises of `scalify` about its arguments, its results and the compiled program."""

import functools
import gc
import re
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from beside_plain import F32, HALF
from draws import draw_normal
from jax.experimental.xla_metadata import set_xla_metadata
from numpy.testing import assert_allclose, assert_array_equal
from propagated import scalify

from scalify_core import ScaledArray, as_scaled_array, asarray
from scalify_core.interpreter import transform

X = draw_normal(0, (16, 64))
PARAMS = {
    "w1": draw_normal(1, (64, 128)) / 8,
    "w2": draw_normal(2, (128, 8)) / 11,
}
Y = draw_normal(3, (16, 8))


def loss_fn(params, x, y):
    return jnp.mean((jax.nn.relu(x @ params["w1"]) @ params["w2"] - y) ** 2)


def test_results_that_depend_on_scaled_inputs_are_scaled_and_others_are_not():
    def fun(x, n, plain):
        return x * 2, x > 0, n + 1, plain * 2, jnp.ones(3)

    out = scalify(fun)(as_scaled_array(X, 1.0), jnp.arange(3), X)
    are_scaled = [isinstance(x, ScaledArray) for x in out]
    assert are_scaled == [True, False, False, False, False]
    assert out[1].dtype == bool


def test_data_format_is_the_promotion_of_the_scaled_operands():
    half, single = as_scaled_array(X, 1.0, dtype=HALF), as_scaled_array(X, 1.0)
    assert scalify(jnp.add)(half, half).dtype == HALF
    assert scalify(jnp.add)(half, single).dtype == F32
    assert scalify(jnp.add)(half, X).dtype == HALF  # a plain array has no say
    assert scalify(lambda x: x.astype(jnp.bfloat16))(half).dtype == jnp.bfloat16


def test_keyword_arguments_and_those_that_are_no_arrays():
    def fun(x, mode, *, y, power=1):
        assert (mode, type(power)) == ("sum", int)
        return (x + y) ** power

    s = as_scaled_array(X, 1.0)
    squared = scalify(functools.partial(fun, power=2))
    for actual in (squared(s, "sum", y=s), squared(s, mode="sum", y=s)):
        assert_allclose(asarray(actual), (X + X) ** 2, rtol=1e-6)


def test_scaled_arrays_that_the_function_makes_are_plain_to_what_it_returns():
    fun = lambda x: (as_scaled_array(x * 3, 2.0), as_scaled_array(x * 3))
    for x in scalify(fun)(as_scaled_array(X, 0.5)):
        assert not isinstance(x.data, ScaledArray)
        assert_array_equal(asarray(x), 3 * X)


def test_names_and_metadata_are_preserved():
    def fun(x, w):
        with jax.named_scope("outer"):
            x = jax.jit(lambda x: jax.named_scope("inner")(jnp.tanh)(x))(x @ w)
        with set_xla_metadata(mark="here"):
            return jnp.sin(x).sum()

    args = as_scaled_array((X, PARAMS["w1"]), 1.0)
    text = jax.jit(scalify(jax.grad(fun))).lower(*args).as_text(debug_info=True)
    for pattern in (r"outer.*/dot_general", r"inner.*/tanh", 'mark = "here"'):
        assert re.search(pattern, text)


def test_donated_scaled_arrays_are_reused():
    step = jax.jit(scalify(lambda x: x * 3.0), donate_argnums=0)
    compiled = step.lower(as_scaled_array(X, F32(1))).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= X.nbytes


def float_operations(jaxpr):
    """Count the operations on float arrays (not scalars), except for exact
    multiplications by powers of two."""
    counts = Counter()
    for eqn in jaxpr.eqns:
        inner = [p for p in eqn.params.values() if hasattr(p, "eqns")]
        constants = [getattr(v, "val", None) for v in eqn.invars]
        is_power = any(c is not None and np.frexp(abs(c))[0] == 0.5 for c in constants)
        aval = eqn.outvars[0].aval
        if inner:
            counts += sum(map(float_operations, inner), Counter())
        elif aval.ndim and jnp.issubdtype(aval.dtype, jnp.floating):
            counts[eqn.primitive.name] += not (eqn.primitive.name == "mul" and is_power)
    return counts


def test_static_scales_leave_only_powers_of_two_and_no_argument_in_the_program():
    def step(params, x, y):
        gradient = jax.grad(loss_fn)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    scaled = as_scaled_array(PARAMS, 0.125), *as_scaled_array((X, Y), 1.0)
    program = jax.jit(scalify(step))
    actual = float_operations(program.trace(*scaled).jaxpr)
    plain = float_operations(jax.jit(step).trace(PARAMS, X, Y).jaxpr)
    assert actual.total() <= plain.total(), (actual - plain, plain - actual)
    assert all(actual[name] <= plain[name] for name in ("dot_general", "add", "div"))
    lines = program.lower(*scaled).as_text().splitlines()
    main = next(line for line in lines if "@main" in line)
    assert "tensor<f32>," not in main.split("->")[0]


def test_clipping_by_the_global_norm_is_a_program_in_proportion_to_the_tensors():
    """XLA may repeat the scales of a sum, each of which follows from that before, in
    all that reads them."""
    clip = optax.clip_by_global_norm(1.0)
    clipped = jax.jit(scalify(lambda g: clip.update(g, optax.EmptyState())[0]))

    def instructions(n):
        grads = [ScaledArray(jnp.ones((8, 8), HALF), F32(2.0**-i)) for i in range(n)]
        return clipped.lower(grads).compile().as_text().count(" = ")

    # of a square's growth it would be four times as many
    assert instructions(12) < 3 * instructions(6)


@pytest.mark.parametrize("scale", [2.0**9, F32(2.0**9)])
def test_a_power_of_two_moves_the_scale_and_no_data(scale):
    x = ScaledArray(X.astype(HALF), scale)
    for power in (2.0**-20, 1.0, 2.0**20):
        out = scalify(lambda x, power=power: x * power)(x)
        assert float(out.scale) == power * 2.0**9
        assert_array_equal(out.data, x.data)


def test_tracing_leaves_the_garbage_collector_as_it_was():
    def fails(x):
        assert not gc.isenabled()
        raise RuntimeError("inside")

    was = gc.isenabled()
    try:
        for enabled, change in ((False, gc.disable), (True, gc.enable)):
            change()
            with pytest.raises(RuntimeError, match="inside"):
                scalify(fails)(as_scaled_array(jnp.ones(3)))
            assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()


@pytest.mark.parametrize("scales", ["auto", "static"])
def test_numbers_that_the_function_returns_are_arrays_unless_they_are_pythons(scales):
    fun = lambda x: (x * 2, 3, 2.5, True, np.float32(2), np.arange(3), None)
    results = transform.scalify(fun, scales=scales)(as_scaled_array(X, dtype=HALF))
    _, *settings, number, numbers, none = results
    assert none is None
    assert settings == [3, 2.5, True]
    assert list(map(type, settings)) == [int, float, bool]
    assert all(isinstance(x, jax.Array) for x in (number, numbers))
    assert (number.dtype, numbers.dtype) == (F32, jnp.int32)
    assert (number.tolist(), numbers.tolist()) == (2, [0, 1, 2])


@pytest.mark.parametrize(
    ("scales", "dtype", "traces"),
    [("static", HALF, [F32]), ("auto", F32, [F32]), ("auto", HALF, [F32, HALF])],
)
def test_a_function_runs_at_each_call_and_under_jit_once(scales, dtype, traces):
    actual = []

    def fun(x):
        actual.append(x.dtype)
        return x @ x.T

    scaled = transform.scalify(fun, scales=scales)
    for run, calls in ((scaled, 3), (jax.jit(scaled), 1)):
        actual.clear()
        for factor in (1, 2, 3):
            run(as_scaled_array(factor * X, F32(2), dtype=dtype))
        assert actual == calls * traces


FACTOR = 1.0


@pytest.mark.parametrize("scales", ["auto", "static"])
def test_a_global_an_attribute_and_a_list_are_read_at_each_call(scales, monkeypatch):
    model, factors = SimpleNamespace(rate=1.0), [1.0]
    fun = lambda x: x * FACTOR * model.rate * sum(factors)
    scaled, x = transform.scalify(fun, scales=scales), as_scaled_array(X, dtype=HALF)
    changes = (
        lambda: None,
        lambda: monkeypatch.setitem(globals(), "FACTOR", 2.0),
        lambda: setattr(model, "rate", 4.0),
        lambda: factors.append(1.0),
    )
    for change, product in zip(changes, (1, 2, 8, 16), strict=True):
        change()
        assert_array_equal(asarray(scaled(x)), product * asarray(x))
