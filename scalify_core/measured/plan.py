"""What is to be done with each equation of a jaxpr, found once, before it is evaluated.

Every variable has a *format*, that of the ScaledArrays it is computed from, or None: no
scale takes part, it is plain. Forwards the formats follow from those of the arguments;
backwards from the products follows which variables are stored, and which equations
nobody needs. An equation in which nothing is stored, here or further in, is bound as it
stands, on logical values in FP32: loops, solvers, collectives and whatever JAX may add
among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, jaxprs_in_params

from scalify_core.caches import per_jaxpr
from scalify_core.measured import exact
from scalify_core.measured.products import (
    Reading,
    Want,
    contracted_size,
    has_no_free_axes,
    readings,
    settled,
)

Format = np.dtype | None

PRODUCTS = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated"})
# Elements only move: what is stored may move as it is stored.
MOVES = frozenset(
    {
        "reshape",
        "transpose",
        "broadcast_in_dim",
        "squeeze",
        "rev",
        "slice",
        "dynamic_slice",
        "gather",
        "split",
        "copy",
    }
    | {
        "copy_p",
        "stop_gradient",
        "name",
        "sharding_constraint",
        "reshard",
        "expand_dims",
        "unstack",
        "tile",
        "neg",
    }
)
# Who reads all of the result reads all of the operand, so it may as well be stored
# before.
_WHOLE = MOVES - {"slice", "dynamic_slice", "gather", "split", "unstack"}
KEEP_AXES = frozenset(
    {"copy", "copy_p", "stop_gradient", "name", "sharding_constraint", "reshard", "neg"}
)
# They mean the number in the dtype that the program was traced with.
_AS_TRACED = frozenset({"bitcast_convert_type", "nextafter", "reduce_precision"})
CALLS = {
    **dict.fromkeys(
        ("jit", "closed_call", "core_call", "remat2", "shard_map", "custom_jvp_call"),
        "jaxpr",
    ),
    **{"custom_vjp_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"},
}


class Step(NamedTuple):
    """One equation, and how it is done.

    Attributes:
        eqn: the equation.
        kind: "plain": no scale takes part; "bind": as it stands, on FP32 logical
            values; "move": on what is stored, if it is; "product", "convert",
            "composite"; else the name of a primitive with inner jaxprs.
        formats: of the operands.
        out_formats: of the results.
        wants: of each operand, how it is wanted for a product, here or further on, or
            None.
        store: of each result, how it is stored at once, or None.
        lift: whether operands of narrow dtypes are brought to FP32, where the user cast
            to those.
        traced: whether operands are brought to the dtypes of the trace.
        whole: of a product, whether it reads all digits of its operands, in several
            products of narrow ones.
    """

    eqn: Any
    kind: str
    formats: tuple[Format, ...]
    out_formats: tuple[Format, ...]
    wants: tuple[Want | None, ...] = ()
    store: tuple[Want | None, ...] = ()
    lift: bool = False
    traced: bool = False
    whole: bool = False


class Plan(NamedTuple):
    """Of a jaxpr whose arguments have certain formats.

    Attributes:
        steps: the equations that are needed, in order.
        out_formats: of the results.
        reads: of each argument, how products read it as a whole, or None.
        stores: whether anything is stored, or done otherwise than in the plain program.
    """

    steps: tuple[Step, ...]
    out_formats: tuple[Format, ...]
    reads: tuple[Reading | None, ...]
    stores: bool


@per_jaxpr
def plan_of(jaxpr: Any, formats: tuple[Format, ...]) -> Plan:
    """The plan of a jaxpr for arguments of these formats."""
    known: dict[Any, Format] = dict(zip(jaxpr.invars, formats, strict=True))
    origins, _ = exact.origins_in(jaxpr, (None,) * len(jaxpr.invars))

    def format_of(atom: Any) -> Format:
        return None if type(atom) is Literal else known.get(atom)

    steps = []
    for eqn in jaxpr.eqns:
        step = _step(eqn, tuple(map(format_of, eqn.invars)), origins)
        known.update(zip(eqn.outvars, step.out_formats, strict=True))
        steps.append(step)
    kept, reads = _backwards(jaxpr, steps)
    return Plan(
        tuple(kept),
        tuple(map(format_of, jaxpr.outvars)),
        tuple(reads.get(var) for var in jaxpr.invars),
        any(step.kind not in ("plain", "bind", "move") for step in kept),
    )


def _backwards(
    jaxpr: Any, steps: Sequence[Step]
) -> tuple[list[Step], dict[Any, Reading]]:
    """The steps that are needed, with what they store, and how variables are read by
    products.
    """
    needed = {atom for atom in jaxpr.outvars if type(atom) is not Literal}
    # by variable: where each who reads it is told
    found: dict[Any, list[tuple[list[Want | None], int, Reading]]] = {}
    kept = []

    def settle(var: Any) -> Reading | None:
        """All who read it have been seen: tells each how it is stored, and gives what
        is stored first.
        """
        told = found.pop(var, [])
        wants = settled([reading for *_, reading in told])
        for (place, i, _), want in zip(told, wants, strict=True):
            place[i] = want
        readings = [
            x._replace(may=want.parts)
            for (*_, x), want in zip(told, wants, strict=True)
        ]
        # Who must have many scales is first: of many, one can be made; the other way
        # round something may be lost.
        return max(readings, key=lambda x: math.prod(x.must), default=None)

    for step in reversed(steps):
        eqn = step.eqn
        if not eqn.effects and needed.isdisjoint(eqn.outvars):
            continue
        needed.update(atom for atom in eqn.invars if type(atom) is not Literal)
        of_results = list(map(settle, eqn.outvars))
        wants: list[Want | None] = [None] * len(eqn.invars)
        for i, (atom, reading) in enumerate(
            zip(eqn.invars, _read(step, of_results), strict=True)
        ):
            if reading is not None and type(atom) is not Literal:
                found.setdefault(atom, []).append((wants, i, reading))
            elif reading is not None:
                wants[i] = Want(reading.dtype)
        store = tuple(
            None if f is None or x is None else Want(x.dtype, x.may)
            for x, f in zip(of_results, step.out_formats, strict=True)
        )
        kept.append((step._replace(store=store), wants))
    of_arguments = {
        var: reading
        for var in (*jaxpr.constvars, *jaxpr.invars)
        if (reading := settle(var)) is not None
    }
    return [
        step._replace(wants=tuple(wants)) for step, wants in reversed(kept)
    ], of_arguments


def _read(step: Step, of_results: Sequence[Reading | None]) -> Sequence[Reading | None]:
    """How the operands of an equation are read by products, here or further on."""
    eqn = step.eqn
    if step.kind == "product":
        fmt = product_format(step.formats, eqn)
        assert fmt is not None
        return [*readings(eqn, fmt), *[None] * (len(eqn.invars) - 2)]
    if step.kind == "move":
        return [_read_before(eqn, of_results[0]), *[None] * (len(eqn.invars) - 1)]
    if step.kind == "scan":
        consts, carry, _ = scan_parts(eqn, eqn.invars)
        inner = inner_plan(step).reads
        n, m = len(consts), len(consts) + len(carry)
        return [
            *inner[:n],
            *[None] * len(carry),
            *(_of_turns(x, eqn.params["length"]) for x in inner[m:]),
        ]
    if step.kind in CALLS:
        return inner_plan(step).reads
    return [None] * len(eqn.invars)


def _read_before(eqn: Any, reading: Reading | None) -> Reading | None:
    """How the operand of what only moves elements is read, if its result is."""
    name = eqn.primitive.name
    if reading is None or name not in _WHOLE:
        return None
    if name in KEEP_AXES:
        return reading
    if name == "transpose":
        back = np.argsort(eqn.params["permutation"])
        return Reading(
            reading.dtype, *(tuple(parts[i] for i in back) for parts in reading[1:])
        )
    # Which part an element is of is not followed further.
    ones = (1,) * len(eqn.invars[0].aval.shape)
    return (
        Reading(reading.dtype, ones, ones) if max(reading.may, default=1) == 1 else None
    )


def _of_turns(reading: Reading | None, length: int) -> Reading | None:
    """How a stack is read, if each turn of a scan reads its slice so: it may differ in
    size from turn to turn.
    """
    if reading is None:
        return None
    return Reading(reading.dtype, *((max(length, 1), *parts) for parts in reading[1:]))


def inner_plan(step: Step) -> Plan:
    """The plan of the inner jaxpr of a call or a scan."""
    formats = step.formats
    if step.kind == "scan":
        formats, _ = scan_formats(step.eqn, formats)
    return plan_of(inner_jaxpr(step.eqn), formats)


def inner_jaxpr(eqn: Any) -> Any:
    """The one that a call calls, or the body of a scan."""
    return eqn.params["call_jaxpr" if "call_jaxpr" in eqn.params else "jaxpr"]


def _step(
    eqn: Any, formats: tuple[Format, ...], origins: Mapping[Any, exact.Origins]
) -> Step:
    name = eqn.primitive.name
    if all(f is None for f in formats):
        return Step(eqn, "plain", formats, (None,) * len(eqn.outvars))
    if name in PRODUCTS:
        return _product_step(eqn, formats, origins)
    if name == "convert_element_type":
        return _convert_step(eqn, formats)
    if name == "scalify_composite":
        return Step(eqn, "composite", formats, composite_formats(eqn, formats))
    if name in _INNER or name in CALLS:
        out_formats, stores = _INNER.get(name, _call_formats)(eqn, formats)
        if stores:
            return Step(eqn, name, formats, out_formats)
        return Step(eqn, "bind", formats, out_formats, traced=_narrow(eqn.invars))
    out_formats = arithmetic_formats(eqn, formats)
    if name in MOVES and _moves_data(eqn):
        return Step(eqn, "move", formats, out_formats)
    traced = name in _AS_TRACED or (
        _narrow(eqn.invars) and any(True for _ in jaxprs_in_params(eqn.params))
    )
    return Step(
        eqn, "bind", formats, out_formats, lift=_narrow(eqn.invars), traced=traced
    )


def _moves_data(eqn: Any) -> bool:
    fill = eqn.params.get("fill_value")
    return fill is None or fill == 0 or not np.isfinite(fill)


def _narrow(atoms: Sequence[Any]) -> bool:
    """Whether the program was traced with floats of less than 32 bits there."""
    return any(is_float(x.aval) and x.aval.dtype.itemsize < 4 for x in atoms)


def _product_step(
    eqn: Any, formats: tuple[Format, ...], origins: Mapping[Any, exact.Origins]
) -> Step:
    fmt = product_format(formats, eqn)
    aval = eqn.outvars[0].aval
    if not is_float(aval):
        return Step(eqn, "bind", formats, (None,))
    has_mask = fmt is not None and _has_mask(eqn, formats, origins)
    # each element is read once: in FP32 that costs no more than in parts
    if has_mask and has_no_free_axes(eqn):
        precision = eqn.params["precision"] or (
            lax.Precision.HIGHEST,
            lax.Precision.HIGHEST,
        )
        eqn = eqn.replace(params={**eqn.params, "precision": precision})
        return Step(eqn, "bind", formats, arithmetic_formats(eqn, formats), lift=True)
    if fmt is None or _is_in_float32(eqn, formats, fmt, origins):
        return Step(eqn, "bind", formats, arithmetic_formats(eqn, formats), lift=True)
    wider = aval.dtype.itemsize > max(x.aval.dtype.itemsize for x in eqn.invars[:2])
    return Step(
        eqn,
        "product",
        formats,
        (np.dtype(aval.dtype) if wider else fmt,),
        whole=has_mask,
    )


def _has_mask(
    eqn: Any, formats: Sequence[Format], origins: Mapping[Any, exact.Origins]
) -> bool:
    """Whether an operand of a product is zeros and powers of two, which may copy the
    other: all its digits are read.

    What is copied so is often compared with what it was copied from: it must be the
    same number. So the patches of a convolution are made, permutations with signs, and
    means of pairs.
    """
    if eqn.primitive.name not in ("dot_general", "conv_general_dilated"):
        return False
    found = zip(eqn.invars[:2], formats, strict=False)
    return any(
        own is None and type(x) is not Literal and exact.are_powers(origins.get(x))
        for x, own in found
    )


def _is_in_float32(
    eqn: Any,
    formats: Sequence[Format],
    fmt: np.dtype,
    origins: Mapping[Any, exact.Origins],
) -> bool:
    """Whether a product is left in FP32: of plain FP32 that is rounded, of the highest
    precision, or of one term.

    JAX promotes FP16 times FP32 to FP32, and so does this: who gives a table, a time or
    data as plain FP32 means all of its digits. What FP16 holds as it is, such as a mask
    or a one-hot vector, is read in FP16.
    """

    def is_rounded(atom: Any, own: Format) -> bool:
        if own is not None or exact.is_narrow(np.dtype(atom.aval.dtype)):
            return False
        return type(atom) is Literal or not exact.holds(fmt, origins.get(atom))

    # Of the user's, and of the derivatives of `jnp.linalg`: plain code of FP16 has FP32
    # there.
    in_full = eqn.params["precision"] == (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    return (
        in_full
        or contracted_size(eqn) < 2
        or any(map(is_rounded, eqn.invars[:2], formats))
    )


def product_format(formats: Sequence[Format], eqn: Any) -> Format:
    """The format in which a product reads its operands; None: FP32, or wider."""
    fmt = arithmetic_format(formats[:2], eqn.invars)
    return None if fmt is None or fmt.itemsize >= 4 else fmt


def _convert_step(eqn: Any, formats: tuple[Format, ...]) -> Step:
    dtype = np.dtype(eqn.params["new_dtype"])
    if not jnp.issubdtype(dtype, jnp.floating):
        return Step(eqn, "bind", formats, (None,), traced=_narrow(eqn.invars))
    return Step(eqn, "convert", formats, (dtype,))


def arithmetic_formats(eqn: Any, formats: Sequence[Format]) -> tuple[Format, ...]:
    """The formats of the results of arithmetic: one for all that are floats."""
    fmt = arithmetic_format(formats, eqn.invars)
    return tuple(fmt if is_float(var.aval) else None for var in eqn.outvars)


def arithmetic_format(formats: Sequence[Format], atoms: Sequence[Any]) -> Format:
    """The promotion of the operands' formats; see `value.result_dtype`, which is the
    same of values.
    """
    found = {
        f
        for f, x in zip(formats, atoms, strict=False)
        if f is not None and x.aval.shape
    }
    found = found or {f for f in formats if f is not None}
    if len(found) == 1:
        (only,) = found
        return only if only.itemsize > 1 else np.dtype(np.float16)
    return np.dtype(
        jnp.result_type(
            *({f for f in found if f.itemsize > 1} or {np.dtype(np.float16)})
        )
    )


def composite_formats(eqn: Any, formats: Sequence[Format]) -> tuple[Format, ...]:
    """The formats of a composite's results."""
    name = eqn.params["call"].name
    if name in ("stop_scaling", "get_data_scale", "stop_scaling.fwd"):
        return (None,) * len(eqn.outvars)
    if name in ("probe.fwd", "probe.bwd"):
        return (
            arithmetic_format(formats, eqn.invars),
            *[None] * (len(eqn.outvars) - 1),
        )
    return arithmetic_formats(eqn, formats)


def _call_formats(
    eqn: Any, formats: tuple[Format, ...]
) -> tuple[tuple[Format, ...], bool]:
    plan = plan_of(inner_jaxpr(eqn), formats)
    return plan.out_formats, plan.stores


def scan_parts(
    eqn: Any, operands: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Constants, carry and scanned operands."""
    consts, carry, xs = (
        list(part) for part in eqn.params["ft_in"].update(operands).unpack()
    )
    return consts, carry, xs


def scan_formats(
    eqn: Any, formats: tuple[Format, ...]
) -> tuple[tuple[Format, ...], Plan]:
    """The formats of the body's arguments, of which the carry's last, and the body's
    plan.
    """
    consts, carry, xs = scan_parts(eqn, formats)

    def body(carry: Sequence[Format]) -> tuple[Sequence[Format], Plan]:
        plan = plan_of(eqn.params["jaxpr"], (*consts, *carry, *xs))
        return plan.out_formats[: len(carry)], plan

    carry, plan = _settled(body, carry)
    return (*consts, *carry, *xs), plan


def _settled(body: Callable, carry: Sequence[Format]) -> tuple[Sequence[Format], Plan]:
    """The formats of a carry that one more turn leaves as they are."""
    while True:
        out, plan = body(tuple(carry))
        # Not by ==, for which float64 is None.
        if all(y is None for x, y in zip(carry, out, strict=True) if x is None):
            return carry, plan
        carry = [y if x is None else x for x, y in zip(carry, out, strict=True)]


def _scan(eqn: Any, formats: tuple[Format, ...]) -> tuple[tuple[Format, ...], bool]:
    inner, plan = scan_formats(eqn, formats)
    _, carry, _ = scan_parts(eqn, inner)
    return (*carry, *plan.out_formats[len(carry) :]), plan.stores


def while_parts(
    eqn: Any, operands: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """The constants of the condition, those of the body, and the carry."""
    n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    return operands[:n], operands[n : n + m], operands[n + m :]


def while_carry(eqn: Any, formats: tuple[Format, ...]) -> tuple[Sequence[Format], Plan]:
    """The formats of the carry, and the body's plan."""
    _, consts, carry = while_parts(eqn, formats)

    def body(carry: Sequence[Format]) -> tuple[Sequence[Format], Plan]:
        plan = plan_of(eqn.params["body_jaxpr"], (*consts, *carry))
        return plan.out_formats, plan

    return _settled(body, carry)


def _while(eqn: Any, formats: tuple[Format, ...]) -> tuple[tuple[Format, ...], bool]:
    carry, plan = while_carry(eqn, formats)
    consts, _, _ = while_parts(eqn, formats)
    return (
        tuple(carry),
        plan.stores or plan_of(eqn.params["cond_jaxpr"], (*consts, *carry)).stores,
    )


def _cond(eqn: Any, formats: tuple[Format, ...]) -> tuple[tuple[Format, ...], bool]:
    plans = [plan_of(branch, formats[1:]) for branch in eqn.params["branches"]]
    outs = zip(*(plan.out_formats for plan in plans), strict=True)
    formats = tuple(
        _promoted([f for f in alternatives if f is not None]) for alternatives in outs
    )
    return formats, any(plan.stores for plan in plans)


def _promoted(formats: Sequence[np.dtype]) -> Format:
    if not formats:
        return None
    return formats[0] if len(set(formats)) == 1 else np.dtype(jnp.result_type(*formats))


_INNER: dict[str, Callable] = {"scan": _scan, "while": _while, "cond": _cond}


def is_float(aval: Any) -> bool:
    """Whether an abstract value is of real floating-point numbers."""
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.floating)
