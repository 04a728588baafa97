"""`resume=RUN`: continue or fork a run by its directory alone, with its settings.

A run directory may come from somebody else. Its settings overwrite keys of the composed
configuration as plain values: none of its text is parsed as an override, interpolated,
or seen by Hydra.
"""

import copy
import os
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from trainer.bounds import annotations
from trainer.config.fields import check_groups, flatten
from trainer.config.renamed import renamed_keys
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.files import check_no_links, read_mapping, saved_steps
from trainer.text import as_typed, nearest, unquoted

# A continued run does not keep these: they are not settings of the training.
NOT_CONTINUED = ("run_dir", "resume", "dry_run", "launcher")
# The user who starts a run decides where it writes outside its directory, who gets its
# metrics, and from where compiled programs, which are code, are loaded.
COMPILE_CACHE, DATA_CACHE = "compile_cache", "data.cache_dir"
NOT_TRUSTED = (COMPILE_CACHE, DATA_CACHE, "tracker.entity")
TASKS = "eval.tasks"
CONFIGS = str(Path(__file__).resolve().parents[1] / "configs")
RUN_NAME = "tracker.name"
# The choice of `parallel` sets the values of group `diloco`.
CHOSEN_BY = {"diloco": "parallel"}


class CommandLine(NamedTuple):
    """The parts of which a configuration is composed.

    Attributes:
      overrides: flags, choices of groups and `key=value`, for Hydra; all from the
        command line or from our own lists.
      settings: values by dotted key of a continued run or of `config=FILE`, without
        those that `overrides` set.
      trusted: whether the user wrote the settings. Somebody else may have written those
        of a run: their ids of the hub are not fetched.
      ignored: values of NOT_TRUSTED keys that the run has; they are not used.
    """

    overrides: list[str]
    settings: dict[str, Any]
    trusted: bool = False
    ignored: dict[str, str] = {}  # noqa: RUF012 never changed


def continue_run(
    arguments: Sequence[str],
    groups: Mapping[str, Sequence[str]],
    families: Mapping[str, str],
    *,
    is_sweep: bool,
) -> CommandLine:
    """Add the settings of the run that `resume.source` names, if it names one.

    Without `run_dir`, or with the run's own, the run itself is continued; else it is
    forked. A group that `arguments` choose keeps no settings of the run.

    Args:
      arguments: overrides in their long forms.
      groups: the choices of each group of the configuration.
      families: a choice of `model` for each family.
      is_sweep: whether each job has its own directory.

    Raises:
      UserError: a damaged run directory, or arguments that contradict each other.
    """
    pairs = (argument.partition("=") for argument in arguments)
    overrides = {key.lstrip("+~"): value for key, _, value in pairs}
    typed_source = overrides.get("resume.source", "auto")
    source = unquoted(typed_source)
    file = Path(source) / "config.yaml"
    if source in ("auto", "none"):
        return CommandLine(list(arguments), {})
    if not file.is_file():
        # With the default settings in their place, another run would be trained.
        if saved_steps(Path(source)):
            raise UserError(
                f"resume={source} has checkpoints, but no file {file.name} with its"
                f" settings; restore it from a copy, or give all settings and"
                f" run_dir={source} to continue from its checkpoints"
            )
        return CommandLine(list(arguments), {})
    # Before the file is read: these errors are the command line's alone.
    _check_overrides(overrides, source)
    tree = read_saved(file)
    run_dir = unquoted(overrides.get("run_dir", source))
    # A link to the run's directory is the run, too.
    is_same_run = not is_sweep and os.path.realpath(run_dir) == os.path.realpath(source)
    if is_same_run and overrides.get("resume.step", "null") != "null":
        raise UserError(
            f"resume.step={overrides['resume.step']} starts another run from that step"
            f" of resume={source}; add run_dir=DIRECTORY for it"
        )
    chosen = chosen_groups(groups, overrides)
    settings = {}
    for key, value in flatten(tree):
        group = key.partition(".")[0]
        if group in NOT_CONTINUED or group in chosen:
            continue
        is_overridden = any(overlaps(key, other) for other in overrides)
        # A fork does not inherit the run's name.
        if not is_overridden and (is_same_run or key != RUN_NAME):
            settings[key] = value
    ignored = {}
    for key in NOT_TRUSTED:
        if settings.get(key) is not None:
            ignored[key] = settings.pop(key)
    for task in settings.get(TASKS) or ():
        if not re.fullmatch(r"[\w-]+", str(task)):
            raise UserError(
                f"{file}: {TASKS} names the file {task!r}, which may be a program; give"
                f" {TASKS}= yourself"
            )
    # The choice of these three groups decides which of their keys exist or are null, so
    # it is named again.
    choices = []
    if "model" not in chosen:
        choices.append(f"model={_preset_of_family(tree, families, source)}")
    for group, key in (("optimizer", "name"), ("data", "source")):
        choice = tree[group][key]
        if group not in chosen and choice in groups[group]:
            choices.append(f"{group}={choice}")
    # `arguments` still have `resume.source`, so that a run directory without a
    # checkpoint is refused at the start.
    own_run_dir = [f"run_dir={typed_source}"] if is_same_run else []
    overrides_of_run = [*choices, *arguments, *own_run_dir]
    return CommandLine(overrides_of_run, settings, ignored=ignored)


def chosen_groups(groups: Iterable[str], overrides: Container[str]) -> list[str]:
    """Return the groups whose values the overrides choose; see `CHOSEN_BY`."""
    chosen = [group for group in groups if group in overrides]
    return chosen + [g for g, chooser in CHOSEN_BY.items() if chooser in chosen]


def _preset_of_family(
    tree: Mapping[str, Any], families: Mapping[str, str], source: str
) -> str:
    """Return a choice of `model` with the keys of the run's family."""
    family = tree["model"]["family"]
    if family not in families:
        raise UserError(
            f"resume={source} is a {family}, which is not known;"
            f" {nearest(family, list(families))}"
        )
    return families[family]


def _check_overrides(overrides: Mapping[str, str], source: str) -> None:
    """Raise UserError for overrides that would replace groups of saved settings."""
    if "experiment" in overrides:
        raise UserError(
            f"experiment={overrides['experiment']}, but resume={source} takes its"
            " settings from that run; leave experiment out, or name the keys to change"
        )
    for key, value in overrides.items():
        if key in annotations(Config) and value.startswith("{"):
            raise UserError(
                f"{key}={value}: with resume= give its keys one by one, such as"
                f" {key}.{value[1:9]}..."
            )


def overlaps(key: str, other: str) -> bool:
    """Return whether one of two dotted keys is the other or a group that holds it."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def with_settings(tree: DictConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve the composed configuration, overwritten by `CommandLine.settings`.

    Interpolations of the composed configuration may read settings. In the value of a
    setting, text such as ${run_dir} stays text.
    """
    values = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(values, dict)
    # OmegaConf refuses to interpolate "???", its missing value, so no interpolation
    # reads a setting that contains ${...}.
    hidden = {key: "???" for key, value in settings.items() if "${" in str(value)}
    set_keys(values, {**settings, **hidden})
    resolved = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    assert isinstance(resolved, dict)
    set_keys(resolved, settings)
    return {str(key): value for key, value in resolved.items()}


def set_keys(tree: dict[Any, Any], values: Mapping[str, Any]) -> None:
    """Set dotted keys of nested mappings; missing groups, and values in the place of a
    group, become mappings.
    """
    for key, value in values.items():
        *groups, name = key.split(".")
        node = tree
        for group in groups:
            if not isinstance(node.get(group), dict):
                node[group] = {}
            node = node[group]
        node[name] = copy.deepcopy(value)


def read_saved(file: Path) -> dict[str, Any]:
    """Return a run's config.yaml, with the current names of its keys.

    Raises:
      UserError: the run has a symbolic link, the file is damaged, or its groups are not
        those of the schema.
    """
    # config.yaml could be a link to a private file, parts of which an error would
    # quote.
    check_no_links(file.parent)
    try:
        tree = renamed_keys(read_mapping(file))
        unknown = tree.keys() - annotations(Config).keys()
        if unknown:
            raise ValueError(f"unknown key {min(unknown)}")
        check_groups(Config, tree)
        choices = (
            tree["model"]["family"],
            tree["optimizer"]["name"],
            tree["data"]["source"],
        )
        if not all(isinstance(name, str) for name in choices):
            raise ValueError("model.family, optimizer.name or data.source is not text")
        tasks = tree.get("eval", {}).get("tasks")
        if tasks is not None and not isinstance(tasks, list):
            raise ValueError(f"eval.tasks={as_typed(tasks)} is not a list")
    except (ValueError, KeyError, TypeError, AttributeError, UserError) as error:
        raise UserError(
            f"{file} is damaged ({error}); give all settings and run_dir={file.parent}"
            " to continue from its checkpoints"
        ) from error
    return tree


def default_cache(key: str) -> str | None:
    """Return the default directory of a cache, COMPILE_CACHE or DATA_CACHE."""
    file = "config.yaml" if key == COMPILE_CACHE else "base/data.yaml"
    directory: str | None = read_mapping(Path(CONFIGS, file))[key.rpartition(".")[2]]
    return directory
