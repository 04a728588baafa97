"""A function that is evaluated by a program for all outputs computed alike."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from precisions import bits

from trainer.parallel import leafwise
from trainer.parallel.leafwise import evaluate_leafwise
from trainer.parallel.mesh import make_mesh, replicated


def everywhere(shapes):
    place = replicated(make_mesh(1))
    return jax.tree.map(lambda x: place, shapes)


@pytest.fixture
def programs(monkeypatch):
    """The programs that are compiled."""
    compiled, compile_program = [], leafwise.jitted.__wrapped__

    @functools.cache
    def jitted(program, placed):
        compiled.append(program)
        return compile_program(program, placed)

    monkeypatch.setattr(leafwise, "jitted", jitted)
    return compiled


def layer(key, stddev):
    return {
        "kernel": stddev * jax.random.normal(key, (4, 8)),
        "bias": jnp.zeros(8),
    }


def initial(layers, given=None):
    keys = jax.random.split(jax.random.key(3), layers)
    return [layer(jax.random.fold_in(key, 1), 0.02) for key in keys], keys[0], given


def test_equal_layers_run_one_program_with_the_bits_of_one_for_all(programs):
    for layers in (2, 7):
        actual = evaluate_leafwise(lambda n=layers: initial(n), place=everywhere)
        expected = jax.jit(lambda n=layers: initial(n))()
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        assert bits(actual) == bits(expected)
        assert len(programs) == 3  # a kernel, a bias, a key


@pytest.mark.parametrize(
    "other",
    [
        lambda key: 0.03 * jax.random.normal(key, (4, 8)),
        lambda key: 0.02 * jax.random.normal(key, (8, 4)),
        lambda key: 0.02 * jax.random.uniform(key, (4, 8)),
        lambda key: 0.02 * jax.random.normal(key, (4, 8), jnp.float16),
        lambda key: jnp.full((4, 8), -0.0),
    ],
)
def test_outputs_that_differ_in_anything_have_programs_of_their_own(programs, other):
    def fun():
        key = jax.random.key(0)
        return layer(key, 0.02)["kernel"], jnp.zeros((4, 8)), other(key)

    actual = evaluate_leafwise(fun, place=everywhere)
    assert bits(actual) == bits(jax.jit(fun)())
    assert len(programs) == 3


def test_outputs_that_share_an_array_are_one_program(programs):
    @jax.jit
    def halves(x):
        return x[:2], x[2:]

    def fun(x):
        y = jax.random.normal(jax.random.key(1), (4, 8))
        return *halves(jnp.exp(x)), y, y + x, jnp.float32(2), x

    x = jax.device_put(np.ones((4, 8), np.float32), replicated(make_mesh(1)))
    actual = evaluate_leafwise(fun, x, place=everywhere)
    assert bits(actual) == bits(jax.jit(fun)(x))
    assert [len(program.jaxpr.outvars) for program in programs] == [2, 2, 1, 1]
    assert not programs[-1].jaxpr.eqns  # an argument that is returned


def test_groups_that_a_later_output_joins_are_one_program(programs):
    def fun():
        a, b = (jax.random.normal(jax.random.key(n), (4,)) for n in (0, 1))
        return a, b, a + b, 2 * b, jnp.zeros(4)

    actual = evaluate_leafwise(fun, place=everywhere)
    assert bits(actual) == bits(jax.jit(fun)())
    assert [len(program.jaxpr.outvars) for program in programs] == [4, 1]


def test_every_output_is_placed_where_it_is_asked_for():
    mesh = make_mesh(1, 8)
    placed = jax.NamedSharding(mesh, jax.P("fsdp")), replicated(mesh)

    def fun():
        key = jax.random.key(0)
        return jnp.pad(jax.random.normal(key, (13, 4)), ((0, 3), (0, 0))), key

    actual = evaluate_leafwise(fun, place=lambda shapes: placed)
    assert tuple(x.sharding for x in actual) == placed
    assert bits(actual) == bits(jax.jit(fun)())


def test_arrays_and_keys_that_a_function_closes_over_are_its_constants():
    table, key = jnp.arange(4.0), jax.random.key(5)

    def fun():
        return table * jax.random.normal(key, (4,)), table

    assert bits(evaluate_leafwise(fun, place=everywhere)) == bits(jax.jit(fun)())


def test_a_loop_may_return_keys_beside_arrays():
    def step(key, _):
        key, layer_key = jax.random.split(key)
        return key, jax.random.normal(layer_key, (4,))

    def fun():
        key, x = jax.lax.scan(step, jax.random.key(6), length=3)
        return x, jax.random.normal(key, (4,)), key

    assert bits(evaluate_leafwise(fun, place=everywhere)) == bits(jax.jit(fun)())
