"""docs/trust.md: its program prints what it shows, and what it says of scales is so."""

import functools
import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from draws import draw_normal

from scalify_core import (
    ScaledArray,
    as_scaled_array,
    asarray,
    explain,
    optim,
    scalify,
)
from scalify_core.ops.functional import gelu

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "trust.md").read_text()
X = as_scaled_array(jnp.arange(1.0, 5.0), dtype=jnp.float16)


def test_the_program_prints_what_the_page_shows(tmp_path, capsys):
    program, shown = re.findall(r"^```\w*\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    path = tmp_path / "features.py"
    path.write_text(program)
    runpy.run_path(str(path))
    printed = capsys.readouterr().out
    assert printed == shown, (
        f"docs/trust.md is stale; its second block is now\n{printed}"
    )


def test_forward_mode_goes_inside():
    with pytest.raises(TypeError, match=r"taken inside, scalify\(jax.grad\(f\)\)"):
        jax.jvp(scalify(jnp.sin), (X,), (X,))
    _, tangent = scalify(lambda x, t: jax.jvp(jnp.sin, (x,), (t,)))(X, X)
    x = np.arange(1.0, 5.0)
    np.testing.assert_allclose(asarray(tangent), x * np.cos(x), rtol=2**-9)
    with pytest.raises(TypeError, match="forward-mode"):
        scalify(lambda x, t: jax.jvp(gelu, (x,), (t,)))(X, X)


def test_one_run_time_scale_is_mapped_inside_or_by_its_axes():
    with pytest.raises(ValueError, match="rank"):
        jax.vmap(scalify(jnp.sin))(X)
    actual = (
        scalify(jax.vmap(jnp.sin))(X),
        jax.vmap(scalify(jnp.sin), in_axes=(ScaledArray(0, None),))(X),
    )
    assert [x.scale.shape for x in actual] == [(), (4,)]
    for x in (
        *actual,
        jax.vmap(scalify(jnp.sin))(as_scaled_array(asarray(X), 1.0, dtype=jnp.float16)),
    ):
        np.testing.assert_allclose(asarray(x), np.sin(np.arange(1.0, 5.0)), rtol=2**-9)


def test_what_is_said_of_donated_scales():
    mapped = jax.vmap(scalify(lambda x: x * 0.5), in_axes=(ScaledArray(0, None),))
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        out = jax.jit(mapped, donate_argnums=0)(
            as_scaled_array(jnp.arange(1.0, 5.0), dtype=jnp.float16)
        )
    np.testing.assert_array_equal(asarray(out), np.arange(1.0, 5.0) / 2)
    scaled = as_scaled_array({"a": jnp.ones(3), "b": jnp.ones(4)}, dtype=jnp.float16)
    halved = jax.jit(
        scalify(lambda tree: jax.tree.map(lambda x: x * 0.5, tree)), donate_argnums=0
    )(scaled)
    np.testing.assert_array_equal(asarray(halved)["b"], np.full(4, 0.5))


def test_numbers_far_below_the_scale_are_zeros_and_those_far_above_saturate():
    x = ScaledArray(
        jnp.asarray([2.0**-24, 2.0**-26, 2.0**15, 2.0**17], jnp.float32), 1.0
    ).astype(jnp.float16)
    np.testing.assert_array_equal(asarray(x), [2.0**-24, 0, 2.0**15, 65504])


def test_an_optimiser_step_with_narrow_moments_is_better_done_outside():
    sizes = 10.0 ** jnp.linspace(-4, 3, 64)[:, None]
    tx = optax.adam(1e-2)
    params = as_scaled_array(draw_normal(1, (64, 8)), dtype=jnp.float16)
    gradient = jax.grad(lambda p: jnp.sum(sizes * jnp.tanh(p) ** 2))

    def step(p, state):
        updates, state = tx.update(gradient(p), state, p)
        return optax.apply_updates(p, updates), state

    def updates(fun, p, state):
        """The largest, and that of the row with the smallest gradient."""
        first = asarray(p)
        for _ in range(8):
            p, state = fun(p, state)
        rows = jnp.abs(asarray(p) - first).max(1)
        return float(rows.max()), float(rows[0])

    plain = tx.init(asarray(params))
    inside = jax.jit(scalify(step))
    largest, smallest = updates(jax.jit(step), asarray(params), plain)
    assert 0.07 < smallest <= largest < 0.1
    largest, smallest = updates(
        inside, params, as_scaled_array(plain, dtype=jnp.float16)
    )
    assert smallest < 0.03
    assert 0.07 < largest < 0.1
    largest, smallest = updates(inside, params, plain)
    assert 0.07 < smallest <= largest < 0.1
    assert inside(params, plain)[1][0].nu.dtype == jnp.float32

    stored = optim.scaled_state(tx, mu=jnp.float16, nu=jnp.float16, seed=0)

    @jax.jit
    def outside(p, state):
        updates, state = stored.update(
            asarray(scalify(gradient)(as_scaled_array(p, dtype=jnp.float16))), state, p
        )
        return optax.apply_updates(p, updates), state

    largest, smallest = updates(outside, asarray(params), stored.init(asarray(params)))
    assert 0.07 < smallest <= largest < 0.1


def test_the_lowest_number_masks_after_a_product():
    q, w = as_scaled_array(
        (draw_normal(0, (4, 3)), jnp.eye(3)[:, :2]), dtype=jnp.float16
    )

    def masked(q, w, number):
        return jnp.where(jnp.arange(3)[None] == 2, number, q) @ w

    lowest = float(jnp.finfo(jnp.float32).min)
    for number in (lowest, -1e4):
        actual = asarray(scalify(functools.partial(masked, number=number))(q, w))
        np.testing.assert_allclose(actual, asarray(q)[:, :2], rtol=2**-10)

    def called(q, w):
        masked = jnp.where(jnp.arange(3)[None] == 2, lowest, q)
        return jax.jit(lambda q, w: q @ w)(masked, w)

    actual = asarray(scalify(called)(q, w))
    np.testing.assert_allclose(actual, asarray(q)[:, :2], rtol=2**-10)

    def argument(q, w, mask):
        return jnp.where(jnp.arange(3)[None] == 2, mask, q) @ w

    assert "dot_general" in explain(argument, q, w, lowest).first_loss
    assert not asarray(scalify(argument)(q, w, lowest)).any()


def test_rows_that_a_permutation_given_as_an_argument_copies_are_rounded():
    x, order = as_scaled_array(
        (draw_normal(0, (8, 8)), jnp.eye(8)[::-1]),
        dtype=jnp.float16,
    )

    def differ(order_of):
        actual = scalify(
            lambda x, order: jnp.abs(
                order_of(order) @ jnp.tanh(x) - jnp.tanh(x)[::-1]
            ).max()
        )(x, order)
        return float(asarray(actual))

    assert 0 < differ(lambda order: order) < 2**-11
    assert differ(lambda order: jnp.eye(8)[::-1]) == 0
    assert differ(lambda order: jax.nn.one_hot(order.argmax(-1), 8)) == 0
