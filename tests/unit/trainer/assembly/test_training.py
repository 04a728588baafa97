"""A run that lost its directory says so, and writes nothing there."""

from types import SimpleNamespace

import pytest

from trainer.assembly.training import finish_session, source_of_tokenizer
from trainer.config.composition import compose_config
from trainer.errors import UserError
from trainer.observe.trackers.jsonl import JsonlTracker
from trainer.observe.trackers.protocol import TrackerStart
from trainer.run.checkpoint import Checkpointer, Restored
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
        tracker.start(TrackerStart(path, 0, {}))
        with pytest.raises(RunDirLost, match="was moved"):
            moved_while_open(held, tracker, error)
    assert not any(path.iterdir())
    assert len((tmp_path / "moved" / "metrics.jsonl").read_text().splitlines()) == 1


def test_no_file_is_copied_from_the_weights_that_a_saved_setting_names():
    c = compose_config(["init_from=private", "resume=other"])
    assert source_of_tokenizer(c, Restored(0, None, {})) == "private"
    continued = {"totals": {}}
    assert source_of_tokenizer(c, Restored(3, None, continued)) is None
    fork = {"forked": {"run": "other", "step": 3}}
    assert source_of_tokenizer(c, Restored(3, None, fork)) == "other"
    assert source_of_tokenizer(c, Restored(4, None, fork)) is None
