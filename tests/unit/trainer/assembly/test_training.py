"""A run that lost its directory says so, and writes nothing there."""

from types import SimpleNamespace

import pytest

from trainer.assembly.training import finish_session
from trainer.errors import UserError
from trainer.observe.trackers.jsonl import JsonlTracker
from trainer.observe.trackers.protocol import TrackerStart
from trainer.run.checkpoint import Checkpointer
from trainer.run.rundir import RunDir, RunDirLost
from trainer.run.shutdown import Timeouts


def moved_while_open(held, tracker, error):
    """Move the directory of a run between its first row and an error."""
    session = SimpleNamespace(
        run_dir=held.path,
        verify_run_dir=held.verify_ownership,
        checkpointer=Checkpointer(held.path / "checkpoints"),
        tracker=tracker,
        display=None,
        timeouts=Timeouts(0, 0, 0),
    )
    with finish_session(session):
        held.path.rename(held.path.with_name("moved"))
        held.path.mkdir()
        tracker.row(1, {"train/loss": 1.0})
        raise error("cannot write run/metrics.jsonl")


@pytest.mark.parametrize("error", [UserError, FileNotFoundError])
def test_a_moved_directory_explains_another_error_and_stays_as_it_is(tmp_path, error):
    path, tracker = tmp_path / "run", JsonlTracker()
    with RunDir(path) as held:
        held.write_config({})
        tracker.start(TrackerStart(path, 0, False, {}, None, None))
        with pytest.raises(RunDirLost, match="was moved"):
            moved_while_open(held, tracker, error)
    assert not any(path.iterdir())
    assert len((tmp_path / "moved" / "metrics.jsonl").read_text().splitlines()) == 1
