"""A run directory is held by one trainer at a time, and bound to one configuration."""

import copy
import fcntl
import os
import signal
import subprocess
import sys

import jax.numpy as jnp
import pytest
import yaml

from trainer.config.composition import compose_config
from trainer.config.fields import from_saved, to_tree
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.observe.records import encode_row
from trainer.run.checkpoint import Checkpointer
from trainer.run.rundir import (
    RunDir,
    RunDirLost,
    is_in_use,
)

CONFIG = {
    "seed": 1,
    "train": {"steps": 10, "batch_tokens": 64},
    "tracker": {"tags": ("a", "b")},
    "run_dir": "x",
}


@pytest.fixture
def run_dir(tmp_path):
    directory = RunDir(tmp_path / "run")
    yield directory
    directory.release()


def saved_config(directory):
    return yaml.safe_load((directory.path / "config.yaml").read_text())


def test_another_configuration_is_refused_with_the_keys_that_differ(run_dir):
    run_dir.write_config(CONFIG)
    train = {"steps": 10, "batch_tokens": 128}
    with pytest.raises(UserError) as error:
        run_dir.write_config(CONFIG | {"seed": 2, "train": train, "new": {"key": True}})
    changes = "seed=2 (was 1); train.batch_tokens=128 (was 64); new.key=true"
    assert f"belongs to another configuration: {changes}" in str(error.value)
    assert "\n" not in str(error.value)
    assert saved_config(run_dir)["seed"] == 1


def test_results_of_steps_that_are_taken_again_are_set_aside(run_dir, caplog):
    """The report would show them as those of the new weights."""
    (run_dir.path / "numerics").mkdir()
    picture = run_dir.path / "numerics" / "weights.png"
    picture.touch()
    evaluation, tasks = (
        run_dir.path / name for name in ("evaluation.json", "tasks.json")
    )
    evaluation.write_text('{"step": 6}')
    tasks.write_text('{"step": 4}')
    run_dir.set_results_aside(6, draws_pictures=True)
    assert not caplog.messages
    run_dir.set_results_aside(4, draws_pictures=True)
    assert (run_dir.path / "evaluation.json.old").read_text() == '{"step": 6}'
    assert [path.exists() for path in (evaluation, tasks, picture)] == [False, 1, 1]
    evaluation.write_text("damaged")
    run_dir.set_results_aside(0, draws_pictures=True)
    assert not any(path.exists() for path in (evaluation, tasks, picture))
    assert (run_dir.path / "numerics" / "weights.png.old").exists()
    assert "evaluation.json, tasks.json, weights.png are of" in caplog.messages[-1]


def test_pictures_of_steps_that_are_not_drawn_again_are_set_aside(run_dir):
    (run_dir.path / "numerics").mkdir()
    picture = run_dir.path / "numerics" / "weights.png"
    picture.touch()
    rows = (encode_row(step, {"numerics/w/h.0/rms": 1.0}) for step in (2, 6))
    (run_dir.path / "metrics.jsonl").write_bytes(b"".join(rows))
    run_dir.set_results_aside(4, draws_pictures=True)
    run_dir.set_results_aside(6, draws_pictures=False)
    assert picture.exists()
    run_dir.set_results_aside(4, draws_pictures=False)
    assert not picture.exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [("data", {"paths": ["x" * 64] * 4000}), ("run_dir", "[" * 2001)],
)
def test_a_configuration_that_could_not_be_read_again_is_refused(run_dir, key, value):
    with pytest.raises(
        UserError, match=r"could not be read again \(more than .*; shorten"
    ):
        run_dir.check(CONFIG | {key: value})
    assert not (run_dir.path / "config.yaml").exists()


EVALUATION = {"eval_batches": 2, "final_eval_batches": 2}
PARALLEL = {"data": -1, "fsdp": 1, "tensor": 1, "distributed": True}
SUMS = {"reduce": "fp32", "deterministic_reduce": False}


@pytest.mark.parametrize(
    ("group", "first", "may", "may_not", "message"),
    [
        # more memory for fewer kernels changes no number, and may be new
        ("model", {}, {"keep_fp8_weights": True}, {"d": 2}, r"model\.d=2"),
        # losses of validations of two sizes would be compared for the best checkpoint
        (
            "train",
            EVALUATION,
            {"final_eval_batches": 9, "steps": 20},
            {"eval_batches": 9},
            r"train\.eval_batches=9 \(was 2\)",
        ),
        # other devices may share the work but not send other numbers
        (
            "parallel",
            PARALLEL | SUMS,
            {"data": 1, "fsdp": 2, "tensor": 2, "distributed": False},
            {"reduce": "fp8", "deterministic_reduce": True},
            r"reduce=fp8 \(was fp32\); .*reduce=true \(was false\); restore these",
        ),
        ("tracker", {"tags": ("a",)}, {"tags": ("c",)}, {}, None),
    ],
)
def test_keys_that_change_no_number_may_change(
    run_dir, group, first, may, may_not, message
):
    run_dir.write_config(CONFIG | {group: first})
    if message is not None:
        with pytest.raises(UserError, match=message):
            run_dir.write_config(CONFIG | {group: first | may_not})
    run_dir.write_config(CONFIG | {group: first | may, "run_dir": "y"})
    assert saved_config(run_dir)[group].keys() == (first | may).keys()


def test_a_job_of_a_sweep_does_not_go_on_with_a_run_of_other_steps(run_dir):
    run_dir.write_config(CONFIG)
    longer = CONFIG | {"train": CONFIG["train"] | {"steps": 12}}
    run_dir.check(longer)
    for fixed in ("train.steps", "train"):
        with pytest.raises(UserError, match=r"train.steps=12 \(was 10\)"):
            run_dir.check(longer, fixed=[fixed])


def test_a_path_is_the_same_with_a_slash_at_its_end_and_a_name_is_not(run_dir):
    def given(weights, *paths, tokenizer="gpt2"):
        data = {"paths": paths, "tokenizer": tokenizer}
        return CONFIG | {"init_from": weights, "data": data}

    run_dir.write_config(given("gpt2", "a.txt", "books/"))
    run_dir.check(given("gpt2/", "a.txt", "books"))
    for other, says in (
        (given("/", "b.txt"), r"init_from=/ \(was gpt2\); data\.paths=\[b\.txt\]"),
        (
            given("gpt2", "a.txt", "books", tokenizer="gpt2/"),
            r"configuration: data\.tokenizer=gpt2/ \(was gpt2\);",
        ),
    ):
        with pytest.raises(UserError, match=says):
            run_dir.check(other)


def test_a_key_of_a_phase_that_is_newer_than_the_run_is_no_difference(run_dir):
    new = to_tree(compose_config(["train.phases=[{until:3,precision:sim},{}]"]))
    new["train"]["phases"] = list(new["train"]["phases"])
    old = copy.deepcopy(new)
    del old["train"]["phases"][0]["precision"]["four_over_six"]
    run_dir.write_config(old)
    run_dir.check(new)
    assert from_saved(Config, old) == from_saved(Config, new)


def test_a_damaged_configuration_is_that_of_the_newest_checkpoint(run_dir):
    run_dir.write_config(CONFIG)
    (run_dir.path / "config.yaml").write_text("{]")
    with pytest.raises(UserError, match=r"config\.yaml is damaged"):
        run_dir.write_config(CONFIG)
    config = CONFIG | {"tracker": {"tags": ["a", "b"]}}
    with Checkpointer(run_dir.path / "checkpoints") as checkpointer:
        checkpointer.save(3, {"x": jnp.ones(2)}, {"config": config})
    with pytest.raises(UserError, match=r"seed=2 \(was 1\)"):
        run_dir.check(CONFIG | {"seed": 2})
    run_dir.write_config(CONFIG)
    assert saved_config(run_dir)["seed"] == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("samples.txt", "is no run, and has a samples.txt"),
        ("metrics.jsonl", "is no run, and has a metrics.jsonl"),
        ("tokenizer.json", "is no run, and has a tokenizer.json"),
        ("hang.txt", "is no run, and has a hang.txt"),
        (".lock", r"has a \.lock that no trainer wrote"),
        # another framework's
        ("checkpoints/1000/model.bin", "is no run, and has files in checkpoints/"),
        ("checkpoints/step-1/model.bin", "is no run, and has files in checkpoints/"),
        ("tensorboard/events.tfevents.1", "is no run, and has files in tensorboard/"),
    ],
)
def test_a_directory_that_is_no_run_keeps_its_files(tmp_path, name, message):
    for path in (tmp_path / name, tmp_path / "film.partial"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("the user's own")
    with pytest.raises(UserError, match=message):
        RunDir(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(files) == sorted([tmp_path / name, tmp_path / "film.partial"])
    assert {path.read_text() for path in files} == {"the user's own"}


def test_a_configuration_of_another_program_gets_no_lock_beside_it(tmp_path):
    (tmp_path / "config.yaml").write_text("a: 1\n")
    with (
        pytest.raises(UserError, match="belongs to another configuration"),
        RunDir(tmp_path) as held,
    ):
        held.check(CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_start_that_was_killed_early_can_be_repeated(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for name in (".lock", "checkpoints/.writable-0", ".0123456789abcdef.partial"):
        (tmp_path / name).touch()
    (tmp_path / ".lock").write_text("process 1 on somewhere\n")
    (tmp_path / "film.partial").write_text("the user's own")
    with RunDir(tmp_path) as held:
        held.write_config(CONFIG)
    assert {path.name for path in tmp_path.iterdir()} == {
        *(".lock", "checkpoints", "config.yaml", "film.partial"),
    }


HOLDER = """
import os, sys
from pathlib import Path
from trainer.run.rundir import RunDir

held = RunDir(Path(sys.argv[1]))
child = os.fork()
if child:
    print(child, flush=True)
sys.stdin.read()
"""


def test_a_killed_trainer_leaves_the_directory_free_although_a_child_of_it_lives_on(
    tmp_path,
):
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    child = int(process.stdout.readline())
    with pytest.raises(UserError, match=f"in use by process {process.pid} on .*; stop"):
        RunDir(tmp_path)
    process.kill()
    process.wait()
    try:
        RunDir(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)  # it lived until here
    process.communicate(timeout=30)


def test_a_lock_that_is_another_file_too_is_refused(tmp_path):
    """The process's name was written over the other file."""
    notes = tmp_path / "notes"
    notes.write_text("process notes of a thesis")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").hardlink_to(notes)
    with pytest.raises(UserError, match=r"has a \.lock with a further name"):
        RunDir(tmp_path / "run")
    assert notes.read_text() == "process notes of a thesis"


def test_a_lock_that_is_removed_while_it_is_taken_does_not_count(tmp_path, monkeypatch):
    flock = fcntl.flock

    def remove_and_lock(file, how):
        (tmp_path / ".lock").unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", remove_and_lock)
    with pytest.raises(UserError, match="is in use by another process"):
        RunDir(tmp_path)


def test_a_directory_with_links_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match=r"\.lock is a symbolic link"):
        RunDir(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_run_that_does_not_start_leaves_nothing_and_takes_nothing(tmp_path):
    with RunDir(tmp_path / "run") as held:
        (held.path / "checkpoints").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    for name in ("empty", "full"):
        RunDir(tmp_path / name).__exit__()
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"empty", "full", "full/notes.txt"}


def test_a_trainer_whose_lock_was_removed_stops_before_its_next_checkpoint(tmp_path):
    with RunDir(tmp_path / "run") as first:
        first.write_config(CONFIG)
        first.verify_ownership()
        (first.path / ".lock").unlink()
        with RunDir(first.path) as second:
            second.verify_ownership()
            with pytest.raises(UserError, match=r"\.lock was removed or replaced"):
                first.verify_ownership()


def test_a_run_directory_that_is_moved_is_said_to_be(tmp_path):
    path = tmp_path / "run"
    assert not is_in_use(path)
    with RunDir(path) as held:
        held.write_config(CONFIG)
        assert is_in_use(path)
        path.rename(tmp_path / "moved")
        (path / "checkpoints").mkdir(parents=True)  # as a save in progress makes it
        with pytest.raises(RunDirLost, match="was moved, removed"):
            held.verify_ownership()
    assert [entry.name for entry in path.iterdir()] == ["checkpoints"]


def test_changes_of_a_held_directory_are_seen_before_the_next_checkpoint(tmp_path):
    with RunDir(tmp_path / "run") as held:
        held.write_config(CONFIG)
        config = saved_config(held)
        (held.path / "config.yaml").unlink()
        held.restore_config()
        assert saved_config(held) == config
        (held.path / "checkpoints").symlink_to(tmp_path)
        with pytest.raises(UserError, match="checkpoints is a symbolic link"):
            held.verify_ownership()
