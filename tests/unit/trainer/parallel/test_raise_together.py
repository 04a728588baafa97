"""Two processes of a run, of which this one plays both: where they differ, both are
refused. Real ones are in e2e/trainer/parallel/test_processes.py."""

import os
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from trainer.errors import UserError
from trainer.parallel.processes import check_same_settings
from trainer.run.initial_weights import check_weights_finite
from trainer.run.inputs import check_same_inputs
from trainer.run.rundir import RunDir


@pytest.fixture
def refusal(monkeypatch):
    """Return the error of process 0 where the two check different things."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def refuse(check, mine, theirs):
        sent = []

        def gather(values):
            sent.append(values)
            return np.stack([values, sent[0]])

        monkeypatch.setattr(multihost_utils, "process_allgather", gather)
        check(theirs)  # as process 1, which agrees with itself
        with pytest.raises(UserError) as error:
            check(mine)
        return str(error.value)

    return refuse


def test_other_settings_are_named(refusal):
    def settings(run_dir, steps, flag):  # a path may differ
        train = {"steps": steps, "lr": 1}
        return {"train": train, "run_dir": run_dir, "environment": {"x": flag}}

    mine, theirs = settings("a", 6, "yes"), settings("b", 7, "no")
    message = "environment.x, train.steps: process 1 was given another value than"
    assert refusal(check_same_settings, mine, theirs).startswith(message)


def test_other_data_weights_and_checkpoints_are_named(refusal, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    checkpoint = tmp_path / "run" / "checkpoints" / "3" / "manifest" / "metadata"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_text("a")

    def check(inputs):
        content, init_from, source = inputs
        given = SimpleNamespace(fingerprint=content, content=content)
        resume = SimpleNamespace(source=source, step=None)
        check_same_inputs(
            SimpleNamespace(init_from=init_from, resume=resume),
            SimpleNamespace(manifest=given, tokenizer=given),
        )

    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    for mine, theirs, name in (
        (("a", None, "none"), ("b", None, "none"), "the data"),
        (("a", one, "auto"), ("a", two, "auto"), "init_from"),
        (("a", None, one), ("a", None, str(tmp_path / "run")), "resume"),
    ):
        message = f"{name}: process 1 reads another content there than process 0"
        assert refusal(check, mine, theirs).startswith(message)


def test_weights_that_differ_in_one_number_are_other_weights(refusal):
    mine, theirs = {"w": np.zeros(3, np.float32)}, {"w": np.zeros(3, np.float32)}
    theirs["w"][2] = 1
    actual = refusal(
        lambda params: check_weights_finite("init_from=w", params), mine, theirs
    )
    assert actual.startswith("init_from=w: process 1 reads another content")


def test_a_directory_that_one_process_alone_sees_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda x: x)
    gather = lambda values: np.stack([values, values + 1])
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    with pytest.raises(UserError, match="process 1 has another directory there"):
        RunDir(tmp_path / "A")
    assert not (tmp_path / "A").exists()


def test_a_refusal_of_the_first_process_alone_is_that_of_all(monkeypatch, tmp_path):
    sent = []
    with RunDir(tmp_path):
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        for index in (0, 1):
            received = iter(list(sent))

            def broadcast(values, index=index, received=received):
                sent.append(values)
                return next(received) if index else values

            monkeypatch.setattr(jax, "process_index", lambda index=index: index)
            monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", broadcast)
            with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
                RunDir(tmp_path)
