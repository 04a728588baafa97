"""Weights that are not finite are found before a checkpoint holds them, and no run with
them ends well."""

import contextlib
import dataclasses
import math
import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command import tiny_config
from safetensors.numpy import load_file, save_file

from trainer import Callback, Diverged, UserError, train
from trainer.assembly import callbacks
from trainer.assembly import training as assembly
from trainer.assembly.saved_model import restore_run
from trainer.cli import export
from trainer.report.page import ending
from trainer.report.run_records import RunRecords
from trainer.run.checkpoint import Checkpointer
from trainer.step.state import first_nonfinite_array


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configuration(*overrides):
    return tiny_config("checkpoint.keep=9", *overrides)


@pytest.fixture
def alter(monkeypatch):
    """Have every step compiled from now on pass its result through a function (step,
    old_state, state, metrics)."""
    compile_step = assembly.compile_step

    def use(change):
        def compiled(*args):
            step = compile_step(*args)

            def altered(state, tokens, step_inputs):
                # a copy, since the step donates its state
                old_state = jax.tree.map(jnp.copy, state)
                result = step(state, tokens, step_inputs)
                return change(int(step_inputs.step) + 1, old_state, *result)

            altered.as_text = step.as_text
            return altered

        monkeypatch.setattr(assembly, "compile_step", compiled)

    return use


def poison(at, times=1):
    """One NaN in one weight, by the update of step `at`, so often as that step is
    taken."""
    left = [times]

    def change(step, old_state, state, metrics):
        if step == at and left[0]:
            left[0] -= 1
            leaves, tree = jax.tree.flatten(state.params)
            leaves[0] = leaves[0].at[(0,) * leaves[0].ndim].set(jnp.nan)
            state = dataclasses.replace(state, params=jax.tree.unflatten(tree, leaves))
        return state, metrics

    return change


def test_a_run_goes_back_from_weights_that_are_not_finite(alter, folder):
    alter(poison(at=4))
    run = train(configuration("train.steps=6", "checkpoint.every=2"))
    assert run.rows[-1]["step"] == 6
    assert run.rows[-1]["watchdog/rollbacks"] == 1
    with Checkpointer.reading(folder / "A" / "checkpoints") as checkpointer:
        assert checkpointer.steps() == [2, 4, 6]
        for step in checkpointer.steps():
            state = checkpointer.restore(
                assembly.to_checkpoint_form(run.state), step
            ).state
            assert first_nonfinite_array(state) is None


def run_with_stop(run_dir, after, *settings):
    """A run, stopped in the step after `after` (None: never) and continued."""

    def stop(context):
        if context.step == after:
            os.kill(os.getpid(), signal.SIGTERM)

    config = configuration(f"run_dir={run_dir}", "checkpoint.keep=1", *settings)
    callbacks = [Callback("stop", 1, stop)]
    run = train(config, callbacks=callbacks)
    assert (run.stopped_by is None) == (after is None)
    return run if run.stopped_by is None else train(config, callbacks=callbacks)


def test_a_run_that_was_stopped_goes_back_to_the_step_of_an_undisturbed_one(alter):
    """It has the checkpoint of the stop, which is newer."""
    runs = []
    for run_dir, after in (("A", None), ("B", 4)):
        alter(poison(at=6))
        run = run_with_stop(run_dir, after, "train.steps=8", "checkpoint.every=4")
        assert "rolled back to step 4;" in (run.run_dir / "metrics.jsonl").read_text()
        runs.append(run.state.params)
    assert jax.tree.all(jax.tree.map(np.array_equal, *runs))


def test_a_run_that_was_stopped_ends_where_an_undisturbed_one_cannot_go_back(alter):
    for run_dir, after in (("A", None), ("B", 4)):
        alter(poison(at=6))
        with pytest.raises(Diverged, match=r"step 6: params/.* is not finite"):
            run_with_stop(run_dir, after, "train.steps=8", "checkpoint.every=9")


def test_poison_that_no_loss_shows_never_reaches_a_checkpoint_and_is_exit_code_3(alter):
    alter(poison(at=3, times=9))
    with pytest.raises(Diverged, match=r"step 3: params/.* is not finite after step 3"):
        train(configuration("train.steps=3", "checkpoint.every=3"))
    names = [path.name for path in Path("A/checkpoints").iterdir()]
    assert not [name for name in names if name.isdigit()]


def test_a_run_that_ends_with_an_older_state_failed(alter):
    alter(poison(at=6))
    with pytest.raises(
        Diverged,
        match=r"all 6 steps were taken, but the run was rolled back after its last step",
    ):
        train(configuration("train.steps=6", "checkpoint.every=2"))


def test_a_run_whose_last_steps_were_skipped_failed_and_so_does_the_same_command_again(
    alter, folder
):
    def skip(step, old_state, state, metrics):
        if step > 3:
            return old_state, metrics | {"finite": jnp.array(False)}
        return state, metrics

    alter(skip)
    message = r"all 4 steps were taken, but the last 1 steps .* skipped"
    for _ in range(2):
        with pytest.raises(Diverged, match=message):
            train(configuration("train.steps=4"))
    history = RunRecords.read(folder / "A")
    assert [text for _, text in history.events if text.startswith("stopped: ")] == [
        "stopped: the last 1 steps were not finite and were skipped"
    ]
    assert "4 of 4 steps: ended by the watchdog" in ending(history)


def test_a_last_validation_with_nan_beyond_the_first_batches_is_exit_code_3(
    monkeypatch,
):
    def evaluate(*args, **settings):
        result = evaluate_finite(*args, **settings)
        return result._replace(row=result.row | {"val/loss": math.nan})

    evaluate_finite = callbacks.evaluate
    monkeypatch.setattr(callbacks, "evaluate", evaluate)
    message = "the validation loss after the last step is nan"
    with pytest.raises(Diverged, match=message):
        train(configuration("train.steps=1"))


def test_given_weights_are_looked_at_and_the_tensor_named(folder, finished_run):
    with contextlib.chdir(finished_run[0]):
        export.main(export.Arguments("A", str(folder / "weights")))
    file = folder / "weights" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "c_fc.weight" in name)
    tensors[name] = tensors[name].copy()
    tensors[name].flat[7] = np.inf
    save_file(tensors, file, metadata={"format": "pt"})
    message = r"init_from=weights: params/.*c_fc.* is not finite; choose other weights"
    with pytest.raises(UserError, match=message):
        train(configuration("run_dir=B", "init_from=weights", "train.steps=1"))
    assert not (folder / "B").exists()


def test_a_checkpoint_of_an_older_version_with_a_nan_is_refused(folder):
    run = train(configuration("train.steps=1"))
    with Checkpointer(folder / "A" / "checkpoints") as checkpointer:
        broken, _ = poison(1)(1, None, run.state, {})
        state = assembly.to_checkpoint_form(broken)
        checkpointer.save(2, state, checkpointer.manifest().meta)
    message = r"checkpoint 2 in .*: params/.* is not finite; choose another run"
    with pytest.raises(UserError, match=message):
        restore_run(folder / "A")
    message = r"checkpoint 2 of run_dir=A: params/.* is not finite; start another run"
    with pytest.raises(UserError, match=message):
        train(configuration("train.steps=3"))
