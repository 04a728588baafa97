"""Evaluating a jaxpr by its plan: FP32 between stores, a measured scale at each."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from scalify_core import lowering, registry, storage, watch
from scalify_core.array import ScaledArray, with_scale
from scalify_core.measured import masks, readers, roots, store
from scalify_core.measured.plan import (
    KEEP_AXES,
    Plan,
    Step,
    is_float,
    plan_of,
    product_format,
)
from scalify_core.measured.products import Want, lines, scales_of_result
from scalify_core.scales import broadcast_scale
from scalify_core.scopes import scope_of, within
from scalify_core.watch import Reporter

_IN_FULL = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
_SMALLEST_LINE = 2.0**-20  # of the largest: what a result stores with all digits
Kind = Callable[[Step, "Operands"], Any]
kinds: dict[str, Kind] = {}


def kind(*names: str) -> Callable[[Kind], Kind]:
    """Decorator: how steps of these kinds are done; the function gives a list of
    results.
    """

    def register(fun: Kind) -> Kind:
        kinds.update(dict.fromkeys(names, fun))
        return fun

    return register


_reporter: ContextVar[Reporter | None] = ContextVar("reporter", default=None)


def evaluated(
    jaxpr: Any,
    leaves: Sequence[Any],
    dtypes: Sequence[np.dtype | None] = (),
    *,
    reporter: Reporter | None = None,
) -> list[Any]:
    """Return the results of a jaxpr, of arrays and ScaledArrays, as such.

    An argument that is returned is returned as it is.

    Args:
        jaxpr: traced with float32 arrays for what is scaled.
        leaves: its arguments.
        dtypes: of the results in plain code; None where they are not known.
        reporter: what the program tells what is lost; None: it has no callbacks.
    """
    args = list(map(entering, leaves))
    formats = tuple(map(format_of, leaves))
    plan = plan_of(jaxpr, formats)
    out_formats = formats_of_results(plan.out_formats, dtypes)
    token = _reporter.set(reporter)
    try:
        env = Operands(jaxpr, args, (False,) * len(out_formats))
        out = run(jaxpr, plan, env)
        given = {id(x) for x in args}
        constants = masks.constants_in(jaxpr, masks.of_arguments(args, formats))
        nonzero, _ = roots.taken_of(jaxpr, (False,) * len(out))
        of_results = zip(
            jaxpr.outvars, out, out_formats, constants, nonzero, strict=True
        )
        returned: list[Any] = [
            (
                x
                if f is None or is_as_it_is(x, f, given)
                else _returned(jaxpr, var, x, f, large, nonzero=keep)
            )
            for var, x, f, large, keep in of_results
        ]
    finally:
        _reporter.reset(token)
    if reporter is not None:
        reporter.call_is_done(returned)
    return returned


def formats_of_results(
    formats: Sequence[np.dtype | None], dtypes: Sequence[np.dtype | None]
) -> list[np.dtype | None]:
    """In which results are stored: with the dtypes of plain code, if those are known; 8
    bits count as FP16 there.
    """
    dtypes = [*dtypes, *[None] * (len(formats) - len(dtypes))]
    return [
        own if _is_own(own, dtype) else dtype
        for own, dtype in zip(formats, dtypes, strict=True)
    ]


def is_as_it_is(x: Any, dtype: np.dtype, given: set[int]) -> bool:
    """Whether a result is returned as it is: it is an argument, which is not only cast
    to FP32.
    """
    return id(x) in given and not (
        type(x) is ScaledArray and x.dtype.itemsize < dtype.itemsize
    )


def _is_own(own: np.dtype | None, dtype: np.dtype | None) -> bool:
    if own is None or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return True
    return own.itemsize == 1 and dtype.itemsize < 4


def format_of(x: Any) -> np.dtype | None:
    """Return the format of an argument; None: it is plain."""
    return np.dtype(x.dtype) if type(x) is ScaledArray else None


def entering(x: Any) -> Any:
    """An argument: a ScaledArray, or an array of logical values."""
    if type(x) is not ScaledArray:
        return x if isinstance(x, jax.Array) else jnp.asarray(x)
    scale = x.scale if x.is_static else jnp.asarray(x.scale, jnp.float32)
    data = x.data if isinstance(x.data, jax.Array) else jnp.asarray(x.data)
    return with_scale(
        data, scale if x.is_static or scale.size != 1 else scale.reshape(())
    )


def _returned(
    jaxpr: Any,
    var: Any,
    x: Any,
    dtype: np.dtype,
    constants: frozenset[float],
    *,
    nonzero: bool,
) -> ScaledArray:
    """A result, stored; what that loses is reported at the equation that makes it."""
    reporter = _reporter.get()
    makers = (
        [] if reporter is None else [eqn for eqn in jaxpr.eqns if var in eqn.outvars]
    )
    if reporter is None or not makers:
        return store.result(x, dtype, constants, nonzero=nonzero)
    with reporter.at(makers[0]):
        out = store.result(x, dtype, constants, nonzero=nonzero)
        if store.has_own_range(dtype):
            reporter.returned(
                str(dtype), watch.beside_lost(store.wide(x), store.wide(out))
            )
        return out


def run(jaxpr: Any, plan: Plan, args: Sequence[Any] | Operands) -> list[Any]:
    """The results of a jaxpr by its plan: each a ScaledArray, or an array of logical
    values.
    """
    env, reporter = (
        args if isinstance(args, Operands) else Operands(jaxpr, args),
        _reporter.get(),
    )
    for scope, steps in itertools.groupby(plan.steps, lambda step: scope_of(step.eqn)):
        with within(*scope):
            for step in steps:
                with (
                    contextlib.nullcontext()
                    if reporter is None
                    else reporter.at(step.eqn)
                ):
                    env.write(step, kinds[step.kind](step, env))
    return [env.read(atom) for atom in jaxpr.outvars]


class Operands:
    """What the variables of a jaxpr are, while it is evaluated."""

    def __init__(
        self, jaxpr: Any, args: Sequence[Any], resized: tuple[bool, ...] | None = None
    ) -> None:
        """Of its arguments; `resized`: of which results rows may be given other sizes
        (None: of all), see `readers`.
        """
        self._jaxpr, self._resized = (
            jaxpr,
            (True,) * len(jaxpr.outvars) if resized is None else resized,
        )
        self.values: dict[Any, Any] = dict(
            zip(jaxpr.constvars, jaxpr.consts, strict=True)
        )
        self.values.update(zip(jaxpr.invars, args, strict=True))
        self.copies: dict[tuple[Any, Want], ScaledArray] = {}

    def read(self, atom: Any) -> Any:
        """As it is: a ScaledArray, or the logical value."""
        return atom.val if type(atom) is Literal else self.values[atom]

    def copy(self, atom: Any, want: Want | None) -> ScaledArray | None:
        """As what a product reads, if that is wanted of it and it has been stored so;
        else None.
        """
        return (
            None
            if want is None or type(atom) is Literal
            else self.copies.get((atom, want))
        )

    def passed_on(self, atom: Any, want: Want | None, alone: bool) -> Any:
        """As a call reads it that passes it on to products: stored, if they read it
        `alone` and it has been; else FP32.

        Who is to be told what a product loses is shown what was not stored yet; it is
        stored all the same, later.
        """
        copy = self.copy(atom, want) if alone and _reporter.get() is None else None
        return self.read(atom) if copy is None else copy

    def wide(self, atom: Any) -> Any:
        """The logical value, in FP32 where it is scaled."""
        return store.wide(self.read(atom))

    def stored(self, atom: Any, want: Want) -> ScaledArray:
        """In a narrow format; once for all who read it so."""
        x = self.read(atom)
        if type(atom) is Literal:
            return store.stored(x, *want)
        found = self.copies.get((atom, want))
        if found is None:
            found = self.copies[atom, want] = store.stored(
                x, *want, masked=atom in masks.lowest_in(self._jaxpr)
            )
        return found

    def is_logical(self, atom: Any) -> bool:
        """Whether a variable is a logical value, of which what is stored has not all
        digits.
        """
        return type(self.values[atom]) is not ScaledArray

    def is_resized(self, var: Any) -> bool:
        """Whether who reads a variable may give its rows other sizes."""
        return var in readers.resized(self._jaxpr, self._resized)

    def in_units_of(self, atom: Any, stored: ScaledArray) -> Any:
        """The logical value over the scale of what it is stored as, FP32."""
        (x,) = lowering.once(storage.as_float32(self.wide(atom)))
        return x * broadcast_scale(
            jnp.float32(1) / jnp.asarray(stored.scale, jnp.float32), x
        )

    def write(self, step: Step, results: Sequence[Any]) -> None:
        """The results of a step, and what its plan stores of them for products; all
        others read them in FP32.
        """
        for var, x, want in zip(step.eqn.outvars, results, step.store, strict=True):
            self.values[var] = x
            if want is not None and (var, want) not in self.copies:
                self.copies[var, want] = store.stored(
                    x, *want, masked=var in masks.lowest_in(self._jaxpr)
                )


def listed(eqn: Any, out: Any) -> Sequence[Any]:
    """The results of a primitive as a list."""
    return out if eqn.primitive.multiple_results else [out]


@kind("plain")
def _plain(step: Step, env: Operands) -> Sequence[Any]:
    return listed(step.eqn, registry.bind(step.eqn, *map(env.read, step.eqn.invars)))


@kind("bind")
def _bind(step: Step, env: Operands) -> Sequence[Any]:
    eqn = step.eqn
    operands = list(map(env.wide, eqn.invars))
    if step.traced:
        operands = [
            _as_traced(x, var.aval) for x, var in zip(operands, eqn.invars, strict=True)
        ]
    elif step.lift:
        operands = [storage.as_float32(x) if _is_narrow(x) else x for x in operands]
    out = listed(eqn, registry.bind(eqn, *operands))
    if not step.traced:
        return out
    return [
        x if f is None or not _is_narrow(x) else storage.as_float32(x)
        for x, f in zip(out, step.out_formats, strict=True)
    ]


def _as_traced(x: Any, aval: Any) -> Any:
    return storage.saturating_cast(jnp.asarray(x), aval.dtype) if is_float(aval) else x


def _is_narrow(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4


@kind("move")
def _move(step: Step, env: Operands) -> Sequence[Any]:
    """Products read what is stored of the operand, moved, and not measured again; all
    others the value, moved.
    """
    eqn, (atom, *rest) = step.eqn, step.eqn.invars
    others = list(map(env.read, rest))
    copy = env.copy(atom, step.wants[0])
    want = None if copy is None else step.store[0]
    if want is not None and (moved := _moved(eqn, copy, others)) is not None:
        (y,) = moved
        if y.dtype == want.dtype and store.scaled_in(y, want.parts):
            env.copies[eqn.outvars[0], want] = y
    moved = _moved(eqn, env.read(atom), others)
    return _bind(step, env) if moved is None else moved


def _moved(eqn: Any, x: Any, others: Sequence[Any]) -> list[ScaledArray] | None:
    """The results for a stored operand, as they are stored; None: it is not, or the
    scale does not move so.
    """
    if type(x) is not ScaledArray or x.dtype.itemsize >= 4:
        return None
    scale = _moved_scale(eqn, x)
    if scale is None:
        return None
    return [
        with_scale(y, scale) for y in listed(eqn, registry.bind(eqn, x.data, *others))
    ]


def _moved_scale(eqn: Any, x: ScaledArray) -> Any:
    """The scale of `x` moved as its elements are; None: it is not known how."""
    if x.is_static or jnp.ndim(x.scale) == 0 or eqn.primitive.name in KEEP_AXES:
        return x.scale
    if eqn.primitive.name == "transpose" and jnp.ndim(x.scale) == x.ndim:
        return lax.transpose(x.scale, eqn.params["permutation"])
    return None


@kind("product")
def _product(step: Step, env: Operands) -> Sequence[Any]:
    eqn = step.eqn
    dtype = product_format(step.formats, eqn)
    assert dtype is not None
    a, b = (
        env.stored(atom, want or Want(dtype))
        for atom, want in zip(eqn.invars[:2], step.wants[:2], strict=True)
    )
    rest = list(map(env.read, eqn.invars[2:]))
    # BF16 holds what FP32 does, and XLA's CPU backend has no BF16 product with an FP32
    # result.
    result = np.dtype(np.float32) if store.has_own_range(dtype) else dtype

    def multiply(a: Any, b: Any) -> Any:
        return storage.as_float32(
            eqn.primitive.bind(
                a, b, *rest, **{**eqn.params, "preferred_element_type": result}
            )
        )

    out, scales = multiply(a.data, b.data), scales_of_result(eqn, a, b, *rest)
    # by a `whole` one: of the other operand, zeros and powers
    copied = 1 if step.formats[0] is None else 0
    if step.whole and env.is_logical(eqn.invars[copied]):
        x = (a, b)[copied]
        for part, unit in store.rest_of(env.in_units_of(eqn.invars[copied], x), x.data):
            out += unit * (multiply(a.data, part) if copied else multiply(part, b.data))
    if (reporter := _reporter.get()) is not None:
        in_full = {
            **eqn.params,
            "preferred_element_type": np.dtype(np.float32),
            "precision": _IN_FULL,
        }
        left, right = (
            (env.in_units_of(atom, x), x.data)
            for atom, x in zip(eqn.invars, (a, b), strict=False)
        )
        if step.whole:
            left, right = (
                (store.in_parts(*found), found[1]) for found in (left, right)
            )
        multiply_in_full = lambda a, b: eqn.primitive.bind(a, b, *rest, **in_full)
        smallest = 0.0 if env.is_resized(eqn.outvars[0]) else _SMALLEST_LINE
        lost = watch.lines_lost(
            multiply_in_full, lines(eqn), left, right, scales, smallest
        )
        reporter.multiplied(str(dtype), lost)
    return [store.scaled_by(out, *scales)]


@kind("convert")
def _convert(step: Step, env: Operands) -> Sequence[Any]:
    """A cast to a narrow dtype is the user's wish to round: the value is stored."""
    x, dtype = env.wide(step.eqn.invars[0]), np.dtype(step.eqn.params["new_dtype"])
    return [
        (
            store.stored(x, dtype)
            if dtype.itemsize < 4
            else lax.convert_element_type(x, dtype)
        )
    ]
