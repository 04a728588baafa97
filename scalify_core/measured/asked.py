"""Which products a program asks to have in FP32, by casts that are none where all of it is traced in FP32.

`x.astype(jnp.float32) @ y` is FP16 times FP16 to who sees FP32 arrays. So the function is traced a second time, with
the dtypes that plain code would have, and the products of both traces are laid beside each other, jaxpr by jaxpr. What
is in FP32 there because the program says so is given the highest precision here, which is FP32, see `plan`.

A cast to FP32 is a request; what is computed of that in FP32 goes on with it, until a cast back. A product of narrow
operands with an FP32 result asks for this result, and for what is computed of FP32 alone. But another product of that
and a narrow operand reads both in the narrow format: so are the gradients of attention's logits. Promotion is no
request: a scalar or a table that happens to be FP32 (`x / np.sqrt(d)`) takes no product out of its format.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.source_info_util import Transform
from jax.extend.core import Literal

from scalify_core.caches import per_jaxpr
from scalify_core.measured.plan import CALLS, PRODUCTS, inner_jaxpr, scan_parts, while_parts

_INNER = {**dict.fromkeys(CALLS, ("jaxpr", "call_jaxpr")), "scan": ("jaxpr",), "cond": ("branches",)}
_INNER["while"] = ("cond_jaxpr", "body_jaxpr")
# Functions of JAX by which a program asks for a dtype. Sums of FP16 are FP32 in any case, and FP16 again afterwards.
_CASTS = {"astype", "convert_element_type", "asarray", "array", "sum", "mean", "prod", "var", "nansum", "nanmean"}
_PROMOTES = "promote_"  # so begin the names of functions of JAX and Flax that find a common dtype
_BY_HAND = "custom_vjp.__call__"  # and by which it has a pullback of its own
_JAX, _FLAX = os.path.dirname(jax.__file__), f"{os.sep}flax{os.sep}"
_IN_FULL = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)


Level = int  # how a value came to be FP32: 0, by itself; or as follows
# Promoted at a line of the user's, or within a library; asked for as the result of a product, or by a cast.
PROMOTED, _PROMOTED_BY_LIBRARY, _OF_PRODUCT, _OF_CAST = 1, 2, 3, 4


class Item(NamedTuple):
    """A product, or an equation that has some inside.

    Attributes:
        key: what it is, the same in both traces.
        asked: whether it is a product that was asked to be in FP32.
        promoted: of a product with an FP32 operand that nobody asked for, how that came to be so; else None.
        inner: the items of its inner jaxprs.
    """

    key: Any
    asked: bool
    promoted: Level | None
    inner: tuple[tuple[Item, ...], ...]

    @property
    def any_asked(self) -> bool:
        """Whether a product was asked for, here or further in."""
        return self.asked or any(item.any_asked for items in self.inner for item in items)


def in_full(jaxpr: Any, plain: Any, given: tuple[Level, ...]) -> Any:
    """`jaxpr` with the products in full that are FP32 on request in `plain`, the trace of plain code.

    `given`: how the last arguments of `plain` came to be FP32; nobody asked for those before.
    """
    found = _asked(jaxpr, of_plain(plain, given)[0])
    return jaxpr if found is None else found


def promoted(jaxpr: Any, plain: Any, given: tuple[Level, ...]) -> dict[int, Level]:
    """The products of a jaxpr, also further in, with an FP32 operand in `plain` that nobody asked for.

    By their ids, how that came to be FP32.
    """
    return dict(_promoted(jaxpr, of_plain(plain, given)[0]))


def is_unknown(jaxpr: Any, plain: Any, given: tuple[Level, ...]) -> bool:
    """Whether a product is asked to be in FP32 in `plain` of which it is not known which one of `jaxpr` it is."""
    return _is_unknown(jaxpr, of_plain(plain, given)[0])


def of_plain(plain: Any, given: tuple[Level, ...]) -> tuple[tuple[Item, ...], tuple[Level, ...]]:
    """The products of the trace of plain code, and how its results came to be FP32."""
    return _found(plain, (0,) * (len(plain.invars) - len(given)) + given, False)


def is_wide(aval: Any) -> bool:
    """Whether a value is FP32 or wider."""
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact) and aval.dtype.itemsize >= 4


def is_on_request(aval: Any, level: Level) -> bool:
    """Whether a value of plain code has its dtype by what the program says: it is narrow, or FP32 was asked for."""
    return not is_wide(aval) or level >= _OF_PRODUCT


@per_jaxpr
def has_products(jaxpr: Any) -> bool:
    """Whether there is a product, here or further in."""
    return bool(_places(jaxpr))


def has_same_products(jaxpr: Any, plain: Any) -> bool:
    """Whether all products of a jaxpr stand in the same order in the trace of plain code."""
    places, others = _places(jaxpr), _places(plain)
    if [key for _, key in places] != [key for _, key in others]:
        return False
    inner = ((_inner(jaxpr.eqns[i]), _inner(plain.eqns[j])) for (i, _), (j, _) in zip(places, others, strict=True))
    return all(has_same_products(*pair) for both in inner for pair in zip(*both, strict=True))


@per_jaxpr
def _places(jaxpr: Any) -> tuple[tuple[int, Any], ...]:
    """The equations of a jaxpr that are products, or have some inside: their numbers and their keys."""
    found: list[tuple[int, Any]] = []
    for i, eqn in enumerate(jaxpr.eqns):
        name = eqn.primitive.name
        if name in PRODUCTS:
            shapes = tuple(x.aval.shape for x in eqn.invars)
            dims = next(str(x) for key, x in eqn.params.items() if key.endswith("dimension_numbers"))
            found.append((i, (name, shapes, dims)))
        elif any(map(_places, _inner(eqn))):
            found.append((i, (name, len(_inner(eqn)))))
    return tuple(found)


def _inner(eqn: Any) -> list[Any]:
    """The inner jaxprs of an equation that are followed."""
    found = [eqn.params[key] for key in _INNER.get(eqn.primitive.name, ()) if key in eqn.params]
    return [jaxpr for x in found for jaxpr in (x if isinstance(x, tuple) else (x,))]


@per_jaxpr
def _asked(jaxpr: Any, items: tuple[Item, ...]) -> Any:
    """The jaxpr in which the products that were asked for are in full; None: the jaxpr as it is.

    Where a program branches on dtypes, and has products that the other one has not, the others stand side by side.
    """
    if not any(item.any_asked for item in items):
        return None
    eqns = list(jaxpr.eqns)
    for i, item in _beside(jaxpr, items):
        eqns[i] = _with_inner(eqns[i], item) if item.inner else _in_full(eqns[i]) if item.asked else eqns[i]
    return jaxpr.replace(eqns=eqns)


def _beside(jaxpr: Any, items: tuple[Item, ...]) -> Iterator[tuple[int, Item]]:
    """The numbers of equations, each with its item of plain code."""
    places = _places(jaxpr)
    keys, others = [key for _, key in places], [item.key for item in items]
    for start, other, size in difflib.SequenceMatcher(None, keys, others, autojunk=False).get_matching_blocks():
        for (i, _), item in zip(places[start : start + size], items[other : other + size], strict=True):
            yield i, item


@per_jaxpr
def _promoted(jaxpr: Any, items: tuple[Item, ...]) -> tuple[tuple[int, Level], ...]:
    found: list[tuple[int, Level]] = []
    for i, item in _beside(jaxpr, items):
        if item.promoted is not None:
            found.append((id(jaxpr.eqns[i]), item.promoted))
        for inner, of_inner in zip(_inner(jaxpr.eqns[i]), item.inner, strict=True):
            found += _promoted(inner, of_inner)
    return tuple(found)


@per_jaxpr
def _is_unknown(jaxpr: Any, items: tuple[Item, ...]) -> bool:
    beside = list(_beside(jaxpr, items))
    if sum(item.any_asked for _, item in beside) < sum(item.any_asked for item in items):
        return True
    inner = (pair for i, item in beside for pair in zip(_inner(jaxpr.eqns[i]), item.inner, strict=True))
    return any(_is_unknown(*pair) for pair in inner)


def _in_full(eqn: Any) -> Any:
    if eqn.params["precision"] is not None and not isinstance(eqn.params["precision"], tuple):
        return eqn  # an algorithm that was chosen by name
    return eqn.replace(params={**eqn.params, "precision": _IN_FULL})


def _with_inner(eqn: Any, item: Item) -> Any:
    inner = iter(item.inner)

    def replaced(jaxpr: Any) -> Any:
        found = _asked(jaxpr, next(inner))
        return jaxpr if found is None else found

    params = dict(eqn.params)
    for key in _INNER[eqn.primitive.name]:
        if key in params:
            old = params[key]
            params[key] = tuple(map(replaced, old)) if isinstance(old, tuple) else replaced(old)
    return eqn.replace(params=params)


@per_jaxpr
def _found(jaxpr: Any, given: tuple[Level, ...], backward: bool) -> tuple[tuple[Item, ...], tuple[Level, ...]]:
    """The items of a jaxpr of plain code, and how its results came to be FP32, as `given` of its arguments.

    `backward`: whether it is transposed.
    """
    known = dict(zip(jaxpr.invars, given, strict=True))

    def level(atom: Any) -> Level:
        return 0 if type(atom) is Literal else known.get(atom, 0)

    numbers, items = dict(_places(jaxpr)), []
    for i, eqn in enumerate(jaxpr.eqns):
        asked = list(map(level, eqn.invars))
        inner, outs = _through(eqn, asked, _is_backward(eqn, backward))
        known.update((var, out if is_wide(var.aval) else 0) for var, out in zip(eqn.outvars, outs, strict=True))
        if i in numbers:
            is_asked = not inner and _is_asked(eqn, asked)
            promoted = None if inner or is_asked or not any(is_wide(x.aval) for x in eqn.invars[:2]) else max(asked)
            items.append(Item(numbers[i], is_asked, promoted, inner))
    return tuple(items), tuple(map(level, jaxpr.outvars))


def _is_asked(eqn: Any, asked: Sequence[Level]) -> bool:
    """Whether a product is FP32 on request, its operands having come to be so."""
    is_mixed = any(_is_narrow(x.aval) for x in eqn.invars[:2])
    return max(asked) >= (_OF_CAST if is_mixed else _OF_PRODUCT)


def _through(eqn: Any, asked: list[Level], backward: bool) -> tuple[tuple[tuple[Item, ...], ...], Sequence[Level]]:
    """The items of the inner jaxprs of an equation, and how its results came to be FP32."""
    name = eqn.primitive.name
    if name == "scan":
        return _loop(eqn.params["jaxpr"], *scan_parts(eqn, asked), backward)
    if name == "while":
        of_cond, consts, carry = while_parts(eqn, asked)
        body, outs = _loop(eqn.params["body_jaxpr"], consts, carry, (), backward)
        cond, _ = _found(eqn.params["cond_jaxpr"], (*of_cond, *outs), backward)
        return (cond, *body), outs
    if name == "cond":
        found = [_found(branch, tuple(asked[1:]), backward) for branch in eqn.params["branches"]]
        return tuple(items for items, _ in found), [max(out) for out in zip(*(outs for _, outs in found), strict=True)]
    if name in CALLS:
        items, outs = _found(inner_jaxpr(eqn), tuple(asked), backward)
        return (items,), outs
    if name == "convert_element_type":
        return (), [asked[0] if is_wide(eqn.invars[0].aval) else _of_cast(eqn, backward)]
    own = _of_product(eqn, backward) if name in PRODUCTS else 0
    return (), [max(own, *asked, 0)] * len(eqn.outvars)


def _loop(
    jaxpr: Any, consts: Sequence[Level], carry: Sequence[Level], xs: Sequence[Level], backward: bool
) -> tuple[tuple[tuple[Item, ...], ...], Sequence[Level]]:
    """As `_through`, of a body whose carry one more turn leaves as it is."""
    while True:
        items, outs = _found(jaxpr, (*consts, *carry, *xs), backward)
        after = [max(x, y) for x, y in zip(carry, outs, strict=False)]
        if after == list(carry):
            return (items,), outs
        carry = after


def _is_backward(eqn: Any, within: bool) -> bool:
    """Whether an equation is that of a transposed one: its cast to FP32 is made of a cast back.

    What a backward pass computes again is not, and a pullback that is written by hand is what it says.
    """
    stack = eqn.source_info.name_stack.stack
    if any(x.name == "rematted_computation" for x in stack):
        return False
    return within or any(type(x) is Transform and x.name == "transpose" for x in stack)


def _of_product(eqn: Any, backward: bool) -> Level:
    """What the FP32 result of a product is: asked for, of two narrow operands; or as wide as one of them."""
    narrow = sum(_is_narrow(x.aval) for x in eqn.invars[:2])
    if narrow != 1:
        return _OF_PRODUCT if narrow else 0
    return 0 if backward else _PROMOTED_BY_LIBRARY if _called(eqn)[1] else PROMOTED


def _of_cast(eqn: Any, backward: bool) -> Level:
    """What a cast to FP32 is: written in the program, or in a library; or made because another operand is wider.

    It is seen from what the program has called. Of a pullback that is written by hand, and in loops, branches and calls
    of what belongs to it, all that is left is that it is.
    """
    if not _is_narrow(eqn.invars[0].aval):
        return 0
    called, in_library = _called(eqn)
    if _BY_HAND in called:
        return _OF_CAST
    if backward:
        return 0
    if not _CASTS.isdisjoint(called) and not any(name.startswith(_PROMOTES) for name in called):
        return _OF_CAST
    return _PROMOTED_BY_LIBRARY if in_library else PROMOTED


def _called(eqn: Any) -> tuple[list[str], bool]:
    """The functions of JAX that an equation was made in, and that of Flax which called them, if one did; whether so."""
    called = []
    for frame in [] if eqn.source_info.traceback is None else eqn.source_info.traceback.frames:
        if frame.file_name.startswith(_JAX):
            called.append(frame.function_name)
        else:
            in_library = _FLAX in frame.file_name
            return [*called, frame.function_name] if in_library else called, in_library
    return called, False


def _is_narrow(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype.itemsize < 4
