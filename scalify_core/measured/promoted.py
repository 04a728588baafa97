"""Products and results that are narrow though plain code has FP32 there, by promotion, which asks for nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from scalify_core.measured import asked, exact
from scalify_core.measured.plan import (
    CALLS,
    Format,
    Step,
    inner_jaxpr,
    plan_of,
    product_format,
    scan_formats,
    while_carry,
    while_parts,
)
from scalify_core.places import UNKNOWN, Place, name_of, place_of


class Promoted(NamedTuple):
    """A product that reads an operand in a narrow format which plain code has in FP32, or such a result.

    Attributes:
        place: where it is made.
        name: of the primitive.
        dtype: the format.
        level: how it came to be FP32, see `asked`.
    """

    place: Place
    name: str
    dtype: str
    level: asked.Level

    def __str__(self) -> str:
        library = f" in {self.place.library}" if self.place.library else ""
        return f"{self.place}, {self.name}{library}{' of the backward pass' if self.place.backward else ''}"


def found(jaxpr: Any, formats: tuple[Format, ...], levels: Mapping[int, asked.Level]) -> list[Promoted]:
    """Each once, of a jaxpr whose arguments have these formats; `levels`: of its products, by their ids."""
    are_stored = tuple(fmt is not None and fmt.itemsize < 4 for fmt in formats)
    return list(dict.fromkeys(_found(jaxpr, formats, levels, UNKNOWN, are_stored)))


def _found(
    jaxpr: Any,
    formats: tuple[Format, ...],
    levels: Mapping[int, asked.Level],
    outer: Place,
    are_stored: tuple[bool, ...],
) -> Iterator[Promoted]:
    held, _ = exact.held_in(jaxpr, are_stored)
    for step in plan_of(jaxpr, formats).steps:
        if step.kind == "product":
            level = levels.get(id(step.eqn))
            rounds = not all(type(x) is not Literal and x in held for x in step.eqn.invars[:2])
            if level is not None and not step.whole and rounds:
                dtype = str(product_format(step.formats, step.eqn))
                yield Promoted(place_of(step.eqn, outer), name_of(step.eqn), dtype, level)
        elif inner := _inner(step):
            at = place_of(step.eqn, outer)
            for further, of_arguments in inner:
                is_call = step.kind in CALLS
                known = [is_call and type(x) is not Literal and x in held for x in step.eqn.invars]
                stored = tuple(known if is_call else [False] * len(further.invars))
                yield from _found(further, of_arguments, levels, at, stored)


def _inner(step: Step) -> Sequence[tuple[Any, tuple[Format, ...]]]:
    """The inner jaxprs in which something is stored, each with the formats of its arguments."""
    eqn = step.eqn
    if step.kind in CALLS:
        return [(inner_jaxpr(eqn), step.formats)]
    if step.kind == "scan":
        return [(inner_jaxpr(eqn), scan_formats(eqn, step.formats)[0])]
    if step.kind == "cond":
        return [(branch, step.formats[1:]) for branch in eqn.params["branches"]]
    if step.kind == "while":
        of_cond, of_body, _ = while_parts(eqn, step.formats)
        carry, _ = while_carry(eqn, step.formats)
        return [(eqn.params["cond_jaxpr"], (*of_cond, *carry)), (eqn.params["body_jaxpr"], (*of_body, *carry))]
    return []


def of_results(
    plain: Any, levels: Sequence[asked.Level], dtypes: Sequence[Any], formats: Sequence[Format]
) -> list[Promoted]:
    """The results that are narrow here and FP32 in the trace of plain code, each line and primitive once.

    Args:
        plain: that trace.
        levels: of its results.
        dtypes: in which results are stored as there; None: not.
        formats: of the same results by their data.
    """
    makers = {var: eqn for eqn in plain.eqns for var in eqn.outvars}
    of_all = zip(plain.outvars, levels, dtypes, formats, strict=False)
    promoted = [
        Promoted(place_of(makers[var]), name_of(makers[var]), str(fmt), level)
        for var, level, dtype, fmt in of_all
        if dtype is None and fmt is not None and fmt.itemsize < 4 and type(var) is not Literal and var in makers
    ]
    return list(dict.fromkeys(promoted))


def text_of_result(dtype: str) -> str:
    """What is said of a result, or of some."""
    return f"plain code has this result in FP32, by promotion; here it is {dtype}; x.astype(jnp.float32) keeps FP32"


def text_of(dtype: str) -> str:
    """What is said of a product, or of some."""
    return (
        f"plain code has FP32 here, by promotion; {dtype} is read; x.astype(jnp.float32) of the operand, before "
        f'another promotes it, or precision="highest" keeps FP32'
    )
