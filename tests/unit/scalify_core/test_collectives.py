"""Collectives of values whose scales differ from device to device, or from one batched
element to the next."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import assert_near
from draws import draw_normal
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec
from numpy.testing import assert_allclose
from propagated import scalify

import scalify_core as sc
from scalify_core import ScaledArray, as_scaled_array

SCALES = 2.0 ** jnp.arange(0.0, 16.0, 2.0)
# Of sums of 8 terms in FP32.
RTOL = 8 * float(jnp.finfo(jnp.float32).eps)


def rows():
    return draw_normal(0, (8, 4))


@pytest.mark.parametrize("check_vma", [True, False])
def test_sum_over_devices_of_what_each_rescaled_for_itself(check_vma):
    mesh = Mesh(np.asarray(jax.devices()), "d", axis_types=(AxisType.Auto,))

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=PartitionSpec("d"),
        out_specs=PartitionSpec(),
        check_vma=check_vma,
    )
    def summed(x):
        return lax.psum(sc.static.dynamic_rescale_rms(x).sum(0), "d")

    x = rows() * SCALES[:, None]
    actual = jax.jit(scalify(summed))(as_scaled_array(x, 1.0))
    assert_allclose(actual, x.sum(0), rtol=0, atol=RTOL * np.abs(x).max())


def differences_of_sums(t):
    return (
        lax.psum((t, 2 * t, 1), "i"),
        t - lax.pmean(t, "i"),
        lax.pmax(t, "i") - lax.pmin(t, "i"),
    )


def moves(t):
    around = lax.ppermute(t, "i", [(j, (j + 1) % 8) for j in range(8)])
    return (
        around,
        lax.all_gather(t, "i"),
        lax.all_to_all(t, "i", 0, 0),
        t * lax.axis_index("i"),
    )


def normalised_over_the_batch(t):
    """And the gradient of that."""

    def loss(t):
        t = t - lax.pmean(t.mean(), "i")
        return (
            t / jnp.sqrt(lax.pmean(jnp.square(t).mean(), "i") + 1e-6)
        ) ** 3, lax.psum_scatter(t, "i")

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
    expected = batched(fun)(sc.asarray(scaled))
    # The scaled gradient passes a few sums of 64 terms.
    assert_near(actual, expected, 64 * RTOL)


def mesh_of_devices():
    return Mesh(np.asarray(jax.devices()), "d", axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_sum_over_axes_of_a_mesh_and_of_a_vmap_at_once(kind):
    spec = PartitionSpec("d")

    @functools.partial(
        jax.shard_map,
        mesh=mesh_of_devices(),
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    def fun(x):
        return jax.vmap(
            lambda t: lax.psum(t, ("i", "d")) * lax.pmax(t, "i") + 1.0, axis_name="i"
        )(x)

    x = draw_normal(1, (16, 4))
    scaled = as_scaled_array(x, 1.0 if kind == "static" else None)
    assert_near(jax.jit(scalify(fun))(scaled), fun(x), 16 * RTOL)


# Loops inside shard_map: what is carried varies over the mesh, the scale that it begins
# with does not.


def turned_around(t):
    around = [(j, (j + 1) % 8) for j in range(8)]
    return lax.fori_loop(0, 4, lambda i, c: lax.ppermute(c, "d", around) * 1.1 + t, t)


def ring_attention(t):
    """Keys and values go round, with a maximum and sums that begin at constants."""
    around = [(j, (j + 1) % 8) for j in range(8)]
    start = lambda number, *shape: lax.pcast(
        jnp.full((len(t), *shape), number), "d", to="varying"
    )

    def turn(carry, _):
        m, total, out, keys = carry
        scores = t @ keys.T
        new = jnp.maximum(m, scores.max(-1))
        weights, decay = jnp.exp(scores - new[:, None]), jnp.exp(m - new)
        out = out * decay[:, None] + weights @ keys
        return (
            new,
            total * decay + weights.sum(-1),
            out,
            lax.ppermute(keys, "d", around),
        ), None

    (m, total, out, _), _ = lax.scan(
        turn, (start(-1e30), start(0.0), start(0.0, 4), t), None, length=8
    )
    return out / total[:, None] + m[:, None]


def summed_in_turns(t):
    def turn(c, _):
        c = c + lax.psum(t * c.mean(), "d") + lax.pmean(jnp.float32(1.0) * c, "d")
        return c, lax.pmean(c, "d")

    c, ys = lax.scan(turn, t, None, length=3)
    return c + ys.sum(0)


def until_all_are_large(t):
    return lax.while_loop(
        lambda c: lax.pmin(jnp.abs(c).max(), "d") < 100, lambda c: c * 1.5 + t, t
    )


def some_on_each_device(t):
    far = lax.axis_index("d") > 3
    t = lax.cond(far, lambda: t, lambda: jnp.zeros_like(t))
    return lax.cond(
        t.sum() > 0, lambda: sc.static.dynamic_rescale_rms(t) * 2.0, lambda: t
    ) + jnp.where(far, 1.0, t)


@pytest.mark.parametrize(
    ("fun", "check_vma"),
    [
        (turned_around, False),
        (summed_in_turns, True),
        (until_all_are_large, False),
        (some_on_each_device, True),
        (ring_attention, True),  # the program says what varies
    ],
)
def test_control_flow_on_each_device(fun, check_vma):
    spec = PartitionSpec("d")
    fun = jax.shard_map(
        fun, mesh=mesh_of_devices(), in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    scaled = as_scaled_array(draw_normal(1, (16, 4)), dtype=jnp.float16)
    # Eight turns of a few roundings each, and sums of 16 terms.
    rtol = 64 * float(jnp.finfo(jnp.float16).eps)
    assert_near(jax.jit(scalify(fun))(scaled), jax.jit(fun)(sc.asarray(scaled)), rtol)
