"""Every key of the configuration with its default, its choices and its comment.

The comments are read from the YAML files of `trainer/configs`. A comment stands behind
its key and continues in more indented lines below it.
"""

import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from omegaconf import OmegaConf

from trainer.bounds import OneOf, Variants, annotations
from trainer.config.composition import (
    choices_of_groups,
    compose_tree,
    explain_hydra_errors,
    long_forms,
)
from trainer.config.resume import CONFIGS
from trainer.config.schema import Config
from trainer.text import as_typed

LINE = re.compile(
    r"(?P<indent> *)(?P<entry>- )?(?P<key>[\w/@]+)(:|(?=\s+#))"
    r"(?P<value>.*?)((?<=\s)# (?P<about>.*))?$"
)
CONTINUATION = re.compile(r"(?P<indent> +)# (?P<about>.*)$")
NOT_KEYS = ("defaults", "hydra")


class Key(NamedTuple):
    """A key of the configuration.

    Attributes:
      name: the dotted key.
      default: the value as the user types it.
      choices: all valid values; empty if they are not a list of names.
      about: the comment.
    """

    name: str
    default: str
    choices: tuple[str, ...]
    about: str


class Group(NamedTuple):
    """A group of keys.

    Attributes:
      name: the part of the keys before the dot; empty: keys without a group.
      chosen: the choice NAME, as in `model=NAME`; empty for a group without choices.
      choices: all valid choices.
      about: the comment.
      keys: the keys, with their defaults in the choice `chosen`.
    """

    name: str
    chosen: str
    choices: tuple[str, ...]
    about: str
    keys: tuple[Key, ...]


def reference(overrides: Sequence[str] = ()) -> list[Group]:
    """Return all keys by group, with their values under these overrides.

    Raises:
      UserError: an override is not valid.
    """
    long = long_forms(overrides)
    with explain_hydra_errors(long):
        tree = compose_tree(long, return_hydra_config=True)
    # Hydra alone knows every choice: the tree has the keys that it set.
    choice_of = dict(tree.hydra.runtime.choices)
    valid = choices_of_groups()
    raw = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(raw, dict)
    values = {str(key): raw[key] for key in raw if key not in NOT_KEYS}
    # Hydra leaves a group without a choice out of the tree.
    values.setdefault("experiment", None)
    # The tree is not resolved, so that `run_dir` shows its pattern. The learning rate
    # shows its number.
    values["optimizer"]["lr"] = tree.optimizer.lr
    about = comments(Path(CONFIGS, "config.yaml").read_text(encoding="utf-8"))
    groups = [Group("", "", (), "", tuple(_keys("", values, about)))]
    for name, group in values.items():
        # Top-level keys, which the first group has.
        if not isinstance(group, Mapping) and name not in valid:
            continue
        choice = choice_of.get(name)
        # Only these groups have files; `diloco` is set by the choices of `parallel`.
        texts = {} if name not in [*valid, "diloco"] else _comments_of(name, choice)
        keys = _keys(f"{name}.", group or {}, {**about, **texts})
        groups.append(
            Group(
                name,
                "" if name not in valid else str(choice or "null"),
                tuple(valid.get(name, ())),
                about.get(name, ""),
                tuple(keys),
            )
        )
    return groups


def _keys(
    prefix: str, values: Mapping[str, Any], about: Mapping[str, str]
) -> Iterator[Key]:
    """Yield the keys of the group `prefix`, or for "" the keys without a group."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        is_group = not prefix and isinstance(value, Mapping)
        if not is_group and name != "experiment":
            valid = valid_names(name, values)
            yield Key(name, as_typed(value), valid, about.get(name, ""))


def _comments_of(group: str, choice: str | None) -> dict[str, str]:
    """Return the comments of a group's keys, each from the first file that has it."""
    files = [Path(CONFIGS, "base", f"{group}.yaml")]
    # The base first: it has a comment for each key.
    if choice is not None:
        file = Path(CONFIGS, group, f"{choice}.yaml")
        bases = re.findall(r"/base/(\w+)@", file.read_text(encoding="utf-8"))
        files += [Path(CONFIGS, "base", f"{base}.yaml") for base in bases]
        files.append(file)
    if group == "model":  # from_init has the keys of every family, but no base
        files += sorted(
            file
            for file in Path(CONFIGS, "base").glob("*.yaml")
            if "\nfamily:" in file.read_text(encoding="utf-8")
        )
    comment_of: dict[str, str] = {}
    for file in filter(Path.is_file, files):
        for key, text in comments(file.read_text(encoding="utf-8")).items():
            # The base explains a key; a choice that sets it need not repeat that.
            comment_of.setdefault(f"{group}.{key}", text)
    return comment_of


def comments(text: str) -> dict[str, str]:
    """Return the comment of each key of a YAML file, by dotted key.

    An entry of the defaults list, such as `- model: gpt2_nano`, counts as key `model`.
    """
    comment_of: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        more = CONTINUATION.match(line)
        # Comments with less indentation are for readers of the file, not of the help.
        if more and path and len(more["indent"]) > path[-1][0] + 2:
            name = ".".join(key for _, key in path)
            comment_of[name] = (
                f"{comment_of.get(name, '')} {more['about'].strip()}".strip()
            )
            continue
        match = LINE.match(line)
        if not match:
            continue
        indent = len(match["indent"])
        # Indentation alone tells the groups: a YAML parser drops the comments.
        path = [(depth, key) for depth, key in path if depth < indent]
        if match["entry"]:
            path = []
        # In the defaults list `base/diloco@diloco` sets group `diloco`.
        path.append((indent, match["key"].partition("@")[2] or match["key"]))
        if match["about"]:
            comment_of[".".join(key for _, key in path)] = match["about"].strip()
    return comment_of


def valid_names(name: str, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names that a key takes; empty if it takes other values."""
    hint: Any = Config
    for part in name.split("."):
        # The keys of a model or an optimizer depend on the chosen family or name.
        hint = _variant_of(hint, values)
        if not isinstance(hint, type) or part not in (fields := annotations(hint)):
            return ()
        hint = fields[part]
    while True:
        origin = typing.get_origin(hint)
        arguments = typing.get_args(hint)
        if origin is Literal:
            return tuple(map(str, arguments))
        for extra in getattr(hint, "__metadata__", ()):
            if isinstance(extra, OneOf):
                return tuple(extra.names)
        if origin not in (Annotated, types.UnionType, typing.Union):
            return ()
        hint = arguments[0]


def _variant_of(hint: Any, values: Mapping[str, Any]) -> Any:
    """Return the dataclass that an annotation means for these values of the group."""
    for extra in getattr(hint, "__metadata__", ()):
        if isinstance(extra, Variants):
            name = values.get(extra.key)
            # The common class for a name that is not valid, which another check
            # reports.
            return extra.classes.get(str(name), typing.get_args(hint)[0])
    return hint
