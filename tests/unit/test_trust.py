"""docs/trust.md: its program prints the output that it shows, and its limits hold."""

import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from beside_plain import F32, HALF
from draws import draw_normal
from numpy.testing import assert_allclose, assert_array_equal

from scalify_core import (
    ScaledArray,
    as_scaled_array,
    asarray,
    explain,
    optim,
    scalify,
)
from scalify_core.ops.functional import gelu
from scalify_core.static import dynamic_rescale_max, dynamic_rescale_rms

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "trust.md").read_text()
X = as_scaled_array(jnp.arange(1.0, 5.0), dtype=HALF)


def test_the_program_prints_what_the_page_shows(tmp_path, capsys):
    program, shown = re.findall(r"^```\w*\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    path = tmp_path / "features.py"
    path.write_text(program)
    runpy.run_path(str(path))
    printed = capsys.readouterr().out
    assert printed == shown, (
        f"docs/trust.md is stale; its second block is now\n{printed}"
    )


def test_the_lowest_number_masks_after_a_product_but_not_as_an_argument():
    q, w = as_scaled_array((draw_normal(0, (4, 3)), jnp.eye(3)[:, :2]), dtype=HALF)
    lowest = float(jnp.finfo(F32).min)

    def masked(q, w, number, product=jnp.matmul):
        return product(jnp.where(jnp.arange(3) == 2, number, q), w)

    for fun in (
        lambda q, w: masked(q, w, lowest),
        lambda q, w: masked(q, w, lowest, jax.jit(jnp.matmul)),
        lambda q, w: masked(q, w, -1e4),
    ):
        actual = asarray(scalify(fun)(q, w))
        assert_allclose(actual, asarray(q)[:, :2], rtol=2**-10)
    assert not asarray(scalify(masked)(q, w, jnp.asarray(lowest))).any()
    assert "dot_general" in explain(masked, q, w, jnp.asarray(lowest)).first_loss


def test_a_written_unit_of_1e9_counts_as_a_mask_and_one_that_is_an_argument_does_not():
    x = as_scaled_array(jnp.asarray([-1.0, -0.5, -1e-3, 1e-3]), dtype=HALF)
    in_units = lambda x, unit=1e9: (x**3 * unit).astype(HALF)
    assert (asarray(scalify(in_units)(x))[:2] > -1e4).all()
    assert "saturate" in explain(in_units, x).first_loss
    actual = asarray(scalify(in_units)(x, F32(1e9)))
    assert_allclose(actual, asarray(x) ** 3 * 1e9, rtol=2**-9)


def test_what_replaces_infinities_needs_a_number_near_the_rest():
    x = as_scaled_array(jnp.asarray([1.0, 2.0, np.inf]), dtype=HALF)
    assert_array_equal(asarray(scalify(jnp.nan_to_num)(x)), [0, 0, np.inf])
    assert "zero in float16" in explain(jnp.nan_to_num, x).first_loss
    near = lambda x: jnp.nan_to_num(x, posinf=1e4)
    assert_allclose(asarray(scalify(near)(x)), [1, 2, 1e4], rtol=2**-11)


def test_static_products_in_fp16_make_large_numbers_of_infinities():
    x = as_scaled_array(jnp.asarray([[1.0, np.inf], [1.0, 2.0]]), dtype=HALF)
    is_finite = lambda x: (jnp.isfinite(x @ x), jnp.isfinite(x))
    assert scalify(is_finite, scales="static")(x)[0].all()
    for scales, dtype in (("auto", HALF), ("static", jnp.bfloat16)):
        actual = scalify(is_finite, scales=scales)(x.astype(dtype))
        for mine, plain in zip(actual, is_finite(asarray(x)), strict=True):
            assert_array_equal(mine, plain)


def test_far_from_1_static_scales_need_a_rule_and_the_largest_magnitude():
    large = as_scaled_array(jnp.full(4, 2.0**20), 2.0**20, dtype=HALF)
    fifth = lambda x: x**5
    assert_array_equal(asarray(scalify(fifth, scales="static")(large)), 65504)
    assert "integer_pow" in explain(fifth, large, scales="static").first_loss
    small = jnp.full(4, 1e-25)
    for rescale, expected in ((dynamic_rescale_rms, 0), (dynamic_rescale_max, 1e-25)):
        fun = lambda x, p, rescale=rescale: rescale(x * p)
        one = as_scaled_array(jnp.ones(4), 1.0, dtype=HALF)
        actual = asarray(scalify(fun, scales="static")(one, small))
        assert_allclose(actual, expected, rtol=2**-10)
        has_lost = explain(fun, one, small, scales="static").first_loss is not None
        assert has_lost == (expected == 0)


def test_an_optimizer_step_with_narrow_moments_is_better_done_outside():
    sizes = 10.0 ** jnp.linspace(-4, 3, 64)[:, None]
    tx = optax.adam(1e-2)
    stored = optim.scaled_state(tx, mu=HALF, nu=HALF, seed=0)
    params = as_scaled_array(draw_normal(1, (64, 8)), dtype=HALF)
    plain = tx.init(asarray(params))
    gradient = jax.grad(lambda p: jnp.sum(sizes * jnp.tanh(p) ** 2))

    @jax.jit
    @scalify
    def inside(p, state):
        updates, state = tx.update(gradient(p), state, p)
        return optax.apply_updates(p, updates), state

    @jax.jit
    def outside(p, state):
        scaled = scalify(gradient)(as_scaled_array(p, dtype=HALF))
        updates, state = stored.update(asarray(scaled), state, p)
        return optax.apply_updates(p, updates), state

    def updates(step, p, state):
        """Return the update of the row with the smallest gradient, and the largest."""
        first = asarray(p)
        for _ in range(8):
            p, state = step(p, state)
        rows = jnp.abs(asarray(p) - first).max(1)
        return float(rows[0]), float(rows.max())

    # Adam moves a parameter by about its learning rate, whatever its gradient.
    of_smallest, largest = updates(inside, params, as_scaled_array(plain, dtype=HALF))
    assert of_smallest < 0.03
    assert 0.07 < largest < 0.1
    of_plain = updates(inside, params, plain)
    of_stored = updates(outside, asarray(params), stored.init(asarray(params)))
    assert all(0.07 < update < 0.1 for update in (*of_plain, *of_stored))
    assert inside(params, plain)[1][0].nu.dtype == F32


def test_rows_that_a_permutation_given_as_an_argument_copies_are_rounded():
    x, order = as_scaled_array((draw_normal(0, (8, 8)), jnp.eye(8)[::-1]), dtype=HALF)

    @scalify
    def difference(x, order):
        h = jnp.tanh(x)
        return jnp.abs(order.astype(x.dtype) @ h - h[::-1]).max()

    assert 0 < asarray(difference(x, order)) < 2**-11
    assert asarray(difference(x, asarray(order) > 0)) == 0


def test_forward_mode_goes_inside_in_functions_of_jax_numpy():
    _, tangent = scalify(lambda x, t: jax.jvp(jnp.sin, (x,), (t,)))(X, X)
    x = np.arange(1.0, 5.0)
    assert_allclose(asarray(tangent), x * np.cos(x), rtol=2**-9)
    with pytest.raises(TypeError, match="forward-mode"):
        scalify(lambda x, t: jax.jvp(gelu, (x,), (t,)))(X, X)


def test_one_run_time_scale_is_mapped_inside_or_by_its_axes():
    with pytest.raises(ValueError, match="rank"):
        jax.vmap(scalify(jnp.sin))(X)
    inside = scalify(jax.vmap(jnp.sin))(X)
    by_axes = jax.vmap(scalify(jnp.sin), in_axes=(ScaledArray(0, None),))(X)
    static = jax.vmap(scalify(jnp.sin))(as_scaled_array(asarray(X), 1.0, dtype=HALF))
    assert (inside.scale.shape, by_axes.scale.shape) == ((), (4,))
    for actual in (inside, by_axes, static):
        assert_allclose(asarray(actual), np.sin(np.arange(1.0, 5.0)), rtol=2**-9)


def test_a_scale_donated_to_a_vmap_is_not_usable_and_each_tensor_has_its_own():
    halve = scalify(lambda tree: jax.tree.map(lambda x: x * 0.5, tree))
    mapped = jax.vmap(halve, in_axes=(ScaledArray(0, None),))
    x = as_scaled_array(jnp.arange(1.0, 5.0), dtype=HALF)
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        out = jax.jit(mapped, donate_argnums=0)(x)
    assert_array_equal(asarray(out), np.arange(1.0, 5.0) / 2)
    two = as_scaled_array({"a": jnp.ones(3), "b": jnp.ones(4)}, dtype=HALF)
    halved = jax.jit(halve, donate_argnums=0)(two)
    assert_array_equal(asarray(halved)["b"], np.full(4, 0.5))
