"""The trackers of a configuration, each of which is told everything; and the logs of an
attempt without a checkpoint."""

import math

import pytest

from trainer.observe.records import read_rows, read_samples
from trainer.observe.trackers.choose import make_tracker
from trainer.observe.trackers.jsonl import JsonlTracker
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
    calls = [
        ("start", TrackerStart(tmp_path, 0, {})),
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
        getattr(TrackerGroup(recorders), name)(*args)
    assert [r.calls for r in recorders] == [calls, calls]
    methods = {name for name in vars(Tracker) if not name.startswith("_")}
    assert {name for name, *_ in calls} == methods - {"id", "checkpoint_state"}


def test_a_row_that_is_sent_again_has_numbers_that_are_not_finite_as_numbers(tmp_path):
    log, recorder = JsonlTracker(), Recorder()
    log.start(TrackerStart(tmp_path, 0, {}))
    log.row(1, {"train/loss": -math.inf, "tokens": 8})
    log.replay(recorder, after=0)
    assert recorder.calls == [("row", 1, {"train/loss": -math.inf, "tokens": 8})]


def test_records_of_later_steps_are_sent_again_rows_before_texts(tmp_path):
    log = JsonlTracker()
    log.start(TrackerStart(tmp_path, 0, {}))
    for step in (1, 2, 3):
        log.sample(step, "sample", f"text of {step}")
        log.row(step, {"train/loss": 1 / step})
    log.event(3, "FP8 is used")
    recorder = Recorder()
    log.replay(recorder, after=1)
    assert recorder.calls == [
        ("row", 2, {"train/loss": 1 / 2}),
        ("sample", 2, "sample", "text of 2"),
        ("row", 3, {"train/loss": 1 / 3}),
        ("event", 3, "FP8 is used"),
        ("sample", 3, "sample", "text of 3"),
    ]


def test_every_tracker_finishes_even_if_one_before_it_cannot():
    class Full(Tracker):
        def finish(self, exit_code=0):
            raise OSError("full")

    last = Recorder()
    with pytest.raises(OSError, match="full"):
        TrackerGroup([Full(), last]).finish(2)
    assert last.calls == [("finish", 2)]


def test_records_after_the_last_valid_step_are_sent_again(tmp_path):
    starts = [
        (TrackerStart(tmp_path, 0, {}), -1),
        (TrackerStart(tmp_path, 3, {}), 3),
        (TrackerStart(tmp_path, 3, {}, redo_row=True), 2),
        (TrackerStart(tmp_path, 3, {}, is_fork=True), -1),
    ]
    for start, last_valid_step in starts:
        assert start.last_valid_step == last_valid_step


def attempt(run_dir, steps, *, kind="jsonl", start=0, is_fork=False):
    """Run some steps, without a checkpoint."""
    tracker = make_tracker(kind, TrackerStart(run_dir, start, {}, is_fork=is_fork))
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


def test_without_a_tracker_rows_of_steps_that_are_taken_again_are_cut(tmp_path):
    """They were those of an attempt that is given up."""
    attempt(tmp_path, range(1, 6))
    make_tracker("none", TrackerStart(tmp_path, 3, {}))
    assert logged(tmp_path) == (["FP8 is used", 1, 2, 3], 3)
    make_tracker("none", TrackerStart(tmp_path, 3, {}, redo_row=True))
    assert logged(tmp_path) == (["FP8 is used", 1, 2], 2)
