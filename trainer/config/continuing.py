"""`resume=RUN`: continue or fork a run by its directory alone; settings that are not
given anew are those of the run.

A run directory is data that somebody else may have written. Its settings are laid over
the composed configuration as values: no text of theirs is parsed as an override,
interpolated, or seen by Hydra.
"""

import copy
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from trainer.bounds import annotations
from trainer.config.fields import flatten
from trainer.config.renamed import renamed_keys
from trainer.config.schema import DATA_KEYS, Config
from trainer.errors import UserError
from trainer.files import read_mapping
from trainer.models.specs import FIRST
from trainer.text import nearest

# Where the run was, how it started, and what it did besides training.
NOT_TAKEN = ("run_dir", "resume", "dry_run")
# Whoever starts a run says where it writes beside its directory, and where compiled
# programs, which are code, are.
COMPILED, DATA_CACHE = "compile_cache", "data.cache_dir"
TASKS = "eval.tasks"
CONFIGS = str(Path(__file__).resolve().parents[2] / "configs")
NEW_NAME = "tracker.name"
# groups of keys that a choice of another group gives values
SET_BY = {"diloco": "parallel"}


class CommandLine(NamedTuple):
    """What a configuration is composed of.

    Attributes:
      overrides: flags, choices of groups and `key=value`, for Hydra; all from the
          command line or from our own lists.
      saved: settings of the run that is continued, by dotted key; without keys that
          `overrides` set.
      not_taken: its caches, by key, which the command line does not set either.
    """

    overrides: list[str]
    saved: dict[str, Any]
    not_taken: dict[str, str] = {}  # noqa: RUF012 never changed


def continued(
    arguments: Sequence[str],
    groups: Mapping[str, Sequence[str]],
    families: Mapping[str, str],
    *,
    several: bool,
) -> CommandLine:
    """Add the settings of the run that `resume.source` names, if it names one.

    Without `run_dir`, or with the run's own, the run itself goes on; else another one
    starts from it. A group that is chosen anew takes nothing from the run.

    Args:
      arguments: overrides in their long forms.
      groups: the choices of each group of the configuration.
      families: a choice of `model` of each family.
      several: whether it is a sweep, of which each job has a directory of its own.

    Raises:
      UserError: a damaged run directory, or arguments that contradict each other.
    """
    given = {
        key.lstrip("+~"): value
        for key, _, value in (argument.partition("=") for argument in arguments)
    }
    written = given.get("resume.source", "auto")
    source = written.strip("'\"")
    file = Path(source) / "config.yaml"
    if source in ("auto", "none") or not file.is_file():
        return CommandLine(list(arguments), {})
    if "experiment" in given:
        raise UserError(
            f"experiment={given['experiment']}, but resume={source} takes its settings"
            " from that run; leave experiment out, or name the keys to change"
        )
    for key, value in given.items():
        if key in annotations(Config) and value.startswith("{"):
            raise UserError(
                f"{key}={value}: beside resume= give its keys one by one, such as"
                f" {key}.{value[1:9]}..."
            )
    tree = read_saved(file)
    itself = not several and os.path.realpath(
        given.get("run_dir", source)
    ) == os.path.realpath(source)
    if itself and given.get("resume.step", "null") != "null":
        raise UserError(
            f"resume.step={given['resume.step']} starts another run from that step of"
            f" resume={source}; add run_dir=DIRECTORY for it"
        )
    anew = [group for group in groups if group in given]
    anew += [keys for keys, group in SET_BY.items() if group in anew]
    not_taken = {*NOT_TAKEN, *anew}
    saved = {
        key: value
        for key, value in flatten(
            {group: value for group, value in tree.items() if group not in not_taken}
        )
        if (itself or key != NEW_NAME)
        and not any(overlaps(key, other) for other in given)
    }
    caches = {
        key: saved.pop(key)
        for key in (COMPILED, DATA_CACHE)
        if saved.get(key) is not None
    }
    for task in saved.get(TASKS) or ():
        if not re.fullmatch(r"[\w-]+", str(task)):
            raise UserError(
                f"{file}: {TASKS} names the file {task!r}, which may be a program; give"
                f" {TASKS}= yourself"
            )
    # The keys of these two groups depend on their choice; those of all other groups are
    # the same.
    family, optimizer = tree["model"]["family"], tree["optimizer"]["name"]
    choices = []
    if "model" not in anew:
        if family not in families:
            raise UserError(
                f"resume={source} is a {family}, which is not known;"
                f" {nearest(family, list(families))}"
            )
        choices.append(f"model={families[family]}")
    if "optimizer" not in anew:
        choices += [
            f"optimizer={name}" for name in groups["optimizer"] if name == optimizer
        ]
    place = [f"run_dir={written}", "resume.source=auto"] if itself else []
    return CommandLine([*choices, *arguments, *place], saved, caches)


def overlaps(key: str, other: str) -> bool:
    """Return whether one of two dotted keys is the other or a group that holds it."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def lay_over(tree: DictConfig, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve the composed configuration, with the saved settings in it as they are.

    Interpolations of the composed configuration are resolved, and may read saved
    values; text like one in a saved value stays text.
    """
    plain = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(plain, dict)
    # OmegaConf refuses to interpolate a missing value, which these are to it.
    put(
        plain,
        {key: "???" if "${" in str(value) else value for key, value in saved.items()},
    )
    resolved = OmegaConf.to_container(OmegaConf.create(plain), resolve=True)
    assert isinstance(resolved, dict)
    put(resolved, saved)
    return {str(key): value for key, value in resolved.items()}


def put(tree: dict[Any, Any], values: Mapping[str, Any]) -> None:
    """Set dotted keys of nested mappings; a part that is no mapping becomes one."""
    for key, value in values.items():
        *groups, name = key.split(".")
        node = tree
        for group in groups:
            if not isinstance(node.get(group), dict):
                node[group] = {}
            node = node[group]
        node[name] = copy.deepcopy(value)


def read_saved(file: Path) -> dict[str, Any]:
    """Read a run's config.yaml, whose groups are those of the schema. Raises
    UserError.
    """
    if file.is_symlink():
        raise UserError(f"{file} is a symbolic link; replace it by the file itself")
    try:
        tree = renamed_keys(read_mapping(file))
        unknown = tree.keys() - annotations(Config).keys()
        if unknown:
            raise ValueError(f"unknown key {min(unknown)}")
        tree["model"] = {"family": FIRST} | tree["model"]
        tree["data"] = {
            key: value
            for key, value in tree["data"].items()
            if is_used(key, tree["data"]["source"])
        }
        if not all(
            isinstance(name, str)
            for name in (tree["model"]["family"], tree["optimizer"]["name"])
        ):
            raise ValueError("model.family and optimizer.name are not text")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file} is damaged ({error}); give all settings and run_dir={file.parent}"
            " to continue from its checkpoints"
        ) from error
    return tree


def default_cache(key: str) -> str | None:
    """Return the place that a cache, COMPILED or DATA_CACHE, has by default."""
    file = "config.yaml" if key == COMPILED else "base/data.yaml"
    place: str | None = read_mapping(Path(CONFIGS, file))[key.rpartition(".")[2]]
    return place


def is_used(key: str, source: str) -> bool:
    """Return whether a source uses a key of `data`; an older config.yaml has the keys
    of all sources, with values.
    """
    return source in DATA_KEYS.get(key, (source,))
