"""The table of scale propagation rules, and the one-line definers that fill it.

Primitives are named by `primitive.name`, as jaxprs print them.

A rule is a function `rule(eqn, *operands) -> result` (a list of results where the primitive has several). An operand
is a `Value`, or plain: an array, a number or a constant that no scale belongs to. At least one operand is a `Value`.
So is a result that carries a scale; integers and booleans are plain. `eqn` is the jaxpr's equation, traced with
float32 where the data may be narrower.

    structural("transpose")                  # the operation on the data, the scale as it is
    unscaled("exp")                          # on the logical value in FP32, result of scale 1

    @rule("mul")
    def _mul(eqn, a, b): ...
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from scalify_core import value as v
from scalify_core.value import Value


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one primitive propagates scales.

    Attributes:
        fun: the rule.
        kind: the definer's name: what docs/coverage.md says.
        wide: whether operands may come with FP32 data that has not yet been rounded to its format.
        lazy: whether operands may come with a factor that is not yet in their data.
        control: whether `fun` also wants the evaluator of inner jaxprs, as the keyword `evaluate`.
    """

    fun: Callable
    kind: str
    wide: bool = True
    lazy: bool = False
    control: bool = False


rules: dict[str, Rule] = {}
composite_rules: dict[str, Callable] = {}
wide_composites: set[str] = set()
transparent_composites: dict[str, tuple[int, int]] = {}
_warned: set[str] = set()


def rule(*primitives: str, wide: bool = True, lazy: bool = False) -> Callable:
    """Decorator: a hand-written rule."""
    return _definer("rule", primitives, wide=wide, lazy=lazy)


def control(*primitives: str, wide: bool = False) -> Callable:
    """Decorator: a rule of a primitive with inner jaxprs, called with `evaluate=`."""
    return _definer("control", primitives, wide=wide, control=True)


def structural(*primitives: str) -> None:
    """The same operation on the data; each result has the scale of the value at its place, or of the only value."""
    _definer("structural", primitives, lazy=True)(_structural)


def unscaled(*primitives: str) -> None:
    """The operation on the logical value in FP32; the result has scale 1."""
    _definer("unscaled", primitives, lazy=True)(_unscaled)


def logical(*primitives: str) -> None:
    """The operation on the logical value in FP32; the result is brought back to the first operand's scale."""
    _definer("logical", primitives, lazy=True)(_logical)


def takes_wide(eqn: Any) -> bool:
    """Whether the equation's rule reads data that has not been rounded to its format."""
    if eqn.primitive.name == "scalify_composite":
        return eqn.params["call"].name in wide_composites
    found = rules.get(eqn.primitive.name)
    return found is None or found.wide


def passed(eqn: Any) -> tuple[Any, Any] | None:
    """The variable that an equation only looks at, and its new name; None: the equation does something."""
    if eqn.primitive.name != "scalify_composite":
        return None
    places = transparent_composites.get(eqn.params["call"].name)
    return None if places is None else (eqn.invars[places[0]], eqn.outvars[places[1]])


def composite_rule(name: str, *, wide: bool = False, transparent: tuple[int, int] | None = None) -> Callable:
    """Decorator: the rule of the composite calls named `name` ("gelu", "gelu.fwd", "gelu.bwd").

    The rule takes the `Call` and its operands in the tree of the function's arguments (`Value`, plain or None), with
    their data in their formats; it returns the results in the tree of the function's results. With `wide`, data may
    be FP32 that has not yet been rounded. With `transparent`, the numbers of an operand and of a result among all
    leaves, that operand is returned as it is, whatever it is, and the program is evaluated as without the call.
    """

    def register(fun: Callable) -> Callable:
        composite_rules[name] = fun
        if wide:
            wide_composites.add(name)
        if transparent is not None:
            transparent_composites[name] = transparent
        return fun

    return register


def default(eqn: Any, *operands: Any) -> Any:
    """For primitives without a rule: as `unscaled`, with one warning that names the primitive."""
    name = eqn.primitive.name
    if name not in _warned:
        _warned.add(name)
        warnings.warn(f"scalify: no rule for the primitive {name!r}: it runs in FP32 with scale 1", stacklevel=2)
    return _unscaled(eqn, *operands)


def bind(eqn: Any, *operands: Any) -> Any:
    """The equation's primitive on plain operands."""
    params = eqn.primitive.get_bind_params(eqn.params)
    return eqn.primitive.bind(*operands, **params)


def plain(eqn: Any, *operands: Any) -> Any:
    """An equation that no scale takes part in. Uniform constants stay known: a loop's zeros must not get a scale."""
    fold = _FOLDED.get(eqn.primitive.name)
    if fold is not None and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
        constants = [v.uniform(x) for x in operands]
        if None not in constants:
            aval = eqn.outvars[0].aval
            with np.errstate(all="ignore"):
                number = fold(*(np.asarray(c).astype(aval.dtype) for c in constants))
            return np.broadcast_to(number, aval.shape)
    return bind(eqn, *(v.materialise(x) for x in operands))


def _same(x: np.ndarray) -> np.ndarray:
    return x


_FOLDED: dict[str, Callable] = {
    **dict.fromkeys(("broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "copy", "copy_p"), _same),
    **{"neg": np.negative, "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply},
}


def _definer(
    kind: str, primitives: tuple[str, ...], wide: bool = True, lazy: bool = False, control: bool = False
) -> Callable:
    def register(fun: Callable) -> Callable:
        for primitive in primitives:
            rules[primitive] = Rule(fun, kind, wide, lazy, control)
        return fun

    return register


def _structural(eqn: Any, *operands: Any) -> Any:
    # A negative factor would turn maxima into minima.
    operands = tuple(_one_scale(x) if isinstance(x, Value) else x for x in operands)
    out = bind(eqn, *(x.data if isinstance(x, Value) else v.materialise(x) for x in operands))
    first = next(x for x in operands if isinstance(x, Value))
    if not eqn.primitive.multiple_results:
        return v.value(out, first.scale, first.rho, first.dtype, first.factor, first.excess)
    like = operands if len(out) == len(operands) else [first] * len(out)
    return [
        v.value(y, x.scale, x.rho, x.dtype, x.factor) if isinstance(x, Value) and _is_float(y) else y
        for x, y in zip(like, out, strict=True)
    ]


def _one_scale(x: Value) -> Value:
    x = v.scalar_scale(x)
    return x if x.factor > 0 else v.settle(x)


def _unscaled(eqn: Any, *operands: Any) -> Any:
    args = [v.unscaled(x, var.aval.dtype) for x, var in zip(operands, eqn.invars, strict=True)]
    dtype = v.result_dtype(*operands)
    out = bind(eqn, *args)
    if not eqn.primitive.multiple_results:
        return v.value(out, 1.0, 1.0, dtype) if _is_float(out) else out
    return [v.value(y, 1.0, 1.0, dtype) if _is_float(y) else y for y in out]


def _logical(eqn: Any, *operands: Any) -> Any:
    out = _unscaled(eqn, *operands)
    if not isinstance(out, Value):
        return out
    first = next(x for x in operands if isinstance(x, Value))
    return v.value(v.at_scale(out, first.scale), first.scale, first.rho, out.dtype)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)
