"""Make frozen dataclasses from nested mappings. A UserError names the wrong key or
value and what is valid.
"""

import dataclasses
import os
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from trainer.bounds import Variants, annotations, check
from trainer.config.renamed import new_name, renamed_keys
from trainer.errors import UserError
from trainer.text import as_typed, nearest


def from_saved(cls: type, tree: Any) -> Any:
    """Return `from_tree` of a saved configuration, which may have old names of keys and
    lack new keys.

    A missing key that may be null is null, and so are all keys of a missing group of
    such keys.
    """
    if isinstance(tree, Mapping):
        tree = renamed_keys(tree)
    return from_tree(cls, completed(cls, tree))


def completed(hint: Any, tree: Any) -> Any:
    """Return saved values of the class `hint`, with null for missing keys that may be
    null.
    """
    if typing.get_origin(hint) in (types.UnionType, typing.Union):  # X | None
        # X of `X | None`: the schema has no other unions.
        return completed(typing.get_args(hint)[0], tree)
    if typing.get_origin(hint) is tuple and isinstance(tree, list):
        return [completed(typing.get_args(hint)[0], item) for item in tree]
    if not isinstance(tree, Mapping):
        return tree
    variants = _variants(hint)
    if variants is not None:
        # An unknown name gives None, and `from_tree` reports it.
        hint = variants.classes.get(str(tree.get(variants.key)))
    if not isinstance(hint, type) or not dataclasses.is_dataclass(hint):
        return tree
    hints = annotations(hint)
    result = {
        key: completed(hints[key], value) if key in hints else value
        for key, value in tree.items()
    }
    for key, key_hint in hints.items():
        # A key that is new since the run was saved: null keeps what the run did without
        # it.
        if key not in tree and _may_be_null(key_hint):
            result[key] = None
        elif key not in tree and _is_group_of_nulls(key_hint):
            result[key] = dict.fromkeys(annotations(key_hint))
    return result


def _may_be_null(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


def _is_group_of_nulls(hint: Any) -> bool:
    """Return whether an annotation is a dataclass all of whose keys may be null."""
    return (
        isinstance(hint, type)
        and dataclasses.is_dataclass(hint)
        and all(map(_may_be_null, annotations(hint).values()))
    )


def from_tree(cls: type, tree: Any, path: str = "", variant: str = "") -> Any:
    """Return the dataclass `cls` from nested mappings.

    Args:
      cls: the dataclass.
      tree: the mappings.
      path: dotted key of `cls` in the configuration, for messages.
      variant: " of NAME" if `cls` is one of several variants, for messages.

    Raises:
      UserError: a key or a value is not valid.
    """
    if not isinstance(tree, Mapping):
        raise UserError(f"{path}: expected a group of keys, found {as_typed(tree)}")
    hints = annotations(cls)
    prefix = f"{path}." if path else ""
    for key in tree:
        if key not in hints:
            # Before the nearest name, which for a renamed key is often another one.
            new_key = new_name(f"{prefix}{key}")
            advice = f"it was renamed; use {new_key}"
            if new_key is None:
                advice = nearest(str(key), list(hints))
            raise UserError(f"unknown key {prefix}{key}{variant}; {advice}")
    # Fields of `TrainPhase` have defaults; those of the groups have theirs in the YAML
    # files.
    optional = {
        field.name
        for field in dataclasses.fields(cls)
        if field.default is not dataclasses.MISSING
    }
    missing = [
        f"{prefix}{key}" for key in hints if key not in tree and key not in optional
    ]
    if missing:
        raise UserError(
            f"missing key {', '.join(missing)}{variant}; add {missing[0]}=VALUE, or"
            " GROUP=CHOICE, which sets it"
        )
    values = {}
    for key, hint in hints.items():
        if key in tree:
            values[key] = converted(hint, tree[key], f"{prefix}{key}")
    return cls(**values)


def to_tree(config: Any) -> dict[str, Any]:
    """Return nested plain dictionaries (JSON and YAML types), the inverse of
    `from_tree`.
    """
    return _plain(dataclasses.asdict(config))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys of nested mappings and their values; a list is a value."""
    for key, value in tree.items():
        # Lists compare equal to those of a saved YAML file; tuples would not.
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


def in_groups(key: str, groups: Iterable[str]) -> bool:
    """Return whether a dotted key is one of `groups`, or inside one of them."""
    # The points keep `data` from holding a key such as `database`.
    return any(f"{key}.".startswith(f"{group}.") for group in groups)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    # JSON and YAML have lists only.
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value


def converted(hint: Any, value: Any, path: str) -> Any:
    """Return a value in the type and within the bounds of its annotation `hint`.

    Raises:
      UserError: the value is not valid; the message names `path`.
    """
    variants = _variants(hint)
    if variants is not None:
        return _chosen_variant(variants, value, path)
    result = _in_type_of(hint, value, path)
    check(hint, result, path)
    return result


def _check_text(value: str, path: str) -> None:
    """Raise UserError for a text that can be neither a path nor written as UTF-8."""
    try:
        # `fsencode` is how Python gives a name to the system.
        is_valid = b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:  # JSON and YAML can spell such a character
        is_valid = False
    if not is_valid:
        raise UserError(
            f"{path}={value!r}: a text may hold neither the character NUL nor half of a"
            " surrogate pair"
        )


def _in_type_of(hint: Any, value: Any, path: str) -> Any:
    """Return a value converted to the type of its annotation."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return from_tree(typing.cast(type, hint), value, path)
    if origin is Annotated:
        return _in_type_of(args[0], value, path)
    # `Annotated[...] | None` has the origin typing.Union, `int | None` types.UnionType.
    if origin in (types.UnionType, typing.Union):  # X | None
        if value is None:
            return None
        return _in_type_of(args[0], value, path)
    if origin is Literal:
        # YAML reads the choice `true` as a boolean.
        word = str(value).lower()
        if isinstance(value, bool) and word in args:
            return word
        return value
    if origin is tuple:
        # A text is a sequence of its letters.
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise UserError(
                f"{path}={as_typed(value)}: expected a list of"
                f" {_describe_list(args[0], path)}"
            )
        return tuple(converted(args[0], v, f"{path}[{i}]") for i, v in enumerate(value))
    # Python's True is an int, but `true` is not a number of a configuration.
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        check(int, value, path)  # `float` would overflow on a huge number
        return float(value)
    if hint is str and isinstance(value, int | float) and not isinstance(value, bool):
        raise UserError(
            f"{path}={as_typed(value)}: expected text, found a number, whose digits may"
            " have been others (1.10 is 1.1); put it in quotes"
        )
    if hint is str and isinstance(value, str):
        _check_text(value, path)
    # Not `isinstance`: True is an instance of int.
    if type(value) is not hint:
        raise UserError(
            f"{path}={as_typed(value)}: expected {_type_name(hint)}, found"
            f" {_type_name(type(value))}"
        )
    return value


def _variants(hint: Any) -> Variants | None:
    """Return the classes that an annotation chooses from; None: it has one class."""
    for extra in getattr(hint, "__metadata__", ()):
        if isinstance(extra, Variants):
            return extra
    return None


def check_groups(cls: type, tree: Mapping[str, Any]) -> None:
    """Raise UserError if a group of the dataclass `cls` is not a mapping."""
    for key, hint in annotations(cls).items():
        is_group = dataclasses.is_dataclass(hint) or _variants(hint) is not None
        if is_group and not isinstance(tree.get(key, {}), Mapping):
            raise UserError(f"{key}={as_typed(tree[key])}: expected a group of keys")


def _chosen_variant(variants: Variants, value: Any, path: str) -> Any:
    """Return the mapping as the variant that its key names."""
    name: Any = value.get(variants.key) if isinstance(value, Mapping) else value
    # An unhashable name, such as a list, would be a TypeError in the lookup.
    if not isinstance(name, str) or name not in variants.classes:
        # `optimizer=NAME` is a choice; a family is a key of its own.
        key = path if variants.key == "name" else f"{path}.{variants.key}"
        raise UserError(
            f"{key}={as_typed(name)} is not a choice;"
            f" {nearest(str(name), list(variants.classes))}"
        )
    return from_tree(variants.classes[name], value, path, f" of {name}")


def _type_name(hint: Any) -> str:
    """Return the name of a type of values, for messages."""
    names: dict[Any, str] = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        list: "a list",
        dict: "a group of keys",
        type(None): "nothing (null)",
    }
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _describe_list(item: Any, path: str) -> str:
    """Describe a list of items of the annotation `item`, for messages."""
    if typing.get_origin(item) is Annotated:
        item = typing.get_args(item)[0]
    lists: dict[Any, str] = {
        int: f"whole numbers, such as {path}=[1,2]",
        float: f"numbers, such as {path}=[0.5,2]",
        str: f"texts, such as {path}=[a,b]",
    }
    if dataclasses.is_dataclass(item):
        return f"groups of keys, such as {path}=[{{key:value}},{{key:value}}]"
    return lists.get(item, f"lists, such as {path}=[[1,2],[3,4]]")
