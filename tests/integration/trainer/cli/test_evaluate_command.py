"""The evaluation of another text: how much of it is read."""

import shutil
from pathlib import Path

import pytest

from trainer.cli import evaluate

SAVED = Path(__file__).resolve().parents[3] / "data" / "saved_by_7ef3f38" / "fp32"
BATCH = 256  # tokens


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        (0, "1 batch, 256 tokens; 42 tokens after them, less than a batch, left out"),
        (1, "1 batch, 256 tokens; text after batches=1 is not read"),
    ],
)
def test_the_text_that_is_left_out_is_told(
    tmp_path, monkeypatch, capsys, batches, said
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(SAVED, "run")
    # The last token has no next one to predict.
    Path("other.txt").write_text("x" * (BATCH + 43))
    evaluate.main(
        evaluate.Arguments("run", text="other.txt", batches=batches, precisions="fp32")
    )
    assert said in capsys.readouterr().out
