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
from command import CACHE, TINY, values

from trainer import Callback, CallbackKind, Diverged, Tracker, UserError, compose, train

SMALL = [*TINY, "parallel.data=1", "sample.max_new_tokens=4", CACHE]
B, T, V = 16, 33, 64


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configuration(*overrides, run_dir="A"):
    return compose([*SMALL, f"run_dir={run_dir}", "tracker=jsonl", *overrides])


class Walk:
    """Every token is the one before plus 1 or 2: what can be learnt of it is the size
    of the step."""

    vocab_size = V

    def __init__(self):
        self.validation = [self.batch(10**6)]

    def batch(self, step):
        rng = np.random.default_rng(step)
        return (
            rng.integers(V, size=(B, 1)) + rng.integers(1, 3, size=(B, T)).cumsum(1)
        ) % V


class Recorder(Tracker):
    def __init__(self):
        self.steps, self.samples, self.exit_code = [], [], None

    def start(self, beginning):
        self.begun = beginning.step

    def row(self, step, row):
        self.steps.append(step)

    def sample(self, step, name, text):
        self.samples.append((step, name, text))

    def finish(self, exit_code=0):
        self.exit_code = exit_code


def test_importing_the_package_imports_neither_jax_nor_a_tracker():
    code = (
        "import sys, trainer; print(*sorted({'jax', 'wandb', 'hydra', 'tensorboardX',"
        " 'numpy'} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert done.stdout.split() == []


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
    actual = train(
        configuration("train.steps=10", "train.eval_every=0"),
        data=Walk(),
        tracker=recorder,
        callbacks=callbacks,
    )
    assert (actual.step, actual.stopped_by, actual.run_dir.name) == (10, None, "A")
    assert [row["step"] for row in actual.rows] == recorder.steps == list(range(1, 11))
    assert [row["step"] for row in actual.rows if "own/largest" in row] == [4, 8, 10]
    assert seen == [4, -6, 8, 10, -10]
    assert [s for s in recorder.samples if s[1] == "notes"] == [
        (n, "notes", f"at {n}") for n in (4, 8, 10)
    ]
    assert (recorder.begun, recorder.exit_code) == (0, 0)
    assert actual.rows[-1]["val/loss"] < np.log(V)
    assert sum(x.size for x in jax.tree.leaves(actual.state.params)) > 1000
    (sample,) = [text for _, name, text in recorder.samples if name == "samples"]
    assert all(
        int(word) < V for word in sample.removeprefix("In the beginning").split()
    )


def test_a_run_stopped_in_its_last_callbacks_says_what_is_not_done(capsys):
    stop = Callback("stop", 0, lambda context: os.kill(os.getpid(), signal.SIGTERM))
    after = Callback("after", 0, lambda context: {"own/after": 1})
    for _ in range(2):  # the signal comes again as the callbacks are repeated
        train(configuration("train.steps=2"), data=Walk(), callbacks=[stop, after])
        assert (
            "stopped after step 2 of 2, before its final validation was done; to resume"
            " from step 2: the same call" in capsys.readouterr().out
        )
    whole = train(configuration("train.steps=2"), data=Walk(), callbacks=[after])
    assert whole.rows[-1]["own/after"] == 1
    assert "done: 2 steps" in capsys.readouterr().out


def test_a_run_that_goes_on_is_the_run_that_was_not_stopped():
    # a shell that runs the tests in the background ignores it
    before = signal.getsignal(signal.SIGINT)
    whole = train(configuration("train.steps=8", run_dir="whole"), data=Walk())
    stop = Callback(
        "stop",
        3,
        lambda context: (
            os.kill(os.getpid(), signal.SIGINT) if context.step == 3 else None
        ),
    )
    part = train(
        configuration("train.steps=8", run_dir="part"), data=Walk(), callbacks=[stop]
    )
    assert part.stopped_by == signal.SIGINT
    assert 3 <= part.step < 8
    assert len(list((part.run_dir / "checkpoints").glob("[0-9]*"))) == 1
    rest = train(
        configuration("train.steps=8", run_dir="part"), data=Walk(), callbacks=[stop]
    )
    assert (rest.step, rest.stopped_by) == (8, None)
    assert values(whole.run_dir) == values(rest.run_dir)
    for a, b in zip(
        jax.tree.leaves(whole.state.params),
        jax.tree.leaves(rest.state.params),
        strict=True,
    ):
        assert np.array_equal(a, b)
    assert signal.getsignal(signal.SIGINT) is before


def test_texts_are_prepared_once_and_trained_on_in_another_thread_too():
    texts = [f"{i} and {i} are {2 * i}. " * 9 for i in range(300)]
    config = configuration("train.steps=2", "data.val_fraction=0.1")
    actual = train(config, data=texts)
    assert actual.step == 2
    cache = config.data.cache_dir
    prepared = sorted(os.listdir(cache))
    assert (
        sum(name.startswith("own-") and name.endswith(".jsonl") for name in prepared)
        == 1
    )
    other = dataclasses.replace(config, run_dir="B")
    entries = []
    # where no signal can be caught
    thread = threading.Thread(
        target=lambda: entries.append(train(other, data=iter(texts)))
    )
    thread.start()
    thread.join()
    assert entries[0].step == 2
    assert sorted(os.listdir(cache)) == prepared


def test_a_second_interruption_is_a_keyboard_interrupt_and_the_process_goes_on():
    def twice(context):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(
            configuration("train.steps=6"),
            data=Walk(),
            callbacks=[Callback("twice", 2, twice)],
        )


class Wide(Walk):
    def batch(self, step):
        return super().batch(step) + (V if step == 3 else 0)


class Short(Walk):
    def batch(self, step):
        return super().batch(step)[:, 1 if step == 0 else 0 :]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("one text", "data is one text; expected a list"),
        (["a", 7], "text 1 is int"),
        ([], "empty"),
        (Wide(), rf"batch\(3\) has ids from {V} to {2 * V - 1}; expected 0 to {V - 1}"),
        (Short(), r"batch\(0\) is int64 \[16, 32\]; expected integers \[16, 33\]"),
        (
            type(
                "Bare", (), {"vocab_size": V, "validation": [], "batch": Walk.batch}
            )(),
            "a Bare has no batch in validation",
        ),
        (7, "a int has no vocab_size, validation, batch"),
    ],
)
def test_data_that_cannot_be_trained_on_is_a_user_error(data, said):
    with pytest.raises(UserError, match=said):
        train(configuration("train.steps=6"), data=data)


def test_errors_are_exceptions_of_the_program():
    with pytest.raises(UserError, match="did you mean"):
        compose(["train.stepz=3"])
    with pytest.raises(UserError, match="two callbacks are called 'samples'"):
        train(
            configuration(),
            data=Walk(),
            callbacks=[Callback("samples", 1, lambda context: None)],
        )

    def diverge(context):  # as the watchdog does: test_runs.py
        raise Diverged("it did")

    recorder = Recorder()
    with pytest.raises(Diverged, match="it did"):
        train(
            configuration("train.steps=2"),
            data=Walk(),
            tracker=recorder,
            callbacks=[Callback("diverge", 1, diverge)],
        )
    assert recorder.exit_code == 3
