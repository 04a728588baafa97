"""Bounds are annotations: what a field may hold is refused in one line that names it,
elsewhere it is left alone."""

import math
import re
from typing import Annotated, Literal

import pytest

from trainer.bounds import (
    BELOW_1,
    POWER_OF_TWO,
    UP_TO_1,
    OneOf,
    Positive,
    at_least,
    at_most,
    check,
    more_than,
)
from trainer.errors import UserError

CASES = [
    (Positive, (1, 7), (0, -1), "at least 1"),
    (Annotated[float, at_least(0)], (0.0, 1e30), (-1e-9, math.nan), "at least 0"),
    (Annotated[float, at_least(0)], (0.0,), (math.inf,), "a finite number"),
    (Annotated[float, at_least(0)], (3.4e38,), (1e39,), "a number of at most 3.4e38"),
    (Annotated[int, at_least(2), at_most(3)], (2, 3), (4,), "at most 3"),
    (
        Annotated[float, more_than(0, ", such as 64")],
        (1e-9,),
        (0.0, math.nan),
        "more than 0, such as 64",
    ),
    (
        Annotated[float, BELOW_1],
        (0.0, 1 - 2**-24),
        (1 - 2**-25, 1.0, -0.1, math.nan),
        r"a number in \[0, 1 - 2\^-24\]",
    ),
    (Annotated[float, UP_TO_1], (0.0, 1.0), (1.001, math.nan), r"a number in \[0, 1\]"),
    (
        Annotated[float, POWER_OF_TWO],
        (4096.0, 2.0**-12),
        (3.0, -2.0, 0.0, math.inf, math.nan),
        "a power of two",
    ),
    (Annotated[float, POWER_OF_TWO] | None, (None, 2.0), (3.0,), "a power of two"),
]


@pytest.mark.parametrize(("hint", "valid", "invalid", "expected"), CASES)
def test_a_value_out_of_its_bounds_is_named_with_what_is_expected(
    hint, valid, invalid, expected
):
    for value in valid:
        check(hint, value, "a.b")
    for value in invalid:
        with pytest.raises(
            UserError, match=rf"^a\.b={re.escape(str(value))}: expected {expected}"
        ):
            check(hint, value, "a.b")


@pytest.mark.parametrize(
    "hint", [Literal["gelu", "swiglu"], Annotated[str, OneOf({"gelu": 1, "swiglu": 2})]]
)
def test_a_value_that_is_no_choice_is_answered_with_the_nearest_one(hint):
    check(hint, "gelu", "model.mlp")
    with pytest.raises(
        UserError,
        match=(
            r"^model\.mlp=gelo is not a choice; did you mean 'gelu'\? Valid:"
            r" gelu, swi"
        ),
    ):
        check(hint, "gelo", "model.mlp")
