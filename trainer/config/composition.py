"""The configuration composed from `configs/` and the command line's arguments, by
Hydra, and checked.
"""

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config import inherited
from trainer.config.combinations import validate
from trainer.config.continuing import CONFIGS, CommandLine, continued, lay_over
from trainer.config.fields import flatten, from_tree
from trainer.config.phases import phases_of
from trainer.config.renamed import refuse_old_names
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.text import nearest, without_braces

HOME = re.compile(
    r"^((?:run_dir|init_from|resume\.source|data\.cache_dir|data\.prepared_dir)=)~(?=/|$)"
)
IN_LIST = re.compile(r"([\[,=]\s*)~(?=[/,\]]|$)")
PATTERNS = ("data.paths", "data.sources")


def compose_config(arguments: Sequence[str]) -> Config:
    """The checked configuration that the trainer would run with these arguments. Raises
    UserError, Hydra's errors.
    """
    line = expanded(arguments)
    with initialize_config_dir(CONFIGS, version_base=None):
        return checked(compose("config", line.overrides), line.saved)


def resolved(line: CommandLine) -> str:
    """The resolved configuration of a command line as YAML, with the settings of a run
    that it continues.
    """
    given = [
        argument
        for argument in line.overrides
        if "=" in argument and not argument.startswith("-")
    ]
    with initialize_config_dir(CONFIGS, version_base=None):
        return yaml.safe_dump(
            lay_over(compose("config", given), line.saved), sort_keys=False
        )


def compose_or_explain(arguments: Sequence[str]) -> Config:
    """`compose_config`, all of whose errors are a UserError."""
    try:
        return compose_config(arguments)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error, long_forms(arguments))) from None
    except OSError as error:
        raise UserError(
            f"{str(error.filename)[:300]}: {error.strerror}; choose another path"
        ) from error


def checked(tree: DictConfig, saved: Mapping[str, Any], **changes: Any) -> Config:
    """The schema's dataclass of a composed tree, with saved settings and `changes` of
    top-level keys. Raises UserError.

    `saved`: as `CommandLine` has them.
    """
    plain = lay_over(tree, saved)
    plain.pop("experiment", None)  # the name of a group choice without keys of its own
    plain |= changes
    if inherited.is_open(plain.get("model")):
        plain["model"] = inherited.inherit(
            plain["model"],
            plain["init_from"],
            other_tokenizer=plain["init"]["embeddings"] is not None,
        )
    plain["train"]["phases"] = with_presets(plain["train"]["phases"])
    config: Config = from_tree(Config, plain)
    validate(config)
    for phase in phases_of(config):
        validate(phase.config)
    return config


def with_presets(phases: Any) -> Any:
    """`train.phases`, with all fields of the precisions that it names. UserError for a
    name that is none.
    """
    if not isinstance(phases, list):
        return phases
    return [
        (
            {**phase, "precision": in_full(phase["precision"])}
            if isinstance(phase, dict) and "precision" in phase
            else phase
        )
        for phase in phases
    ]


def in_full(precision: Any) -> Any:
    """A phase's precision, of the name of a preset, or of
    `{name:PRESET,key:value,...}`.
    """
    if isinstance(precision, str):
        return preset(precision)
    if isinstance(precision, dict) and precision.get("name") in presets():
        return {**preset(precision["name"]), **precision}
    return precision


def presets() -> list[str]:
    """The names of precisions."""
    return sorted(path.stem for path in Path(CONFIGS, "precision").glob("*.yaml"))


def preset(name: str) -> dict[str, Any]:
    """The fields of a precision. UserError for a name that is none."""
    if name not in presets():
        raise UserError(
            f"train.phases: precision={name!r} is no preset; {nearest(name, presets())}"
        )
    base, own = (
        OmegaConf.load(Path(CONFIGS, folder))
        for folder in ("base/precision.yaml", f"precision/{name}.yaml")
    )
    fields = OmegaConf.to_container(OmegaConf.merge(base, own))
    assert isinstance(fields, dict)
    return {str(key): value for key, value in fields.items() if key != "defaults"}


def expanded(arguments: Sequence[str]) -> CommandLine:
    """The arguments in their long forms, flags first, and the settings of a run that
    they continue.

    Raises UserError.
    """
    long = long_forms(arguments)
    refuse_old_names(long)
    given = [
        argument
        for argument in long
        if "=" in argument and not argument.startswith("-")
    ]
    # and their values; Hydra wants them first
    flags = [argument for argument in long if argument not in given]
    groups = {
        path.name: sorted(choice.stem for choice in path.glob("*.yaml"))
        for path in sorted(Path(CONFIGS).iterdir())
        if path.is_dir() and path.name != "base"
    }
    line = continued(given, groups, choices_of_families(), several=is_sweep(flags))
    return line._replace(overrides=[*flags, *line.overrides])


def choices_of_families() -> dict[str, str]:
    """The first choice of `model` of each family, whose keys are those of all its
    choices: its base has its name.
    """
    found: dict[str, str] = {}
    for path in sorted(Path(CONFIGS, "model").glob("*.yaml")):
        base = re.search(r"/base/(\w+)@_here_", path.read_text(encoding="utf-8"))
        if base:
            found.setdefault(base[1], path.stem)
    return found


def is_sweep(arguments: Sequence[str]) -> bool:
    """Return whether several runs are asked for."""
    return bool({"-m", "--multirun"} & set(arguments))


def key_of(override: str) -> str:
    """What it sets."""
    return override.partition("=")[0].lstrip("+~")


class Sweep(NamedTuple):
    """The jobs of a command line: the keys that have several values, and for each job
    its arguments.
    """

    keys: list[str]
    jobs: list[list[str]]

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Self:
        """The sweep of expanded arguments; it has no jobs where it is none, or one
        whose jobs nobody can list.
        """
        given = [
            argument
            for argument in arguments
            if "=" in argument and not argument.startswith("-")
        ]
        try:
            overrides = (
                OverridesParser.create().parse_overrides(given)
                if is_sweep(arguments)
                else []
            )
        except HydraException:
            return cls([], [])  # Hydra says so
        swept = {o.get_key_element(): o for o in overrides if o.is_sweep_override()}
        if any(o.is_interval_sweep() for o in swept.values()):
            return cls(list(swept), [])
        values = [
            [f"{key}={value}" for value in o.sweep_string_iterator()]
            for key, o in swept.items()
        ]
        plain = (
            [
                text
                for text, o in zip(given, overrides, strict=True)
                if not o.is_sweep_override()
            ]
            if overrides
            else []
        )
        return cls(
            list(swept),
            [[*plain, *job] for job in itertools.product(*values)] if swept else [],
        )

    def complaints(self, saved: Mapping[str, Any]) -> list[str]:
        """What is wrong with the jobs, each thing once: before the first of them
        trains. `saved`: as of `checked`.
        """
        found: dict[str, str] = {}
        for number, arguments in enumerate(self.jobs):
            try:
                with initialize_config_dir(CONFIGS, version_base=None):
                    own = [
                        a
                        for a in arguments
                        if not key_of(a).startswith(("hydra.", "hydra/"))
                    ]
                    checked(compose("config", own), saved)
            except UserError as error:
                found.setdefault(
                    str(error), f"job {number}: {error}; no job was started"
                )
            except (HydraException, OmegaConfBaseException) as error:
                text = explain(error, arguments)
                found.setdefault(text, f"job {number}: {text}; no job was started")
        return list(found.values())


def long_forms(arguments: Sequence[str]) -> list[str]:
    """The arguments with their short forms written out.

    `resume=auto` is `resume.source=auto`; `precision=sim_e3m4` is `precision=sim` with
    that format in both directions; `~` is the home directory, which no shell writes out
    behind `run_dir=` and Hydra cannot read in a list.
    """
    long = []
    for argument in arguments:
        simulated = re.fullmatch(r"(\+*)precision=(sim_(e\d+m\d+[ts]?))", argument)
        if simulated:
            sign, name, form = simulated.groups()
            long += [f"{sign}precision=sim"]
            long += [
                f"precision.{key}={value}"
                for key, value in (
                    ("name", name),
                    ("forward", form),
                    ("backward", form),
                )
            ]
        else:
            argument = re.sub(r"^(\+*)resume=", r"\1resume.source=", argument)
            paths = IN_LIST if argument.startswith("data.paths=") else HOME
            long.append(
                paths.sub(lambda found: found[1] + os.path.expanduser("~"), argument)
            )
    return long


def explain(error: Exception, argv: list[str]) -> str:
    """Hydra's and OmegaConf's messages in one line, with the nearest valid key where
    they name a wrong one.
    """
    text = " ".join(str(error).split("Config search path:")[0].split())
    if "override_grammar" in text:
        text = text.split(" See https://")[0]
        for argument in argv:
            if (
                key_of(argument) in PATTERNS
                and (listed := without_braces(argument)) != argument
            ):
                return (
                    f"{argument}: braces are not understood in a pattern; list the"
                    f" patterns: {listed}"
                )
        return (
            f"{text}: cannot be read; unusual characters need quotes within quotes:"
            " \"data.paths=['a (1).txt']\""
        )
    absent = re.search(r"Could not find '([^']+)/([^/']+)'", text)
    if absent and Path(CONFIGS, absent.group(1)).is_dir():
        return wrong_choice(*absent.groups())
    wrong = re.search(r"Could not override '([^']+)'", text)
    if not wrong:
        return text
    # The keys depend on the choices of groups.
    choices = [
        argument
        for argument in argv
        if re.fullmatch(r"\w+=\w+", argument) and is_group(argument)
    ]
    with initialize_config_dir(CONFIGS, version_base=None):
        return wrong_key(
            wrong.group(1), OmegaConf.to_container(compose("config", choices))
        )


def is_group(argument: str) -> bool:
    """Return whether `name=choice` chooses of a group."""
    return Path(CONFIGS, argument.split("=")[0]).is_dir()


def wrong_key(key: str, tree: Any) -> str:
    """What is wrong with the dotted `key`: the first part that `tree` does not have,
    and what it has there.
    """
    parts, whole = key.split("."), tree
    for depth, part in enumerate(parts):
        if not isinstance(tree, dict):
            return f"unknown key {key}: {'.'.join(parts[:depth])} has no keys"
        if part not in tree:
            close, far = nearest(part, list(tree)), elsewhere(parts[-1], whole)
            # a bare name may lack its group
            first = far if len(parts) == 1 or "did you mean" not in close else ""
            return f"unknown key {key}; {first or close}"
        tree = tree[part]
    return f"{key} cannot be overridden like this"


def elsewhere(name: str, tree: Any) -> str:
    """The keys of other groups that are called so, or begin so, as the answer to
    somebody who left the group out.
    """
    keys = [key for key, _ in flatten(tree)]
    called = [key for key in keys if key.split(".")[-1] == name] or [
        key for key in keys if key.split(".")[-1].startswith(f"{name}_")
    ]
    return (
        f"did you mean {' or '.join(called)}? `--cfg job` shows all keys"
        if called
        else ""
    )


def wrong_choice(group: str, choice: str) -> str:
    """What is wrong with a choice that its group does not have."""
    valid = [path.stem for path in Path(CONFIGS, group).glob("*.yaml")]
    simulated = (
        [
            "sim_eXmY (any format, such as sim_e3m4, truncated sim_e3m4t, stochastic"
            " sim_e3m4s)"
        ]
        if group == "precision"
        else []
    )
    found = nearest(choice, valid)
    return (
        f"{group}={choice}: there is no {group}/{choice};"
        f" {', '.join([found, *simulated])}"
    )
