"""The cases of a family that `make test` runs."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case left to `make test-all`: others of its family, or a test that a comment
    names, show the same."""
    return pytest.param(*values, marks=pytest.mark.slow)


def quick(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """Return all values of a parameter; those that are not chosen are left to
    `make test-all`.

    A case runs in `make test` where every one of its parameters has a chosen value. A
    tuple holds values of several parameters.
    """
    return [value if value in chosen else slow(*_values(value)) for value in values]


def _values(value: Any) -> tuple:
    return value if isinstance(value, tuple) else (value,)
