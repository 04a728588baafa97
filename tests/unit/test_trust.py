"""docs/trust.md: its program prints the output that it shows, and its limits are
those of the code."""

import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalify_core import (
    as_scaled_array,
    asarray,
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
