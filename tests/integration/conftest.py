"""What tests of several rooms share: a finished run."""

from pathlib import Path

import compiled_once
import pytest
from command import here, values

from trainer.report import page


@pytest.fixture(autouse=True)
def short_runs(monkeypatch):
    """Runs take what others have compiled, and have no charts, a fifth of their time.

    `finished_run`, which is made before, has charts.
    """
    compiled_once.use(monkeypatch)
    monkeypatch.setattr(page, "draw_charts", lambda charts: [])


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory) -> tuple[Path, list[dict]]:
    """A directory with the run A of 20 steps, and its rows. Others may write beside it,
    but not into it."""
    folder = tmp_path_factory.mktemp("finished")
    here(folder, "A", "train.steps=20", "checkpoint.every=10")
    return folder, values(folder / "A")
