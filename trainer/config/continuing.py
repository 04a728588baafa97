"""`resume=RUN`: continue or fork a run by its directory alone, with its settings.

A run directory may come from somebody else. Its settings are laid over the composed
configuration as values: none of its text is parsed as an override, interpolated, or
seen by Hydra.
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
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.files import read_mapping
from trainer.text import nearest, unquoted

# Not settings of the training.
NOT_TAKEN = ("run_dir", "resume", "dry_run", "launcher")
# Who starts a run decides where it writes outside its directory, to whom it sends its
# metrics, and from where compiled programs, which are code, are loaded.
COMPILED, DATA_CACHE = "compile_cache", "data.cache_dir"
NOT_TRUSTED = (COMPILED, DATA_CACHE, "tracker.entity")
TASKS = "eval.tasks"
CONFIGS = str(Path(__file__).resolve().parents[1] / "configs")
RUN_NAME = "tracker.name"
# Groups whose values come from the choice of another group.
SET_BY = {"diloco": "parallel"}


class CommandLine(NamedTuple):
    """The parts of which a configuration is composed.

    Attributes:
      overrides: flags, choices of groups and `key=value`, for Hydra; all from the
        command line or from our own lists.
      saved: settings of the continued run by dotted key, without those that `overrides`
        set.
      not_taken: values of that run by key of `NOT_TRUSTED`, which are not used.
    """

    overrides: list[str]
    saved: dict[str, Any]
    not_taken: dict[str, str] = {}  # noqa: RUF012 never changed


def continue_run(
    arguments: Sequence[str],
    groups: Mapping[str, Sequence[str]],
    families: Mapping[str, str],
    *,
    is_sweep: bool,
) -> CommandLine:
    """Add the settings of the run that `resume.source` names, if it names one.

    Without `run_dir`, or with the run's own, the run itself is continued; else it is
    forked. A group that is chosen again takes nothing from the run.

    Args:
      arguments: overrides in their long forms.
      groups: the choices of each group of the configuration.
      families: a choice of `model` for each family.
      is_sweep: whether each job has a directory of its own.

    Raises:
      UserError: a damaged run directory, or arguments that contradict each other.
    """
    pairs = (argument.partition("=") for argument in arguments)
    given = {key.lstrip("+~"): value for key, _, value in pairs}
    written = given.get("resume.source", "auto")
    source = unquoted(written)
    file = Path(source) / "config.yaml"
    if source in ("auto", "none") or not file.is_file():
        return CommandLine(list(arguments), {})
    _refuse_contradictions(given, source)
    tree = read_saved(file)
    run_dir = unquoted(given.get("run_dir", source))
    # A link to the run's directory is the run, too.
    is_same_run = not is_sweep and os.path.realpath(run_dir) == os.path.realpath(source)
    if is_same_run and given.get("resume.step", "null") != "null":
        raise UserError(
            f"resume.step={given['resume.step']} starts another run from that step of"
            f" resume={source}; add run_dir=DIRECTORY for it"
        )
    chosen_groups = [group for group in groups if group in given]
    chosen_groups += [keys for keys, group in SET_BY.items() if group in chosen_groups]
    not_taken = {*NOT_TAKEN, *chosen_groups}
    saved = {}
    for key, value in flatten({k: v for k, v in tree.items() if k not in not_taken}):
        is_given = any(overlaps(key, other) for other in given)
        # A fork has a name of its own.
        if not is_given and (is_same_run or key != RUN_NAME):
            saved[key] = value
    not_trusted = {}
    for key in NOT_TRUSTED:
        if saved.get(key) is not None:
            not_trusted[key] = saved.pop(key)
    for task in saved.get(TASKS) or ():
        if not re.fullmatch(r"[\w-]+", str(task)):
            raise UserError(
                f"{file}: {TASKS} names the file {task!r}, which may be a program; give"
                f" {TASKS}= yourself"
            )
    # The keys of these three groups depend on their choice, or which of them are null.
    choices = []
    if "model" not in chosen_groups:
        family = tree["model"]["family"]
        if family not in families:
            raise UserError(
                f"resume={source} is a {family}, which is not known;"
                f" {nearest(family, list(families))}"
            )
        choices.append(f"model={families[family]}")
    for group, key in (("optimizer", "name"), ("data", "source")):
        choice = tree[group][key]
        if group not in chosen_groups and choice in groups[group]:
            choices.append(f"{group}={choice}")
    # `resume.source` stays: saved settings without a checkpoint start no run.
    place = [f"run_dir={written}"] if is_same_run else []
    return CommandLine([*choices, *arguments, *place], saved, not_trusted)


def _refuse_contradictions(given: Mapping[str, str], source: str) -> None:
    """Refuse overrides that would replace saved settings as a whole."""
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


def overlaps(key: str, other: str) -> bool:
    """Return whether one of two dotted keys is the other or a group that holds it."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def with_saved(tree: DictConfig, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve the composed configuration, with the saved settings laid over it.

    Interpolations of the composed configuration may read saved values; text like one in
    a saved value stays text.
    """
    plain = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(plain, dict)
    # OmegaConf refuses to interpolate "???", its missing value: so nobody reads a saved
    # value with ${...} in it.
    hidden = {key: "???" for key, value in saved.items() if "${" in str(value)}
    set_keys(plain, {**saved, **hidden})
    resolved = OmegaConf.to_container(OmegaConf.create(plain), resolve=True)
    assert isinstance(resolved, dict)
    set_keys(resolved, saved)
    return {str(key): value for key, value in resolved.items()}


def set_keys(tree: dict[Any, Any], values: Mapping[str, Any]) -> None:
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
    """Read a run's config.yaml, and check that its groups are the schema's. Raises
    UserError.
    """
    if file.is_symlink():
        raise UserError(f"{file} is a symbolic link; replace it by the file itself")
    try:
        tree = renamed_keys(read_mapping(file))
        unknown = tree.keys() - annotations(Config).keys()
        if unknown:
            raise ValueError(f"unknown key {min(unknown)}")
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
    """Return the default directory of a cache, COMPILED or DATA_CACHE."""
    file = "config.yaml" if key == COMPILED else "base/data.yaml"
    place: str | None = read_mapping(Path(CONFIGS, file))[key.rpartition(".")[2]]
    return place
