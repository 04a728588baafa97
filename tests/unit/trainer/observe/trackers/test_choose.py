"""Which trackers a configuration gives, and that all of them are told everything."""

import os
import subprocess
import sys

import pytest

from trainer.observe.trackers.choose import make_tracker
from trainer.observe.trackers.protocol import Several, Tracker, TrackerStart


class Recorder(Tracker):
    def __init__(self):
        self.calls = []

    def __getattribute__(self, name):
        if name in ("calls", "id", "__class__"):
            return object.__getattribute__(self, name)
        return lambda *args: self.calls.append((name, *args))


def test_every_call_reaches_every_tracker(tmp_path):
    recorders = [Recorder(), Recorder()]
    both = Several(recorders)
    calls = [
        ("start", TrackerStart(tmp_path, 0, False, {}, None, None)),
        ("row", 1, {}),
        ("event", 1, "e"),
        ("sample", 1, "n", "t"),
        ("picture", 1, "n", tmp_path),
        ("summary", {}),
        ("alert", "a", "t"),
        ("flush",),
        ("finish", 3),
    ]
    for name, *args in calls:
        getattr(both, name)(*args)
    assert [r.calls for r in recorders] == [calls, calls]
    methods = {name for name in vars(Tracker) if not name.startswith("_")} - {
        "id",
        "written",
    }
    assert {name for name, *_ in calls} == methods
    assert Several([]).written() is None


def test_no_tracker_writes_nothing(tmp_path):
    tracker = make_tracker("none", tmp_path, start=0, config={})
    tracker.row(1, {"train/loss": 1.0})
    tracker.finish()
    assert list(tmp_path.iterdir()) == []


def test_wandb_is_not_imported_without_need(tmp_path):
    program = (
        "import sys; from pathlib import Path; from trainer.observe.trackers.choose"
        " import make_tracker; make_tracker('jsonl', Path(sys.argv[1]), start=0,"
        " config={}).finish(); assert 'wandb' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", program, tmp_path],
        check=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )


def test_every_tracker_finishes_even_if_one_before_it_cannot():
    class Full(Tracker):
        def finish(self, exit_code=0):
            raise OSError("full")

    last = Recorder()
    with pytest.raises(OSError, match="full"):
        Several([Full(), last]).finish(2)
    assert last.calls == [("finish", 2)]


def test_a_tracker_of_ones_own_gets_the_runs_record_of_what_it_lacks(tmp_path):
    before = make_tracker("jsonl", tmp_path, start=0, config={})
    for step in (1, 2, 3):
        before.row(step, {"train/loss": 1 / step})
    before.finish()

    class Own(Tracker):
        def __init__(self):
            self.steps = [1]

        def start(self, start):
            start.log.replay(self, after=self.steps[-1])

        def row(self, step, row):
            self.steps.append(step)

    own = Own()
    tracker = make_tracker("jsonl", tmp_path, start=2, config={}, custom=own)
    tracker.row(3, {"train/loss": 1 / 3})
    tracker.finish()
    assert own.steps == [1, 2, 3]
