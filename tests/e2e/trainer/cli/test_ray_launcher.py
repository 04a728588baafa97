"""`launcher=ray` on a cluster of two nodes on this machine, of which workers, nodes and
the command are killed."""

import os
import signal
import time

import pytest
from command import finish, parameters, several, trainer, values

from scripts.faults.ray_cluster import cluster

pytestmark = pytest.mark.timeout(900)
EVERY = 20
ARGS = [
    "parallel=fsdp",
    "train.steps=150",
    f"checkpoint.every={EVERY}",
    "checkpoint.keep=99",
    "train.eval_every=0",
    "tracker=jsonl",
    "sample.max_new_tokens=0",
]


@pytest.fixture(scope="module")
def nodes():
    with cluster(2) as started:
        yield started


def on_ray(nodes, folder, run_dir, *args):
    words = ["launcher=ray", "launcher.workers=[2,2]", *args]
    return trainer(folder, run_dir, *ARGS, *words, RAY_ADDRESS=nodes.address)


def until(condition, process):
    end = time.monotonic() + 300
    while not condition() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    assert condition(), process.communicate(timeout=30)[0]


def last_row(run_dir):
    return len(values(run_dir)) if (run_dir / "metrics.jsonl").exists() else 0


def processes_of_starts(run_dir):
    path = run_dir / "environment.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line.startswith("processes: ")]


def test_a_killed_worker_and_a_killed_command_change_no_bit(nodes, tmp_path):
    for process in several(tmp_path, "undisturbed", *ARGS, devices=1):
        finish(process)
    run_dir = tmp_path / "A"
    process = on_ray(nodes, tmp_path, "A")
    until(lambda: last_row(run_dir) > EVERY, process)
    os.kill(nodes.workers()[-1], signal.SIGKILL)
    until(lambda: len(processes_of_starts(run_dir)) == 2, process)
    until(lambda: last_row(run_dir) > 2 * EVERY, process)
    process.kill()
    said, _ = process.communicate()
    assert "lost worker 1 of 2 (its process or its machine has ended)" in said
    assert "Traceback" not in said
    output = finish(on_ray(nodes, tmp_path, "A"))
    assert "resuming after step" in output
    assert "done: 150 steps" in output
    assert values(run_dir) == values(tmp_path / "undisturbed")
    assert parameters(run_dir, 150) == parameters(tmp_path / "undisturbed", 150)


DILOCO = ["parallel=diloco", "diloco.replicas=2", "diloco.quorum=1"]
DILOCO += ["diloco.sync_every=5"]


@pytest.mark.parametrize("parallel", [[], DILOCO], ids=["fsdp", "diloco"])
def test_a_run_goes_on_without_a_killed_node_and_takes_another_in(
    nodes, tmp_path, parallel
):
    run_dir = tmp_path / "A"
    words = [
        "train.steps=100000",
        "launcher.workers=[1,2]",
        "launcher.resize_seconds=2",
    ]
    process = on_ray(nodes, tmp_path, "A", *words, *parallel)
    until(lambda: last_row(run_dir) > EVERY, process)
    nodes.kill()
    until(lambda: len(processes_of_starts(run_dir)) == 2, process)
    rows = last_row(run_dir)
    until(lambda: last_row(run_dir) > rows + 5, process)
    nodes.add()
    until(lambda: len(processes_of_starts(run_dir)) == 3, process)
    rows = last_row(run_dir)
    until(lambda: last_row(run_dir) > rows + 5, process)
    process.send_signal(signal.SIGTERM)
    said = finish(process, code=143)
    assert processes_of_starts(run_dir) == [f"processes: {n}" for n in (2, 1, 2)]
    assert "the cluster has room for 2 workers: saving a checkpoint" in said
    steps = [row["step"] for row in values(run_dir)]
    assert steps == list(range(1, len(steps) + 1))
    assert f"stopped after step {len(steps)} of 100000" in said
    assert parameters(run_dir, len(steps))
    if parallel:
        assert "DiLoCo: one replica" in said


def test_a_users_error_in_a_worker_is_one_line_and_no_start_follows(nodes, tmp_path):
    words = ["data=text", "data.paths=[not_here.txt]"]
    output = finish(on_ray(nodes, tmp_path, "A", *words), code=2)
    assert "not_here.txt" in output
    assert output.count("error: ") == 1
    assert "Traceback" not in output
    assert "lost worker" not in output


def test_without_a_cluster_one_line_says_how_to_start_one(tmp_path):
    words = ["launcher=ray", "launcher.workers=[1,1]"]
    process = trainer(tmp_path, "A", *words, RAY_TMPDIR=str(tmp_path))
    output = finish(process, code=2)
    assert "error: launcher=ray found no Ray cluster on this machine" in output
    assert len(output.splitlines()) == 1
