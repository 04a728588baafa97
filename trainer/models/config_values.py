"""Checked values of a config.json; errors name the key."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.files import read_object


def read_config[T](file: Path, parse: Callable[[Mapping[str, Any]], T]) -> T:
    """Return what `parse` makes of a config.json; its UserErrors then name the file."""
    config = read_object(file)
    try:
        return parse(config)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def whole_number(tree: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive integer of a configuration, or raise UserError."""
    value = tree.get(key)
    # Some files have null for a number that they leave out.
    value = default if value is None else value
    if type(value) is not int or value < 1:  # a bool is an int, but not a number
        raise UserError(f"{key}={value!r}: expected a whole number, at least 1")
    return value


def number(
    tree: Mapping[str, Any], key: str, default: float | None = None, use: str = ""
) -> float:
    """Return a number of a configuration, or raise UserError.

    `use` is the end of the message, such as ", which rope_type='yarn' needs".
    """
    value = tree.get(key, default)
    # `isinstance` would take true for 1.
    if type(value) not in (int, float):
        raise UserError(f"{key}={value!r}: expected a number{use}")
    return float(value)


def boolean(tree: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return a boolean of a configuration, or raise UserError."""
    value = tree.get(key, default)
    if not isinstance(value, bool):
        raise UserError(f"{key}={value!r}: expected true or false")
    return value


def check_supported(
    config: Mapping[str, Any], supported: Mapping[str, tuple[Any, ...]]
) -> None:
    """Raise UserError for a key whose value is none of the supported ones.

    Keys may be absent. With other values the model would not compute the same function.
    """
    for key, values in supported.items():
        # The first value is the meaning of a file without the key.
        if config.get(key, values[0]) not in values:
            raise UserError(
                f"{key}={config[key]!r} is not supported; valid: {values[0]!r}"
            )
