"""What `scalify` promises about its arguments, its results, gradients, transformations
and the compiled program."""

import functools
import gc
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from beside_plain import F32, HALF
from draws import draw_normal
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal
from propagated import scalify

from scalify_core import ScaledArray, as_scaled_array, asarray
from scalify_core.interpreter import registry, transform
from scalify_core.interpreter.rules.composites import on_values
from scalify_core.static import composite, composite_rule

X = draw_normal(0, (16, 64))
PARAMS = {
    "w1": draw_normal(1, (64, 128)) / 8,
    "w2": draw_normal(2, (128, 8)) / 11,
}
Y = draw_normal(3, (16, 8))


def loss_fn(params, x, y):
    return jnp.mean((jax.nn.relu(x @ params["w1"]) @ params["w2"] - y) ** 2)


def is_scaled(x):
    return isinstance(x, ScaledArray)


def test_results_that_depend_on_scaled_inputs_are_scaled_and_others_are_not():
    def fun(x, n, key, plain):
        return x * 2, x > 0, n + 1, jax.random.split(key), plain * 2, jnp.ones(3)

    out = scalify(fun)(as_scaled_array(X, 1.0), jnp.arange(3), jax.random.key(0), X)
    assert [is_scaled(x) for x in out] == [True, False, False, False, False, False]
    assert out[1].dtype == bool


def test_multiplication_by_a_power_of_two_moves_the_scale_and_no_data():
    x = as_scaled_array(X, 1.0, dtype=HALF)
    out = scalify(lambda x: x * 0.25)(x)
    assert out.scale == 0.25
    assert_array_equal(out.data, x.data)


def test_data_format_is_the_promotion_of_the_scaled_operands():
    half, single = as_scaled_array(X, 1.0, dtype=HALF), as_scaled_array(X, 1.0)
    assert scalify(jnp.add)(half, half).dtype == HALF
    assert scalify(jnp.add)(half, single).dtype == F32
    assert scalify(jnp.add)(half, X).dtype == HALF  # a plain array has no say
    assert scalify(lambda x: x.astype(jnp.bfloat16))(half).dtype == jnp.bfloat16


def test_keyword_arguments_and_those_that_are_no_arrays():
    def fun(x, mode, *, y, power=1):
        assert mode == "sum"
        assert isinstance(power, int)
        return (x + y) ** power

    s = as_scaled_array(X, 1.0)
    squared = scalify(functools.partial(fun, power=2))
    for actual in (squared(s, "sum", y=s), squared(s, mode="sum", y=s)):
        assert_allclose(asarray(actual), (X + X) ** 2, rtol=1e-6)


def test_scaled_arrays_that_the_function_makes_are_plain_to_what_it_returns():
    def fun(x):
        return as_scaled_array(x * 3, 2.0), as_scaled_array(x * 3)

    out = scalify(fun)(as_scaled_array(X, 0.5))
    for x in out:
        assert not is_scaled(x.data)
        assert_array_equal(asarray(x), 3 * X)


def test_values_of_a_surrounding_transformation_may_be_closed_over():
    transform = lambda f: jax.jit(jax.grad(f))
    p = as_scaled_array(X, 4.0)

    def loss(run):
        return lambda y: asarray(run(lambda p: jnp.sum(jnp.sin(p) * y**2))(p))

    expected = transform(lambda y: jnp.sum(jnp.sin(X) * y**2))(X)
    assert_allclose(transform(loss(scalify))(X), expected, rtol=1e-4)


def test_names_and_metadata_are_kept():
    def fun(x, w):
        with jax.named_scope("outer"):
            x = jax.jit(lambda x: jax.named_scope("inner")(jnp.tanh)(x))(x @ w)
        with set_xla_metadata(mark="here"):
            return jnp.sin(x)

    args = as_scaled_array((X, PARAMS["w1"]), 1.0)
    text = (
        jax.jit(scalify(jax.grad(lambda *args: fun(*args).sum())))
        .lower(*args)
        .as_text(debug_info=True)
    )
    assert re.search(r"outer.*/dot_general", text)
    assert re.search(r"inner.*/tanh", text)
    assert 'mark = "here"' in text


@pytest.mark.parametrize(
    ("under", "count"), [(lambda fun: fun, 4), (jax.jit, 1)], ids=["called", "jit"]
)
def test_function_runs_once_a_call_and_under_jit_once(under, count):
    traces = []

    @scalify
    def fun(x):
        traces.append(x.dtype)
        return jnp.sum(x**2)

    run = under(fun)
    for factor in range(1, 5):
        run(as_scaled_array(factor * X, 2.0, dtype=HALF))
    assert traces == [F32] * count


def test_nested_jit_keeps_its_name_and_is_lowered_once():
    @jax.jit
    def block(x, w):
        return jnp.tanh(x @ w)

    def fun(x, w):
        for _ in range(3):
            x = block(x, w)
        return x

    w = as_scaled_array(jnp.eye(64), 1.0)
    text = jax.jit(scalify(fun)).lower(as_scaled_array(X, 1.0), w).as_text()
    assert len(re.findall(r"func.func private @block", text)) == 1
    assert len(re.findall(r"call @block", text)) == 3


def test_donated_scaled_arrays_are_reused():
    state = as_scaled_array(X, F32(1))
    step = jax.jit(scalify(lambda x: x * 3.0), donate_argnums=0)
    compiled = step.lower(state).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= X.nbytes


def test_shardings_are_kept():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("data"))
    x = as_scaled_array(jax.device_put(X, sharding), 1.0)

    def fun(x, w):
        return jax.lax.with_sharding_constraint(x @ w, sharding)

    out = jax.jit(scalify(fun))(x, as_scaled_array(PARAMS["w1"], 0.125))
    assert out.data.sharding.is_equivalent_to(sharding, 2)
    assert_allclose(asarray(out), X @ PARAMS["w1"], rtol=0, atol=1e-5)


def float_operations(jaxpr):
    """How many operations on float arrays (not scalars) there are, exact
    multiplications by powers of two apart."""
    counts = Counter()
    for eqn in jaxpr.eqns:
        inner = [p for p in eqn.params.values() if hasattr(p, "eqns")]
        if inner:
            counts += sum(map(float_operations, inner), Counter())
        elif eqn.outvars[0].aval.ndim and jnp.issubdtype(
            eqn.outvars[0].aval.dtype, jnp.floating
        ):
            constants = [getattr(v, "val", None) for v in eqn.invars]
            if not (
                eqn.primitive.name == "mul"
                and any(c is not None and np.frexp(abs(c))[0] == 0.5 for c in constants)
            ):
                counts[eqn.primitive.name] += 1
    return counts


def test_static_scales_leave_only_powers_of_two_and_no_argument_in_the_program():
    def step(params, x, y):
        gradient = jax.grad(loss_fn)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    scaled = (
        as_scaled_array(PARAMS, 0.125),
        as_scaled_array(X, 1.0),
        as_scaled_array(Y, 1.0),
    )
    actual = float_operations(jax.jit(scalify(step)).trace(*scaled).jaxpr)
    plain = float_operations(jax.jit(step).trace(PARAMS, X, Y).jaxpr)
    assert actual.total() <= plain.total(), (actual - plain, plain - actual)
    text = jax.jit(scalify(step)).lower(*scaled).as_text()
    main = next(line for line in text.splitlines() if "@main" in line)
    assert "tensor<f32>," not in main.split("->")[0]
    assert all(
        actual[name] <= plain[name]
        for name in ("dot_general", "add", "sub", "div", "max", "exp", "sqrt")
    )


def test_clipping_by_the_global_norm_compiles_to_a_program_in_proportion_to_the_tensors():
    """XLA may repeat the scales of a sum, each of which follows from that before, in
    all that reads them."""
    clip = optax.clip_by_global_norm(1.0)
    clipped = jax.jit(scalify(lambda g: clip.update(g, optax.EmptyState())[0]))

    def instructions(n):
        grads = [ScaledArray(jnp.ones((8, 8), HALF), F32(2.0**-i)) for i in range(n)]
        return clipped.lower(grads).compile().as_text().count(" = ")

    # of a square's growth it would be four times as many
    assert instructions(12) < 3 * instructions(6)


def test_scales_of_results_are_multiplied_out():
    powers = [i for i in range(-20, 21) if i != 0]
    f = scalify(
        lambda x, y, z: [v * 2.0**i for v in (x, y) for i in powers] + [z * 2.0, x]
    )
    x, y = (ScaledArray(jnp.ones(4, HALF), F32(scale)) for scale in (2.0**9, 2.0**-7))
    *multiples, static, same = f(x, y, ScaledArray(jnp.ones(4, HALF), 2.0**-3))
    assert [float(out.scale) for out in multiples] == [
        2.0 ** (k + i) for k in (9, -7) for i in powers
    ]
    assert all(out.data.tolist() == [1] * 4 for out in multiples)
    assert (static.scale, float(same.scale)) == (2.0**-2, 2.0**9)


def test_scales_of_results_that_have_nothing_in_common_stay_apart():
    f = scalify(lambda x, y: (x * 2.0, y * 4.0))
    x = ScaledArray(jnp.ones((2, 4), HALF), F32([2.0**3, 2.0**5]))
    y = ScaledArray(jnp.ones(4, HALF), F32(2.0**-2))
    batched, same = jax.vmap(f, in_axes=(0, None), out_axes=(0, None))(x, y)
    assert batched.scale.tolist() == [2.0**4, 2.0**6]
    assert float(same.scale) == 1
    here, there = (jax.device_put(y, device) for device in jax.devices()[:2])
    assert [out.scale.devices() for out in f(here, there)] == [
        here.data.devices(),
        there.data.devices(),
    ]


def test_users_write_composites_with_rules_in_a_dozen_lines(monkeypatch):
    monkeypatch.setattr(registry, "rules", dict(registry.rules))

    @composite
    def squared_relu(x):
        return jnp.square(jnp.maximum(x, 0))

    @composite_rule("squared_relu")
    def _(call, x):
        return on_values(call, [(x.size**2, x.dtype)], x)

    x = as_scaled_array(X / 256, 2.0**-8, dtype=HALF)
    out = scalify(squared_relu)(x)
    assert out.scale == 2.0**-16
    assert_allclose(
        asarray(out), np.maximum(asarray(x), 0) ** 2, rtol=2**-11, atol=2**-40
    )


@pytest.mark.parametrize("enabled", [True, False])
def test_tracing_leaves_the_garbage_collector_as_it_was(enabled):
    def fails(x):
        raise RuntimeError("inside")

    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        scalify(jnp.sin)(as_scaled_array(jnp.ones(3)))
        assert gc.isenabled() == enabled
        with pytest.raises(RuntimeError, match="inside"):
            scalify(fails)(as_scaled_array(jnp.ones(3)))
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()


@pytest.mark.parametrize(
    ("scales", "under"), [("auto", lambda fun: fun), ("static", jax.jit)]
)
def test_numbers_that_the_function_returns_are_arrays(scales, under):
    fun = lambda x: (x * 2, 3, 2.5, True, np.float32(2), np.arange(3), None)
    _, *actual, none = under(transform.scalify(fun, scales=scales))(
        as_scaled_array(X, dtype=HALF)
    )
    assert none is None
    assert all(isinstance(x, jax.Array) for x in actual)
    assert [x.dtype for x in actual] == [
        jnp.int32,
        F32,
        bool,
        F32,
        jnp.int32,
    ]
    assert [x.tolist() for x in actual] == [3, 2.5, True, 2, [0, 1, 2]]
