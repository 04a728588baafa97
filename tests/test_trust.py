"""docs/trust.md: its program prints what it shows, and what it says of scales is so."""

import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalify_core import ScaledArray, as_scaled_array, asarray, gelu, scalify

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "trust.md").read_text()
X = as_scaled_array(jnp.arange(1.0, 5.0), dtype=jnp.float16)


def test_the_program_prints_what_the_page_shows(tmp_path, capsys):
    program, shown = re.findall(r"^```\w*\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    path = tmp_path / "features.py"
    path.write_text(program)
    runpy.run_path(str(path))
    printed = capsys.readouterr().out
    assert printed == shown, f"docs/trust.md is stale; its second block is now\n{printed}"


def test_forward_mode_goes_inside():
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(scalify(jnp.sin), (X,), (X,))
    _, tangent = scalify(lambda x, t: jax.jvp(jnp.sin, (x,), (t,)))(X, X)
    x = np.arange(1.0, 5.0)
    np.testing.assert_allclose(asarray(tangent), x * np.cos(x), rtol=2**-9)
    with pytest.raises(TypeError, match="forward-mode"):
        scalify(lambda x, t: jax.jvp(gelu, (x,), (t,)))(X, X)


def test_one_run_time_scale_is_mapped_inside_or_by_its_axes():
    with pytest.raises(ValueError, match="rank"):
        jax.vmap(scalify(jnp.sin))(X)
    found = scalify(jax.vmap(jnp.sin))(X), jax.vmap(scalify(jnp.sin), in_axes=(ScaledArray(0, None),))(X)
    assert [x.scale.shape for x in found] == [(), (4,)]
    for x in (*found, jax.vmap(scalify(jnp.sin))(as_scaled_array(asarray(X), 1.0, dtype=jnp.float16))):
        np.testing.assert_allclose(asarray(x), np.sin(np.arange(1.0, 5.0)), rtol=2**-9)


def test_what_is_said_of_donated_scales():
    mapped = jax.vmap(scalify(lambda x: x * 0.5), in_axes=(ScaledArray(0, None),))
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        out = jax.jit(mapped, donate_argnums=0)(as_scaled_array(jnp.arange(1.0, 5.0), dtype=jnp.float16))
    np.testing.assert_array_equal(asarray(out), np.arange(1.0, 5.0) / 2)
    own = as_scaled_array({"a": jnp.ones(3), "b": jnp.ones(4)}, dtype=jnp.float16)
    halved = jax.jit(scalify(lambda tree: jax.tree.map(lambda x: x * 0.5, tree)), donate_argnums=0)(own)
    np.testing.assert_array_equal(asarray(halved)["b"], np.full(4, 0.5))


def test_numbers_far_below_the_scale_are_zeros_and_those_far_above_saturate():
    x = ScaledArray(jnp.asarray([2.0**-24, 2.0**-26, 2.0**15, 2.0**17], jnp.float32), 1.0).astype(jnp.float16)
    np.testing.assert_array_equal(asarray(x), [2.0**-24, 0, 2.0**15, 65504])
