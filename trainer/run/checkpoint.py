"""Checkpoints: asynchronous, atomic, checked to the last bit on the way back.

A checkpoint is the directory `<step>/` with two Orbax items, committed together by one
  rename: state     the arrays of the train state, flat, under the names of
  `leaf_names`; PRNG keys as their key data. manifest  JSON: format version, step, the
  caller's meta, and for each leaf its shape, dtype and checksum.

Checksums are of the leaves' values, not of files, and are compared after a restore,
onto however many devices: whatever happens to the files in between, a state that is
returned is the state that was saved.
"""

import asyncio
import hashlib
import inspect
import json
import logging
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from trainer.errors import UserError
from trainer.run.checkpoint_formats import FORMAT, READABLE, as_current, stored_name
from trainer.step.state_tree import checksums, describe, is_key, leaf_names, mismatch

DAMAGED = "damaged"
ORBAX = str(Path(ocp.__file__).parent)
# Orbax counts its patience with a save, 10 minutes, by the wall clock: one that was set
# right ended the run. Seconds: twenty days, which are less than 2^31 milliseconds.
LONG = 20 * 86400

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
    """A checkpoint whose files are missing, unreadable, or not those that were
    written.
    """


def _digest(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _hide_late_ends() -> None:
    """A save or a restore that failed leaves reads and writes behind that nobody
    awaits; each would print something.

    Tracebacks come to `sys.unraisablehook`: from TensorStore, which tells Orbax's event
    loop of their ends when that is closed (no Python code called it there, which tells
    it from an error of ours), and from coroutines of Orbax that are thrown away; and to
    asyncio's log, from its futures. Who saved or restored has been told.
    """
    before = sys.unraisablehook
    if getattr(before, "hides_late_ends", False):
        return

    def hook(report: Any) -> None:
        outermost = (
            report.exc_traceback.tb_frame.f_code if report.exc_traceback else None
        )
        tells = (
            outermost is asyncio.BaseEventLoop.call_soon_threadsafe.__code__
            and report.exc_type is RuntimeError
        )
        thrown_away = inspect.iscoroutine(
            report.object
        ) and report.object.cr_code.co_filename.startswith(ORBAX)
        if not (tells or thrown_away):
            before(report)

    hook.hides_late_ends = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook
    logging.getLogger("asyncio").addFilter(_is_not_of_orbax)
    warnings.filterwarnings(
        "ignore", "coroutine 'async_serialize.* was never awaited", RuntimeWarning
    )


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    """Return whether what a record reports was raised elsewhere."""
    trace = record.exc_info[2] if isinstance(record.exc_info, tuple) else None
    return trace is None or not trace.tb_frame.f_code.co_filename.startswith(ORBAX)


class Checkpointer:
    """The checkpoints of one run.

    Args:
      directory: made if missing. Raises UserError when it cannot be written.
      keep: how many of the newest stay.
      keep_best: whether the one with the lowest validation loss stays too.
      read_only: touch nothing, not even what a save has left behind: another process
          may be training here.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int = 1,
        keep_best: bool = False,
        read_only: bool = False,
    ) -> None:
        self.directory = directory.resolve()
        self._read_only = read_only
        self._saving: int | None = None
        self._has_failed = False
        _hide_late_ends()
        # Orbax logs what it makes of these options, and the exceptions that it also
        # raises, which are reported here.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        newest = LatestN(keep)
        # BestN keeps the last of its sorting; reverse puts the lowest loss there. No
        # validation loss: no candidate.
        best = BestN(
            get_metric_fn=_val_loss,
            reverse=True,
            n=1,
            keep_checkpoints_without_metrics=False,
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=(
                AnyPreservationPolicy([newest, best]) if keep_best else newest
            ),
            best_fn=_val_loss,  # makes Orbax store the metrics
            best_mode="min",
            cleanup_tmp_directories=True,  # what a killed or failed save left behind
            read_only=read_only,  # overrides the line above
            async_options=ocp.AsyncOptions(timeout_secs=LONG),
        )
        try:
            if not read_only:
                self.directory.mkdir(parents=True, exist_ok=True)
                probe = self.directory / f".writable-{jax.process_index()}"
                probe.touch()
                probe.unlink()
            self._set_aside_metrics()
            self._manager = ocp.CheckpointManager(self.directory, options=options)
        except OSError as error:
            raise UserError(
                f"cannot write to {self.directory}: {error.strerror}; choose another"
                " run_dir"
            ) from error

    @classmethod
    def reading(cls, directory: Path) -> Self:
        """The checkpoints of a run that may be going on in another process."""
        return cls(directory, read_only=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Steps with a committed checkpoint, ascending. The one being written is not
        among them.
        """
        return sorted(
            step for step in self._manager.all_steps() if step != self._saving
        )

    @property
    def best_step(self) -> int | None:
        """The step with the lowest validation loss among those kept; None when none was
        saved with one.
        """
        return self._manager.best_step()

    def save(
        self,
        step: int,
        state: Any,
        meta: Mapping[str, Any],
        *,
        val_loss: float | None = None,
    ) -> bool:
        """Start saving the state after `step` steps; returns when it is copied, the
        rest goes on in the background.

        Rows of steps up to `step` belong into the log before, so that a run resumed
        here has lost none.

        Args:
          step: steps taken.
          state: a tree of arrays; PRNG key arrays are allowed.
          meta: JSON values, given back by `restore`.
          val_loss: nats; what `keep_best` goes by.

        Returns:
          False when `step` is the newest checkpoint already (a state is a function of
          its step), else True.

        Raises:
          UserError: the save before this one failed, this one cannot start, or a later
              step is saved already.
        """
        self.wait()
        steps = self.steps()
        if steps and step == steps[-1]:
            return False
        if steps and step < steps[-1]:
            raise UserError(
                f"cannot save step {step}: {self.directory} holds step {steps[-1]}; "
                "resume from that, or choose another run_dir"
            )
        names = leaf_names(state)
        leaves = [
            jax.random.key_data(leaf) if is_key(leaf) else leaf
            for leaf in jax.tree.leaves(state)
        ]
        described = describe(state)
        for leaf, name, value in zip(
            jax.tree.leaves(state), names, checksums(leaves), strict=True
        ):
            described[name] |= {"checksum": value} | (
                {"impl": str(jax.random.key_impl(leaf))} if is_key(leaf) else {}
            )
        manifest = {
            "format": FORMAT,
            "step": step,
            "meta": dict(meta),
            "leaves": described,
        }
        manifest["digest"] = _digest(manifest)
        stored = {
            name: leaf for name, leaf in zip(names, leaves, strict=True) if leaf.size
        }  # Orbax refuses empty arrays
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(stored), manifest=ocp.args.JsonSave(manifest)
        )
        comparable = val_loss is not None and np.isfinite(val_loss)
        self._saving = step
        try:
            self._manager.save(
                step,
                args=items,
                metrics={"val_loss": val_loss} if comparable else None,
                force=True,
            )
        except OSError as error:
            raise self._save_failed(error) from error
        return True

    def check(self) -> None:
        """Raise the UserError of a background save that failed since; cheap, for every
        step. Does not wait.
        """
        if self._saving is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Until the save in the background is committed. Raises UserError when it
        failed.
        """
        if self._saving is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # whatever stopped the background thread
            raise self._save_failed(error) from error
        self._saving = None

    def _save_failed(self, error: Exception) -> UserError:
        step, self._saving, self._has_failed = self._saving, None, True
        self._manager.reload()
        intact = self.steps()
        free = shutil.disk_usage(self.directory).free / 2**30
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        return UserError(
            f"could not save checkpoint {step} in {self.directory}: {reason}"
            f" ({free:.2f} GiB free on that disk); intact:"
            f" {', '.join(map(str, intact)) or 'none'}; make room, then continue with"
            " the same run_dir"
        )

    def meta(self, step: int | None = None) -> dict[str, Any]:
        """The meta of a checkpoint, by default of the newest that is readable. Raises
        UserError.
        """
        meta: dict[str, Any] = self._readable_manifest(step)["meta"]
        return meta

    def newest(self) -> int:
        """The step of the newest checkpoint that is readable. Raises UserError."""
        step: int = self._readable_manifest(None)["step"]
        return step

    def described(self) -> dict[str, Any]:
        """Shape, dtype and checksum of every leaf of the newest readable checkpoint, by
        name. Raises UserError.
        """
        leaves: dict[str, Any] = self._readable_manifest(None)["leaves"]
        return leaves

    def restore(
        self,
        target: Any,
        step: int | None = None,
        *,
        partial: bool = False,
        order: Sequence[int] | None = None,
    ) -> Restored:
        """The state of a checkpoint, on the devices and in the tree of `target`, bit
        for bit as it was saved.

        A damaged checkpoint is reported in one line and moved to `damaged/`, and the
        one before it is used.

        Args:
          target: the tree of the state with `jax.ShapeDtypeStruct` leaves (arrays do as
            well); their shardings say where each leaf goes, the first device when there
            is none. Or a function that makes it of the meta.
          step: that checkpoint and no other; by default the newest.
          partial: `target` is a part of the saved tree, as `{"params": ...}`.
          order: steps to take in place of all, the first one that is whole.

        Raises:
          UserError: a leaf of `target` differs from the saved one in path, shape or
              dtype; no such step; all damaged.
        """
        self.wait()
        for candidate in self._candidates(step) if order is None else order:
            try:
                manifest = self._manifest(candidate)
                wanted = target(manifest["meta"]) if callable(target) else target
                self._check_match(
                    candidate, wanted, manifest["leaves"], partial=partial
                )
                return Restored(
                    candidate,
                    self._arrays(candidate, wanted, manifest["leaves"]),
                    manifest["meta"],
                )
            except DamagedCheckpointError as damage:
                self._report(candidate, damage, step)
        raise self._none_left()

    def close(self) -> None:
        """Wait for the save in the background and release the threads. Raises UserError
        when that save failed.
        """
        try:
            self.wait()
        finally:
            try:
                self._manager.close()
            except Exception:  # whatever stopped a background thread
                # else of the save that has: Orbax reports once each thing that stopped
                # it
                if not self._has_failed:
                    raise

    def _readable_manifest(self, step: int | None) -> dict[str, Any]:
        for candidate in self._candidates(step):
            try:
                return self._manifest(candidate)
            except DamagedCheckpointError as damage:
                self._report(candidate, damage, step)
        raise self._none_left()

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

    def _none_left(self) -> UserError:
        return UserError(
            f"no usable checkpoint in {self.directory}; start anew in another run_dir"
        )

    def _report(
        self, step: int, damage: DamagedCheckpointError, asked: int | None
    ) -> None:
        if asked is not None:
            raise UserError(
                f"checkpoint {step} in {self.directory} is damaged: {damage}; use"
                " another one"
            ) from damage
        if self._read_only:
            logger.warning(
                "checkpoint %d is damaged (%s): using the one before it", step, damage
            )
            return
        # Out of the way, since the run will come to this step again and save it. One of
        # the processes moves it for all.
        if jax.process_index() == 0:
            (self.directory / DAMAGED).mkdir(exist_ok=True)
            free = next(
                i
                for i in range(1_000_000)
                if not (self.directory / DAMAGED / f"{step}-{i}").exists()
            )
            moved = (self.directory / str(step)).rename(
                self.directory / DAMAGED / f"{step}-{free}"
            )
            logger.warning(
                "checkpoint %d is damaged (%s): moved to %s, using the one before it",
                step,
                damage,
                moved,
            )
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"checkpoint {step} is set aside")
        self._manager.reload()

    def _set_aside_metrics(self) -> None:
        """Orbax would stop at a validation loss that it cannot read, although the state
        beside it may be whole.
        """
        for file in (
            self.directory.glob("*/metrics/metrics") if jax.process_index() == 0 else ()
        ):
            step = file.parent.parent.name
            if step.isdigit() and not _holds_loss(file):
                if self._read_only:
                    raise UserError(
                        f"{file} is damaged; remove {file.parent}, without which the"
                        " checkpoint is whole"
                    )
                (self.directory / DAMAGED).mkdir(exist_ok=True)
                free = next(
                    i
                    for i in range(1_000_000)
                    if not (self.directory / DAMAGED / f"{step}-loss-{i}").exists()
                )
                file.parent.rename(self.directory / DAMAGED / f"{step}-loss-{free}")
                logger.warning(
                    "the validation loss of checkpoint %s is damaged: it cannot be the"
                    " best one",
                    step,
                )
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("validation losses are readable")

    def _manifest(self, step: int) -> dict[str, Any]:
        try:
            manifest = self._manager.restore(
                step, args=ocp.args.Composite(manifest=ocp.args.JsonRestore())
            )["manifest"]
            whole = (
                manifest.pop("digest") == _digest(manifest)
                and manifest["step"] == step
                and "format" in manifest
            )
        except Exception as error:  # a damaged file can raise anything
            raise DamagedCheckpointError(
                f"manifest unreadable: {type(error).__name__}"
            ) from error
        if not whole:
            raise DamagedCheckpointError("manifest altered since it was written")
        if manifest["format"] not in READABLE:
            raise UserError(
                f"checkpoint {step} in {self.directory} has format"
                f" {manifest['format']}, this version reads"
                f" {' and '.join(map(str, READABLE))}; use the version that wrote it"
            )
        return as_current(manifest)

    def _check_match(
        self, step: int, target: Any, saved: dict[str, dict[str, Any]], *, partial: bool
    ) -> None:
        """Orbax itself would cast dtypes silently."""
        difference = mismatch(describe(target), saved, partial=partial)
        if difference is not None:
            advice = "restore it with the configuration it was saved with"
            raise UserError(
                f"checkpoint {step} in {self.directory}: {difference}; {advice}"
            )

    def _arrays(self, step: int, target: Any, saved: dict[str, dict[str, Any]]) -> Any:
        names, leaves = leaf_names(target), jax.tree.leaves(target)
        placed = {
            name: _abstract(leaf) for name, leaf in zip(names, leaves, strict=True)
        }
        wanted = {
            stored_name(name, saved): leaf for name, leaf in placed.items() if leaf.size
        }
        args = ocp.args.PyTreeRestore(
            wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=True,
        )
        try:
            stored = self._manager.restore(step, args=ocp.args.Composite(state=args))[
                "state"
            ]
            found = {
                name: stored[stored_name(name, saved)]
                for name, leaf in placed.items()
                if leaf.size
            }
            found |= {
                n: jnp.zeros(x.shape, x.dtype, device=x.sharding)
                for n, x in placed.items()
                if not x.size
            }
            values = checksums([found[name] for name in names])
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise  # too large for this machine is not damage
        except Exception as error:  # a damaged file can raise anything
            raise DamagedCheckpointError(
                f"state unreadable: {type(error).__name__}"
            ) from error
        for name, value in zip(names, values, strict=True):
            if value != saved[name]["checksum"]:
                raise DamagedCheckpointError(f"{name} is not what was saved")
        restored = [
            (
                jax.random.wrap_key_data(found[name], impl=saved[name]["impl"])
                if is_key(leaf)
                else found[name]
            )
            for name, leaf in zip(names, leaves, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(target), restored)


def _holds_loss(file: Path) -> bool:
    try:
        return isinstance(json.loads(file.read_bytes())["val_loss"], float)
    except (ValueError, TypeError, KeyError):
        return False


def _val_loss(metrics: Mapping[str, float]) -> float:
    return metrics["val_loss"]


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    shape_and_dtype = (
        jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
    )
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(
        shape_and_dtype.shape, shape_and_dtype.dtype, sharding=sharding
    )
