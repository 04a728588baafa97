"""Frozen dataclasses from nested mappings, each wrong key or value answered with one
line of what is valid.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from trainer.bounds import Variants, annotations, check
from trainer.config.renamed import new_name, renamed_keys
from trainer.errors import UserError
from trainer.text import nearest


def from_saved(cls: type, tree: Any) -> Any:
    """`from_tree` of what a run saved, perhaps under old names of keys, or before a key
    existed.

    One that may be null is null, a group of such keys has nulls, and one that tells
    which of several groups is meant has the value that it had then.
    """
    return from_tree(
        cls, _completed(cls, renamed_keys(tree) if isinstance(tree, Mapping) else tree)
    )


def _completed(hint: Any, tree: Any) -> Any:
    """What was saved for an annotation, with the keys that it lacks and that are
    known.
    """
    variants = _variants(hint)
    if variants is not None and isinstance(tree, Mapping):
        tree = (
            {variants.key: variants.first, **tree}
            if variants.first is not None
            else tree
        )
        hint = variants.classes.get(tree.get(variants.key))
    if (
        not isinstance(hint, type)
        or not dataclasses.is_dataclass(hint)
        or not isinstance(tree, Mapping)
    ):
        return tree
    hints = annotations(hint)
    absent = {key: hint for key, hint in hints.items() if key not in tree}
    later: dict[str, Any] = {
        key: None for key, hint in absent.items() if _may_be_null(hint)
    }
    later |= {
        key: dict.fromkeys(annotations(hint))
        for key, hint in absent.items()
        if _is_group_of_nulls(hint)
    }
    return {
        **{
            key: _completed(hints[key], value) if key in hints else value
            for key, value in tree.items()
        },
        **later,
    }


def _may_be_null(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


def _is_group_of_nulls(hint: Any) -> bool:
    """Return whether it is a dataclass all of whose keys may be null."""
    return (
        isinstance(hint, type)
        and dataclasses.is_dataclass(hint)
        and all(map(_may_be_null, annotations(hint).values()))
    )


def from_tree(cls: type, tree: Any, path: str = "", of: str = "") -> Any:
    """The dataclass `cls` from nested mappings. UserError names the key, what was found
    and what is valid.

    `path` and `of` say in a message where `cls` stands and which of several it is.
    """
    if not isinstance(tree, Mapping):
        raise UserError(f"{path}: expected a group of keys, found {tree!r}")
    hints = annotations(cls)
    prefix = f"{path}." if path else ""
    for key in tree:
        if key not in hints:
            new = new_name(f"{prefix}{key}")
            advice = (
                nearest(str(key), list(hints))
                if new is None
                else f"it was renamed; use {new}"
            )
            raise UserError(f"unknown key {prefix}{key}{of}; {advice}")
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
            f"missing key {', '.join(missing)}{of}; choose the group again or give it a"
            " value"
        )
    return cls(
        **{
            key: _convert(hint, tree[key], f"{prefix}{key}")
            for key, hint in hints.items()
            if key in tree
        }
    )


def to_tree(config: Any) -> dict[str, Any]:
    """Nested plain dictionaries (JSON and YAML types only), the inverse of
    `from_tree`.
    """
    return _plain(dataclasses.asdict(config))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of nested mappings and their values; a list is a value, an
    empty mapping has no keys.
    """
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _convert(hint: Any, value: Any, path: str) -> Any:
    """The value of a key, of the type and within the bounds of its annotation.
    UserError names its path.
    """
    variants = _variants(hint)
    if variants is not None:
        return _variant(variants, value, path)
    converted = _typed(hint, value, path)
    check(hint, converted, path)
    return converted


def _typed(hint: Any, value: Any, path: str) -> Any:
    """The value of a key, of the type of its annotation."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return from_tree(typing.cast(type, hint), value, path)
    if origin is Annotated:
        return _typed(args[0], value, path)
    if origin in (types.UnionType, typing.Union):  # X | None
        return None if value is None else _typed(args[0], value, path)
    if origin is Literal:
        # a choice may be called true, which YAML takes for more than a word
        word = str(value).lower()
        return word if isinstance(value, bool) and word in args else value
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise UserError(
                f"{path}={value!r}: expected a list of {args[0].__name__}, such as"
                f" {path}=[a,b]"
            )
        return tuple(_convert(args[0], v, f"{path}[{i}]") for i, v in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if hint is str and isinstance(value, str) and "\0" in value:
        raise UserError(f"{path}={value!r}: a text may not hold the character NUL")
    if type(value) is not hint:
        raise UserError(
            f"{path}={value!r}: expected {_kind(hint)}, found {_kind(type(value))}"
        )
    return value


def _variants(hint: Any) -> Variants | None:
    """The classes that an annotation chooses from; None: it is of one type."""
    return next(
        (
            extra
            for extra in getattr(hint, "__metadata__", ())
            if isinstance(extra, Variants)
        ),
        None,
    )


def _variant(variants: Variants, value: Any, path: str) -> Any:
    """That one of several dataclasses which the mapping's key names."""
    name: Any = value.get(variants.key) if isinstance(value, Mapping) else value
    if name not in variants.classes:
        key = path if variants.key == "name" else f"{path}.{variants.key}"
        raise UserError(
            f"{key}={name!r} is not a choice;"
            f" {nearest(str(name), list(variants.classes))}"
        )
    return from_tree(variants.classes[name], value, path, f" of {name}")


def _kind(hint: Any) -> str:
    names: dict[Any, str] = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "nothing (null)",
    }
    return names.get(hint, getattr(hint, "__name__", str(hint)))
