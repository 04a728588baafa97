"""The run directory: locked by one trainer at a time, and bound to one configuration.

config.yaml      the resolved configuration        environment.txt  versions, devices
.lock            held by the trainer at work       checkpoints/, metrics.jsonl, ...
"""

import contextlib
import fcntl
import logging
import os
import socket
from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Self

import jax
import yaml

from trainer.config.fields import completed, flatten, in_groups
from trainer.config.renamed import renamed_keys
from trainer.config.schema import Config
from trainer.data.shards import read_json_or_empty
from trainer.errors import UserError
from trainer.files import (
    FOLDERS,
    OTHER_RUN_DIR,
    check_no_links,
    check_not_link,
    check_regular,
    explain_unwritable,
    no_follow,
    parse_mapping,
    read_mapping,
    remove_partial,
    write_text,
)
from trainer.observe.records import read_rows
from trainer.parallel.processes import (
    compare_processes,
    raise_together,
    shared_name,
)
from trainer.run.checkpoint import Checkpointer
from trainer.text import as_typed, override

# Files that a run writes, which a user may have under the same name. The folders that
# it writes to are in `FOLDERS`.
WRITTEN_FILES = (
    "metrics.jsonl",
    "samples.txt",
    "tokenizer.json",
    "tokenizer.tiktoken",
    "tokenizer_config.json",
    "environment.txt",
    "report.html",
    "evaluation.json",
    "divergence.txt",
    "hang.txt",
)
# Results of `evaluate`, which name the step of the weights.
RESULT_FILES = ("evaluation.json", "evaluation_of_text.json", "tasks.json")
HOLDER = "process "  # begins the content of a trainer's .lock
# Keys that a resumed run may change. They decide how long, how often and where it
# runs, but not which numbers it computes.
MAY_CHANGE = (
    "run_dir",
    "resume.*",
    "dry_run",
    "compile_cache",
    "train.steps",
    "train.log_every",
    # train.eval_batches may not change: the best checkpoint is chosen on them.
    "train.eval_every",
    "train.final_eval_batches",
    "checkpoint.*",
    "tracker.*",
    "eval.*",
    "metrics.*",
    "sample.*",
    "watchdog.*",
    "profile.*",
    "parallel.data",
    "parallel.fsdp",
    "parallel.tensor",
    "parallel.distributed",
    # Replicas may join and leave, although this changes later steps.
    "diloco.replicas",
    "diloco.quorum",
    "diloco.bandwidth_gbps",
    "launcher.*",
    "data.workers",
    "data.prefetch",
    "data.cache_dir",
    # Instead of the next four, the fingerprint of the data is compared.
    "data.format",
    "data.column",
    "data.split",
    "data.val_fraction",
    "model.keep_fp8_weights",
)
# Keys and groups that the final evaluation, numerics and samples read. A change of them
# has no effect after the run has ended.
READ_AT_END = ("train.final_eval_batches", "eval", "metrics", "sample")
# Keys whose trailing slash does not matter. Not data.tokenizer: gpt2 is a name, gpt2/ a
# directory.
PATH_KEYS = ("init_from", "data.paths", "data.sources", "data.prepared_dir")

logger = logging.getLogger(__name__)


class RunDirLost(UserError):
    """This process no longer holds the run directory, and must not write there."""


class RunDir:
    """A run directory that this process holds until `release`, or until the end of the
    process.

    The first process of a run holds it for all, and alone writes into it. As a context
    manager it releases the directory. If config.yaml was never written, it removes a
    directory that it has made: a run that does not start leaves nothing.

    Args:
      path: made if missing.

    Raises:
      UserError: another process holds it, or it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1
        self._stat: os.stat_result | None = None
        self._made = self._made_lock = False
        self._checked: tuple[Mapping[str, Any], str] | None = None  # with its YAML
        self._config = ""  # the content of config.yaml, once it is written
        self._is_first_process = jax.process_index() == 0
        # A name of this run alone: a file that a killed run left would look shared to
        # all.
        probe = path / shared_name(".shared")
        where = f"to run_dir={path}"
        # The other processes would fail later with another exit code, which a cluster
        # takes for a crash.
        with raise_together():
            if self._is_first_process:
                self._claim()
                if jax.process_count() > 1:
                    with explain_unwritable(where, OTHER_RUN_DIR):
                        probe.touch()
        if jax.process_count() == 1:
            return
        _, differing = compare_processes({"run_dir": probe.exists()})
        if self._is_first_process:
            probe.unlink()
        if differing > 0:
            self.__exit__()
            raise UserError(
                f"run_dir={path}: process {differing} has another directory there than"
                " process 0; give all processes one directory on a shared disk"
            )

    def _claim(self) -> None:
        path = self.path
        self._made = not path.exists()
        with explain_unwritable(f"to run_dir={path}", OTHER_RUN_DIR):
            path.mkdir(parents=True, exist_ok=True)
            # Before the first file is written: a link could lead the run into another
            # directory.
            check_no_links(path)
            self._check_is_run_or_free()
            self._stat = path.stat()
            self._made_lock = not (path / ".lock").exists()
            self._lock = no_follow(path / ".lock", os.O_RDWR | os.O_CREAT)
        try:
            # The kernel releases it when the process ends, also by `kill -9`. It is on
            # a file since NFS locks directories on one machine only.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._still_owns_lock():
                raise BlockingIOError  # the previous holder has removed it meanwhile
        except BlockingIOError:
            holder = self._holder() or "another process"
            self.release()
            raise UserError(
                f"run_dir={path} is in use by {holder}; stop it, or choose another"
                " run_dir"
            ) from None
        if os.fstat(self._lock).st_nlink > 1:
            self.release()
            raise UserError(
                f"run_dir={path} has a .lock with a further name (a hard link, as"
                " `cp -al` makes), which would be changed too; remove it if nothing"
                " trains there"
            )
        last_holder = self._holder()
        # Its content is replaced below, and it may be a file of another program.
        if last_holder and not last_holder.startswith(HOLDER):
            self.release()
            raise UserError(
                f"run_dir={path} has a .lock that no trainer wrote; choose another"
                " run_dir, or move it away"
            )
        # A forked child would keep the lock when this process is killed.
        os.register_at_fork(after_in_child=self.release)
        # On a full disk the lock holds too, but without its holder's name.
        with contextlib.suppress(OSError):
            os.ftruncate(self._lock, 0)
            os.pwrite(
                self._lock,
                f"{HOLDER}{os.getpid()} on {socket.gethostname()}\n".encode(),
                0,
            )

    def _holder(self) -> str:
        """Return the last process that wrote its name into `.lock`; empty: none."""
        # Bounded, because anybody may have written the file.
        return os.pread(self._lock, 200, 0).decode(errors="replace").strip()

    def release(self) -> None:
        """Release the directory for other processes."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _still_owns_lock(self) -> bool:
        """Return whether `.lock` is still the file that this process locked."""
        try:
            current = os.lstat(self.path / ".lock")
        except OSError:
            return False
        return os.path.samestat(current, os.fstat(self._lock))

    def _is_same_directory(self) -> bool:
        """Return whether the directory is still the one that this process opened."""
        try:
            current = self.path.stat()
        except OSError:
            return False
        return self._stat is not None and os.path.samestat(current, self._stat)

    def verify_ownership(self) -> None:
        """Raise an error if the directory is lost.

        Call it before each checkpoint, and after an error: a lost directory may be its
        cause.

        Raises:
          RunDirLost: the directory was moved, or `.lock` was removed or replaced, so
            that another trainer may be at work in the directory.
          UserError: a link has replaced one of its folders.
        """
        if self._lock < 0:
            return
        # First, because a directory that was moved has no lock at its old path either.
        if not self._is_same_directory():
            raise RunDirLost(
                f"run_dir={self.path} was moved, removed or replaced during the run; to"
                " resume from its newest checkpoint, give the same command its new"
                " place as run_dir"
            )
        for name in FOLDERS:
            check_not_link(self.path / name)
        if not self._still_owns_lock():
            raise RunDirLost(
                f"{self.path / '.lock'} was removed or replaced during the run, so that"
                f" another trainer may use run_dir={self.path}; stop that one, or run"
                " the same command again to resume"
            )

    def restore_config(self) -> None:
        """Write config.yaml again if it was removed."""
        if self._lock >= 0 and not (self.path / "config.yaml").exists():
            write_text(self.path / "config.yaml", self._config)

    def check(self, config: Mapping[str, Any], fixed: Collection[str] = ()) -> None:
        """Check that a configuration is that of config.yaml, if there is one.

        Also check that it can be written and read again.

        Args:
          config: nested plain values.
          fixed: dotted keys and groups that a sweep sets; these may not differ.

        Raises:
          UserError: the message names the keys that differ, or what is too long.
        """
        self._readable_text(config)
        if not (self.path / "config.yaml").exists():
            return
        differing = {
            key: change
            for key, change in config_differences(self._saved_config(), config).items()
            if in_groups(key, fixed) or not may_change(key)
        }
        if differing:
            hint = ""
            if all(map(may_change, differing)):
                # Only the sweep's keys differ: the run can be resumed by itself.
                hint = f"; to continue this run alone: {override('resume', self.path)}"
            raise UserError(
                f"run_dir={self.path} belongs to another configuration:"
                f" {'; '.join(differing.values())}; restore these values, or choose"
                f" another run_dir{hint}"
            )

    def _readable_text(self, config: Mapping[str, Any]) -> str:
        """Return the YAML of a configuration, which can be read again."""
        # `write_config` checks again, and a long list takes long to parse.
        if self._checked is None or self._checked[0] != config:
            text = as_yaml(config)
            try:
                parse_mapping(text)
            except ValueError as error:
                raise UserError(
                    f"the config.yaml of run_dir={self.path} could not be read again"
                    f" ({error}); shorten the longest list: data.paths takes"
                    " directories and patterns"
                ) from error
            self._checked = config, text
        return self._checked[1]

    def _check_is_run_or_free(self) -> None:
        """Raise UserError if it is no run, but has files that a run would change."""
        path = self.path
        # If its config.yaml was removed, a run is known by its checkpoints.
        if (path / "config.yaml").exists() or has_checkpoints(path):
            return
        present = [f"a {name}" for name in WRITTEN_FILES if (path / name).exists()]
        for name in FOLDERS:
            # A trainer that was killed at its start may leave hidden files.
            if any(entry.name[0] != "." for entry in (path / name).glob("*")):
                present.append(f"files in {name}/")
        if present:
            raise UserError(
                f"run_dir={path} is no run, and has {present[0]}, which a run"
                " would change; choose another run_dir, or move them away"
            )

    def check_no_effect_after_end(self, step: int, config: Mapping[str, Any]) -> None:
        """Check that no setting changed that has no effect after the run's end.

        Raises:
          UserError: the message names the keys that differ.
        """
        changed = [
            change
            for key, change in config_differences(self._saved_config(), config).items()
            if in_groups(key, READ_AT_END)
        ]
        if changed:
            raise UserError(
                f"run_dir={self.path} has ended after step {step}, so these have no"
                f" effect: {'; '.join(changed)}; restore these values and use"
                " `scalify-trainer evaluate` or `generate`, or set train.steps to train"
                " on"
            )

    def _saved_config(self) -> dict[str, Any]:
        """Return the configuration that the directory belongs to.

        If its file is damaged, the newest checkpoint has it.
        """
        path = self.path / "config.yaml"
        checkpoints = self.path / "checkpoints"
        try:
            return renamed_keys(read_mapping(path))
        except ValueError as error:
            if not has_checkpoints(self.path):
                raise UserError(
                    f"{path} is damaged ({error}); choose another run_dir"
                ) from error
            # As a reader: nothing is moved before the start knows that it may go on
            # here.
            with Checkpointer.reading(checkpoints) as checkpointer:
                config: dict[str, Any] = checkpointer.manifest().meta["config"]
            logger.warning(
                "%s is damaged (%s): taking the configuration of the newest checkpoint",
                path,
                error,
            )
            return config

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Check the configuration, and write config.yaml, which binds the directory to
        it.
        """
        self.check(config)
        if self._is_first_process:
            # Nobody else writes into a run that this process holds.
            remove_partial(self.path)
            text = self._readable_text(config)
            write_text(self.path / "config.yaml", text)
            self._config = text

    def set_results_aside(self, step: int, *, draws_pictures: bool) -> None:
        """Rename results and pictures of an earlier attempt to NAME.old.

        A resumed run takes the steps after `step` again, so their results and pictures
        belong to an earlier attempt. If the run starts anew, all of them do.

        Args:
          step: that of the checkpoint in the directory that the run starts from; 0:
            there is none.
          draws_pictures: whether the run draws the numerics, and so replaces pictures
            of later steps.
        """
        if not self._is_first_process:
            return
        others = []
        for path in (self.path / name for name in RESULT_FILES):
            result_step = read_json_or_empty(path).get("step")
            # The file may have been edited, or be of an earlier version.
            is_later = isinstance(result_step, int) and result_step > step
            if path.exists() and (is_later or step == 0):
                others.append(path)
        if step == 0 or (not draws_pictures and self._has_numerics_after(step)):
            others += sorted((self.path / "numerics").glob("*.png"))
        for path in others:
            # Renamed, not removed: they may be all that is left of that attempt.
            path.replace(f"{path}.old")
        if others:
            logger.warning(
                "run_dir=%s: %s are of weights of an earlier attempt; they are now"
                " NAME.old",
                self.path,
                ", ".join(path.name for path in others),
            )

    def _has_numerics_after(self, step: int) -> bool:
        """Return whether the log has numerics of later steps."""
        return any(
            name.startswith("numerics/")
            for row in read_rows(self.path / "metrics.jsonl")
            if row["step"] > step
            for name in row
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # A config.yaml may be that of another program.
        has_started = bool(self._config) or (
            not self._made_lock and (self.path / "config.yaml").exists()
        )
        # Without the lock, the directory may be another run's.
        if self._is_first_process and self._still_owns_lock() and not has_started:
            checkpoints = self.path / "checkpoints"
            if checkpoints.is_dir() and not any(checkpoints.iterdir()):
                checkpoints.rmdir()
            # Removed while it is held: a process that has just opened it finds by
            # `_still_owns_lock` that it is gone.
            (self.path / ".lock").unlink()
            if self._made and not any(self.path.iterdir()):
                self.path.rmdir()
        self.release()


def check_trained_with(
    run_dir: Path, trained: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
    """Check that a run or a fork takes the settings of the checkpoint it starts from.

    Args:
      run_dir: the directory of the checkpoint.
      trained: the configuration that the checkpoint was written with.
      config: that of config.yaml, which may have been edited or cut.

    Raises:
      UserError: the message names the keys that differ.
    """
    old = renamed_keys(trained)
    given = dict(flatten(config))
    # A default would replace a missing key, also one that was null.
    changes = {
        key: f"{key} is missing (was {as_typed(value)})"
        for key, value in flatten(old)
        if key not in given
    }
    changes = config_differences(old, config) | changes
    changed = [change for key, change in changes.items() if not may_change(key)]
    if changed:
        raise UserError(
            f"{run_dir / 'config.yaml'} is not what the checkpoint was trained"
            f" with: {'; '.join(changed)}; restore these values, or choose"
            " another run_dir"
        )


def as_yaml(config: Mapping[str, Any]) -> str:
    """Return the text of a config.yaml."""
    # In the order of the schema, in which people look for a key.
    return yaml.safe_dump(dict(config), sort_keys=False)


def has_checkpoints(run_dir: Path) -> bool:
    """Return whether a directory has a checkpoint that a trainer wrote, intact or
    not.
    """
    # A numbered folder alone may be anybody's, and would be moved to `damaged/`.
    manifests = (run_dir / "checkpoints").glob("*/manifest/metadata")
    return any(file.parts[-3].isdecimal() for file in manifests)


def config_differences(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> dict[str, str]:
    """Return `key=new (was old)` by key, for each dotted key that differs."""
    # With defaults on both sides: a key that is newer than the run does not differ.
    old_values = dict(flatten(completed(Config, old)))
    new_values = dict(flatten(completed(Config, new)))
    changes = {}
    for key in dict.fromkeys([*new_values, *old_values]):
        old_value = old_values.get(key)
        new_value = new_values.get(key, "absent")
        if normalized(key, old_value) != normalized(key, new_value):
            changes[key] = f"{key}={as_typed(new_value)} (was {as_typed(old_value)})"
    return changes


def may_change(key: str) -> bool:
    """Return whether a resumed run may have another value of a dotted key."""
    return any(fnmatch(key, pattern) for pattern in MAY_CHANGE)


def normalized(key: str, value: Any) -> Any:
    """Return a value for comparison: paths have no trailing slash."""
    if key not in PATH_KEYS:
        return value
    if isinstance(value, list):
        return [normalized(key, item) for item in value]
    if isinstance(value, str):
        # The root directory is a slash alone.
        return value.rstrip("/") or value
    return value


def is_in_use(run_dir: Path) -> bool:
    """Return whether a process is training in a run directory."""
    try:
        # Opening a pipe would wait for a writer.
        check_regular(run_dir / ".lock")
        with (run_dir / ".lock").open("rb") as file:
            # Shared, so that two commands that ask at once do not take each other for a
            # trainer.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
