"""The Dockerfile copies enough to start the trainer."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


def instructions(name):
    return re.findall(rf"^{name} (.*)$", TEXT, re.MULTILINE)


def test_what_is_copied_is_enough_to_start_the_trainer(tmp_path):
    for line in instructions("COPY"):
        *sources, target = line.split()
        for source in sources:
            if (ROOT / source).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / source, tmp_path / target, ignore=ignored)
            else:
                shutil.copy(ROOT / source, tmp_path / target)
    (entry,) = map(json.loads, instructions("ENTRYPOINT"))
    done = subprocess.run(
        [sys.executable, *entry[1:], "--cfg", "job"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "gpt2_nano" in done.stdout
