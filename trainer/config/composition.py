"""Compose the configuration from `trainer/configs/` and the command line, with Hydra,
and check it.
"""

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config import hub, inherited
from trainer.config.combinations import validate
from trainer.config.fields import check_groups, converted, flatten, from_tree
from trainer.config.phases import phases_of
from trainer.config.renamed import check_key_names
from trainer.config.resume import CONFIGS, CommandLine, continue_run, with_settings
from trainer.config.schema import Config
from trainer.config.user_file import settings_of_file
from trainer.errors import UserError, explain_file_errors
from trainer.text import key_of, nearest, without_braces

LEADING_TILDE = re.compile(
    r"^((?:run_dir|init_from|resume\.source|data\.cache_dir|data\.prepared_dir)=)~(?=/|$)"
)
TILDE_IN_LIST = re.compile(r"([\[,=]\s*)~(?=[/,\]]|$)")
# The values of these keys are texts, of which Hydra would read 1e3 as a number and true
# as a boolean.
NAME_KEYS = re.compile(
    r"run_dir|init_from|compile_cache|resume\.source|sample\.prompt|eval\.tasks"
    r"|tracker\.(?:project|entity|group|name|tags)|train\.trainable|(?:model"
    r"|precision)\.name|precision\.(?:exclude|fp8_modules)"
    r"|data\.(?:cache_dir|prepared_dir|tokenizer|name|config|split|column|revision"
    r"|paths|sources)"
)
NUMBER_OR_BOOL = re.compile(
    r"((?:^|[\[,])\s*)([+-]?(?:\.?\d[\w.+-]*|nan|inf(?:inity)?|true|false))"
    r"(?=\s*(?:[,\]]|$))",
    re.IGNORECASE,
)
# Hydra reads these values of a group as something else than a name.
NOT_A_CHOICE = re.compile(r"\[.*|null|true|false|[+-]?[\d.]+", re.IGNORECASE)
# Not in quotes. Python converts no number of more than 4,300 digits.
LONG_NUMBER = re.compile(r"^(?!['\"]).*\d{1001}", re.DOTALL)
PATTERN_KEYS = ("data.paths", "data.sources")


def compose_config(arguments: Sequence[str]) -> Config:
    """Return the checked configuration of these arguments.

    Raises:
      UserError: an argument is not valid; Hydra's errors become UserErrors, too.
    """
    with explain_file_errors(), explain_hydra_errors(long_forms(arguments)):
        line = expand_arguments(arguments)
        return build_config(compose_tree(line.overrides), line)


@contextlib.contextmanager
def explain_hydra_errors(arguments: Sequence[str]) -> Iterator[None]:
    """Turn Hydra's and OmegaConf's errors about these arguments into UserErrors."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(describe_hydra_error(error, arguments)) from None


def compose_tree(overrides: Sequence[str], **settings: Any) -> DictConfig:
    """Return the configuration as Hydra composes it, without checks."""
    # None is the behavior of the installed Hydra; without it Hydra warns and assumes an
    # older one's.
    with initialize_config_dir(CONFIGS, version_base=None):
        return compose("config", list(overrides), **settings)


def resolved_yaml(line: CommandLine) -> str:
    """Return the resolved configuration of a command line as YAML."""
    tree = compose_tree(overrides_in(line.overrides))
    return yaml.safe_dump(with_settings(tree, line.settings), sort_keys=False)


def build_config(tree: DictConfig, line: CommandLine, **changes: Any) -> Config:
    """Return the checked `Config` of a composed tree.

    Args:
      tree: the configuration as Hydra composes it.
      line: the command line, whose settings overwrite the tree.
      changes: values of top-level keys.

    Raises:
      UserError: a key, a value or a combination is not valid.
    """
    values = with_settings(tree, line.settings)
    values.pop("experiment", None)  # a group without keys: only the name of a choice
    values |= changes
    # Code below indexes into the groups.
    check_groups(Config, values)
    fetch_from_hub(values, line)
    if inherited.needs_architecture(values.get("model")):
        values["model"] = inherited.inherit(
            values["model"],
            converted(str | None, values["init_from"], "init_from"),
            other_tokenizer=values["init"]["embeddings"] is not None,
        )
    # After the resume and the file, both of which may have phases; Hydra composes no
    # presets inside of a list.
    values["train"]["phases"] = with_presets(values["train"]["phases"])
    config: Config = from_tree(Config, values)
    validate(config)
    # A phase may have a precision, an optimizer and steps that do not fit the model.
    for phase in phases_of(config):
        validate(phase.config)
    return config


def fetch_from_hub(values: dict[str, Any], line: CommandLine) -> None:
    """Replace ids of the hub by the directories of their files.

    Ids in settings that are not trusted stay: the run directory of somebody else must
    not cause a download.
    """
    for key in hub.KEYS:
        *groups, name = key.split(".")
        keys: Any = values
        for group in groups:
            keys = keys.get(group)
        may_fetch = line.trusted or key not in line.settings
        if may_fetch and isinstance(keys, dict):
            value = keys.get(name)
            if isinstance(value, str):
                keys[name] = hub.fetch(key, value)


def with_presets(phases: Any) -> Any:
    """Return `train.phases` with all fields of the precisions that it names.

    Raises:
      UserError: a phase names an unknown preset.
    """
    if not isinstance(phases, list):
        return phases
    expanded = []
    for phase in phases:
        if isinstance(phase, dict) and "precision" in phase:
            phase = {**phase, "precision": full_precision(phase["precision"])}
        expanded.append(phase)
    return expanded


def full_precision(precision: Any) -> Any:
    """Return all fields of a phase's precision, which is given as the name of a preset
    or as `{name:PRESET,key:value,...}`.
    """
    if isinstance(precision, str):
        return preset(precision)
    if isinstance(precision, dict) and precision.get("name") in presets():
        # A resumed run's phases have all fields, which win over a preset that changed
        # since.
        return {**preset(precision["name"]), **precision}
    return precision


def presets() -> list[str]:
    """Return the names of the presets of `precision`."""
    return sorted(path.stem for path in Path(CONFIGS, "precision").glob("*.yaml"))


def preset(name: str) -> dict[str, Any]:
    """Return the fields of a preset. Raises UserError for an unknown name."""
    if name not in presets():
        raise UserError(
            f"train.phases: precision={name} is not a preset;"
            f" {nearest(name, presets())}"
        )
    base, changes = (
        OmegaConf.load(Path(CONFIGS, folder))
        for folder in ("base/precision.yaml", f"precision/{name}.yaml")
    )
    fields = OmegaConf.to_container(OmegaConf.merge(base, changes))
    assert isinstance(fields, dict)
    return {str(key): value for key, value in fields.items() if key != "defaults"}


def expand_arguments(arguments: Sequence[str]) -> CommandLine:
    """Return the arguments in their long forms, flags first, with the settings of a
    continued run or of `config=FILE`.

    Raises:
      UserError: a key was renamed, a run cannot be continued, or a file cannot be read.
    """
    long = long_forms(arguments)
    # Before Hydra, which would call an old name unknown.
    check_key_names(long)
    overrides = overrides_in(long)
    # Hydra wants flags and their values (`--cfg job`) before the overrides.
    flags = [argument for argument in long if argument not in overrides]
    groups = choices_of_groups()
    families = choice_of_each_family()
    for argument in overrides:
        key, _, value = argument.partition("=")
        if LONG_NUMBER.search(value):  # Hydra's parser raises a ValueError
            raise UserError(f"{key}: expected a number of at most 64 bits")
    files = [text for text in overrides if text.startswith("config=")]
    overrides = [text for text in overrides if text not in files]
    line = continue_run(overrides, groups, families, is_sweep=is_sweep(flags))
    # Which of the two wins would not be clear.
    if files and line.settings:
        raise UserError(
            f"{files[0]}, but resume= takes the settings of that run; leave config="
            " out, or name the keys to change"
        )
    if files:
        path = Path(files[0].partition("=")[2])
        line = settings_of_file(path, overrides, groups, families)
    check_choices(line.overrides, groups)
    return line._replace(overrides=[*flags, *line.overrides])


def check_choices(
    overrides: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> None:
    """Raise UserError for a group whose value Hydra does not read as a name, or reads
    as a path to a file elsewhere, which may run a program.
    """
    for override in overrides:
        key, _, value = override.partition("=")
        if key_of(override) == "hydra.searchpath":
            raise UserError(
                f"{key} adds choices from files that may run a program; config=FILE"
                " takes the settings of a file"
            )
        group = key_of(override).partition("@")[0]
        is_choice = (group in groups or "/" in group) and not value.startswith("{")
        if is_choice and ".." in override:
            raise UserError(
                f"{override}: a choice is a name and no path; config=FILE takes the"
                " settings of a file"
            )
        # For null, true and 1 Hydra raises ValueError, which is no HydraException.
        if key in groups and NOT_A_CHOICE.fullmatch(value):
            raise UserError(f"{override}: expected one of {', '.join(groups[key])}")


def choices_of_groups() -> dict[str, list[str]]:
    """Return the choices of each group."""
    return {
        path.name: sorted(choice.stem for choice in path.glob("*.yaml"))
        for path in sorted(Path(CONFIGS).iterdir())
        # `base` holds what choices inherit from; it is no group.
        if path.is_dir() and path.name != "base"
    }


def choice_of_each_family() -> dict[str, str]:
    """Return one choice of `model` for each family.

    All choices of a family have the same keys.
    """
    choices: dict[str, str] = {}
    for path in sorted(Path(CONFIGS, "model").glob("*.yaml")):
        # Read as text: composing each file would take seconds.
        base = re.search(r"/base/(\w+)@_here_", path.read_text(encoding="utf-8"))
        if base:
            choices.setdefault(base[1], path.stem)
    return choices


def is_sweep(arguments: Sequence[str]) -> bool:
    """Return whether the arguments ask for several runs."""
    return bool({"-m", "--multirun"} & set(arguments))


def overrides_in(arguments: Sequence[str]) -> list[str]:
    """Return the arguments `key=value`, without flags and `~key`."""
    return [a for a in arguments if "=" in a and not a.startswith("-")]


def is_override(argument: str) -> bool:
    """Return whether an argument is `key=value`, or `~key`, which removes a key."""
    return argument.startswith("~") or ("=" in argument and argument[0] != "-")


class Sweep(NamedTuple):
    """The jobs of a command line.

    Attributes:
      keys: the keys that have several values.
      jobs: the overrides of each job; empty without a sweep, or if its jobs cannot be
        listed in advance.
    """

    keys: list[str]
    jobs: list[list[str]]

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Self:
        """Return the sweep of expanded arguments."""
        if not is_sweep(arguments):
            return cls([], [])
        texts = overrides_in(arguments)
        try:
            overrides = OverridesParser.create().parse_overrides(texts)
        except HydraException:
            return cls([], [])  # Hydra reports it
        swept = {o.get_key_element(): o for o in overrides if o.is_sweep_override()}
        # The sweeper draws values of an interval while it runs.
        if not swept or any(o.is_interval_sweep() for o in swept.values()):
            return cls(list(swept), [])
        constant = [
            text
            for text, override in zip(texts, overrides, strict=True)
            if not override.is_sweep_override()
        ]
        values = [
            [f"{key}={value}" for value in override.sweep_string_iterator()]
            for key, override in swept.items()
        ]
        jobs = [[*constant, *job] for job in itertools.product(*values)]
        return cls(list(swept), jobs)

    def problems(self, line: CommandLine) -> list[str]:
        """Return the errors of the jobs' configurations, each error once.

        `line`: as in `build_config`.
        """
        groups = choices_of_groups()
        messages: dict[str, str] = {}
        for number, arguments in enumerate(self.jobs):
            overrides = [
                argument
                for argument in arguments
                # `compose` has no node `hydra`, and would refuse keys of the launcher
                # or the sweeper.
                if not key_of(argument).startswith(("hydra.", "hydra/"))
            ]
            try:
                check_choices(overrides, groups)
                with explain_hydra_errors(arguments):
                    build_config(compose_tree(overrides), line)
            except UserError as error:
                problem = f"job {number}: {error}; no job was started"
                # Jobs that differ in another key have the same error, which one line
                # tells.
                messages.setdefault(str(error), problem)
        return list(messages.values())


def long_forms(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with their short forms written out.

    `resume=auto` is `resume.source=auto`. `precision=sim_e3m4` is `precision=sim` with
    that format in both directions, before all other arguments, which may change it. `~`
    is the home directory: no shell expands it after `run_dir=`, and Hydra cannot read
    it in a list. A name that reads as a number is quoted.
    """
    home = os.path.expanduser("~")
    long, chosen = [], []
    for argument in arguments:
        simulated = re.fullmatch(r"(\+*)precision=(sim_(e\d+m\d+[ts]?))", argument)
        if simulated:
            sign, name, number_format = simulated.groups()
            chosen += [
                f"{sign}precision=sim",
                f"precision.name={name}",
                f"precision.forward={number_format}",
                f"precision.backward={number_format}",
            ]
            continue
        argument = re.sub(r"^(\+*)resume=", r"\1resume.source=", argument)
        tilde = TILDE_IN_LIST if argument.startswith("data.paths=") else LEADING_TILDE
        argument = tilde.sub(lambda match: match[1] + home, argument)
        key, _, value = argument.partition("=")
        if (
            # A value with quotes says itself that it is text.
            NAME_KEYS.fullmatch(key.lstrip("+"))
            and "'" not in value
            and '"' not in value
        ):
            argument = f"{key}={NUMBER_OR_BOOL.sub(r"\1'\2'", value)}"
        long.append(argument)
    # The format first: a later precision.forward= of the user changes it.
    return chosen + long


def describe_hydra_error(error: Exception, argv: Sequence[str]) -> str:
    """Return Hydra's or OmegaConf's message in one line, with the nearest valid key for
    a wrong one.
    """
    # The search path names directories of this installation.
    text = " ".join(str(error).split("Config search path:")[0].split())
    if "override_grammar" in text:
        return _describe_unreadable(text.split(" See https://")[0], argv)
    wrong_choice = re.search(r"Could not find '([^']+)/([^/']+)'", text)
    # A group of Hydra's, such as hydra/sweeper, keeps Hydra's message.
    if wrong_choice and Path(CONFIGS, wrong_choice[1]).is_dir():
        return describe_wrong_choice(*wrong_choice.groups())
    wrong_key = re.search(r"Could not override '([^']+)'", text)
    if not wrong_key:
        return text
    # The valid keys depend on the choices of groups.
    # Only groups: another key could be wrong, too, and would fail here again.
    choices = [
        argument
        for argument in argv
        if re.fullmatch(r"\w+=\w+", argument) and is_group(argument)
    ]
    valid = OmegaConf.to_container(compose_tree(choices))
    return describe_wrong_key(wrong_key[1], valid)


def _describe_unreadable(text: str, argv: Sequence[str]) -> str:
    """Return the message for arguments that Hydra's grammar refuses with `text`."""
    for argument in argv:
        listed = without_braces(argument)
        # A shell without braces, or quotes around them, leaves them to us.
        if key_of(argument) in PATTERN_KEYS and listed != argument:
            return (
                f"{argument}: braces are not understood in a pattern; list the"
                f" patterns: {listed}"
            )
    if missing := re.search(r"'([^']+)' missing EQUAL", text):
        return f"{missing[1]!r}: expected key=value; --help lists the keys"
    for argument in filter(_is_unreadable, argv):
        key, _, value = " ".join(argument.split()).partition("=")
        # A list needs its quotes inside; the message below shows where.
        if "'" not in value and not value.startswith("["):
            return (
                f"{key}={value}: characters such as = ( ) {{ }} : , in a value need"
                f" quotes within quotes: \"{key}='{value}'\""
            )
    return (
        f"{text}: cannot be read; unusual characters need quotes within quotes:"
        " \"data.paths=['a (1).txt']\""
    )


def _is_unreadable(argument: str) -> bool:
    """Return whether Hydra's grammar refuses an argument `key=value`."""
    if "=" not in argument or argument.startswith("-"):
        return False
    try:
        OverridesParser.create().parse_override(argument)
    except HydraException:
        return True
    return False


def is_group(argument: str) -> bool:
    """Return whether `name=choice` is a choice of a group."""
    return Path(CONFIGS, argument.split("=")[0]).is_dir()


def describe_wrong_key(key: str, tree: Any) -> str:
    """Return the message for a wrong dotted key, with the valid keys or the nearest."""
    parts = key.split(".")
    root = tree
    for depth, part in enumerate(parts):
        if not isinstance(tree, dict):
            return f"unknown key {key}: {'.'.join(parts[:depth])} has no keys"
        if part not in tree:
            hint = nearest(part, list(tree), "".join(f"{p}." for p in parts[:depth]))
            # The user may have left out the group.
            if len(parts) == 1 or "did you mean" not in hint:
                hint = suggest_other_group(parts[-1], root) or hint
            return f"unknown key {key}; {hint}"
        tree = tree[part]
    if isinstance(tree, dict) and tree:
        example = f"{key}.{next(iter(tree))}=VALUE"
        return f"{key} is a group of keys; give them one by one, such as {example}"
    return (
        f"{key} cannot be set, because another argument removes it by ~; leave one of"
        " the two out"
    )


def suggest_other_group(name: str, tree: Any) -> str:
    """Return a hint to keys of this name in other groups; empty if there are none."""
    keys = [key for key, _ in flatten(tree)]
    similar = [key for key in keys if key.split(".")[-1] == name]
    if not similar:
        similar = [key for key in keys if key.split(".")[-1].startswith(f"{name}_")]
    if not similar:
        return ""
    return f"did you mean {' or '.join(similar)}? `--cfg job` shows all keys"


def describe_wrong_choice(group: str, choice: str) -> str:
    """Return the message for a choice that a group does not have, with valid ones."""
    valid = choices_of_groups()[group]
    text = f"{group}={choice} is not a choice; {nearest(choice, valid)}"
    if group == "precision":
        similar = [name for name in valid if choice in name]
        if similar:
            text = f"precision={choice}: choose one of {', '.join(similar)}"
        text += (
            ", sim_eXmY (any format, such as sim_e3m4, truncated sim_e3m4t, stochastic"
            " sim_e3m4s)"
        )
    return text
