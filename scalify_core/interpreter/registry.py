"""The table of scale propagation rules, and the one-line definers that fill it.

Primitives are named by `primitive.name`, as jaxprs print them; the calls of composites
are in the same table, see `composite_rule`.

A rule is a function `rule(eqn, *operands) -> results`, a list; `@rule` takes one of a
single result, too. An operand is a `Value`, or plain: an array, a number or a
constant that no scale belongs to. At least one operand is a `Value`, but of casts to
fewer than 32 bits, and of calls and loops around them (`casts_to_narrow`). A result
that carries a scale is a `Value`; integers and booleans are plain. `eqn` is the jaxpr's
equation, traced with float32 where the data may be narrower.

    structural("transpose")  # the operation on the data; the scale is unchanged

    @rule("mul")
    def _mul(eqn, a, b): ...

A primitive without a rule is evaluated in FP32, with scale 1 (`default`). Beside this
table, a new primitive may belong to:

- `measured.products.MOVES`, `KEEP_AXES`: its elements move or change sign, so that
  copies which products read may move with them; the second keeps the axes, too.
- `measured.masks._KEEP`: an element of an operand may be an element of the result.
- `measured.uses._NEEDS_NONZERO`, `_SCALED`: it must not read a zero that was no zero;
  its result is zero where an operand is.
- `_READ_BITS`, `COMBINERS`, `_FOLDED` below, and `numerics.jaxprs.INLINED`, `CALLS`,
  `CONTROL`, `PRODUCTS`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal, jaxprs_in_params

from scalify_core.interpreter import value as v
from scalify_core.interpreter.value import Value
from scalify_core.numerics import formats
from scalify_core.numerics.formats import is_float, is_narrow
from scalify_core.numerics.jaxprs import (
    CALLS,
    CONTROL,
    as_traced,
    inner_jaxpr,
    per_jaxpr,
)

COMPOSITE = "composite "  # before the names of composites, in keys of the table


@dataclasses.dataclass(frozen=True)
class Rule:
    """The rule by which one primitive, or the calls of one composite, propagate scales.

    Attributes:
        fun: the rule.
        wide: whether operands may have FP32 data that is not yet rounded to its format.
        control: whether `fun` takes the evaluator of inner jaxprs, as the keyword
            `evaluate`.
        passes: (i, j): result j is operand i, as of a probe. Readers of the result
            count as readers of the operand.
    """

    fun: Callable
    wide: bool = True
    control: bool = False
    passes: tuple[int, int] | None = None

    def as_read(self, x: Any) -> Any:
        """Return an operand in the form that the rule reads."""
        if not isinstance(x, Value) or self.wide:
            return x
        # A loop keeps it in FP32 inside, too: rounded here, a 1e-12 would enter as a
        # zero.
        if self.control and x.is_fill_value:
            return x
        return v.narrow(x)


rules: dict[str, Rule] = {}  # keys: `key_of(eqn)`


def rule(*primitives: str, wide: bool = True) -> Callable:
    """Return a decorator that registers a hand-written rule."""

    def register(fun: Callable) -> Callable:
        def listed(eqn: Any, *operands: Any) -> list[Any]:
            out = fun(eqn, *operands)
            if isinstance(out, list):
                return out
            return [out]

        _register(primitives, listed, wide=wide)
        return fun

    return register


def control(*primitives: str, wide: bool = False) -> Callable:
    """Return a decorator for a primitive with inner jaxprs: a rule with `evaluate=`."""
    return functools.partial(_register, primitives, wide=wide, control=True)


def structural(*primitives: str) -> None:
    """Register primitives that apply the same operation to the data.

    Each result has the scale of the value at its position, or of the only value. A
    scale that differs along axes becomes the largest.
    """
    _register(primitives, apply_to_data)


def rule_of(eqn: Any) -> Rule:
    """Return the rule of an equation: its primitive's, or its composite's."""
    return rules.get(key_of(eqn), DEFAULT)


def key_of(eqn: Any) -> str:
    """Return the key of an equation's rule.

    It is the primitive's name, or `COMPOSITE` and the composite's name.
    """
    name = eqn.primitive.name
    if name == "scalify_composite":
        return COMPOSITE + eqn.params["call"].name
    return name


def composite_rule(
    name: str,
    *,
    passes: tuple[int, int] | None = None,
    wide: bool = False,
) -> Callable:
    """Return a decorator that registers the rule of the composite calls named `name`.

    Names are "gelu", "gelu.fwd", "gelu.bwd". The rule takes the `CompositeCall` and its
    operands in the tree of the function's arguments (`Value`, plain or None). It
    returns the results in the tree of the function's results.

    With `wide`, see `Rule`, operands may have FP32 data; by default their data is in
    their formats. `passes` counts all leaves; the program is evaluated as if without
    the call.
    """

    def register(fun: Callable) -> Callable:
        def flat(eqn: Any, *operands: Any) -> list[Any]:
            call = eqn.params["call"]
            out = fun(call, *jax.tree.unflatten(call.in_tree, operands))
            return jax.tree.leaves(out, is_leaf=v.is_value)

        _register((COMPOSITE + name,), flat, passes=passes, wide=wide)
        return fun

    return register


def forward_rule(name: str, *, wide: bool = False) -> Callable:
    """Return a decorator that registers the rule of a composite and of its "NAME.fwd".

    The rule returns the result and the residuals, of which the composite itself has no
    use. `wide`: see `composite_rule`.
    """

    def register(fun: Callable) -> Callable:
        composite_rule(f"{name}.fwd", wide=wide)(fun)
        composite_rule(name, wide=wide)(lambda call, *args: fun(call, *args)[0])
        return fun

    return register


def default(eqn: Any, *operands: Any) -> list[Any]:
    """Evaluate a primitive or composite without a rule in FP32, with scale 1.

    There is no warning: the result is that of FP32 until it is stored. Far from 1 it
    then saturates or underflows, which `explain` names.
    """
    dtype = v.result_dtype(*operands)
    return [
        v.value(y, 1.0, 1.0, dtype) if is_float(y) else y
        for y in in_float32(eqn, *operands)
    ]


def in_float32(eqn: Any, *operands: Any) -> list[Any]:
    """Return the results of an equation on the logical values, as plain arrays.

    Values have at least FP32, also where the user cast them to a narrower dtype.
    """
    if eqn.primitive.name == "scalify_composite":
        # Its function is traced anew with FP32 operands: a user's cast to FP16 in front
        # of it is not to overflow.
        args = [v.unscaled(x) for x in operands]
        wide = [formats.as_float32(x) if is_float(x) else x for x in args]
        return eqn.params["call"].bind(*wide)
    pairs = zip(operands, eqn.invars, strict=True)
    if _means_its_dtype(eqn):
        return bind_all(eqn, *(_as_traced(x, var.aval) for x, var in pairs))
    return bind_all(wide_equation(eqn), *(_as_wide_as(x, var.aval) for x, var in pairs))


# Their results depend on the dtype that their operands were traced with.
_READ_BITS = frozenset(
    {
        "bitcast_convert_type",
        "nextafter",
        "reduce_precision",
        "pure_callback",
        "io_callback",
    }
)


def _means_its_dtype(eqn: Any) -> bool:
    """Return whether an equation reads numbers in the dtype that it was traced with.

    It reads their bits, or it has inner jaxprs of a dtype that the user cast to.
    """
    if eqn.primitive.name in _READ_BITS:
        return True
    if eqn.primitive.name in COMBINERS:
        return False
    # Its solvers or callbacks were traced by the user's function for that dtype, and
    # may not take another.
    has_narrow = any(is_narrow(x.aval) for x in eqn.invars)
    return has_narrow and any(True for _ in jaxprs_in_params(eqn.params))


DEFAULT = Rule(default)


def bind(eqn: Any, *operands: Any) -> Any:
    """Bind the equation's primitive to plain operands."""
    # Some primitives, as custom_jvp_call, take functions where their equation has
    # jaxprs.
    params = eqn.primitive.get_bind_params(eqn.params)
    return eqn.primitive.bind(*as_traced(eqn, operands), **params)


def bind_all(eqn: Any, *operands: Any) -> list[Any]:
    """Return the results of `bind` as a list, also where the primitive has one."""
    out = bind(eqn, *map(formats.materialize, operands))
    if eqn.primitive.multiple_results:
        return list(out)
    return [out]


# Behind a user's cast the parameters and inner jaxprs of an equation say 16 bits, while
# its operands here are logical numbers: so they are made to say FP32.

# Their inner jaxpr combines two numbers. It is no program of the user's that needs a
# dtype, so it can be traced anew.
COMBINERS = frozenset({"reduce", "reduce_window"}) | {
    f"scatter{kind}" for kind in ("", "-add", "-sub", "-mul", "-min", "-max")
}
_DTYPES = ("new_dtype", "preferred_element_type", "dtype")


def wide_equation(eqn: Any) -> Any:
    """Return an equation with FP32 in place of narrower floats.

    Its operands are logical numbers, which a product or a sum in 16 bits, though traced
    so, would flush to zero or make infinite.
    """
    changed: dict[str, Any] = {
        key: np.dtype(np.float32)
        for key in _DTYPES
        if key in eqn.params and formats.is_narrow_dtype(eqn.params[key])
    }
    if eqn.primitive.name in COMBINERS:
        (key,) = {"jaxpr", "update_jaxpr"} & eqn.params.keys()
        # Its numbers are logical ones, too: in FP16 a sum of 1e-9 would be zero inside
        # of it.
        body = eqn.params[key]  # None: a scatter that replaces
        if body is not None and any(map(is_narrow, body.in_avals)):
            changed[key] = _wide_jaxpr(body)
    if changed:
        return eqn.replace(params={**eqn.params, **changed})
    return eqn


@per_jaxpr
def _wide_jaxpr(jaxpr: Any) -> Any:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jaxpr.in_avals]
    wide = jax.eval_shape(lambda xs: list(map(formats.at_least_float32, xs)), shapes)
    return jax.make_jaxpr(functools.partial(_in_wide, jaxpr))(*wide)


def _in_wide(jaxpr: Any, *operands: Any) -> list[Any]:
    """Return the results of a jaxpr on FP32 numbers."""
    names = (*jaxpr.constvars, *jaxpr.invars)
    env = dict(zip(names, (*jaxpr.consts, *operands), strict=True))

    def read(atom: Any) -> Any:
        return formats.at_least_float32(
            atom.val if isinstance(atom, Literal) else env[atom]
        )

    for eqn in jaxpr.eqns:
        args = list(map(read, eqn.invars))
        if eqn.primitive.name in CALLS:
            # Functions of jax.numpy are jitted, and such a call has the dtypes that it
            # was traced with.
            out = _in_wide(inner_jaxpr(eqn), *args)
        else:
            out = bind_all(wide_equation(eqn), *args)
        env |= zip(eqn.outvars, out, strict=True)
    return list(map(read, jaxpr.outvars))


def plain(eqn: Any, *operands: Any) -> list[Any]:
    """Return the results of an equation without scaled operands.

    Uniform constants stay known: a loop's zeros must not get a scale.
    """
    numbers = _numbers(eqn, tuple(map(v.uniform, operands)))
    if None in numbers or not numbers:  # no results: bound for its effects
        out = bind_all(eqn, *operands)
    else:
        out = [None] * len(numbers)
    for i, (number, var) in enumerate(zip(numbers, eqn.outvars, strict=True)):
        if number is not None:
            # A broadcast of one element: known as a constant by its strides, and no
            # array in memory.
            constant = np.asarray(number).astype(var.aval.dtype)
            out[i] = np.broadcast_to(constant, var.aval.shape)
    return out


def casts_to_narrow(eqn: Any, *operands: Any) -> bool:
    """Return whether plain operands of an equation are cast to fewer than 32 bits.

    Its results then have a scale, as those of a `Value` have: in the format alone, a
    gradient of 1e-9 behind a cast to FP16 would be zero. A uniform constant that the
    format holds needs none.
    """
    if eqn.primitive.name in CONTROL:
        # A call of plain operands is bound as it is only if nothing inside of it needs
        # a scale.
        return any(map(_has_casts, jaxprs_in_params(eqn.params)))
    if not _is_cast(eqn):
        return False
    number, dtype = v.uniform(operands[0]), eqn.params["new_dtype"]
    return number is None or not formats.holds(dtype, number)


def _is_cast(eqn: Any) -> bool:
    if eqn.primitive.name != "convert_element_type":
        return False
    return is_float(eqn.invars[0].aval) and is_narrow(eqn.outvars[0].aval)


@per_jaxpr
def _has_casts(jaxpr: Any) -> bool:
    return any(
        _is_cast(eqn) or any(map(_has_casts, jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


def known(x: Any) -> Any:
    """Return a NumPy array of one number as a uniform constant; others unchanged."""
    # `np.zeros(8)` that a function closes over is no broadcast, but must not set the
    # scale of `zeros + x` either.
    if not isinstance(x, np.ndarray) or not x.size or not is_float(x):
        return x
    first = x[(0,) * x.ndim]
    if (x == first).all():
        return np.broadcast_to(first, x.shape)
    return x


def _numbers(eqn: Any, operands: tuple[float | None, ...]) -> Sequence[float | None]:
    """Return the number that fills each result, or None where it is unknown."""
    if eqn.primitive.name == "jit":
        # The zeros of a user's jitted function must not set a scale outside of it.
        return _numbers_of(eqn.params["jaxpr"], operands)
    fold = _FOLDED.get(eqn.primitive.name)
    if fold is None or None in operands or not is_float(eqn.outvars[0].aval):
        return [None] * len(eqn.outvars)
    dtype = eqn.outvars[0].aval.dtype
    with np.errstate(all="ignore"):
        # In the equation's dtype, so that the number is rounded as the program rounds
        # it.
        return [float(fold(*(np.asarray(c).astype(dtype) for c in operands)))]


@per_jaxpr
def _numbers_of(jaxpr: Any, operands: tuple[float | None, ...]) -> list[float | None]:
    numbers = dict(
        zip(jaxpr.constvars, map(v.uniform, map(known, jaxpr.consts)), strict=True)
    )
    numbers |= dict(zip(jaxpr.invars, operands, strict=True))

    def read(atom: Any) -> float | None:
        if isinstance(atom, Literal):
            return v.uniform(atom.val)
        return numbers[atom]

    for eqn in jaxpr.eqns:
        numbers |= dict(
            zip(eqn.outvars, _numbers(eqn, tuple(map(read, eqn.invars))), strict=True)
        )
    return list(map(read, jaxpr.outvars))


# What builds constants, and is rounded alike by NumPy and every compiler: GPUs take
# approximate quotients and roots.
_FOLDED: dict[str, Callable] = {
    "broadcast_in_dim": np.asarray,
    "convert_element_type": np.asarray,
    "copy": np.asarray,
    "pvary": np.asarray,
    "reshape": np.asarray,
    "squeeze": np.asarray,
    "neg": np.negative,
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
}


def _register(keys: tuple[str, ...], fun: Callable, **flags: Any) -> Callable:
    rules.update(dict.fromkeys(keys, Rule(fun, **flags)))
    return fun


def apply_to_data(eqn: Any, *operands: Any) -> list[Any]:
    """Apply the operation to the data: the rule that `structural` registers."""
    # One scale: the operation may mix elements that had different ones.
    operands = tuple(map(v.scalar_scale, operands))
    out = bind_all(eqn, *map(v.data_of, operands))
    first = next(x for x in operands if isinstance(x, Value))
    # sort and optimization_barrier take several arrays, each with a scale; split makes
    # several of one.
    like = operands if len(out) == len(operands) else [first] * len(out)
    return [
        x.with_data(y) if isinstance(x, Value) and is_float(y) else y
        for x, y in zip(like, out, strict=True)
    ]


def _as_traced(x: Any, aval: Any) -> Any:
    """Return a logical value in the dtype that it was traced with."""
    x = v.unscaled(x, aval.dtype)
    if is_narrow(aval):
        # A plain operand may be wider than it was traced, and its bits are read.
        return lax.convert_element_type(x, aval.dtype)
    return x


def _as_wide_as(x: Any, aval: Any) -> Any:
    """Return a logical value in FP32, or in FP64 where the trace has that."""
    x = v.logical(x)
    if not is_float(aval) or isinstance(x, jax.Ref):
        return x
    # A program with x64 keeps FP64's digits, where the scale is 1.
    if aval.dtype.itemsize > 4:
        return lax.convert_element_type(x, aval.dtype)
    return formats.as_float32(x)


def apply_to_logical(eqn: Any, *operands: Any) -> list[Any]:
    """Apply the operation to the logical value, and keep the first operand's scale."""
    first = next(x for x in operands if isinstance(x, Value))
    out = default(eqn, *operands)
    for i, y in enumerate(out):
        if isinstance(y, Value):
            out[i] = dataclasses.replace(
                v.at_scale(y, first.scale, first.expected_rms),
                is_fill_value=first.is_fill_value,
            )
    return out
