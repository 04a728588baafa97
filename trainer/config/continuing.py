"""`resume=RUN`: a run is continued, or forked, by its directory alone; what is not given anew is what it was."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer.config.schema import DATA_KEYS
from trainer.errors import UserError
from trainer.models.specs import FIRST
from trainer.text import nearest

# Of the run that was: where it is, how it started, what it was to do besides training, what it was called.
NOT_TAKEN = ("run_dir", "resume", "dry_run", "hydra")
NEW_NAME = "tracker.name"


def continued(
    arguments: Sequence[str], groups: Sequence[str], families: Mapping[str, str], *, several: bool
) -> list[str]:
    """The arguments, before which stand all settings of the run that `resume.source` names, if it names one.

    Without `run_dir`, or with the run's own, the run itself goes on; else another one starts from it. A group that is
    chosen anew has nothing of the run.

    Args:
      arguments: overrides in their long forms.
      groups: the names of the configuration's groups.
      families: a choice of `model` of each family.
      several: whether it is a sweep, of which each job has a directory of its own.

    Raises:
      UserError: a damaged run directory, or what cannot be meant.
    """
    given = {key.lstrip("+~"): value for key, _, value in (argument.partition("=") for argument in arguments)}
    source = given.get("resume.source", "auto").strip("'\"")
    file = Path(source) / "config.yaml"
    if source in ("auto", "none") or not file.is_file():
        return list(arguments)
    if "experiment" in given:
        raise UserError(
            f"experiment={given['experiment']}, but resume={source} takes its settings from that run; leave experiment "
            "out, or name the keys to change"
        )
    tree = read_tree(file)
    itself = not several and os.path.realpath(given.get("run_dir", source)) == os.path.realpath(source)
    if itself and given.get("resume.step", "null") != "null":
        raise UserError(
            f"resume.step={given['resume.step']} starts another run from that step of resume={source}; "
            "add run_dir=DIRECTORY for it"
        )
    anew = [group for group in groups if group in given]
    taken = [
        f"{key}={written(value)}"
        for key, value in leaves(tree)
        if key.split(".")[0] not in (*NOT_TAKEN, *anew) and (itself or key != NEW_NAME) and is_used(key, tree)
    ]
    # Their keys are those of the choice; those of all other groups' choices are the same.
    chosen = [] if "optimizer" in anew else [f"optimizer={tree['optimizer']['name']}"]
    family = tree["model"].get("family", FIRST)
    if family not in families:
        raise UserError(f"resume={source} is a {family}, which is not known; {nearest(family, list(families))}")
    chosen += [] if "model" in anew else [f"model={families[family]}"]
    place = [f"run_dir={written(source)}", "resume.source=auto"] if itself else []
    return [*chosen, *taken, *arguments, *place]


def is_used(key: str, tree: dict[str, Any]) -> bool:
    """Whether the run's source of data uses a key; config.yaml used to have those of all sources, with values."""
    group, _, name = key.partition(".")
    return group != "data" or tree["data"]["source"] in DATA_KEYS.get(name, (tree["data"]["source"],))


def read_tree(file: Path) -> dict[str, Any]:
    """A run's config.yaml."""
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        told = (tree["optimizer"]["name"], tree["data"]["source"], tree["model"].get("family", FIRST))
        if all(isinstance(name, str) for name in told):
            return dict(tree)
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        pass
    raise UserError(f"{file} is damaged; give all settings and run_dir={file.parent} to continue from its checkpoints")


def leaves(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """The dotted keys of the groups, and their values, which may be mappings themselves."""
    found = []
    for key, value in tree.items():
        found += (
            leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and not prefix else [(f"{prefix}{key}", value)]
        )
    return found


def written(value: Any) -> str:
    """A value as an override has it; text in quotes, whatever is in it."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return str(value)
        case list() | tuple():
            return f"[{','.join(map(written, value))}]"
        case dict():
            return f"{{{','.join(f'{key}:{written(item)}' for key, item in value.items())}}}"
    # A backslash is one, but before a quote, where it takes two.
    text = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), str(value))
    return f"'{text.replace('${', '\\${')}'"
