"""The notebooks of examples/ run as they stand, and their outputs are light."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def test_there_are_three_with_outputs_of_their_own():
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        assert path.stat().st_size < 100_000
        cells = json.loads(path.read_text())["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
        assert any(cell["outputs"] for cell in code)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    """In a process of its own, with one device."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", "scripts.docs.notebooks", "write=no", str(path)],
        cwd=ROOT,
        env=environment | {"JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr[-3000:]
