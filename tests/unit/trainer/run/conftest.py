import pytest

from trainer.run.checkpoint import Checkpointer


@pytest.fixture
def open_checkpointer(tmp_path):
    opened = []

    def open_one(keep=3, keep_best=False, directory=tmp_path / "checkpoints"):
        opened.append(Checkpointer(directory, keep=keep, keep_best=keep_best))
        return opened[-1]

    yield open_one
    for checkpointer in opened:
        checkpointer.close()
