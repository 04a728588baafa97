"""Damaged checkpoints are noticed, named and left out."""

import json
import os
import re
import shutil

import jax
import numpy as np
import pytest
from checkpoints import META, abstract, bits, make_state, saved

from trainer.errors import UserError
from trainer.run.checkpoint import Checkpointer
from trainer.run.checkpoint_manifest import sealed


def files(step_directory):
    return [path for path in sorted(step_directory.rglob("*")) if path.is_file()]


def payload(step_directory):
    """Return the file that holds the arrays."""
    data = (step_directory / "state").rglob("d/*")
    return max(data, key=lambda path: path.stat().st_size)


def flip_a_bit(directory):
    path = payload(directory)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def alter_the_meta(directory):
    path = directory / "manifest" / "metadata"
    path.write_text(path.read_text().replace('"seed": 1', '"seed": 2'))


def write_metadata(text):
    return lambda directory: (directory / "_CHECKPOINT_METADATA").write_text(text)


DAMAGE = {
    "bit flipped in the arrays": flip_a_bit,
    "arrays emptied": lambda d: os.truncate(payload(d), 0),
    "manifest removed": lambda d: shutil.rmtree(d / "manifest"),
    "manifest altered": alter_the_meta,
    "metadata is nested too deep": write_metadata("[" * 100_000),
    "time of metadata is out of range": write_metadata(
        '{"commit_timestamp_nsecs": 99999999999999999999999999}'
    ),
    "everything removed": lambda d: [path.unlink() for path in files(d)],
}


def warnings(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "trainer.run.checkpoint"
    ]


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two") / "checkpoints"
    with Checkpointer(directory, keep=3) as checkpointer:
        return saved(checkpointer, 1, 2).directory


@pytest.fixture
def directory(two_steps, tmp_path):
    """The checkpoints of steps 1 and 2."""
    return shutil.copytree(two_steps, tmp_path / "checkpoints")


def restore(checkpointer, **which):
    return checkpointer.restore(abstract(make_state()), **which)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_reported_in_a_line_and_the_one_before_is_used(
    directory, open_checkpointer, caplog, damage
):
    DAMAGE[damage](directory / "2")
    checkpointer = open_checkpointer()
    restored = restore(checkpointer)
    assert restored.step == 1
    assert bits(restored.state) == bits(make_state(1))
    (line,) = warnings(caplog)
    moved = "moved to .*damaged/2-0, using the one before"
    assert re.search(rf"checkpoint 2 is damaged \(.+\): {moved}", line)
    assert "\n" not in line
    if damage == "arrays emptied":  # the run comes to this step again
        saved(checkpointer, 2)
        assert bits(restore(open_checkpointer()).state) == bits(make_state(2))


@pytest.fixture
def with_losses(open_checkpointer):
    """The checkpoints of steps 1 and 2, whose validation losses are their steps."""
    with open_checkpointer(keep_best=True) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, make_state(step), {}, val_loss=float(step))
    return checkpointer.directory


def write_losses(directory, step, loss):
    """Write another validation loss into both files that have it."""
    (directory / step / "metrics" / "metrics").write_text(f'{{"val_loss": {loss}}}')
    file = directory / step / "manifest" / "metadata"
    text = file.read_text()
    file.write_text(text.replace(f'"val_loss": {step}.0', f'"val_loss": {loss}'))
    assert file.read_text() != text


def test_a_manifest_that_is_altered_before_its_step_ends_is_not_sealed_again(
    open_checkpointer,
):
    checkpointer = open_checkpointer()
    row = '{"step": 1, "train/loss": 1.0}'
    checkpointer.save(1, make_state(1), {"unfinished": row, "seed": 7})
    checkpointer.wait()
    file = checkpointer.directory / "1" / "manifest" / "metadata"
    file.write_text(file.read_text().replace('"seed": 7', '"seed": 8'))
    with pytest.raises(UserError, match=r"1 in .* was altered while the run went on"):
        checkpointer.save(1, make_state(1), {"unfinished": None})


def test_rows_of_a_validation_that_were_altered_do_not_remove_the_best_checkpoint(
    open_checkpointer, caplog
):
    def save(step, loss):
        with open_checkpointer(keep=1, keep_best=True) as checkpointer:
            meta = {"validation_rows": 12}
            checkpointer.save(step, make_state(step), meta, val_loss=loss)
        return checkpointer

    save(1, 1.0)
    file = save(2, 2.0).directory / "1" / "metrics" / "metrics"
    for step, content, is_warned in (
        (3, '{"val_loss": 1.0, "rows": 13}', True),
        (4, '{"val_loss": 1.0}', False),  # of an earlier version
    ):
        caplog.clear()
        file.write_text(content)
        with Checkpointer.reading(file.parents[2]) as reader:
            assert reader.best_step == 1
        assert save(step, 3.0).steps() == [1, step]
        assert ("checkpoint 1 was missing or damaged" in caplog.text) == is_warned


@pytest.mark.parametrize("content", [None, b'{"val_loss": 9.5}', b"garbage"])
def test_a_damaged_validation_loss_is_restored_from_the_manifest(
    open_checkpointer, with_losses, caplog, content
):
    folder = with_losses / "1" / "metrics"
    if content is None:
        shutil.rmtree(folder)
        reader = Checkpointer.reading(with_losses)
        assert reader.best_step == 1
        reader.close()
    else:
        (folder / "metrics").write_bytes(content)
        message = "validation loss of checkpoint 1 is damaged; remove"
        with pytest.raises(UserError, match=message):
            # which must not touch files that may be another process's
            Checkpointer.reading(with_losses)
    resumed = open_checkpointer(keep=1, keep_best=True)
    (line,) = warnings(caplog)
    assert "validation loss of checkpoint 1 was missing or damaged" in line
    assert resumed.best_step == 1
    resumed.save(3, make_state(3), {}, val_loss=3.0)
    resumed.wait()
    assert resumed.steps() == [1, 3]


def test_a_manifest_of_other_values_under_a_right_digest_is_damaged(
    open_checkpointer, with_losses
):
    file = with_losses / "1" / "manifest" / "metadata"
    file.write_text(json.dumps(sealed({"step": 1, "meta": [], "val_loss": 1.0})))
    reader = Checkpointer.reading(with_losses)
    with pytest.raises(
        UserError, match=r"checkpoint 1 is damaged .*, so that the best"
    ):
        _ = reader.best_step
    reader.close()
    assert open_checkpointer(keep_best=True).steps() == [2]


def test_a_manifest_without_leaves_under_a_right_digest_is_named(
    directory, open_checkpointer
):
    content = sealed({"format": 4, "step": 2, "meta": {}})
    (directory / "2" / "manifest" / "metadata").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"checkpoint 2 in .*leaves"):
        open_checkpointer().manifest()


def test_the_best_checkpoint_is_chosen_by_intact_manifests_alone(
    open_checkpointer, with_losses
):
    write_losses(with_losses, "1", 9.5)
    reader = Checkpointer.reading(with_losses)
    with pytest.raises(
        UserError, match=r"checkpoint 1 is damaged .*, so that the best"
    ):
        _ = reader.best_step
    reader.close()
    resumed = open_checkpointer(keep_best=True)
    assert (resumed.steps(), resumed.best_step) == ([2], 2)
    assert (with_losses / "damaged" / "1-0").is_dir()


def test_no_flipped_bit_of_any_file_changes_the_restored_state(
    directory, open_checkpointer
):
    """A flip is found, or was in a byte that does not matter (a time, a comment)."""
    rng = np.random.default_rng(0)
    for path in files(directory / "2"):
        content = path.read_bytes()
        data = bytearray(content)
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        path.write_bytes(data)
        restored = restore(open_checkpointer())
        assert bits(restored.state) == bits(make_state(restored.step)), path
        assert restored.meta == META
        if restored.step == 1:
            (moved,) = (directory / "damaged").iterdir()
            moved.rename(directory / "2")
        path.write_bytes(content)


def test_without_an_intact_checkpoint_the_error_says_so(directory, open_checkpointer):
    for step in ("1", "2"):
        flip_a_bit(directory / step)
    message = r"no usable checkpoint in .*; start anew in another run_dir"
    with pytest.raises(UserError, match=message):
        restore(open_checkpointer())
    saved(open_checkpointer(), 0)  # which no run writes
    with pytest.raises(UserError, match="no usable checkpoint"):
        open_checkpointer().manifest()


def test_a_damaged_checkpoint_that_was_asked_for_is_an_error(
    directory, open_checkpointer
):
    flip_a_bit(directory / "1")
    with pytest.raises(UserError, match=r"checkpoint 1 is damaged .* use another"):
        restore(open_checkpointer(), step=1)


def test_a_reader_leaves_a_save_in_progress_and_a_damaged_checkpoint_where_they_are(
    directory,
):
    flip_a_bit(directory / "2")
    (directory / "3.orbax-checkpoint-tmp").mkdir()
    entries = sorted(directory.rglob("*"))
    with Checkpointer.reading(directory) as reader:
        # It has named the step already, in a file or a message.
        assert reader.manifest().step == 2
        with pytest.raises(
            UserError, match=r"checkpoint 2 is damaged \(.*; remove .*s/2$"
        ):
            restore(reader)
    assert sorted(directory.rglob("*")) == entries


def test_a_checkpoint_that_a_run_at_work_removes_is_not_called_damaged(directory):
    with Checkpointer.reading(directory) as reader:
        shutil.rmtree(directory / "2")
        with pytest.raises(UserError, match=r"2 was removed while .* run the command"):
            restore(reader)


def test_a_state_too_large_for_the_device_is_not_taken_for_damage(
    directory, open_checkpointer, monkeypatch
):
    def exhausted(leaves):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    checkpointer = open_checkpointer()
    monkeypatch.setattr("trainer.run.checkpoint.checksums", exhausted)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        restore(checkpointer)
    assert checkpointer.steps() == [1, 2]


def test_a_missing_package_is_no_damage(directory, open_checkpointer, monkeypatch):
    def missing(*_, **__):
        raise ModuleNotFoundError("No module named 'tensorstore'")

    checkpointer = open_checkpointer()
    monkeypatch.setattr(checkpointer._manager, "restore", missing)
    with pytest.raises(ModuleNotFoundError):
        restore(checkpointer)
    assert checkpointer.steps() == [1, 2]
    monkeypatch.setattr("orbax.checkpoint.path.step.Metadata", missing)
    with pytest.raises(ModuleNotFoundError):
        open_checkpointer()
    assert sorted(path.name for path in directory.iterdir()) == ["1", "2"]
