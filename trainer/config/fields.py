"""Frozen dataclasses from nested mappings, each wrong key or value answered with one line of what is valid."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from trainer.errors import UserError


def nearest(name: str, valid: Sequence[str]) -> str:
    """`did you mean 'x'? ` when something close exists, then the valid names."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Valid: {', '.join(sorted(valid))}"


def from_saved(cls: type, tree: Any) -> Any:
    """`from_tree` of what a run saved, perhaps before a key existed: one that may be null is null."""
    hints = typing.get_type_hints(cls)
    later = {key: None for key, hint in hints.items() if type(None) in typing.get_args(hint) and key not in tree}
    groups = {
        key: to_tree(from_saved(hint, tree[key]))
        for key, hint in hints.items()
        if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(tree.get(key), Mapping)
    }
    return from_tree(cls, {**tree, **later, **groups})


def from_tree(cls: type, tree: Any, path: str = "", of: str = "") -> Any:
    """The dataclass `cls` from nested mappings. UserError names the key, what was found and what is valid.

    `path` and `of` say in a message where `cls` stands and which of several it is.
    """
    if not isinstance(tree, Mapping):
        raise UserError(f"{path}: expected a group of keys, found {tree!r}")
    hints = typing.get_type_hints(cls)
    prefix = f"{path}." if path else ""
    for key in tree:
        if key not in hints:
            raise UserError(f"unknown key {prefix}{key}{of}; {nearest(str(key), list(hints))}")
    missing = [f"{prefix}{key}" for key in hints if key not in tree]
    if missing:
        raise UserError(f"missing key {', '.join(missing)}{of}; choose the group again or give it a value")
    return cls(**{key: _convert(hint, tree[key], f"{prefix}{key}") for key, hint in hints.items()})


def to_tree(config: Any) -> dict[str, Any]:
    """Nested plain dictionaries (JSON and YAML types only), the inverse of `from_tree`."""
    return _plain(dataclasses.asdict(config))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return from_tree(typing.cast(type, hint), value, path)
    if origin in (types.UnionType, typing.Union) and dataclasses.is_dataclass(args[1]):
        return _variant(args, value, path)
    if origin in (types.UnionType, typing.Union):  # X | None
        return None if value is None else _convert(args[0], value, path)
    if origin is Literal:
        if value not in args:
            raise UserError(f"{path}={value!r} is not a choice; {nearest(str(value), list(args))}")
        return value
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise UserError(f"{path}={value!r}: expected a list of {args[0].__name__}, such as {path}=[a,b]")
        return tuple(_convert(args[0], v, f"{path}[{i}]") for i, v in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if type(value) is not hint:
        raise UserError(f"{path}={value!r}: expected {_kind(hint)}, found {_kind(type(value))}")
    return value


def _variant(classes: Sequence[type], value: Any, path: str) -> Any:
    """That one of the dataclasses whose `name` the mapping has."""
    by_name = {typing.get_args(typing.get_type_hints(cls)["name"])[0]: cls for cls in classes}
    name = value.get("name") if isinstance(value, Mapping) else value
    if name not in by_name:
        raise UserError(f"{path}={name!r} is not a choice; {nearest(str(name), list(by_name))}")
    return from_tree(by_name[name], value, path, f" of {name}")


def _kind(hint: Any) -> str:
    names: dict[Any, str] = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "nothing (null)",
    }
    return names.get(hint, getattr(hint, "__name__", str(hint)))
