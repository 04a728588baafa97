"""Bounds of a field, in its annotation: `n_layer: Annotated[int, at_least(1)]`.

Specs, policies and the configuration are dataclasses whose annotations are their
bounds. `check` refuses a value out of bounds, `check_fields` an object. Nothing here
imports JAX.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from trainer.errors import UserError
from trainer.text import as_typed, nearest


@dataclass(frozen=True)
class Bound:
    """A condition on a value.

    Attributes:
      holds: whether a value meets it.
      expected: a description of valid values, after the word "expected".
    """

    holds: Callable[[Any], bool]
    expected: str


@dataclass(frozen=True)
class OneOf:
    """One of the names in a table that may grow."""

    names: Collection[str]


@dataclass(frozen=True)
class Variants:
    """One of several dataclasses, told apart by the value of a key.

    Attributes:
      key: the key that tells.
      classes: the dataclass for each of its values.
    """

    key: str
    classes: Mapping[str, type]


def at_least(least: float) -> Bound:
    """Return the bound of `least` or more."""
    return Bound(lambda x: x >= least, f"at least {least}")


def at_most(most: float) -> Bound:
    """Return the bound of `most` or less."""
    return Bound(lambda x: x <= most, f"at most {most}")


def more_than(least: float, hint: str) -> Bound:
    """Return the bound of more than `least`; the message ends with `hint`."""
    return Bound(lambda x: x > least, f"more than {least}{hint}")


# From there on it is 1 in FP32, and a bias correction 1 - b2^t is 0.
BELOW_1 = Bound(lambda x: 0 <= x <= 1 - 2**-24, "a number in [0, 1 - 2^-24]")
UP_TO_1 = Bound(lambda x: 0 <= x <= 1, "a number in [0, 1]")
POWER_OF_TWO = Bound(
    # frexp gives a mantissa in [0.5, 1), and 0.5 for powers of two alone.
    lambda x: 0 < x < math.inf and math.frexp(x)[0] == 0.5,
    "a power of two, such as 4096 or 0.000244140625 (2^-12), or null",
)
Natural = Annotated[int, at_least(0)]
Positive = Annotated[int, at_least(1)]
# More than any model has. A file that says 10^6 would keep a machine busy for hours.
Layers = Annotated[int, at_least(1), at_most(1000)]
# Several minutes of sampling, even on a GPU.
MAX_NEW_TOKENS = 1_000_000
# Sequences that a device computes at once: more do not make it faster.
MAX_SEQUENCES = 65_536
Amount = Annotated[float, at_least(0)]
# A larger number is infinite on the device, though finite in Python.
LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127
Share = Annotated[float, UP_TO_1]
ShareBelow1 = Annotated[float, BELOW_1]


def check(hint: Any, value: Any, path: str) -> None:
    """Raise UserError, with `path`, for a value outside of what its annotation `hint`
    allows.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is not None:
            check(args[0], value, path)  # X of `X | None`
    elif origin is Literal:
        _choose(args, value, path)
    elif origin is Annotated:
        for bound in args[1:]:
            if isinstance(bound, OneOf):
                _choose(bound.names, value, path)
            elif isinstance(bound, Bound) and not bound.holds(value):
                raise UserError(f"{path}={as_typed(value)}: expected {bound.expected}")
        check(args[0], value, path)
    # A plain float has no bound, and infinity meets `at_least`.
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{path}={value}: expected a finite number")
    elif isinstance(value, float) and abs(value) > LARGEST_FLOAT32:
        raise UserError(f"{path}={value}: expected a number of at most 3.4e38")
    # The number is not shown: Python writes none of more than 4,300 digits.
    elif isinstance(value, int) and abs(value) >= 2**63:
        raise UserError(f"{path}: expected a number of at most 64 bits")


def check_fields(instance: Any, prefix: str) -> None:
    """Raise UserError for a field of a dataclass that is out of bounds; its name
    follows `prefix`.
    """
    for name, hint in annotations(type(instance)).items():
        check(hint, getattr(instance, name), f"{prefix}{name}")


def annotations(cls: type) -> dict[str, Any]:
    """Return the annotations of a dataclass's fields by name, with bounds."""
    # Without `include_extras` the bounds would be dropped.
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _choose(names: Collection[str], value: Any, path: str) -> None:
    if value not in names:
        raise UserError(
            f"{path}={as_typed(value)} is not a choice;"
            f" {nearest(str(value), list(names))}"
        )
