"""Checkpoints: asynchronous, atomic, and checked to the last bit when they are
restored.

A checkpoint is the directory `<step>/` with two Orbax items, committed together by one
rename. `state` holds the arrays of the train state, flat, under the names of
`leaf_names`; PRNG keys as their key data. `manifest` is JSON: format version, step, the
caller's meta, and for each leaf its shape, dtype and checksum.

Checksums are of the leaves' values, not of files, and are compared after a restore onto
any number of devices. So a restored state is the saved state, whatever happened to the
files.
"""

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from trainer.errors import UserError
from trainer.files import (
    OTHER_RUN_DIR,
    check_files,
    check_no_links,
    explain_unwritable,
    well_formed,
    write_atomically,
)
from trainer.run.checkpoint_formats import FORMAT, READABLE, STORED_AS, as_current
from trainer.run.checkpoint_manifest import (
    MANIFEST_DAMAGED,
    CheckpointManifest,
    Preservation,
    best_step,
    check_not_removed,
    intact_manifest,
    is_planned,
    manifest_file,
    manifest_loss,
    metrics_of,
    orbax_metrics,
    sealed,
    write_metrics,
)
from trainer.run.metadata import (
    ADVICE,
    check_chunks,
    check_size,
    validate_metadata,
)
from trainer.run.orbax_errors import has_commit_time, hide_orbax_tracebacks
from trainer.step import state_tree
from trainer.step.checksum import checksums

DAMAGED = "damaged"
# Orbax measures its timeout of a save, 10 minutes, by the wall clock: a change of the
# system clock ended a run. Twenty days in seconds, less than 2^31 milliseconds.
SAVE_TIMEOUT = 20 * 86400

logger = logging.getLogger(__name__)


class Restored(NamedTuple):
    """A restored checkpoint: the state after `step` steps, and the meta that was saved
    with it.
    """

    step: int
    state: Any
    meta: dict[str, Any]

    @property
    def is_fork(self) -> bool:
        """Return whether a run starts here as a fork of another run.

        A fork that is resumed later has taken steps of its own.
        """
        forked = self.meta.get("forked")
        return forked is not None and forked["step"] == self.step

    @property
    def origin(self) -> str:
        """`RUN after step N` of a fork, also of one that is resumed; else empty."""
        forked = self.meta.get("forked")
        return f"{forked['run']} after step {forked['step']:,}" if forked else ""


class DamagedCheckpointError(Exception):
    """A checkpoint whose files are missing, unreadable or altered."""


class Checkpointer:
    """The checkpoints of one run.

    Args:
      directory: made if missing. Raises UserError if it cannot be written.
      keep, keep_best: see `Preservation`.
      read_only: change nothing, not even the leftovers of a save: another process may
        be training here.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int = 1,
        keep_best: bool = False,
        read_only: bool = False,
    ) -> None:
        # Orbax takes absolute paths only.
        self.directory = directory.resolve()
        self._read_only = read_only
        self._saving_step: int | None = None
        self._saves_planned = True  # whether the save of `_saving_step` is planned
        self._has_failed = False
        hide_orbax_tracebacks()
        # Orbax logs these options, and also the exceptions that it raises.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=Preservation(keep, keep_best, self._is_planned),
            best_fn=itemgetter("val_loss"),  # makes Orbax store the metrics
            best_mode="min",
            cleanup_tmp_directories=True,  # what a killed or failed save left behind
            read_only=read_only,  # overrides the line above
            async_options=ocp.AsyncOptions(timeout_secs=SAVE_TIMEOUT),
        )
        with explain_unwritable(f"to {self.directory}", OTHER_RUN_DIR):
            # A directory can exist without being writable: Orbax would tell at the
            # first save.
            if not read_only:
                self.directory.mkdir(parents=True, exist_ok=True)
                # With one name, the second process would have no file to remove.
                probe = self.directory / f".writable-{jax.process_index()}"
                probe.touch()
                probe.unlink()
            # Before Orbax, which reads the time and the loss of every checkpoint.
            self._set_aside_unreadable()
            self._manager = ocp.CheckpointManager(self.directory, options=options)

    @classmethod
    def reading(cls, directory: Path) -> Self:
        """Open the checkpoints of a run that may be training in another process.

        Somebody else may have made the run: a link in its directory raises UserError.
        """
        # A link could lead a reader, and an export, to a file outside of the run.
        check_no_links(directory.parent)
        return cls(directory, read_only=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Return the steps of committed checkpoints, ascending."""
        # Orbax lists a step from the beginning of its save.
        return sorted(s for s in self._manager.all_steps() if s != self._saving_step)

    def planned_steps(self) -> list[int]:
        """Return the steps of committed checkpoints that a rollback may take."""
        return [step for step in self.steps() if self._is_planned(step)]

    def _is_planned(self, step: int) -> bool:
        if step == self._saving_step:
            return self._saves_planned
        return is_planned(intact_manifest(self.directory / str(step)))

    @property
    def best_step(self) -> int | None:
        """The step of the checkpoint whose manifest has the lowest validation loss, of
        equal ones the newest; None if none has one.

        Raises UserError for a damaged manifest, because its checkpoint may be the best.
        """
        return best_step(self.directory, self.steps())

    def save(
        self,
        step: int,
        state: Any,
        meta: Mapping[str, Any],
        *,
        val_loss: float | None = None,
        planned: bool = True,
    ) -> None:
        """Start saving the state after `step` steps; return when it is copied.

        It is written in the background. Flush the log up to `step` first, because a run
        that resumes here does not repeat those rows. If `step` is the newest checkpoint
        already, its arrays are not written again, and an `unfinished` one gets the new
        manifest and the loss.

        Args:
          step: steps taken.
          state: a tree of arrays; PRNG key arrays are allowed.
          meta: JSON values, given back by `restore`.
          val_loss: nats, for `keep_best`.
          planned: whether a run that is never stopped saves it, too.

        Raises:
          UserError: the previous save failed, this one cannot start, or a later step
            is saved already.
        """
        # The previous step counts only once it is committed; its error goes first.
        self.wait()
        steps = self.steps()
        if steps and step < steps[-1]:
            raise UserError(
                f"cannot save step {step}: {self.directory} holds step {steps[-1]}; "
                "resume from that, or choose another run_dir"
            )
        names = state_tree.leaf_names(state)
        leaves = [
            jax.random.key_data(leaf) if state_tree.is_key(leaf) else leaf
            for leaf in jax.tree.leaves(state)
        ]
        descriptions = state_tree.describe(state)
        for leaf, name, checksum in zip(
            jax.tree.leaves(state), names, checksums(leaves), strict=True
        ):
            descriptions[name]["checksum"] = checksum
            if state_tree.is_key(leaf):
                descriptions[name]["impl"] = str(jax.random.key_impl(leaf))
        if val_loss is not None and not np.isfinite(val_loss):
            val_loss = None  # it cannot be compared
        manifest = {
            "format": FORMAT,
            "step": step,
            "meta": dict(meta),
            "leaves": descriptions,
            "val_loss": val_loss,
            "planned": planned,
        }
        if steps and step == steps[-1] and self._complete(step, manifest):
            return
        # Orbax refuses empty arrays.
        stored = {
            name: leaf for name, leaf in zip(names, leaves, strict=True) if leaf.size
        }
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(stored),
            manifest=ocp.args.JsonSave(sealed(manifest)),
        )
        self._saving_step, self._saves_planned = step, is_planned(manifest)
        try:
            self._manager.save(
                step,
                args=items,
                metrics=metrics_of(manifest),
                # Callbacks decide when to save. Without this Orbax may return without a
                # save.
                force=True,
            )
        except OSError as error:
            raise self._save_error(error) from error

    def _complete(self, step: int, manifest: Mapping[str, Any]) -> bool:
        """Complete a checkpoint that was saved when a signal interrupted the callbacks
        of its step; return whether it need not be saved again.

        The callbacks have run since: store the new manifest and the validation loss. If
        they changed the arrays (new scales), remove a checkpoint that is planned, since
        a rollback takes the new arrays. Otherwise keep the old manifest, which stays
        `unfinished`, and add only the loss, which was measured before the change.
        """
        folder = self.directory / str(step)
        file = manifest_file(folder)
        saved = intact_manifest(folder)
        if saved is None:
            raise UserError(
                f"checkpoint {step} in {self.directory} was altered while the run went"
                f" on ({MANIFEST_DAMAGED}); run the same command again to continue"
                " from the one before it"
            )
        # Process 0 must not write before all processes have read.
        multihost_utils.sync_global_devices(f"checkpoint {step} is read")
        # Saved with all callbacks of its step: nothing is left to complete.
        if saved["meta"].get("unfinished") is None:
            return True
        val_loss = manifest["val_loss"]
        if val_loss is None:
            val_loss = saved.get("val_loss")
        if saved["leaves"] != manifest["leaves"]:
            if is_planned(manifest):
                self._manager.delete(step)
                return False
            manifest = saved
        completed = sealed({**manifest, "val_loss": val_loss})
        self._saving_step = step
        try:
            if jax.process_index() == 0:
                # The loss first: a kill in between leaves `unfinished`, and the step is
                # completed again.
                metrics = metrics_of(completed)
                if metrics is not None:
                    write_metrics(folder, metrics)
                write_atomically(file, json.dumps(completed))
        except OSError as error:
            raise self._save_error(error) from error
        self._saving_step = None
        multihost_utils.sync_global_devices(f"checkpoint {step} is completed")
        # Orbax holds the losses in memory, by which it keeps the best checkpoint.
        self._manager.reload()
        return True

    def check(self) -> None:
        """Raise the UserError of a background save that has failed, without waiting."""
        if self._saving_step is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Wait until the background save is committed; raise UserError if it failed."""
        if self._saving_step is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # anything may have stopped the background thread
            raise self._save_error(error) from error
        self._saving_step = None

    def _save_error(self, error: Exception) -> UserError:
        step, self._saving_step, self._has_failed = self._saving_step, None, True
        self._manager.reload()
        intact = self.steps()
        free = shutil.disk_usage(self.directory).free / 2**30
        # Messages of Orbax and TensorStore may have many lines.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        return UserError(
            f"could not save checkpoint {step} in {self.directory}: {reason}"
            f" ({free:.2f} GiB free on that disk); intact:"
            f" {', '.join(map(str, intact)) or 'none'}; make room, then continue with"
            " the same run_dir"
        )

    def manifest(self, step: int | None = None) -> CheckpointManifest:
        """Return the description of a checkpoint; `step` None: the newest readable one.

        Raises UserError if there is none. Damage is treated as `restore` treats it.
        """
        return self._first_intact(
            self._candidates(step), self._read_manifest, is_required=step is not None
        )

    def restore(
        self,
        target: Any,
        step: int | None = None,
        *,
        partial: bool = False,
        candidates: Sequence[int] | None = None,
    ) -> Restored:
        """Return the state of a checkpoint, bit-exactly as it was saved, in the form of
        `target`.

        A damaged checkpoint is reported in one line and moved to `damaged/`, and the
        one before it is used. A reader raises UserError instead.

        Args:
          target: the tree of the state, with arrays or `jax.ShapeDtypeStruct`s as
            leaves; or a function that makes it from the meta. Their shardings say where
            each leaf goes; without one, it goes to the first device.
          step: that of the only acceptable checkpoint; None: the newest.
          partial: whether `target` is a part of the saved tree, as `{"params": ...}`.
          candidates: steps to try instead, in this order, until one is intact.

        Raises:
          UserError: a leaf of `target` differs from the saved one in path, shape or
            dtype; there is no such step; all are damaged.
        """
        self.wait()

        def read(candidate: int) -> Restored:
            manifest = self._read_manifest(candidate)
            tree = target(manifest.meta) if callable(target) else target
            # From cheap to dear: the manifest, the sizes of the files, the arrays.
            self._check_match(candidate, tree, manifest.leaves, partial=partial)
            check_size(self.directory / str(candidate), tree)
            state = self._read_state(candidate, tree, manifest.leaves)
            return Restored(candidate, state, manifest.meta)

        if candidates is None:
            candidates = self._candidates(step)
        return self._first_intact(candidates, read, is_required=step is not None)

    def close(self) -> None:
        """Wait for the background save and release the threads. Raises UserError if the
        save failed.
        """
        try:
            self.wait()
        finally:
            try:
                self._manager.close()
            except Exception:
                # After a failed save, Orbax raises the same error again.
                if not self._has_failed:
                    raise

    def _candidates(self, step: int | None) -> list[int]:
        steps = self.steps()
        if step is None:
            return steps[::-1]
        if step not in steps:
            raise UserError(
                f"no checkpoint {step} in {self.directory}; there are:"
                f" {', '.join(map(str, steps)) or 'none'}"
            )
        return [step]

    def _first_intact[T](
        self, candidates: Sequence[int], read: Callable[[int], T], *, is_required: bool
    ) -> T:
        """Return what `read` returns for the first candidate that is not damaged.

        `is_required`: the user asked for this candidate, so no other one is used.
        """
        for step in candidates:
            try:
                return read(step)
            except DamagedCheckpointError as damage:
                path = self.directory / str(step)
                if is_required:
                    check_not_removed(path)
                    raise UserError(
                        f"checkpoint {step} is damaged ({damage}); use another one, or"
                        f" remove {path}"
                    ) from damage
                # The run will save this step again, so one process moves it away.
                if self._read_only or jax.process_index() == 0:
                    self._set_checkpoint_aside(path, str(damage))
                multihost_utils.sync_global_devices(f"checkpoint {step} is set aside")
                self._manager.reload()
        raise UserError(
            f"no usable checkpoint in {self.directory}; start anew in another run_dir"
        )

    def _set_aside_unreadable(self) -> None:
        """Move damaged checkpoints away, and restore damaged validation losses from the
        manifests; a reader raises UserError.

        Orbax would stop at some of them, although another checkpoint, or the state
        beside the loss, is intact. Others would have it keep another best checkpoint.
        """
        # A UserError for pipes, and for files that are far longer than what is stored.
        for folder, _, files in self.directory.walk():
            check_files(folder, files)
        folders = sorted(self.directory.glob("*")) if jax.process_index() == 0 else []
        for folder in folders:
            if not folder.name.isdecimal():
                continue
            manifest = intact_manifest(folder)
            if not has_commit_time(folder):
                self._set_checkpoint_aside(folder, "its metadata is unreadable")
            elif manifest is None and not self._read_only:
                self._set_checkpoint_aside(folder, MANIFEST_DAMAGED)
            else:
                # A reader reports an altered manifest when it needs that step.
                self._check_loss(folder, manifest or {})
        multihost_utils.sync_global_devices("checkpoints are readable")

    def _check_loss(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        """Restore Orbax's file of the validation loss if it differs from the manifest.

        If the manifest has no loss, move the file away.
        """
        loss = manifest_loss(folder, manifest)
        metrics = orbax_metrics(folder)
        expected = metrics_of({**manifest, "val_loss": loss})
        if metrics == expected:
            return
        step = folder.name
        if self._read_only and (metrics is None or metrics["val_loss"] == loss):
            return  # `best_step` takes loss and rows from the manifest
        if self._read_only or expected is None:
            problem = f"the validation loss of checkpoint {step} is damaged"
            effect = "it cannot be the best one"
            self._set_aside(folder / "metrics", f"{step}-loss", problem, effect)
            return
        write_metrics(folder, expected)
        if metrics == {"val_loss": loss}:
            return  # an earlier version stored no rows
        logger.warning(
            "the validation loss of checkpoint %s was missing or damaged; it was"
            " restored from its manifest",
            step,
        )

    def _set_checkpoint_aside(self, folder: Path, damage: str) -> None:
        problem = f"checkpoint {folder.name} is damaged ({damage})"
        self._set_aside(folder, folder.name, problem, "using the one before it")

    def _set_aside(self, path: Path, name: str, problem: str, effect: str) -> None:
        """Move a damaged directory to `damaged/NAME-0`, or to the next free number.

        A reader, which may move nothing, raises UserError. It may have used this
        checkpoint's meta, so it cannot go on with an older one.
        """
        if self._read_only:
            check_not_removed(path)
            raise UserError(f"{problem}; remove {path}")
        folder = self.directory / DAMAGED
        folder.mkdir(exist_ok=True)
        # A step may be damaged again after it was saved anew.
        number = 0
        while (folder / f"{name}-{number}").exists():
            number += 1
        moved = path.rename(folder / f"{name}-{number}")
        logger.warning("%s: moved to %s, %s", problem, moved, effect)

    def _read_manifest(self, step: int) -> CheckpointManifest:
        manifest = intact_manifest(self.directory / str(step))
        # A run of step 0 would train on settings that somebody laid beside it: no
        # checkpoint has that step. A folder that was renamed has another step than its
        # manifest.
        if manifest is None or not manifest["step"] == step > 0:
            raise DamagedCheckpointError(MANIFEST_DAMAGED)
        if manifest["format"] not in READABLE:
            raise UserError(
                f"checkpoint {step} in {self.directory} has format"
                f" {manifest['format']}, this version reads"
                f" {' and '.join(map(str, READABLE))}; use the version that wrote it"
            )
        where = f"checkpoint {step} in {self.directory}"
        with well_formed(where, ADVICE):
            current = as_current(manifest)
            meta, leaves = validate_metadata(current["meta"], current["leaves"], where)
        return CheckpointManifest(step, meta, leaves)

    def _check_match(
        self, step: int, target: Any, saved_leaves: dict[str, Any], *, partial: bool
    ) -> None:
        """Raise UserError if the target differs from the saved leaves. Orbax itself
        would cast dtypes silently.
        """
        difference = state_tree.mismatch(
            state_tree.describe(target), saved_leaves, partial=partial
        )
        if difference is not None:
            raise UserError(
                f"checkpoint {step} in {self.directory}: {difference}; restore it with"
                " the configuration it was saved with"
            )

    def _read_state(self, step: int, target: Any, saved_leaves: dict[str, Any]) -> Any:
        names = state_tree.leaf_names(target)
        leaves, structure = jax.tree.flatten(target)
        abstract = {
            name: _abstract(leaf) for name, leaf in zip(names, leaves, strict=True)
        }
        stored_names = {name: saved_leaves[name].get(STORED_AS, name) for name in names}
        stored = {stored_names[name]: x for name, x in abstract.items() if x.size}
        args = ocp.args.PyTreeRestore(
            stored,
            restore_args=ocp.checkpoint_utils.construct_restore_args(stored),
            partial_restore=True,
        )
        try:
            check_chunks(self.directory / str(step) / "state", stored)
            items = self._manager.restore(step, args=ocp.args.Composite(state=args))
            arrays = {
                name: items["state"][stored_names[name]]
                if x.size
                else jnp.zeros(x.shape, x.dtype, device=x.sharding)
                for name, x in abstract.items()
            }
            computed = checksums([arrays[name] for name in names])
        except (UserError, ImportError, MemoryError, jax.errors.JaxRuntimeError):
            raise  # no damage: too little memory, or a missing package
        except Exception as error:  # a damaged file can raise anything
            raise DamagedCheckpointError(
                f"state unreadable: {type(error).__name__}"
            ) from error
        for name, checksum in zip(names, computed, strict=True):
            if checksum != saved_leaves[name]["checksum"]:
                raise DamagedCheckpointError(f"{name} is not what was saved")
        for name, leaf in zip(names, leaves, strict=True):
            if state_tree.is_key(leaf):
                impl = saved_leaves[name]["impl"]
                arrays[name] = jax.random.wrap_key_data(arrays[name], impl=impl)
        state = jax.tree.unflatten(structure, [arrays[name] for name in names])
        state_tree.check_scales(state, f"checkpoint {step} in {self.directory}", ADVICE)
        return state


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if state_tree.is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
