"""Collectives of values whose scales differ from device to device, or from one batched
element to the next."""

import functools

import jax
import jax.numpy as jnp
import pytest
from beside_plain import F32, HALF, assert_near
from draws import draw_normal
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from propagated import scalify

import scalify_core as sc
from scalify_core import ScaledArray, as_scaled_array

SCALES = 2.0 ** jnp.arange(0.0, 16.0, 2.0)
AROUND = [(j, (j + 1) % 8) for j in range(8)]


def differences_of_sums(t):
    return (
        lax.psum((t, 2 * t, 1), "i"),
        t - lax.pmean(t, "i"),
        lax.pmax(t, "i") - lax.pmin(t, "i"),
    )


def moves(t):
    return (
        lax.ppermute(t, "i", AROUND),
        lax.all_gather(t, "i"),
        lax.all_to_all(t, "i", 0, 0),
        t * lax.axis_index("i"),
    )


def normalised_over_the_batch(t):
    """And the gradient of that."""

    def loss(t):
        t = t - lax.pmean(t.mean(), "i")
        rms = jnp.sqrt(lax.pmean(jnp.square(t).mean(), "i") + 1e-6)
        return (t / rms) ** 3, lax.psum_scatter(t, "i")

    return jax.grad(lambda t: sum(y.sum() for y in loss(t)))(t), loss(t)


def means_in_turns(t):
    return lax.scan(lambda c, _: (lax.pmean(c, "i") + t, c), t, None, length=3)


@pytest.mark.parametrize(
    ("fun", "inside"),
    [
        (differences_of_sums, True),
        (moves, False),
        (normalised_over_the_batch, True),
        (means_in_turns, False),
    ],
)
def test_collectives_over_the_axis_of_a_vmap(fun, inside):
    scaled = ScaledArray(draw_normal(1, (8, 8)), SCALES)
    batched = functools.partial(jax.vmap, axis_name="i")
    actual = jax.jit(scalify(batched(fun)) if inside else batched(scalify(fun)))(scaled)
    # The scaled gradient passes a few sums of 64 terms.
    assert_near(actual, batched(fun)(sc.asarray(scaled)), 512 * jnp.finfo(F32).eps)


# Inside shard_map the carry of a loop varies over the mesh, its first scale does not.


def sum_of_rescaled(t):
    return lax.psum(sc.static.dynamic_rescale_rms(t).sum(0), "d")


def sum_over_mesh_and_vmap(t):
    both = lambda t: lax.psum(t, ("i", "d")) * lax.pmax(t, "i") + 1.0
    return jax.vmap(both, axis_name="i")(t)


def ring(t):
    """Keys go round, beside a maximum and a sum that begin at constants."""
    start = lambda x: lax.pcast(jnp.full(t.shape, x), "d", to="varying")

    def turn(carry, _):
        most, total, keys = carry
        most, total = jnp.maximum(most, keys), total * 0.5 + t * keys
        return (most, total, lax.ppermute(keys, "d", AROUND)), None

    carry = start(-1e30), start(0.0), t
    (most, total, _), _ = lax.scan(turn, carry, None, length=8)
    return total + most


def until_all_are_large(t):
    is_small = lambda c: lax.pmin(jnp.abs(c).max(), "d") < 100
    return lax.while_loop(is_small, lambda c: c * 1.5 + t, t)


def some_on_each_device(t):
    far = lax.axis_index("d") > 3
    t = lax.cond(far, lambda: t, lambda: jnp.zeros_like(t))
    rescaled = lambda: sc.static.dynamic_rescale_rms(t) * 2.0
    return lax.cond(t.sum() > 0, rescaled, lambda: t) + jnp.where(far, 1.0, t)


@pytest.mark.parametrize(
    ("fun", "check_vma"),
    [
        (sum_of_rescaled, True),
        (sum_of_rescaled, False),
        (sum_over_mesh_and_vmap, False),
        (ring, True),  # the program says what varies
        (until_all_are_large, False),
        (some_on_each_device, True),
    ],
)
def test_programs_on_each_device(fun, check_vma):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("d")
    how = {"mesh": mesh, "in_specs": spec, "out_specs": spec, "check_vma": check_vma}
    fun = jax.shard_map(fun, **how)
    x = draw_normal(1, (16, 4)) * jnp.repeat(SCALES[:4], 4)[:, None]
    scaled = as_scaled_array(x, dtype=HALF)
    # Eight turns of a few roundings each, and sums of 16 terms.
    rtol = 64 * float(jnp.finfo(HALF).eps)
    assert_near(jax.jit(scalify(fun))(scaled), jax.jit(fun)(sc.asarray(scaled)), rtol)
