"""Operations that a ScaledArray refuses, with messages that name the alternative."""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from scalify_core.numerics.formats import pow2_round


class UnsupportedArithmetic:
    """A base class that refuses conversion to a number; `asarray` returns numbers."""

    __slots__ = ()

    def __float__(self) -> NoReturn:
        _refuse("float(x)", "float(asarray(x))")

    def __int__(self) -> NoReturn:
        _refuse("int(x)", "int(asarray(x))")

    def __format__(self, form: str) -> str:
        """Return the text of `repr`.

        Raises:
            TypeError: a format is given.
        """
        if form:
            _refuse(f"format(x, {form!r})", f"format(float(asarray(x)), {form!r})")
        return repr(self)

    def item(self, *_: Any) -> NoReturn:
        """Raise TypeError."""
        _refuse("x.item()", "asarray(x).item()")


def _refuse(what: str, instead: str) -> NoReturn:
    """Raise the TypeError."""
    raise TypeError(
        f"{what} of a ScaledArray, which is data and a scale, not a number; write"
        f" {instead}, with scalify_core.asarray"
    )


def check_powers(scale: Any) -> None:
    """Raise ValueError for numbers that are not valid scales."""
    for number in np.ravel(scale).tolist():
        if not number > 0 or pow2_round(number) != number:
            raise ValueError(
                f"ScaledArray: scale is {number}, expected a power of two in [2^-126,"
                " 2^126]"
            )


def check_known(scale: Any) -> None:
    """Check a given run-time scale (or None), as far as its numbers are known here.

    Raises:
        TypeError: it is neither a number nor an array, such as a dtype that was meant
            for another argument.
        ValueError: a number is not a valid scale.
    """
    if scale is not None and not isinstance(scale, jax.typing.ArrayLike):
        raise TypeError(
            f"scale is {scale!r}, expected a power of two or an FP32 array; a dtype is"
            " given by its name, dtype=..."
        )
    if (
        isinstance(scale, jax.Array)
        and not isinstance(scale, jax.core.Tracer)
        and scale.is_fully_addressable
    ):
        check_powers(scale)


def check_dynamic(data: Any, scale: Any) -> None:
    """Check that an array can be the run-time scale of this data.

    Raises:
        TypeError: it is not of a floating-point dtype.
        ValueError: its shape does not match the data.
    """
    if hasattr(scale, "dtype") and not jnp.issubdtype(scale.dtype, jnp.floating):
        raise TypeError(
            f"ScaledArray: the scale is an array of {scale.dtype}, expected float32"
        )
    if len(scale.shape) > len(data.shape) or any(
        s not in (1, n) for s, n in zip(scale.shape, data.shape, strict=False)
    ):
        raise ValueError(
            f"ScaledArray: scale of shape {scale.shape} for data of shape {data.shape},"
            " expected a scalar, the shape of leading axes, or size 1 or that of the"
            " data along each axis"
        )
