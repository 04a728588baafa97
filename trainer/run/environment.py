"""environment.txt of a run directory: versions, devices, and facts about the run."""

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

from trainer.files import read_file, write_text
from trainer.parallel.processes import PROCESS_VARIABLES
from trainer.text import redact
from trainer.version import __version__

# Variables in environment.txt, beside JAX's own settings. Any other variable, such as
# JAX_TOKEN, may be a secret.
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
    """Return the environment of a run: code, versions, devices, and the variables of
    JAX and XLA.
    """
    facts = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "version": __version__,
        "code": code_version(),
    }
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    devices = jax.devices()
    facts["devices"] = (
        f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
    )
    facts["processes"] = str(jax.process_count())
    facts["host"] = f"{os.cpu_count()} CPU cores"
    settings = {name.upper() for name in jax.config.values} | {
        *PROCESS_VARIABLES,
        *XLA_VARIABLES,
    }
    facts |= {name: os.environ[name] for name in sorted(settings & os.environ.keys())}
    return facts


def code_version() -> str:
    """Return the git commit of this package's source, with `+changes` if files differ
    from it.
    """
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str | None:
        try:
            result = subprocess.run(
                ["git", "-C", root, *arguments],
                capture_output=True,
                text=True,
                timeout=10,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        if result.returncode == 0:
            return result.stdout.strip()
        return None

    # git looks for a repository in all directories above: of an installed package it
    # would report somebody's project.
    commit = git("rev-parse", "HEAD") if (root / ".git").exists() else None
    if commit is None:
        return "not a git checkout"
    # Run directories may be untracked files here, and there may be many.
    changes = git("status", "--porcelain", "--untracked-files=no")
    if changes:
        return f"{commit}+changes"
    return commit


def write_environment(
    run_dir: Path, facts: dict[str, str], overrides: Sequence[str]
) -> None:
    """Write environment.txt, `key: value` a line; a resumed run appends its own lines.

    The first process writes it.

    Args:
      run_dir: the run directory.
      facts: values by key.
      overrides: the `key=value` arguments of the command.
    """
    if jax.process_index() > 0:
        return
    # Users share this file in bug reports.
    settings = redact(
        dict(override.split("=", 1) for override in overrides if "=" in override)
    )
    values = environment() | facts
    values["overrides"] = " ".join(f"{key}={value}" for key, value in settings.items())
    add_facts(run_dir, values, separator="\n")


def add_facts(run_dir: Path, facts: dict[str, str], *, separator: str = "") -> None:
    """Append facts to environment.txt, `separator` after those that are there.

    A reader takes the last line of each key. The first process writes it.
    """
    if jax.process_index() > 0:
        return
    # A line break in a value would begin another key.
    text = "".join(
        f"{key}: {' '.join(value.splitlines())}\n" for key, value in facts.items()
    )
    path = run_dir / "environment.txt"
    # Replaced, not appended to: a hard link in a backup of the run keeps its content.
    if path.exists():
        text = read_file(path).decode(errors="replace") + separator + text
    write_text(path, text)
