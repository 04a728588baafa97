import pytest

from trainer.run.checkpoint import Checkpointer


@pytest.fixture
def open_checkpointer(tmp_path):
    opened = []

    def open_one(keep=3, directory=tmp_path / "checkpoints", **settings):
        opened.append(Checkpointer(directory, keep=keep, **settings))
        return opened[-1]

    yield open_one
    for checkpointer in opened:
        checkpointer.close()
