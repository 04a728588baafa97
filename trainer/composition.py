"""The configuration composed from `configs/` and the command line's arguments, by Hydra, and checked."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer import inherited
from trainer.config import Config, validate
from trainer.errors import UserError
from trainer.fields import from_tree, nearest

CONFIGS = str(Path(__file__).resolve().parent.parent / "configs")


def compose_config(arguments: Sequence[str]) -> Config:
    """The checked configuration that the trainer would run with these arguments. Raises UserError, Hydra's errors."""
    with initialize_config_dir(CONFIGS, version_base=None):
        return checked(compose("config", long_forms(arguments)))


def compose_or_explain(arguments: Sequence[str]) -> Config:
    """`compose_config`, all of whose errors are a UserError."""
    try:
        return compose_config(arguments)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error, long_forms(arguments))) from None


def checked(tree: DictConfig, **changes: Any) -> Config:
    """The schema's dataclass of a composed tree, with `changes` of top-level keys. Raises UserError."""
    plain = OmegaConf.to_container(tree, resolve=True)
    assert isinstance(plain, dict)
    plain.pop("experiment", None)  # the name of a group choice without keys of its own
    plain |= changes
    if isinstance(plain.get("model"), dict) and plain["model"].get("name") == inherited.NAME:
        plain["model"] = inherited.inherit(plain["model"], plain["init_from"])
    config: Config = from_tree(Config, plain)
    validate(config)
    return config


def long_forms(arguments: Sequence[str]) -> list[str]:
    """The arguments with their short forms written out.

    `resume=auto` is `resume.source=auto`; `precision=sim_e3m4` is `precision=sim` with that format in both directions.
    """
    long = []
    for argument in arguments:
        simulated = re.fullmatch(r"(\+*)precision=(sim_(e\d+m\d+))", argument)
        if simulated:
            sign, name, form = simulated.groups()
            long += [f"{sign}precision=sim"]
            long += [
                f"precision.{key}={value}" for key, value in (("name", name), ("forward", form), ("backward", form))
            ]
        else:
            long.append(re.sub(r"^(\+*)resume=", r"\1resume.source=", argument))
    return long


def explain(error: Exception, argv: list[str]) -> str:
    """Hydra's and OmegaConf's messages in one line, with the nearest valid key where they name a wrong one."""
    text = " ".join(str(error).split("Config search path:")[0].split())
    wrong = re.search(r"Could not override '([^']+)'", text)
    if not wrong:
        return text
    # The keys depend on the choices of groups.
    choices = [argument for argument in argv if re.fullmatch(r"\w+=\w+", argument) and is_group(argument)]
    with initialize_config_dir(CONFIGS, version_base=None):
        return wrong_key(wrong.group(1), OmegaConf.to_container(compose("config", choices)))


def is_group(argument: str) -> bool:
    """Whether `name=choice` chooses of a group."""
    return Path(CONFIGS, argument.split("=")[0]).is_dir()


def wrong_key(key: str, tree: Any) -> str:
    """What is wrong with the dotted `key`: the first part that `tree` does not have, and what it has there."""
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(tree, dict):
            return f"unknown key {key}: {'.'.join(parts[:depth])} has no keys"
        if part not in tree:
            return f"unknown key {key}; {nearest(part, list(tree))}"
        tree = tree[part]
    return f"{key} cannot be overridden like this"
