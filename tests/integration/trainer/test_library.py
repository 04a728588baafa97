"""The trainer as a library: what a program adds to a run, and that nothing ends the
program."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from command import tiny_config, values
from precisions import bits
from walk import V, Walk

from trainer import Callback, CallbackKind, Diverged, Tracker, UserError, compose, train
from trainer.run import loop
from trainer.run.shutdown import Guard, Timeouts


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Recorder(Tracker):
    def __init__(self):
        self.steps, self.samples, self.exit_code = [], [], None

    def start(self, beginning):
        self.first_step = beginning.step

    def row(self, step, row):
        self.steps.append(step)

    def sample(self, step, name, text):
        self.samples.append((step, name, text))

    def finish(self, exit_code=0):
        self.exit_code = exit_code


def test_importing_the_package_imports_neither_jax_nor_a_tracker():
    heavy = ["jax", "wandb", "hydra", "tensorboardX", "numpy"]
    code = f"import sys, trainer; print(sorted({{*{heavy}}} & set(sys.modules)))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, env=environment) == b"[]\n"


def test_own_batches_an_own_tracker_and_an_own_job_work_together():
    recorder, seen = Recorder(), []

    def largest(context):
        seen.append(context.step)
        context.text("notes", f"at {context.step}")
        return {
            "own/largest": max(abs(x).max() for x in jax.tree.leaves(context.params))
        }

    callbacks = [
        Callback("largest", 4, largest),
        Callback("late", 6, lambda m: seen.append(-m.step), CallbackKind.SAVE),
    ]
    config = tiny_config(
        "train.steps=10", "train.eval_every=0", "sample.max_new_tokens=4"
    )
    actual = train(config, data=Walk(), tracker=recorder, callbacks=callbacks)
    assert (actual.step, actual.stopped_by, actual.run_dir.name) == (10, None, "A")
    assert [row["step"] for row in actual.rows] == recorder.steps == list(range(1, 11))
    assert [row["step"] for row in actual.rows if "own/largest" in row] == [4, 8, 10]
    assert seen == [4, -6, 8, 10, -10]
    notes = [sample for sample in recorder.samples if sample[1] == "notes"]
    assert notes == [(n, "notes", f"at {n}") for n in (4, 8, 10)]
    assert (recorder.first_step, recorder.exit_code) == (0, 0)
    assert actual.rows[-1]["val/loss"] < np.log(V)
    (sample,) = [text for _, name, text in recorder.samples if name == "samples"]
    words = sample.removeprefix("In the beginning").split()
    assert all(int(word) < V for word in words)


def test_each_timeout_of_the_watchdog_reaches_the_guard(monkeypatch):
    given = []

    def recorded(timeouts, *args, **options):
        given.append(timeouts)
        return Guard(timeouts, *args, **options)

    monkeypatch.setattr(loop, "Guard", recorded)
    limits = ["stop_seconds=71", "stall_seconds=72", "hang_seconds=73"]
    words = [f"watchdog.{limit}" for limit in limits]
    train(tiny_config("train.steps=1", "train.eval_every=0", *words), data=Walk())
    assert given == [Timeouts(stop=71, stall=72, hang=73)]


def signalled(number, step=None):
    """A callback that sends this process a signal, after a step or the last one."""

    def send(context):
        if step is None or context.step == step:
            os.kill(os.getpid(), number)

    return Callback("stop", step or 0, send)


def test_a_run_stopped_in_its_last_callbacks_says_what_is_not_done(capsys):
    after = Callback("after", 0, lambda context: {"own/after": 1})
    config = tiny_config("train.steps=2")
    train(config, data=Walk(), callbacks=[signalled(signal.SIGTERM), after])
    assert (
        "stopped after step 2 of 2, before its final validation was done; to resume"
        " from step 2: the same call" in capsys.readouterr().out
    )
    result = train(config, data=Walk(), callbacks=[after])
    assert result.rows[-1]["own/after"] == 1
    assert "done: 2 steps" in capsys.readouterr().out


def test_a_resumed_run_is_the_run_that_was_not_stopped():
    # a shell that runs the tests in the background ignores it
    sigint_handler = signal.getsignal(signal.SIGINT)
    expected = train(tiny_config("train.steps=8", "run_dir=B"), data=Walk())
    config, stop = tiny_config("train.steps=8"), signalled(signal.SIGINT, 3)
    stopped = train(config, data=Walk(), callbacks=[stop])
    assert stopped.stopped_by == signal.SIGINT
    assert 3 <= stopped.step < 8
    assert len(list((stopped.run_dir / "checkpoints").glob("[0-9]*"))) == 1
    resumed = train(config, data=Walk())
    assert (resumed.step, resumed.stopped_by) == (8, None)
    assert values(expected.run_dir) == values(resumed.run_dir)
    assert bits(expected.state.params) == bits(resumed.state.params)
    assert signal.getsignal(signal.SIGINT) is sigint_handler


def test_a_second_interruption_is_a_keyboard_interrupt_and_the_process_goes_on():
    def interrupt(context):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    callbacks = [Callback("interrupt", 2, interrupt)]
    with pytest.raises(KeyboardInterrupt):
        train(tiny_config("train.steps=6"), data=Walk(), callbacks=callbacks)


def test_texts_are_prepared_once_and_trained_on_in_another_thread_too():
    texts = [f"{i} and {i} are {2 * i}. " * 9 for i in range(300)]
    config = tiny_config("train.steps=2", "data.val_fraction=0.1")
    actual = train(config, data=texts)
    assert actual.step == 2
    prepared = sorted(os.listdir(config.data.cache_dir))
    given = [name for name in prepared if name.startswith("own-")]
    assert [name.endswith(".jsonl") for name in given].count(True) == 1
    other = dataclasses.replace(config, run_dir="B")
    results = []
    # where no signal can be caught
    thread = threading.Thread(
        target=lambda: results.append(train(other, data=iter(texts)))
    )
    thread.start()
    thread.join()
    assert results[0].step == 2
    assert sorted(os.listdir(config.data.cache_dir)) == prepared


class Wide(Walk):
    def batch(self, step):
        return super().batch(step) + (V if step == 3 else 0)


class Short(Walk):
    def batch(self, step):
        return super().batch(step)[:, 1 if step == 0 else 0 :]


class Bare:
    vocab_size, validation, batch = V, [], Walk.batch


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("one text", "data is one text; expected a list"),
        (["a", 7], "text 1 is int"),
        (Wide(), rf"batch\(3\) has ids from {V} to {2 * V - 1}; expected 0 to {V - 1}"),
        (Short(), r"batch\(0\) is int64 \[16, 32\]; expected integers \[16, 33\]"),
        (Bare(), "a Bare has no batch in validation"),
        (7, "a int has no vocab_size, validation, batch"),
    ],
)
def test_data_that_cannot_be_trained_on_is_a_user_error(data, message):
    with pytest.raises(UserError, match=message):
        train(tiny_config("train.steps=6"), data=data)


def test_errors_are_exceptions_of_the_program():
    with pytest.raises(UserError, match="did you mean"):
        compose(["train.stepz=3"])
    twice = Callback("evaluation", 1, lambda context: None)
    with pytest.raises(UserError, match="two callbacks are called 'evaluation'"):
        train(tiny_config(), data=Walk(), callbacks=[twice])

    def diverge(context):  # as the watchdog does: test_runs.py
        raise Diverged("it did")

    recorder, callbacks = Recorder(), [Callback("diverge", 1, diverge)]
    with pytest.raises(Diverged, match="it did"):
        train(tiny_config(), data=Walk(), tracker=recorder, callbacks=callbacks)
    assert recorder.exit_code == 3
