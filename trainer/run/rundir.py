"""The directory of a run: taken by one trainer at a time, and by one configuration for
good.

config.yaml      the resolved configuration        environment.txt  what it ran on
.lock            held by the trainer at work       checkpoints/, metrics.jsonl, ...
"""

import contextlib
import fcntl
import logging
import os
import platform
import socket
import subprocess
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import jax
import yaml

from trainer.config.fields import flatten
from trainer.config.renamed import renamed_keys
from trainer.errors import UserError
from trainer.files import (
    no_follow,
    read_mapping,
    refuse_links,
    remove_partial,
    write_text,
)
from trainer.models.specs import FIRST
from trainer.parallel.processes import PROCESS_VARIABLES, refused_together
from trainer.run.checkpoint import Checkpointer
from trainer.text import redact
from trainer.version import __version__

# What a resumed run may change: it decides how long, how often and where, not what is
# computed.
MAY_CHANGE = (
    "run_dir",
    "resume.*",
    "dry_run",
    "compile_cache",
    "train.steps",
    "train.log_every",
    "train.eval_every",
    "train.eval_batches",
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
    # replicas join and leave: then it is another run from there on, as its rows say
    "diloco.replicas",
    "diloco.quorum",
    "diloco.bandwidth_gbps",
    "data.workers",
    "data.prefetch",
    "data.cache_dir",
    "data.format",  # these four: of the text, whose fingerprint is compared
    "data.column",
    "data.split",
    "data.val_fraction",
    "model.keep_fp8_weights",
)
PATHS = (
    "init_from",
    "data.paths",
    "data.sources",
    "data.prepared_dir",
)  # data.tokenizer may be a name: gpt2 is not gpt2/
EARLIER = {
    "model.family": FIRST,
    "init.embeddings": None,
}  # what a configuration meant that was written before there was the key

logger = logging.getLogger(__name__)


class RunDir:
    """A run directory held by this process, until `release` or its end, however it
    ends.

    Of the processes of one run the first holds it for all, and alone writes into it. A
    context manager, which releases it, and removes it again when it was made here and
    no configuration was adopted: what does not start leaves nothing.

    Args:
      path: made if missing.

    Raises:
      UserError: another process holds it, or it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1
        self._made = False
        self._first = jax.process_index() == 0
        with refused_together():
            if self._first:
                self._claim()

    def _claim(self) -> None:
        path = self.path
        self._made = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            refuse_links(path)
            self._lock = no_follow(path / ".lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise UserError(
                f"cannot write to run_dir={path}: {error.strerror}; choose another"
                " run_dir"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = (
                os.pread(self._lock, 200, 0).decode(errors="replace").strip()
                or "another process"
            )
            self.release()
            raise UserError(
                f"run_dir={path} is in use by {holder}; stop it, or choose another"
                " run_dir"
            ) from None
        remove_partial(path)
        # A forked child would keep the lock when this process is killed.
        os.register_at_fork(after_in_child=self.release)
        # a full disk: the lock holds without its holder's name
        with contextlib.suppress(OSError):
            os.ftruncate(self._lock, 0)
            os.pwrite(
                self._lock,
                f"process {os.getpid()} on {socket.gethostname()}\n".encode(),
                0,
            )

    def release(self) -> None:
        """Let others have it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def check(
        self, config: Mapping[str, Any], *, may_change: tuple[str, ...] = MAY_CHANGE
    ) -> None:
        """Where there is a config.yaml already, `config` must be the same but for the
        keys of `may_change`.

        Args:
          config: nested plain values.
          may_change: patterns of dotted keys.

        Raises:
          UserError: naming the keys that differ.
        """
        path = self.path / "config.yaml"
        differing = (
            differences(self._adopted(), config, may_change) if path.exists() else []
        )
        if differing:
            raise UserError(
                f"run_dir={self.path} belongs to another configuration:"
                f" {'; '.join(differing)}; take these values back, or choose another"
                " run_dir"
            )

    def _adopted(self) -> dict[str, Any]:
        """Read the configuration that the directory belongs to: a damaged file's from
        the newest checkpoint.
        """
        path, checkpoints = self.path / "config.yaml", self.path / "checkpoints"
        try:
            return renamed_keys(read_mapping(path))
        except ValueError as error:
            if not any(entry.name.isdigit() for entry in checkpoints.glob("*")):
                raise UserError(
                    f"{path} is damaged ({error}); choose another run_dir"
                ) from error
            with Checkpointer.reading(checkpoints) as checkpointer:
                config: dict[str, Any] = checkpointer.meta()["config"]
            logger.warning(
                "%s is damaged (%s): taking the configuration of the newest checkpoint",
                path,
                error,
            )
            return config

    def adopt(
        self, config: Mapping[str, Any], *, may_change: tuple[str, ...] = MAY_CHANGE
    ) -> None:
        """`check`, then write config.yaml: from now on the directory belongs to this
        configuration.
        """
        self.check(config, may_change=may_change)
        if self._first:
            write_text(
                self.path / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False)
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._first and not (self.path / "config.yaml").exists():
            checkpoints = self.path / "checkpoints"
            if checkpoints.is_dir() and not any(checkpoints.iterdir()):
                checkpoints.rmdir()
            (self.path / ".lock").unlink()
            if self._made and not any(self.path.iterdir()):
                self.path.rmdir()
        self.release()


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], may_change: tuple[str, ...] = ()
) -> list[str]:
    """`key=new (was old)` for each dotted key that differs and matches no pattern of
    `may_change`.
    """
    before, after = dict(flatten(old)), dict(flatten(new))
    keys = [*after, *(key for key in before if key not in after)]
    values = {
        key: (before.get(key, EARLIER.get(key)), after.get(key, "absent"))
        for key in keys
    }
    return [
        f"{key}={now} (was {was})"
        for key, (was, now) in values.items()
        if compared(key, was) != compared(key, now)
        and not any(fnmatch(key, pattern) for pattern in may_change)
    ]


def compared(key: str, value: Any) -> Any:
    """A value as it is compared: paths without the slash that may end them."""
    if key not in PATHS:
        return value
    if isinstance(value, list):
        return [compared(key, item) for item in value]
    return value.rstrip("/") or value if isinstance(value, str) else value


def is_held(run_dir: Path) -> bool:
    """Return whether a process is training in it."""
    try:
        with (run_dir / ".lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


# Variables that environment.txt shows, beside JAX's own settings. Any other, called
# JAX_TOKEN say, may be a secret.
XLA_VARIABLES = (
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
)
PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "ml_dtypes",
    "datasets",
    "tiktoken",
    "wandb",
)


def environment() -> dict[str, str]:
    """Describe what a run ran on: code, versions, devices, and the settings of JAX and
    XLA among the variables.
    """
    found = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "version": __version__,
        "code": code_version(),
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    devices = jax.devices()
    found["devices"] = (
        f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
    )
    found["processes"] = str(jax.process_count())
    found["host"] = f"{os.cpu_count()} CPU cores"
    settings = {name.upper() for name in jax.config.values} | {
        *PROCESS_VARIABLES,
        *XLA_VARIABLES,
    }
    found |= {name: os.environ[name] for name in sorted(settings & os.environ.keys())}
    return found


def code_version() -> str:
    """The git commit of this package's source, `+changes` when files differ from it;
    else the installed version.
    """
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", root, *arguments],
                capture_output=True,
                text=True,
                timeout=10,
            )
        except (OSError, subprocess.TimeoutExpired):  # no git here
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD") if (root / ".git").exists() else None
    if commit is None:
        return "not a git checkout"
    return commit + (
        "+changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    )


def write_environment(
    run_dir: Path, facts: dict[str, str], overrides: Sequence[str]
) -> None:
    """environment.txt, `key: value` a line; a resumed run adds its own part below. The
    first process writes it.

    `facts`: what else a reader would want to know of the run. `overrides`: what its
    user set.
    """
    if jax.process_index() > 0:
        return
    given = redact(
        dict(override.split("=", 1) for override in overrides if "=" in override)
    )
    found = (
        environment()
        | facts
        | {"overrides": " ".join(f"{key}={value}" for key, value in given.items())}
    )
    part = "".join(
        f"{key}: {' '.join(value.splitlines())}\n" for key, value in found.items()
    )
    path = run_dir / "environment.txt"
    before = (
        path.read_text(encoding="utf-8", errors="replace") + "\n"
        if path.exists()
        else ""
    )
    write_text(path, before + part)
