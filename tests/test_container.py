"""What can be known of the Dockerfile without building it: its files are enough, its commands are commands."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def instructions():
    """Pairs of an instruction and what follows it, continued lines joined, comments left out."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    return [line.split(maxsplit=1) for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def test_what_is_copied_is_there_and_enough_to_start_the_trainer(tmp_path):
    ignored = (ROOT / ".dockerignore").read_text().split()
    for name, rest in instructions():
        if name == "COPY":
            *sources, target = rest.split()
            for source in sources:
                assert source not in ignored
                place = tmp_path / target / (source if target.endswith("/") else "")
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / source, place)
    (entry,) = [json.loads(rest) for name, rest in instructions() if name == "ENTRYPOINT"]
    done = subprocess.run([sys.executable, *entry[1:], "--cfg", "job"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "gpt2_nano" in done.stdout


def test_its_commands_are_shell_and_install_what_pyproject_and_the_lock_say():
    commands = [rest for name, rest in instructions() if name == "RUN"]
    for command in commands:
        subprocess.run(["bash", "-n"], input=command, text=True, check=True)
    (install,) = [command for command in commands if "uv pip install" in command]
    assert "--constraint requirements.lock -r pyproject.toml --extra gpu" in " ".join(install.split())
    assert instructions()[0][0] == "FROM"
