"""docs/trust.md: its program prints the output that it shows."""

import re
import runpy
from pathlib import Path

import jax.numpy as jnp

from scalify_core import (
    as_scaled_array,
)

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
