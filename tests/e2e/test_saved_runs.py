"""Runs that an earlier version saved are resumed, evaluated and exported as that
version did it."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from command import parameters, values
from golden.cases import machine

from trainer.cli import evaluate, export
from trainer.cli.train import main

SAVED = Path(__file__).resolve().parents[1] / "data" / "saved_by_7ef3f38"
EXPECTED = json.loads((SAVED / "expected.json").read_text())
RUNS = EXPECTED["runs"]
SAME_MACHINE = machine() == EXPECTED["machine"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with a copy of every saved run; the first run prepares the data for
    all."""
    directory = tmp_path_factory.mktemp("saved")
    for name in RUNS:
        shutil.copytree(SAVED / name, directory / name)
    return directory


@pytest.fixture(autouse=True)
def in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


def assert_losses(actual, expected):
    """Equal on the machine that saved them; elsewhere sums have another order, which a
    few updates amplify."""
    if SAME_MACHINE:
        assert actual == expected
    else:
        np.testing.assert_allclose(actual, expected, rtol=1e-2)


@pytest.mark.parametrize("name", RUNS)
def test_a_saved_run_is_evaluated(folder, name):
    evaluate.main(evaluate.Arguments(run_dir=name, batches=2))
    results = json.loads((folder / name / "evaluation.json").read_text())["results"]
    assert_losses([result["loss"] for result in results], RUNS[name]["evaluation"])


@pytest.mark.parametrize("name", RUNS)
def test_a_saved_run_is_exported_to_the_same_file(folder, name):
    """No arithmetic but the widening of the weights: the file is the same on every
    machine."""
    export.main(export.Arguments(run_dir=name, out=f"exported/{name}"))
    file = folder / "exported" / name / "model.safetensors"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == RUNS[name]["export"]


@pytest.mark.parametrize("name", RUNS)
def test_a_saved_run_is_resumed_bit_exactly(folder, tmp_path, name):
    """On a copy, since evaluation and export are of step 2."""
    shutil.copytree(SAVED / name, tmp_path / name)
    assert main([f"resume={tmp_path / name}"]) == 0
    losses = [row["train/loss"] for row in values(tmp_path / name)]
    assert_losses(losses, RUNS[name]["losses"])
    if SAME_MACHINE:
        leaves = parameters(tmp_path / name, 4).values()
        stored = RUNS[name]["checksums"].values()
        assert [leaf["checksum"] for leaf in leaves] == list(stored)
