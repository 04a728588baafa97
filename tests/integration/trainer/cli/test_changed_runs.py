"""A run whose files somebody changed is not continued, exported or sampled as if it were
whole."""

import re
import shutil
from pathlib import Path

import jax
import pytest
import yaml

from trainer.assembly import saved_model
from trainer.cli import export
from trainer.cli.train import main
from trainer.data.tokenizer import ByteTokenizer
from trainer.errors import UserError
from trainer.run import initial_weights
from trainer.run.checkpoint import Checkpointer
from trainer.run.vocabulary import vocabulary_of

SAVED = Path(__file__).resolve().parents[3] / "data" / "saved_by_7ef3f38" / "fp32"


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(SAVED, "run"))


def test_settings_that_its_checkpoint_was_not_trained_with_are_refused(run_dir, capsys):
    file = run_dir / "config.yaml"
    tree = yaml.safe_load(file.read_text())
    tree["optimizer"]["weight_decay"] = 0.7
    file.write_text(yaml.safe_dump(tree))
    assert main([f"resume={run_dir}", "train.steps=9"]) == 2
    message = capsys.readouterr().err
    assert "is not what the checkpoint was trained with" in message
    assert re.search(r"optimizer.weight_decay=0.7 \(was 0\.\d+\)", message)


def test_settings_of_a_directory_without_checkpoints_are_not_taken(run_dir, capsys):
    shutil.rmtree(run_dir / "checkpoints")
    assert main([f"resume={run_dir}"]) == 2
    assert (
        "resume=run has no checkpoints: nothing was trained" in capsys.readouterr().err
    )


@pytest.mark.parametrize("read", [saved_model.restore_run, vocabulary_of])
def test_another_tokenizer_than_its_checkpoint_s_is_refused(run_dir, monkeypatch, read):
    other = ByteTokenizer()
    other.fingerprint = "another"
    monkeypatch.setattr(initial_weights, "load_saved", lambda *_: other)
    meta = Checkpointer.meta
    monkeypatch.setattr(
        Checkpointer,
        "meta",
        lambda *args: meta(*args) | {"tokenizer_fingerprint": "byte"},
    )
    with pytest.raises(UserError, match="is not that of its checkpoints"):
        read(run_dir)


def test_an_export_that_its_dtype_cannot_hold_is_refused(run_dir, monkeypatch):
    model = saved_model.restore_run(run_dir)
    large = jax.tree.map(lambda x: x * 1e7, model.params)
    monkeypatch.setattr(
        saved_model, "restore_run", lambda *_: model._replace(params=large)
    )
    arguments = export.Arguments(run_dir=str(run_dir), out="out", dtype="fp16")
    with pytest.raises(UserError, match=r"dtype=fp16: .* is not finite in it"):
        export.main(arguments)
    assert not Path("out").exists()
