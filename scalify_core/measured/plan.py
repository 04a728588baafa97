"""What is to be done with each equation of a jaxpr, found once, before it is evaluated.

Every variable has a *format*, that of the ScaledArrays it is computed from, or None: no scale takes part, it is plain.
Forwards the formats follow from those of the arguments; backwards from the products follows which variables are
stored, and which equations nobody needs. An equation in which nothing is stored, here or further in, is bound as it
stands, on logical values in FP32: loops, solvers, collectives and whatever JAX may add among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxprs_in_params

from scalify_core.caches import per_jaxpr

Format = np.dtype | None

PRODUCTS = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated"})
# Elements only move: what is stored may move as it is stored.
MOVES = frozenset(
    {"reshape", "transpose", "broadcast_in_dim", "squeeze", "rev", "slice", "dynamic_slice", "gather", "split", "copy"}
    | {"copy_p", "stop_gradient", "name", "sharding_constraint", "reshard", "expand_dims", "unstack", "tile", "neg"}
)
# Who reads all of the result reads all of the operand, so it may as well be stored before.
_WHOLE = MOVES - {"slice", "dynamic_slice", "gather", "split", "unstack"}
KEEP_AXES = frozenset({"copy", "copy_p", "stop_gradient", "name", "sharding_constraint", "reshard", "neg"})
# Their results may have elements of the operands, or those times 1, or plus what is lost beside them.
_KEEP = (
    MOVES
    | {"select_n", "max", "min", "clamp", "concatenate", "pad", "sort", "dynamic_update_slice", "scatter"}
    | {
        "convert_element_type",
        "add",
        "add_any",
        "sub",
        "mul",
        "scatter-add",
        "reduce_max",
        "reduce_min",
        "reduce_sum",
        "cummax",
        "cummin",
        "cumsum",
        "real",
        "pvary",
        "psum",
        "all_gather",
        "ppermute",
        "all_to_all",
        "roll",
    }
)
# They mean the number in the dtype that the program was traced with.
_AS_TRACED = frozenset({"bitcast_convert_type", "nextafter", "reduce_precision"})
_CALLS = {
    **dict.fromkeys(("jit", "closed_call", "core_call", "remat2", "shard_map", "custom_jvp_call"), "jaxpr"),
    **{"custom_vjp_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"},
}


class Want(NamedTuple):
    """How a value is wanted by who reads it.

    Attributes:
        dtype: the format in which it is to be stored.
        axes: those along which each index has a scale of its own: the batch axes of a product, which differ in size
            as its entries do, and the turns of a scan.
    """

    dtype: np.dtype
    axes: tuple[int, ...] = ()


class Step(NamedTuple):
    """One equation, and how it is done.

    Attributes:
        eqn: the equation.
        kind: "plain": no scale takes part; "bind": as it stands, on FP32 logical values; "move": on what is stored, if
            it is; "product", "convert", "composite"; else the name of a primitive with inner jaxprs.
        formats: of the operands.
        out_formats: of the results.
        wants: of each operand, how it is wanted for a product, here or further on, or None.
        store: of each result, how it is stored at once, or None.
        lift: whether operands of narrow dtypes are brought to FP32, where the user cast to those.
        traced: whether operands are brought to the dtypes of the trace.
    """

    eqn: Any
    kind: str
    formats: tuple[Format, ...]
    out_formats: tuple[Format, ...]
    wants: tuple[Want | None, ...] = ()
    store: tuple[Want | None, ...] = ()
    lift: bool = False
    traced: bool = False


class Plan(NamedTuple):
    """Of a jaxpr whose arguments have certain formats.

    Attributes:
        steps: the equations that are needed, in order.
        out_formats: of the results.
        wants: of each argument, how some product reads it as a whole, or None.
        stores: whether anything is stored, or done otherwise than in the plain program.
    """

    steps: tuple[Step, ...]
    out_formats: tuple[Format, ...]
    wants: tuple[Want | None, ...]
    stores: bool


@per_jaxpr
def plan_of(jaxpr: Any, formats: tuple[Format, ...]) -> Plan:
    """The plan of a jaxpr for arguments of these formats."""
    known: dict[Any, Format] = dict(zip(jaxpr.invars, formats, strict=True))

    def format_of(atom: Any) -> Format:
        return None if type(atom) is Literal else known.get(atom)

    steps = []
    for eqn in jaxpr.eqns:
        step = _step(eqn, tuple(map(format_of, eqn.invars)))
        known.update(zip(eqn.outvars, step.out_formats, strict=True))
        steps.append(step)
    kept, wants = _backwards(jaxpr, steps)
    return Plan(
        tuple(kept),
        tuple(map(format_of, jaxpr.outvars)),
        tuple(wants.get(var) for var in jaxpr.invars),
        any(step.kind not in ("plain", "bind", "move") for step in kept),
    )


def _backwards(jaxpr: Any, steps: Sequence[Step]) -> tuple[list[Step], dict[Any, Want]]:
    """The steps that are needed, with what they store, and how variables are wanted."""
    needed = {atom for atom in jaxpr.outvars if type(atom) is not Literal}
    wants: dict[Any, Want] = {}
    kept = []
    for step in reversed(steps):
        eqn = step.eqn
        if not eqn.effects and needed.isdisjoint(eqn.outvars):
            continue
        needed.update(atom for atom in eqn.invars if type(atom) is not Literal)
        wanted = tuple(_wanted(step, wants))
        for atom, want in zip(eqn.invars, wanted, strict=True):
            # Who wants one scale can make it of many, the other way round something may be lost.
            if want is not None and type(atom) is not Literal and (want.axes or atom not in wants):
                wants[atom] = want
        store = tuple(
            wants.get(v) if f is not None else None for v, f in zip(eqn.outvars, step.out_formats, strict=True)
        )
        kept.append(step._replace(wants=wanted, store=store))
    return kept[::-1], wants


def _wanted(step: Step, wants: dict[Any, Want]) -> Sequence[Want | None]:
    """How an equation wants its operands to be stored."""
    eqn = step.eqn
    if step.kind == "product":
        return [*product_wants(step), *[None] * (len(eqn.invars) - 2)]
    if step.kind == "move":
        return [_wanted_before(eqn, wants.get(eqn.outvars[0])), *[None] * (len(eqn.invars) - 1)]
    if step.kind == "scan":
        consts, carry, _ = scan_parts(eqn, eqn.invars)
        inner = inner_plan(step).wants
        n, m = len(consts), len(consts) + len(carry)
        return [*inner[:n], *[None] * len(carry), *map(_of_turns, inner[m:])]
    if step.kind in _CALLS:
        return inner_plan(step).wants
    return [None] * len(eqn.invars)


def product_wants(step: Step) -> tuple[Want, Want]:
    """How a product reads its operands: each entry of a batch at its own scale, for the other may make up for it."""
    fmt = product_format(step.formats, step.eqn)
    assert fmt is not None
    batch = batch_axes(step.eqn)
    return Want(fmt, batch[0]), Want(fmt, batch[1])


def batch_axes(eqn: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of the operands that are a product's batch."""
    if eqn.primitive.name != "dot_general":
        return (), ()
    _, (lhs, rhs) = eqn.params["dimension_numbers"]
    return tuple(lhs), tuple(rhs)


def _wanted_before(eqn: Any, want: Want | None) -> Want | None:
    """How the operand of what only moves elements is wanted, if its result is."""
    name = eqn.primitive.name
    if want is None or name not in _WHOLE:
        return None
    if not want.axes or name in KEEP_AXES:
        return want
    return Want(want.dtype, tuple(eqn.params["permutation"][a] for a in want.axes)) if name == "transpose" else None


def _of_turns(want: Want | None) -> Want | None:
    """How a stack is wanted, if each turn of a scan wants its slice so: it may differ in size from turn to turn."""
    return None if want is None else Want(want.dtype, (0, *(axis + 1 for axis in want.axes)))


@per_jaxpr
def large_constants(jaxpr: Any) -> frozenset[float]:
    """The finite numbers beyond FP16 that stand in a program, here or further in: what masks and loops begin with."""
    found: set[float] = set()
    for eqn in jaxpr.eqns:
        found.update(*map(_large, eqn.invars))
        for inner in jaxprs_in_params(eqn.params):
            found |= large_constants(inner)
    return frozenset(found)


def _large(atom: Any) -> frozenset[float]:
    number = type(atom) is Literal and is_float(atom.aval) and np.ndim(atom.val) == 0 and 65504 < abs(atom.val) < np.inf
    return frozenset({float(atom.val)}) if number else frozenset()


@per_jaxpr
def constants_in(jaxpr: Any, given: tuple[frozenset[float], ...]) -> tuple[frozenset[float], ...]:
    """The large constants that may be elements of each result, those of the arguments being `given`.

    So are their negatives, their sums, and what a number that stands in the program multiplies or divides them by. Any
    other function of such a number is another number.
    """
    known = dict(zip(jaxpr.invars, given, strict=True))

    def of(atom: Any) -> frozenset[float]:
        return _large(atom) if type(atom) is Literal else known.get(atom, frozenset())

    for eqn in jaxpr.eqns:
        operands, name = tuple(map(of, eqn.invars)), eqn.primitive.name
        outs: tuple[frozenset[float], ...] = (frozenset(),) * len(eqn.outvars)
        if name in _CALLS:
            outs = constants_in(inner_jaxpr(eqn), operands)
        elif inner := [large_constants(jaxpr) for jaxpr in jaxprs_in_params(eqn.params)]:
            outs = (frozenset().union(*operands, *inner),) * len(outs)
        elif name in _KEEP:
            outs = (frozenset().union(*operands, _computed(eqn, operands)),) * len(outs)
        elif name in ("neg", "div"):
            outs = (_computed(eqn, operands),)
        known.update(zip(eqn.outvars, outs, strict=True))
    return tuple(map(of, jaxpr.outvars))


def _computed(eqn: Any, operands: tuple[frozenset[float], ...]) -> frozenset[float]:
    """What arithmetic makes of large constants, in FP32: a temperature, a penalty, two masks added up, a mean."""
    name, found = eqn.primitive.name, set[float]()
    with np.errstate(all="ignore"):
        if name == "neg":
            found = {-c for c in operands[0]}
        elif name in ("add", "add_any", "sub") and len(operands) == 2:
            sign = -1 if name == "sub" else 1
            found = {float(np.float32(a) + np.float32(sign * b)) for a in operands[0] for b in operands[1]}
        elif name in ("mul", "div"):
            a, b = (_number(atom) for atom in eqn.invars)
            if b:
                found = {float(np.float32(c) * np.float32(b if name == "mul" else 1 / b)) for c in operands[0]}
            elif a and name == "mul":
                found = {float(np.float32(c) * np.float32(a)) for c in operands[1]}
        elif name == "reduce_sum":
            count = math.prod(eqn.invars[0].aval.shape) // max(1, math.prod(eqn.outvars[0].aval.shape))
            found = {float(np.float32(c) * np.float32(count)) for c in operands[0]}
    return frozenset(c for c in found if 65504 < abs(c) < np.inf)


def _number(atom: Any) -> float | None:
    """The number that a literal of a program is, or None."""
    return float(atom.val) if type(atom) is Literal and is_float(atom.aval) and np.ndim(atom.val) == 0 else None


def inner_plan(step: Step) -> Plan:
    """The plan of the inner jaxpr of a call or a scan."""
    formats = step.formats
    if step.kind == "scan":
        formats, _ = _scan_formats(step.eqn, formats)
    return plan_of(inner_jaxpr(step.eqn), formats)


def inner_jaxpr(eqn: Any) -> Any:
    """The one that a call calls, or the body of a scan."""
    return eqn.params["call_jaxpr" if "call_jaxpr" in eqn.params else "jaxpr"]


def _step(eqn: Any, formats: tuple[Format, ...]) -> Step:
    name = eqn.primitive.name
    if all(f is None for f in formats):
        return Step(eqn, "plain", formats, (None,) * len(eqn.outvars))
    if name in PRODUCTS:
        return _product_step(eqn, formats)
    if name == "convert_element_type":
        return _convert_step(eqn, formats)
    if name == "scalify_composite":
        return Step(eqn, "composite", formats, composite_formats(eqn, formats))
    if name in _INNER or name in _CALLS:
        out_formats, stores = _INNER.get(name, _call_formats)(eqn, formats)
        if stores:
            return Step(eqn, name, formats, out_formats)
        return Step(eqn, "bind", formats, out_formats, traced=_narrow(eqn.invars))
    out_formats = arithmetic_formats(eqn, formats)
    if name in MOVES and _moves_data(eqn):
        return Step(eqn, "move", formats, out_formats)
    traced = name in _AS_TRACED or (_narrow(eqn.invars) and any(True for _ in jaxprs_in_params(eqn.params)))
    return Step(eqn, "bind", formats, out_formats, lift=_narrow(eqn.invars), traced=traced)


def _moves_data(eqn: Any) -> bool:
    fill = eqn.params.get("fill_value")
    return fill is None or fill == 0 or not np.isfinite(fill)


def _narrow(atoms: Sequence[Any]) -> bool:
    """Whether the program was traced with floats of less than 32 bits there."""
    return any(is_float(x.aval) and x.aval.dtype.itemsize < 4 for x in atoms)


def _product_step(eqn: Any, formats: tuple[Format, ...]) -> Step:
    fmt = product_format(formats, eqn)
    aval = eqn.outvars[0].aval
    if not is_float(aval):
        return Step(eqn, "bind", formats, (None,))
    if fmt is None:
        return Step(eqn, "bind", formats, arithmetic_formats(eqn, formats), lift=True)
    wider = aval.dtype.itemsize > max(x.aval.dtype.itemsize for x in eqn.invars[:2])
    return Step(eqn, "product", formats, (np.dtype(aval.dtype) if wider else fmt,))


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
    """The promotion of the operands' formats; see `value.result_dtype`, which is the same of values."""
    found = {f for f, x in zip(formats, atoms, strict=False) if f is not None and x.aval.shape}
    found = found or {f for f in formats if f is not None}
    if len(found) == 1:
        (only,) = found
        return only if only.itemsize > 1 else np.dtype(np.float16)
    return np.dtype(jnp.result_type(*({f for f in found if f.itemsize > 1} or {np.dtype(np.float16)})))


def composite_formats(eqn: Any, formats: Sequence[Format]) -> tuple[Format, ...]:
    """The formats of a composite's results."""
    name = eqn.params["call"].name
    if name in ("stop_scaling", "get_data_scale", "stop_scaling.fwd"):
        return (None,) * len(eqn.outvars)
    if name in ("probe.fwd", "probe.bwd"):
        return (arithmetic_format(formats, eqn.invars), *[None] * (len(eqn.outvars) - 1))
    return arithmetic_formats(eqn, formats)


def _call_formats(eqn: Any, formats: tuple[Format, ...]) -> tuple[tuple[Format, ...], bool]:
    plan = plan_of(inner_jaxpr(eqn), formats)
    return plan.out_formats, plan.stores


def scan_parts(eqn: Any, operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Constants, carry and scanned operands."""
    consts, carry, xs = (list(part) for part in eqn.params["ft_in"].update(operands).unpack())
    return consts, carry, xs


def _scan_formats(eqn: Any, formats: tuple[Format, ...]) -> tuple[tuple[Format, ...], Plan]:
    """The formats of the body's arguments, of which the carry's last, and the body's plan."""
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
    inner, plan = _scan_formats(eqn, formats)
    _, carry, _ = scan_parts(eqn, inner)
    return (*carry, *plan.out_formats[len(carry) :]), plan.stores


def while_parts(eqn: Any, operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
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
    return tuple(carry), plan.stores or plan_of(eqn.params["cond_jaxpr"], (*consts, *carry)).stores


def _cond(eqn: Any, formats: tuple[Format, ...]) -> tuple[tuple[Format, ...], bool]:
    plans = [plan_of(branch, formats[1:]) for branch in eqn.params["branches"]]
    outs = zip(*(plan.out_formats for plan in plans), strict=True)
    formats = tuple(_promoted([f for f in alternatives if f is not None]) for alternatives in outs)
    return formats, any(plan.stores for plan in plans)


def _promoted(formats: Sequence[np.dtype]) -> Format:
    if not formats:
        return None
    return formats[0] if len(set(formats)) == 1 else np.dtype(jnp.result_type(*formats))


_INNER: dict[str, Callable] = {"scan": _scan, "while": _while, "cond": _cond}


def is_float(aval: Any) -> bool:
    """Whether an abstract value is of real floating-point numbers."""
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.floating)
