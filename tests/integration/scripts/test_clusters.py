"""Files for clusters: what the Slurm script does with each end of a run, manifests that
agree with themselves, and the commands of the page about them."""

import json
import os
import shlex
import stat
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from trainer.config.composition import compose_config

ROOT = Path(__file__).resolve().parents[3]


def run_sbatch(tmp_path, code, *args, **variables):
    """The script with commands of Slurm that write down how they are called; the
    training ends with `code`."""
    calls = tmp_path / "calls"
    for name, body in (("srun", f"exit {code}"), ("scontrol", "exit 0")):
        file = tmp_path / name
        file.write_text(f'#!/bin/bash\necho "{name} $*" >> {calls}\n{body}\n')
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    env = (
        os.environ
        | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        | variables
    )
    script = ["bash", str(ROOT / "scripts/slurm/train.sbatch"), *args]
    done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=60)
    return done, calls.read_text().splitlines() if calls.exists() else []


@pytest.mark.parametrize("code", [0, 2, 3, 143, 137, 1])
def test_slurm_restarts_what_was_stopped_killed_or_crashed_but_not_forever(
    tmp_path, code
):
    done, calls = run_sbatch(tmp_path, code, "run_dir=r", "train.steps=3")
    arguments = "parallel.distributed=true run_dir=r train.steps=3"
    assert calls[0].endswith(f"-m trainer {arguments}")
    if code in (0, 2, 3):  # done or hopeless
        assert (done.returncode, len(calls)) == (code, 1)
        return
    assert calls[-1] == "scontrol requeue 7"
    limits = {"SLURM_RESTART_COUNT": "3", "MAX_RESTARTS": "3"}
    done, calls = run_sbatch(tmp_path, code, "run_dir=r", **limits)
    assert done.returncode == code
    assert "after 3 restarts" in done.stderr
    assert not calls[-1].startswith("scontrol")


def test_slurm_asks_for_the_run_directory(tmp_path):
    done, calls = run_sbatch(tmp_path, 0, "train.steps=3")
    assert (done.returncode, calls) == (2, [])
    assert "run_dir=" in done.stderr


def test_the_manifest_is_a_jobset_of_as_many_processes_as_it_says():
    jobset = yaml.safe_load((ROOT / "scripts/k8s/train.yaml").read_text())
    claim = yaml.safe_load((ROOT / "scripts/k8s/runs.yaml").read_text())
    schema = json.loads((ROOT / "tests/data/jobset_v1alpha2.json").read_text())
    jsonschema.validate(jobset, schema)
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    count = int(variables["JAX_NUM_PROCESSES"])
    assert spec["completions"] == spec["parallelism"] == count
    # JobSet's names: <jobset>-<job>-<replica>-<pod>.<jobset>
    name = jobset["metadata"]["name"]
    address = variables["JAX_COORDINATOR_ADDRESS"].split(":")[0]
    assert address == f"{name}-{job['name']}-0-0.{name}"
    volume = pod["volumes"][0]["persistentVolumeClaim"]
    assert volume["claimName"] == claim["metadata"]["name"]
    words = shlex.split(container["args"][0].partition("-m trainer ")[2])
    assert compose_config(words).parallel.distributed
