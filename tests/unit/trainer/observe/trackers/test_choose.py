"""Which trackers a configuration gives, and that all of them are told everything."""

import os
import subprocess
import sys

import pytest

from trainer.observe.records import read_rows, read_samples
from trainer.observe.trackers.choose import make_tracker
from trainer.observe.trackers.protocol import Tracker, TrackerGroup, TrackerStart


class Recorder(Tracker):
    def __init__(self):
        self.calls = []

    def __getattribute__(self, name):
        if name in ("calls", "id", "__class__"):
            return object.__getattribute__(self, name)
        return lambda *args: self.calls.append((name, *args))


def test_every_call_reaches_every_tracker(tmp_path):
    recorders = [Recorder(), Recorder()]
    both = TrackerGroup(recorders)
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
    assert TrackerGroup([]).written() is None


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
        TrackerGroup([Full(), last]).finish(2)
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


def attempt(run_dir, steps, *, kind="jsonl", start=0, is_fork=False):
    """A run that ends without a checkpoint after these steps."""
    tracker = make_tracker(kind, run_dir, start=start, config={}, is_fork=is_fork)
    for step in steps:
        tracker.row(step, {"train/loss": 1 / step})
        tracker.sample(step, "sample", f"text of {step}")
    tracker.event(start, "FP8 is used")
    tracker.finish()


def logged(run_dir, end=""):
    rows = read_rows(run_dir / f"metrics.jsonl{end}")
    samples = read_samples(run_dir / f"samples.txt{end}")
    return [row.get("event", row["step"]) for row in rows], len(samples)


@pytest.mark.parametrize(
    ("start", "is_fork", "steps"), [(0, False, [1, 2]), (3, True, [4])]
)
def test_rows_of_an_attempt_without_a_checkpoint_are_set_aside(
    tmp_path, caplog, start, is_fork, steps
):
    attempt(tmp_path, range(1, 6))
    assert "no checkpoint" not in caplog.text
    attempt(tmp_path, steps, start=start, is_fork=is_fork)
    assert (
        f"run_dir={tmp_path} has rows up to step 5, but no checkpoint of its own:"
        f" starting after step {start}; its old log is now metrics.jsonl.old"
        in caplog.text
    )
    assert logged(tmp_path) == ([*steps, "FP8 is used"], len(steps))
    assert logged(tmp_path, ".old") == ([1, 2, 3, 4, 5, "FP8 is used"], 5)
    # The next attempt repeats these few rows: the long log stays.
    attempt(tmp_path, [], kind="none", start=start, is_fork=is_fork)
    assert "metrics.jsonl.old is longer" in caplog.text
    assert logged(tmp_path) == ([], 0)
    assert len(logged(tmp_path, ".old")[0]) == 6


def test_an_attempt_without_a_row_leaves_nothing(tmp_path, caplog):
    for _ in range(2):
        attempt(tmp_path, [], start=3, is_fork=True)
    assert logged(tmp_path) == (["FP8 is used"], 0)
    assert not (tmp_path / "metrics.jsonl.old").exists()
    assert not caplog.text
