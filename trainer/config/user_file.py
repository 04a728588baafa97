"""`config=my.yaml`: the user's file, which overrides the defaults and is overridden by
the command line.

Its values overwrite the composed configuration as those of a continued run do: none of
its text is parsed as an override or interpolated.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.bounds import annotations
from trainer.config.fields import flatten
from trainer.config.renamed import renamed_keys
from trainer.config.resume import CommandLine, chosen_groups, overlaps, set_keys
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.files import path_of, read_mapping
from trainer.text import as_typed, key_of, nearest

# A key of a group may name its choice, as in `data: {source: text}`. The first of these
# whose value is a choice counts.
CHOICE_KEYS = ("source", "kind", "name")


def settings_of_file(
    path: Path,
    arguments: Sequence[str],
    groups: Mapping[str, Sequence[str]],
    families: Mapping[str, str],
) -> CommandLine:
    """Return the settings of a file, without those that the arguments set.

    The file has keys as the command line does, nested (`train: {steps: 100}`) or dotted
    (`train.steps: 100`), and choices (`model: llama_nano`). If an argument chooses a
    group, the file's keys of that group are ignored.

    Args:
      path: the file.
      arguments: overrides in their long forms, without `config=`.
      groups: the choices of each group of the configuration.
      families: a choice of `model` for each family.

    Raises:
      UserError: the file does not exist, is not YAML, or has an unknown key.
    """
    choices, tree = _read(path, groups, families)
    overridden = {key_of(argument) for argument in arguments}
    # An experiment sets keys of many groups, some of which the file may set, too.
    if "experiment" in overridden:
        raise UserError(
            f"experiment= and config={path}: which wins is not clear; put experiment"
            " into the file, or name the keys to change"
        )
    chosen = chosen_groups(groups, overridden)
    settings = {}
    for key, value in flatten(tree):
        # A choice on the command line sets the whole group, so parts of the file's are
        # dropped.
        is_chosen = key.partition(".")[0] in chosen
        if not is_chosen and not any(overlaps(key, other) for other in overridden):
            settings[key] = value
    new_choices = [
        f"{group}={name}" for group, name in choices.items() if group not in overridden
    ]
    return CommandLine([*new_choices, *arguments], settings, trusted=True)


def _read(
    path: Path, groups: Mapping[str, Sequence[str]], families: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the file's choices of groups, and its other keys, nested."""
    try:
        entries = read_mapping(path_of(path))
    except OSError as error:
        raise UserError(f"config={path}: {error.strerror}; give a YAML file") from error
    except ValueError as error:
        raise UserError(f"config={path}: {error}; give keys and values") from error
    choices: dict[str, str] = {}
    tree: dict[str, Any] = {}
    given: set[str] = set()
    # Top-level keys, and groups without keys of their own (experiment).
    valid = [*groups, *annotations(Config)]
    for key, value in entries.items():
        group = key.partition(".")[0]
        if group == "resume":
            raise UserError(
                f"config={path}: {key} belongs on the command line; resume=RUN takes"
                " all settings of a run"
            )
        if group not in valid:
            raise UserError(
                f"config={path}: unknown key {key}; {nearest(group, sorted({*valid}))}"
            )
        if key in groups and not isinstance(value, Mapping):
            # `data:` with nothing below it is null in YAML: the file chooses nothing.
            if value is not None:
                choices[key] = _choice(path, key, value, groups[key])
        else:
            new = dict(flatten({key: value}))
            for name in new:
                # One of the two values would be lost, and which one depends on their
                # order.
                if any(overlaps(name, other) for other in given):
                    raise UserError(
                        f"config={path}: {name} is there twice, nested and dotted; give"
                        " it once"
                    )
            given |= new.keys()
            set_keys(tree, new)
    try:
        # The command line refuses old names; a file may be a run's old config.yaml.
        tree = renamed_keys(tree)
    except UserError as error:
        raise UserError(f"config={path}: {error}") from None
    for group, values in tree.items():
        if group not in choices and isinstance(values, Mapping) and group in groups:
            names = [values.get(key) for key in CHOICE_KEYS]
            names = [name for name in names if name in groups[group]]
            # A run's config.yaml may name a preset that no file here has; its family
            # tells which keys it has.
            if group == "model" and not names:
                names = [families.get(str(values.get("family")))]
            if names and names[0] is not None:
                choices[group] = str(names[0])
    return choices, tree


def _choice(path: Path, group: str, value: Any, valid: Sequence[str]) -> str:
    """Return the choice of a group, which must be one word.

    In other text Hydra would resolve interpolations, or follow a path to another file.
    """
    choice = as_typed(value)
    if not re.fullmatch(r"\w+", choice):
        raise UserError(
            f"config={path}: {group}={choice[:100]} is not a choice;"
            f" {nearest(choice, list(valid))}"
        )
    return choice
