import copy
import fcntl
import json
import os
import re
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
from trainer.run.checkpoint import Checkpointer
from trainer.run.rundir import (
    RunDir,
    RunDirLost,
    environment,
    is_in_use,
    write_environment,
)
from trainer.text import redact

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


def test_a_job_of_a_sweep_does_not_go_on_with_a_run_of_other_steps(run_dir):
    run_dir.write_config(CONFIG)
    longer = CONFIG | {"train": {"steps": 12, "batch_tokens": 64}}
    run_dir.check(longer)
    run_dir.check(CONFIG, fixed=["train.steps", "tracker"])
    with pytest.raises(UserError) as refused:
        run_dir.check(longer, fixed=["train.steps"])
    assert "train.steps=12 (was 10)" in str(refused.value)
    assert f"resume={run_dir.path}" in str(refused.value)
    with pytest.raises(UserError, match=r"tracker\.tags"):
        run_dir.check(CONFIG | {"tracker": {"tags": ()}}, fixed=["tracker"])


@pytest.mark.parametrize("name", ["samples.txt", "metrics.jsonl", "tokenizer.json"])
def test_a_directory_that_is_no_run_keeps_its_files(tmp_path, run_dir, name):
    (run_dir.path / name).write_text("the user's own")
    with pytest.raises(UserError, match=f"is no run, and has a {name}"):
        run_dir.write_config(CONFIG)
    assert (run_dir.path / name).read_text() == "the user's own"


def test_a_key_of_a_phase_that_is_newer_than_the_run_is_no_difference(run_dir):
    new = to_tree(compose_config(["train.phases=[{until:3,precision:sim},{}]"]))
    new["train"]["phases"] = list(new["train"]["phases"])
    old = copy.deepcopy(new)
    del old["train"]["phases"][0]["precision"]["four_over_six"]
    run_dir.write_config(old)
    run_dir.check(new)
    assert from_saved(Config, old) == from_saved(Config, new)


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


def test_two_trainers_cannot_have_one_directory(run_dir):
    says = rf"process {os.getpid()} on .*; stop it, or choose another run_dir"
    with pytest.raises(UserError, match=f"in use by {says}"):
        RunDir(run_dir.path)


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
    with pytest.raises(UserError, match=f"in use by process {process.pid} on "):
        RunDir(tmp_path)
    process.kill()
    process.wait()
    try:
        RunDir(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)  # it lived until here
    process.communicate(timeout=30)


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError,
        match=r"cannot write to run_dir=.*file/run: .*; choose another run_dir",
    ):
        RunDir(tmp_path / "file" / "run")


def test_another_configuration_is_refused_with_the_keys_that_differ(run_dir):
    run_dir.write_config(CONFIG)
    other = CONFIG | {
        "seed": 2,
        "train": {"steps": 10, "batch_tokens": 128},
        "new": {"key": True},
    }
    with pytest.raises(UserError) as error:
        run_dir.write_config(other)
    message = str(error.value)
    assert (
        "belongs to another configuration: seed=2 (was 1); train.batch_tokens=128 (was"
        " 64); new.key=True" in message
    )
    assert "choose another run_dir" in message
    assert "\n" not in message
    assert yaml.safe_load((run_dir.path / "config.yaml").read_text())["seed"] == 1


EVALUATION = {"eval_batches": 2, "final_eval_batches": 2}
PARALLEL = {"data": -1, "fsdp": 1, "tensor": 1, "distributed": True}
SUMS = {"reduce": "fp32", "deterministic_reduce": False}


@pytest.mark.parametrize(
    ("group", "first", "may", "may_not", "said"),
    [
        # more memory for fewer kernels changes no number, and may be new
        ("model", {}, {"keep_fp8_weights": True}, {"d": 2}, r"model\.d=2"),
        # losses of validations of two sizes would be compared for the best checkpoint
        (
            "train",
            EVALUATION,
            {"final_eval_batches": 9},
            {"eval_batches": 9},
            r"train\.eval_batches=9 \(was 2\)",
        ),
        # other devices may share the work but not send other numbers
        (
            "parallel",
            PARALLEL | SUMS,
            {"data": 1, "fsdp": 2, "tensor": 2, "distributed": False},
            {"reduce": "fp8"},
            r"n: parallel.reduce=fp8 \(was fp32\); restore these values",
        ),
        (
            "parallel",
            PARALLEL | SUMS,
            {},
            {"deterministic_reduce": True},
            r"parallel.deterministic_reduce=True \(was False\)",
        ),
    ],
)
def test_what_changes_no_number_may_change(run_dir, group, first, may, may_not, said):
    config = CONFIG if group == "model" else CONFIG | {group: first}
    run_dir.write_config(config)
    with pytest.raises(UserError, match=said):
        run_dir.write_config(config | {group: first | may_not})
    run_dir.write_config(config | {group: first | may})


def test_what_only_says_how_long_and_where_may_change(run_dir):
    run_dir.write_config(CONFIG)
    longer = {"train": CONFIG["train"] | {"steps": 20}, "tracker": {"tags": ("c",)}}
    run_dir.write_config(CONFIG | {"run_dir": "y"} | longer)
    written = yaml.safe_load((run_dir.path / "config.yaml").read_text())
    assert written["train"]["steps"] == 20


def test_a_path_is_the_same_with_a_slash_at_its_end_and_a_name_is_not(run_dir):
    def given(weights, *paths, tokenizer="gpt2"):
        data = {"paths": paths, "tokenizer": tokenizer}
        return CONFIG | {"init_from": weights, "data": data}

    run_dir.write_config(given("gpt2", "a.txt", "books/"))
    run_dir.write_config(given("gpt2/", "a.txt", "books"))
    for other, says in (
        (given("/", "b.txt"), r"init_from=/ \(was gpt2/\); data\.paths=\['b\.txt'\]"),
        (
            given("gpt2", "a.txt", "books", tokenizer="gpt2/"),
            r"configuration: data\.tokenizer=gpt2/ \(was gpt2\);",
        ),
    ):
        with pytest.raises(UserError, match=says):
            run_dir.check(other)


def test_a_damaged_configuration_is_that_of_the_newest_checkpoint(run_dir):
    run_dir.write_config(CONFIG)
    (run_dir.path / "config.yaml").write_text("{]")
    with pytest.raises(UserError, match=r"config.yaml is damaged"):
        run_dir.write_config(CONFIG)
    with Checkpointer(run_dir.path / "checkpoints") as checkpointer:
        checkpointer.save(
            3, {"x": jnp.ones(2)}, {"config": json.loads(json.dumps(CONFIG))}
        )
    for damage in ("", "{", "[]"):
        (run_dir.path / "config.yaml").write_text(damage)
        with pytest.raises(UserError, match=r"seed=2 \(was 1\)"):
            run_dir.check(CONFIG | {"seed": 2})
        run_dir.write_config(CONFIG)
        assert yaml.safe_load((run_dir.path / "config.yaml").read_text())["seed"] == 1


def test_secrets_are_removed_and_tokens_of_text_are_not():
    tree = {
        "batch_tokens": 64,
        "tokenizer": "gpt2",
        "hf_token": "s1",
        "nested": [{"api_key": "s2", "apikey": "s3", "AWS_SECRET_ACCESS_KEY": "s4"}],
        "db": {"password": "s5", "url": "https://user:s6@host/x", "token": None},
        "key": "kept",
    }
    clean = redact(tree)
    text = str(clean)
    assert not [
        secret for secret in ("s1", "s2", "s3", "s4", "s5", "s6") if secret in text
    ]
    assert clean["batch_tokens"] == 64
    assert clean["tokenizer"] == "gpt2"
    assert clean["key"] == "kept"
    assert clean["db"]["url"] == "https://host/x"
    assert clean["db"]["token"] is None


def test_the_environment_says_versions_and_devices_but_no_secrets(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("MY_TOKEN", "hidden")
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    monkeypatch.setenv("JAX_API_LOGIN", "hidden")
    monkeypatch.setenv("JAX_ENABLE_CHECKS", "false")
    (tmp_path / "environment.txt").write_bytes(b"damaged \xff\n")
    overrides = ["seed=1", "x.password=hidden"]
    write_environment(
        tmp_path, {"parameters": "1", "text": "a\n\nparameters: 3"}, overrides
    )
    write_environment(tmp_path, {"parameters": "2"}, overrides)  # a resumed run
    text = (tmp_path / "environment.txt").read_text()
    assert text.startswith("damaged ")
    actual = environment()
    assert text.count(f"jax: {actual['jax']}\n") == 2
    assert "devices: 8 x cpu (cpu)\n" in text
    assert "overrides: seed=1 x.password=(removed)\n" in text
    assert "XLA_FLAGS" in text
    assert "JAX_ENABLE_CHECKS: false\n" in text
    assert re.findall("^parameters: (.*)$", text, re.MULTILINE) == ["1", "2"]
    assert "hidden" not in text


@pytest.mark.parametrize(
    "name", [".lock", "config.yaml", "metrics.jsonl", "checkpoints", "checkpoints/100"]
)
def test_a_directory_with_links_is_refused_before_anything_is_written(tmp_path, name):
    (tmp_path / "precious").write_text("mine")
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match=rf"{name} is a symbolic link"):
        RunDir(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "mine"


def test_what_does_not_start_leaves_nothing(tmp_path):
    with RunDir(tmp_path / "run") as held:
        (held.path / "checkpoints").mkdir()
    assert not (tmp_path / "run").exists()


def test_a_users_own_directory_stays_and_so_does_what_is_in_it(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    for name in ("empty", "full"):
        RunDir(tmp_path / name).__exit__()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "empty",
        "full",
        "full/notes.txt",
    ]


def test_a_directory_with_a_run_stays_and_is_held_while_a_process_trains(tmp_path):
    assert not is_in_use(tmp_path / "none")
    with RunDir(tmp_path / "run") as held:
        assert is_in_use(held.path)
        held.write_config(CONFIG)
    assert (held.path / "config.yaml").exists()
    assert not is_in_use(tmp_path / "run")
    RunDir(tmp_path / "run").release()


def test_a_trainer_whose_lock_was_removed_stops_before_its_next_checkpoint(tmp_path):
    with RunDir(tmp_path / "run") as first:
        first.write_config(CONFIG)
        first.verify_ownership()
        (first.path / ".lock").unlink()
        with pytest.raises(UserError, match=r"\.lock was removed or replaced"):
            first.verify_ownership()
        with RunDir(first.path) as second:
            second.verify_ownership()
            with pytest.raises(UserError, match=r"\.lock was removed or replaced"):
                first.verify_ownership()


def test_a_run_directory_that_is_moved_is_said_to_be(tmp_path):
    path = tmp_path / "run"
    with RunDir(path) as held:
        held.write_config(CONFIG)
        path.rename(tmp_path / "moved")
        (path / "checkpoints").mkdir(parents=True)  # as a save in progress makes it
        with pytest.raises(RunDirLost, match="was moved, removed"):
            held.verify_ownership()
    assert [entry.name for entry in path.iterdir()] == ["checkpoints"]


def test_a_folder_that_a_link_replaces_is_named_before_the_next_checkpoint(tmp_path):
    with RunDir(tmp_path / "run") as held:
        held.write_config(CONFIG)
        (held.path / "checkpoints").symlink_to(tmp_path)
        with pytest.raises(UserError, match="checkpoints is a symbolic link"):
            held.verify_ownership()


def test_a_lock_that_is_removed_while_it_is_taken_does_not_count(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    flock = fcntl.flock

    def remove_and_lock(file, how):
        (tmp_path / "run" / ".lock").unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", remove_and_lock)
    with pytest.raises(UserError, match="is in use by another process"):
        RunDir(tmp_path / "run")


def test_a_removed_configuration_is_written_again_before_the_next_checkpoint(tmp_path):
    with RunDir(tmp_path / "run") as held:
        held.write_config(CONFIG)
        whole = (held.path / "config.yaml").read_text()
        (held.path / "config.yaml").unlink()
        held.verify_ownership()
        assert (held.path / "config.yaml").read_text() == whole
