"""The built wheel, installed into an empty environment, is a working command with all
it runs on."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from command import CACHE

from scripts.faults.chaos import SMALL
from trainer import __version__
from trainer.__main__ import COMMANDS
from trainer.text import merge_overrides

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("trainer", "scalify_core")


def run(*command, cwd, **variables):
    clean = os.environ | variables
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        clean.pop(name, None)
    words = [str(part) for part in command]
    return subprocess.run(words, cwd=cwd, env=clean, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built of a copy, since the build writes beside its sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    code = (
        "import sys; from setuptools.build_meta import build_wheel;"
        " build_wheel(sys.argv[1])"
    )
    done = run(sys.executable, "-c", code, folder / "dist", cwd=folder)
    assert done.returncode == 0, done.stderr
    (path,) = (folder / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def command(wheel, tmp_path_factory):
    """`scalify-trainer` of an environment that has the wheel, and only by a path file
    what the tests have."""
    folder = tmp_path_factory.mktemp("environment")
    done = run(sys.executable, "-m", "venv", folder, cwd=folder)
    assert done.returncode == 0, done.stderr
    python = folder / "bin" / "python"
    pip = ["-m", "pip", "install", "--no-index", "--no-deps", "--quiet"]
    installed = run(python, *pip, wheel, cwd=folder)
    assert installed.returncode == 0, installed.stderr
    site = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    (site / "tests.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )
    home = run(python, "-c", "import trainer; print(trainer.__file__)", cwd=folder)
    assert home.stdout.startswith(str(folder)), home
    return folder / "bin" / "scalify-trainer"


def test_a_wheel_holds_every_file_of_the_packages(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    for name in PACKAGES:
        files = [
            p
            for p in (ROOT / name).rglob("*")
            if p.is_file() and "__pycache__" not in p.parts
        ]
        assert files
        assert {str(p.relative_to(ROOT)) for p in files} <= held
        assert f"{name}/py.typed" in held
    tops = {name.partition("/")[0] for name in held}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


@pytest.mark.smoke
def test_the_installed_command_prints_the_configuration(command, tmp_path):
    done = run(command, "--cfg", "job", "precision=bf16", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["precision"]["name"] == "bf16"


def test_every_command_works_beside_files_of_its_modules_names(command, tmp_path):
    for name in ("scripts", "configs", "trainer", "scalify_core"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('not ours')")
    (tmp_path / "trainer.py").write_text("raise SystemExit('not ours')")
    (tmp_path / "my.yaml").write_text("train: {steps: 2}\ntracker: jsonl\n")
    (tmp_path / "a.txt").write_text("In the beginning was the word. " * 2000)
    data = ["data=text", "data.tokenizer=byte", "data.paths=[a.txt]"]
    settings = [
        *data,
        CACHE,
        "config=my.yaml",
        "train.final_eval_batches=2",
        "sample.max_new_tokens=0",
        "precision=scalify_fp8_fp16",
        "run_dir=A",
    ]
    commands = {
        "train": merge_overrides(SMALL, settings),
        "evaluate": ["run_dir=A", "batches=1", "step=2"],
        "generate": ["run_dir=A", "max_new_tokens=2", "step=best"],
        "export": ["run_dir=A", "out=exported", "dtype=bf16"],
        "report": ["run_dir=A"],
        "compare": ["runs=A,B", "out=no"],
        "explain": ["run_dir=A", "top=1"],
        "bisect": ["run_dir=A", "top=1"],
        "prepare-data": data,
        "train-tokenizer": [*data, "vocab_size=260", "out=mine"],
        "plan": ["--help"],
    }
    assert set(commands) == set(COMMANDS)
    for name, arguments in commands.items():
        if name == "compare":
            shutil.copytree(tmp_path / "A", tmp_path / "B")
        done = run(command, name, *arguments, cwd=tmp_path, JAX_PLATFORMS="cpu")
        assert done.returncode == 0, (name, done.stderr[-2000:])
    exported = tmp_path / "exported"
    written = json.loads((exported / "config.json").read_text())
    assert written["torch_dtype"] == "bfloat16"
    generation = json.loads((exported / "generation_config.json").read_text())
    assert generation["eos_token_id"] == written["eos_token_id"]
    card = (exported / "README.md").read_text()
    assert "2 steps of 512 tokens, 1,024 tokens in all" in card
    assert 'PreTrainedTokenizerFast.from_pretrained(".")' in card


def test_the_version_is_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert project["version"] == __version__ == citation["version"]
    assert project["license"] == citation["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
