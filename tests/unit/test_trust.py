"""docs/trust.md: its program prints the output that it shows, and its limits are
those of the code."""

import functools
import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import draw_normal

from scalify_core import (
    ScaledArray,
    as_scaled_array,
    asarray,
    explain,
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
    inside = scalify(jax.vmap(jnp.sin))(X)
    by_axes = jax.vmap(scalify(jnp.sin), in_axes=(ScaledArray(0, None),))(X)
    assert (inside.scale.shape, by_axes.scale.shape) == ((), (4,))
    for y in (inside, by_axes):
        np.testing.assert_allclose(asarray(y), np.sin(np.arange(1.0, 5.0)), rtol=2**-9)


def test_the_lowest_number_masks_after_a_product_unless_it_is_an_argument():
    q, w = as_scaled_array(
        (draw_normal(0, (4, 3)), jnp.eye(3)[:, :2]), dtype=jnp.float16
    )

    def masked(q, w, number):
        return jnp.where(jnp.arange(3)[None] == 2, number, q) @ w

    lowest = float(jnp.finfo(jnp.float32).min)
    for number in (lowest, -1e4):
        actual = asarray(scalify(functools.partial(masked, number=number))(q, w))
        np.testing.assert_allclose(actual, asarray(q)[:, :2], rtol=2**-10)
    assert "dot_general" in explain(masked, q, w, lowest).first_loss
    assert not asarray(scalify(masked)(q, w, lowest)).any()
