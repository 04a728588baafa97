"""Calls inside a program with measured scales: each is evaluated once, and stays the
call that it is."""

import jax
import jax.numpy as jnp
from beside_plain import error, normal, scaled
from jax.extend.core import jaxprs_in_params

from scalify_core import ScaledArray, asarray, scalify
from scalify_core.array.scaled_array import is_scaled_array
from scalify_core.ops.functional import attention

HALF = jnp.float16


def traced(fun, *args):
    return jax.jit(scalify(fun)).trace(*args).jaxpr


def calls(jaxpr, name):
    """The calls of functions, or the primitives, of a name: each equation at any depth,
    once for its jaxpr."""
    actual = [
        eqn
        for eqn in jaxpr.eqns
        if name in (eqn.params.get("name"), eqn.primitive.name)
    ]
    return actual + [eqn for inner in inner_jaxprs(jaxpr) for eqn in calls(inner, name)]


def inner_jaxprs(jaxpr):
    actual = {
        id(inner): inner for eqn in jaxpr.eqns for inner in jaxprs_in_params(eqn.params)
    }
    return list(actual.values())


def size(jaxpr):
    """How many equations are written down: what is called twice stands there once."""
    actual, todo = {}, [jaxpr]
    while todo:
        inner = todo.pop()
        if id(inner) not in actual:
            actual[id(inner)] = inner
            todo += inner_jaxprs(inner)
    return sum(len(inner.eqns) for inner in actual.values())


def test_layers_of_one_function_are_one_program():
    layer = jax.checkpoint(jax.jit(lambda x, w: jnp.tanh(x @ w)))

    def deep(x, weights):
        for w in weights:
            x = layer(x, w)
        return x

    x, weights = scaled(normal(0, 4, 8), [normal(i, 8, 8) for i in range(6)])
    actual = calls(traced(deep, x, weights), "remat2")
    assert len(actual) == 6
    # The first reads an argument, which is FP16, all others what the one before gives.
    assert len({id(eqn.params["jaxpr"]) for eqn in actual}) <= 2


def test_a_call_that_calls_twice_is_not_evaluated_twice():
    def nested(depth):
        if depth == 0:
            return lambda x, w: jnp.tanh(x @ w)
        inner = nested(depth - 1)
        return jax.jit(lambda x, w: inner(inner(x, w), w))

    x, w = scaled(normal(0, 4, 8), normal(1, 8, 8))
    assert size(traced(nested(8), x, w)) < 1.5 * 2 * size(traced(nested(4), x, w))


def test_name_donation_and_shardings_of_a_call_are_kept():
    mesh = jax.make_mesh((2,), ("d",), (jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.P("d"))

    def product(x, w):
        return x @ w

    inner = jax.jit(
        product,
        donate_argnums=0,
        in_shardings=(rows, None),
        out_shardings=rows,
        keep_unused=True,
    )
    x, w = scaled(normal(0, 4, 8), normal(1, 8, 8))
    (call,) = calls(traced(lambda x, w: inner(x, w) * 2, x, w), "product")
    data, scale, *weight = call.params["donated_invars"]
    assert (data, scale) == (True, True)
    assert not any(weight)
    assert call.params["keep_unused"]
    constraints = [
        eqn
        for eqn in call.params["jaxpr"].eqns
        if eqn.primitive.name == "sharding_constraint"
    ]
    assert [eqn.params["sharding"] for eqn in constraints] == [rows] * 2
    actual = jax.jit(scalify(inner))(x, w)
    assert error(actual, asarray(x) @ asarray(w)) < 2e-3


def test_an_argument_that_calls_hand_through_is_returned_as_it_came():
    inner = jax.jit(lambda x, w: (w, x @ w, x))
    outer = jax.jit(lambda x, w: inner(x, w)[::-1])
    x, w = (ScaledArray(a.data, 0.5) for a in scaled(normal(0, 4, 8), normal(1, 8, 8)))
    same_x, product, same_w = scalify(outer)(x, w)
    assert (same_x.scale, same_w.scale) == (0.5, 0.5)
    assert same_x.data is x.data
    assert same_w.data is w.data
    assert product.dtype == HALF


def test_attention_reads_the_format_at_any_scale():
    segments, exponents = jnp.repeat(jnp.arange(4), 8)[None], (20, -20, 30)

    def attend(*operands):
        moved = [x * 2.0**-n for x, n in zip(operands, exponents, strict=True)]
        return attention(*moved, segments=segments)

    gradients = jax.grad(lambda *x: jnp.sum(jnp.sin(attend(*x))), (0, 1, 2))
    args = scaled(*(normal(i, 1, 32, 4, 16) * 2.0**n for i, n in enumerate(exponents)))
    batch = jax.tree.map(lambda x: x[None], args, is_leaf=is_scaled_array)
    assert "f16[1,4,32,32]" in str(traced(attend, *args))
    for fun, given in ((attend, args), (jax.vmap(gradients), batch)):
        assert error(scalify(fun)(*given), fun(*asarray(given))) < 2.0**-10
