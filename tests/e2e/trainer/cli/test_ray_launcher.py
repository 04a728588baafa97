"""`launcher=ray` on a cluster of two nodes on this machine, of which workers, nodes and
the command are killed."""

import signal
import time

import pytest
from command import finish, parameters, trainer, values

from scripts.faults import lost_machines
from scripts.faults.ray_cluster import cluster

pytestmark = pytest.mark.timeout(1200)
ARGS = [
    "parallel=fsdp",
    "train.steps=100000",
    "checkpoint.every=20",
    "train.eval_every=0",
]


@pytest.fixture(scope="module")
def nodes():
    with cluster(2) as started:
        yield started


def on_ray(nodes, folder, *args):
    words = ["launcher=ray", "launcher.workers=[1,2]", *args]
    return trainer(folder, "A", *ARGS, *words, RAY_ADDRESS=nodes.address)


def until(condition, process):
    end = time.monotonic() + 300
    while not condition() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    assert condition(), process.communicate(timeout=30)[0]


def rows(run_dir):
    return values(run_dir) if (run_dir / "metrics.jsonl").exists() else []


def processes_of_starts(run_dir):
    path = run_dir / "environment.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line.startswith("processes: ")]


def test_a_killed_worker_node_and_command_change_no_bit(tmp_path):
    settings = lost_machines.Arguments(str(tmp_path / "out"), 3, precision="fp32")
    lost_machines.main(settings)  # raises an error for each difference
    output = (tmp_path / "out" / "disturbed.log").read_text()
    assert output.count("of 2 has failed (") == 2
    assert "done: 150 steps" in output


DILOCO = ["parallel=diloco", "diloco.replicas=2", "diloco.quorum=1"]
DILOCO += ["diloco.sync_every=5"]


def test_a_run_goes_on_without_a_killed_node_and_takes_another_in(nodes, tmp_path):
    """A state that is split: test_a_killed_worker_node_and_command_change_no_bit."""
    run_dir = tmp_path / "A"
    process = on_ray(nodes, tmp_path, "launcher.resize_seconds=2", *DILOCO)
    until(lambda: len(rows(run_dir)) > 20, process)
    for starts, change in ((2, nodes.kill), (3, nodes.add)):
        change()
        until(lambda n=starts: len(processes_of_starts(run_dir)) == n, process)
        count = len(rows(run_dir))
        until(lambda n=count: len(rows(run_dir)) > n + 5, process)
    process.send_signal(signal.SIGTERM)
    output = finish(process, code=143)
    assert processes_of_starts(run_dir) == [f"processes: {n}" for n in (2, 1, 2)]
    assert "of 2 has failed (" in output
    assert "the cluster has room for 2 workers: saving a checkpoint" in output
    assert "Traceback" not in output
    steps = [row["step"] for row in rows(run_dir)]
    assert steps == list(range(1, len(steps) + 1))
    assert f"stopped after step {len(steps)} of 100000" in output
    assert parameters(run_dir, len(steps))
    assert "DiLoCo: one replica" in output


def test_a_signal_while_it_waits_for_machines_ends_the_command(nodes, tmp_path):
    words = ["launcher=ray", "launcher.workers=[1,1]", "launcher.worker_cpus=2"]
    process = trainer(tmp_path, "A", *ARGS, *words, RAY_ADDRESS=nodes.address)
    for line in process.stdout:
        if "the cluster has no free resources for 1 worker" in line:
            break
    process.send_signal(signal.SIGTERM)
    output = finish(process, code=143)
    assert "SIGTERM: no worker is training, so there is nothing to save" in output
    assert "to resume: run the same command again" in output


def test_a_users_error_in_a_worker_is_one_line_and_no_start_follows(nodes, tmp_path):
    words = ["data=text", "data.tokenizer=byte", "data.paths=[not_here.txt]"]
    output = finish(on_ray(nodes, tmp_path, *words), code=2)
    assert "not_here.txt" in output
    assert output.count("error: ") == 1
    assert "Traceback" not in output
    assert "has failed" not in output
