"""On a mesh with explicit axes, which JAX tracks in types, programs run as plain ones."""

import jax
import jax.numpy as jnp
import pytest
from beside_plain import error
from jax import lax
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from scalify_core import as_scaled_array, asarray, scalify


def scanned(x, w):
    step = lambda carry, row: (jnp.tanh(carry @ w + row), None)
    return jnp.sum(lax.scan(step, jnp.zeros_like(x), jnp.stack([x, x]))[0] ** 2)


def counted(x, w):
    step = lambda carry: (carry[0] + 1, carry[1] @ w + x)
    return lax.while_loop(lambda carry: carry[0] < 3, step, (0, jnp.zeros_like(x)))[1]


PROGRAMS = {
    "gradient of relu": jax.grad(lambda x, w: jnp.sum(jax.nn.relu(x @ w) ** 2), (0, 1)),
    "scan from zeros": jax.grad(scanned, (0, 1)),
    "while from zeros": counted,
    "mask": lambda x, w: jax.nn.softmax(jnp.where(jnp.tri(8) > 0, x @ w, -1e9)),
    "automatic axes": lambda x, w: x.at[jnp.array([0, 1])].get(out_sharding=P()),
    "another split": lambda x, w: jnp.clip(reshard(x, P(None, "d")) * 2, 0, 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_run_as_on_automatic_axes(name):
    program = PROGRAMS[name]
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jnp.linspace(-1, 1, 64).reshape(8, 8)
        x = jax.device_put(x, NamedSharding(mesh, P("d")))
        w = jax.device_put(jnp.eye(8) + 0.125, NamedSharding(mesh, P()))
        args = as_scaled_array((x, w), dtype=jnp.float16)
        expected = jax.jit(program)(*asarray(args))
        for scales in ("auto", "static"):
            actual = asarray(jax.jit(scalify(program, scales=scales))(*args))
            types = (jax.tree.map(jax.typeof, tree) for tree in (actual, expected))
            assert next(types) == next(types)
            assert error(actual, expected) < 2.0**-8
