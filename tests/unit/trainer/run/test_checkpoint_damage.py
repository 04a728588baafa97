"""Damaged checkpoints are noticed, named and left out."""

import os
import re
import shutil

import jax
import numpy as np
import pytest
from checkpoints import META, abstract, bits, make_state, saved

from trainer.errors import UserError
from trainer.run import checkpoint
from trainer.run.checkpoint import Checkpointer


def files(step_directory):
    return [path for path in sorted(step_directory.rglob("*")) if path.is_file()]


def payload(step_directory):
    """The file that holds the arrays."""
    return max(
        (step_directory / "state").rglob("d/*"), key=lambda path: path.stat().st_size
    )


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
    "arrays truncated": lambda d: os.truncate(
        payload(d), payload(d).stat().st_size // 2
    ),
    "arrays emptied": lambda d: os.truncate(payload(d), 0),
    "arrays removed": lambda d: payload(d).unlink(),
    "state removed": lambda d: shutil.rmtree(d / "state"),
    "manifest removed": lambda d: shutil.rmtree(d / "manifest"),
    "manifest altered": alter_the_meta,
    "manifest truncated": lambda d: os.truncate(d / "manifest" / "metadata", 40),
    "metadata is a list": write_metadata("[1]"),
    "metadata is nested too deep": write_metadata("[" * 100_000),
    "time of metadata is out of range": write_metadata(
        '{"commit_timestamp_nsecs": 99999999999999999999999999}'
    ),
    "index removed": lambda d: (d / "state" / "manifest.ocdbt").unlink(),
    "everything removed": lambda d: [path.unlink() for path in files(d)],
}


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two") / "checkpoints"
    with Checkpointer(directory, keep=3) as checkpointer:
        return saved(checkpointer, 1, 2).directory


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_reported_in_a_line_and_the_one_before_is_used(
    two_steps, tmp_path, open_checkpointer, caplog, damage
):
    directory = shutil.copytree(two_steps, tmp_path / "checkpoints")
    DAMAGE[damage](directory / "2")
    checkpointer = open_checkpointer()
    restored = checkpointer.restore(abstract(make_state()))
    assert restored.step == 1
    assert bits(restored.state) == bits(make_state(1))
    (line,) = [
        record.getMessage()
        for record in caplog.records
        if record.name == "trainer.run.checkpoint"
    ]
    assert re.search(
        r"checkpoint 2 is damaged \(.+\): moved to .*damaged/2-0, using the one before",
        line,
    )
    assert "\n" not in line
    if damage == "arrays emptied":  # the run comes to this step again
        saved(checkpointer, 2)
        restored = open_checkpointer().restore(abstract(make_state()))
        assert bits(restored.state) == bits(make_state(2))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[1]",
        b'{"val_loss": null}',
        b'{"val_loss": 0.5}',  # not what was saved
    ],
)
def test_a_damaged_validation_loss_costs_neither_the_checkpoint_nor_the_run(
    open_checkpointer, caplog, text
):
    with open_checkpointer(keep=3, keep_best=True) as checkpointer:
        for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0)):
            checkpointer.save(step, make_state(step), {}, val_loss=loss)
    (checkpointer.directory / "1" / "metrics" / "metrics").write_bytes(text)
    with pytest.raises(
        UserError,
        match=r"validation loss of checkpoint 1 is damaged; remove .*/1/metrics$",
    ):
        # which must not touch what may be another process's
        Checkpointer.reading(checkpointer.directory)
    with open_checkpointer(keep=3, keep_best=True) as checkpointer:
        (line,) = [
            record.getMessage()
            for record in caplog.records
            if record.name == "trainer.run.checkpoint"
        ]
        assert re.fullmatch(
            "the validation loss of checkpoint 1 is damaged: moved to .*/1-loss-0, it"
            " cannot be the best one",
            line,
        )
        assert bits(checkpointer.restore(abstract(make_state()), 1).state) == bits(
            make_state(1)
        )
        assert checkpointer.best_step == 2
        checkpointer.save(4, make_state(4), {}, val_loss=4.0)
        checkpointer.wait()
        assert checkpointer.steps() == [2, 3, 4]


def test_no_flipped_bit_of_any_file_changes_what_is_restored(open_checkpointer):
    """A flip is found, or was in a byte that does not matter (a time, a comment)."""
    directory = saved(open_checkpointer(), 1, 2).directory
    rng = np.random.default_rng(0)
    for path in files(directory / "2"):
        whole = path.read_bytes()
        data = bytearray(whole)
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        path.write_bytes(data)
        checkpointer = open_checkpointer()
        restored = checkpointer.restore(abstract(make_state()))
        assert bits(restored.state) == bits(make_state(restored.step)), path
        assert restored.meta == META
        if restored.step == 1:
            (moved,) = (directory / "damaged").iterdir()
            moved.rename(directory / "2")
        path.write_bytes(whole)


def test_when_all_are_damaged_the_error_says_so(open_checkpointer):
    directory = saved(open_checkpointer(), 1, 2).directory
    for step in ("1", "2"):
        flip_a_bit(directory / step)
    with pytest.raises(
        UserError, match=r"no usable checkpoint in .*; start anew in another run_dir"
    ):
        open_checkpointer().restore(abstract(make_state()))


def test_a_checkpoint_of_step_0_which_no_run_writes_is_not_restored(open_checkpointer):
    saved(open_checkpointer(), 0)
    with pytest.raises(UserError, match="no usable checkpoint"):
        open_checkpointer().newest()


def test_of_several_in_a_given_order_the_first_whole_one_is_restored(open_checkpointer):
    checkpointer = saved(open_checkpointer(), 1, 2, 3)
    assert checkpointer.restore(abstract(make_state()), candidates=[2, 1]).step == 2
    flip_a_bit(checkpointer.directory / "2")
    assert checkpointer.restore(abstract(make_state()), candidates=[2, 1]).step == 1
    assert checkpointer.steps() == [1, 3]


def test_a_damaged_checkpoint_that_was_asked_for_is_an_error(open_checkpointer):
    checkpointer = saved(open_checkpointer(), 1, 2)
    flip_a_bit(checkpointer.directory / "1")
    with pytest.raises(UserError, match=r"checkpoint 1 in .* is damaged"):
        checkpointer.restore(abstract(make_state()), step=1)


def test_a_reader_leaves_a_save_in_progress_and_a_damaged_checkpoint_where_they_are(
    open_checkpointer,
):
    directory = saved(open_checkpointer(), 1, 2).directory
    flip_a_bit(directory / "2")
    in_progress = directory / "3.orbax-checkpoint-tmp"
    in_progress.mkdir()
    before = sorted(directory.rglob("*"))
    with Checkpointer.reading(directory) as reader:
        # It has named the step already, in a file or a message.
        assert reader.newest() == 2
        with pytest.raises(UserError, match=r"2 in .* is damaged: .* remove .*s/2$"):
            reader.restore(abstract(make_state()))
    assert sorted(directory.rglob("*")) == before


def test_a_checkpoint_that_a_run_at_work_removes_is_not_called_damaged(
    open_checkpointer,
):
    directory = saved(open_checkpointer(), 1).directory
    with Checkpointer.reading(directory) as reader:
        shutil.rmtree(directory / "1")
        with pytest.raises(UserError, match=r"1 was removed while .* run the command"):
            reader.restore(abstract(make_state()))


def test_reading_where_there_is_nothing_is_an_error_and_makes_nothing(tmp_path):
    with (
        Checkpointer.reading(tmp_path / "nowhere") as reader,
        pytest.raises(UserError, match=r"no usable checkpoint in .*nowhere"),
    ):
        reader.restore(abstract(make_state()))
    assert not (tmp_path / "nowhere").exists()


def test_a_state_too_large_for_the_device_is_not_taken_for_damage(
    open_checkpointer, monkeypatch
):
    checkpointer = saved(open_checkpointer(), 1)

    def exhausted(leaves):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr("trainer.step.state_tree.checksums", exhausted)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        checkpointer.restore(abstract(make_state()))
    assert checkpointer.steps() == [1]


def test_the_meta_alone_can_be_read_and_skips_a_damaged_one(open_checkpointer):
    checkpointer = saved(open_checkpointer(), 1, 2)
    alter_the_meta(checkpointer.directory / "2")
    assert checkpointer.meta() == META
    assert checkpointer.steps() == [1]


def test_a_missing_package_is_no_damage(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path)
    saved(checkpointer, 1)

    def missing(*_, **__):
        raise ModuleNotFoundError("No module named 'tensorstore'")

    monkeypatch.setattr(checkpointer._manager, "restore", missing)
    with pytest.raises(ModuleNotFoundError):
        checkpointer.restore(abstract(make_state(1)))
    assert checkpointer.steps() == [1]


def test_a_package_that_is_missing_at_the_start_sets_no_checkpoint_aside(
    tmp_path, monkeypatch
):
    saved(Checkpointer(tmp_path), 1)

    def missing(*_):
        raise ModuleNotFoundError("No module named 'etils'")

    monkeypatch.setattr(checkpoint.ocp.path.step, "Metadata", missing)
    with pytest.raises(ModuleNotFoundError):
        Checkpointer(tmp_path)
    assert (tmp_path / "1").is_dir()
