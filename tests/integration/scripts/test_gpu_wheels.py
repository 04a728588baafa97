"""A GPU's image without this project's dependencies gets them as wheels."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_a_command_finds_the_wheels_that_were_brought(tmp_path):
    """Unpacked once; they come before what is installed."""
    folder = tmp_path / "wheels"
    (folder / "site").mkdir(parents=True)
    (folder / "site" / "hydra.py").write_text("brought = True\n")
    (folder / "site" / ".whole").touch()
    command = [
        ROOT / "scripts" / "gpu" / "with.sh",
        folder,
        "python3",
        "-c",
        "import hydra, trainer; print(hydra.brought)",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.stdout.strip() == "True", done.stderr
