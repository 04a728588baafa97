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

from scalify_core import registry, storage
from scalify_core.array import ScaledArray
from scalify_core.measured import store
from scalify_core.measured.plan import (
    Format,
    Plan,
    Step,
    constants_in,
    is_float,
    plan_of,
    product_format,
    scan_parts,
)
from scalify_core.scopes import scope_of, within
from scalify_core.watch import Reporter

Kind = Callable[[Step, "Operands"], Any]
kinds: dict[str, Kind] = {}


def kind(*names: str) -> Callable[[Kind], Kind]:
    """Decorator: how steps of these kinds are done; the function gives a list of results."""

    def register(fun: Kind) -> Kind:
        kinds.update(dict.fromkeys(names, fun))
        return fun

    return register


_reporter: ContextVar[Reporter | None] = ContextVar("reporter", default=None)


def evaluated(jaxpr: Any, leaves: Sequence[Any], reporter: Reporter | None = None) -> list[Any]:
    """The results of a jaxpr that was traced with float32 for what is scaled, of arrays and ScaledArrays, as such.

    An argument that is returned is returned as it is. With a reporter, the program tells it what is lost.
    """
    args = list(map(entering, leaves))
    plan = plan_of(jaxpr, tuple(np.dtype(x.dtype) if type(x) is ScaledArray else None for x in args))
    token = _reporter.set(reporter)
    try:
        out = run(jaxpr, plan, args)
        given = {id(x) for x in args}
        constants = constants_in(jaxpr, (frozenset(),) * len(args))
        returned = [
            x if f is None or id(x) in given else _returned(jaxpr, var, x, f, large)
            for var, x, f, large in zip(jaxpr.outvars, out, plan.out_formats, constants, strict=True)
        ]
    finally:
        _reporter.reset(token)
    if reporter is not None:
        reporter.call_is_done(returned)
    return returned


def entering(x: Any) -> Any:
    if type(x) is not ScaledArray:
        return x if isinstance(x, jax.Array) else jnp.asarray(x)
    scale = x.scale if x.is_static else jnp.asarray(x.scale, jnp.float32)
    data = x.data if isinstance(x.data, jax.Array) else jnp.asarray(x.data)
    return ScaledArray(data, scale if x.is_static or scale.size != 1 else scale.reshape(()))


def _returned(jaxpr: Any, var: Any, x: Any, dtype: np.dtype, constants: frozenset[float]) -> ScaledArray:
    """A result, stored; what that loses is reported at the equation that makes it."""
    reporter = _reporter.get()
    makers = [] if reporter is None else [eqn for eqn in jaxpr.eqns if var in eqn.outvars]
    if reporter is None or not makers:
        return store.result(x, dtype, constants)
    with reporter.at(makers[0]):
        return store.result(x, dtype, constants)


def run(jaxpr: Any, plan: Plan, args: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr by its plan: each a ScaledArray, or an array of logical values."""
    env, reporter = Operands(jaxpr, args), _reporter.get()
    for scope, steps in itertools.groupby(plan.steps, lambda step: scope_of(step.eqn)):
        with within(*scope):
            for step in steps:
                with contextlib.nullcontext() if reporter is None else reporter.at(step.eqn):
                    env.write(step, kinds[step.kind](step, env))
    return [env.read(atom) for atom in jaxpr.outvars]


class Operands:
    """What the variables of a jaxpr are, while it is evaluated."""

    def __init__(self, jaxpr: Any, args: Sequence[Any]) -> None:
        """Of its arguments."""
        self.values: dict[Any, Any] = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
        self.values.update(zip(jaxpr.invars, args, strict=True))
        self.copies: dict[tuple[Any, np.dtype], ScaledArray] = {}

    def read(self, atom: Any) -> Any:
        """As it is: a ScaledArray, or the logical value."""
        return atom.val if type(atom) is Literal else self.values[atom]

    def moved(self, atom: Any, wanted: Format) -> Any:
        """As what only passes it on reads it: stored, if that is wanted of it and has been done."""
        return self.read(atom) if wanted is None else self.copies.get((atom, wanted), self.read(atom))

    def wide(self, atom: Any) -> Any:
        """The logical value, in FP32 where it is scaled."""
        return store.wide(self.read(atom))

    def stored(self, atom: Any, dtype: np.dtype) -> ScaledArray:
        """In a narrow format; once for all who read it so."""
        x = self.read(atom)
        if type(atom) is Literal:
            return store.stored(x, dtype)
        found = self.copies.get((atom, dtype))
        if found is None or not has_one_scale(found):
            found = self.copies[atom, dtype] = store.stored(x, dtype)
        return found

    def write(self, step: Step, results: Sequence[Any]) -> None:
        """The results of a step, and what its plan stores of them for products; all others read them in FP32.

        What a scan stacks turn by turn, such as the activations of layers, may differ in size from turn to turn. The
        scan that reads it, as that of the gradient does, takes it apart again.
        """
        scan = step.eqn.primitive.name == "scan"
        carry = len(scan_parts(step.eqn, step.eqn.invars)[1]) if scan else len(results)
        for i, (var, x, dtype) in enumerate(zip(step.eqn.outvars, results, step.store, strict=True)):
            self.values[var] = x
            if dtype is not None:
                stored = store.stored_in_slices if i >= carry else store.stored
                self.copies[var, dtype] = stored(x, dtype)


def has_one_scale(x: ScaledArray) -> bool:
    """Whether all elements have the same scale."""
    return x.is_static or jnp.ndim(x.scale) == 0


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
        operands = [_as_traced(x, var.aval) for x, var in zip(operands, eqn.invars, strict=True)]
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
    eqn = step.eqn
    x, *rest = env.moved(eqn.invars[0], step.wants[0]), *map(env.read, eqn.invars[1:])
    if type(x) is not ScaledArray or not has_one_scale(x) or x.dtype.itemsize >= 4:
        return _bind(step, env)
    out = listed(eqn, registry.bind(eqn, x.data, *rest))
    return [ScaledArray(y, x.scale) for y in out]


@kind("product")
def _product(step: Step, env: Operands) -> Sequence[Any]:
    eqn = step.eqn
    dtype = product_format(step.formats, eqn)
    assert dtype is not None
    a, b = (env.stored(atom, dtype) for atom in eqn.invars[:2])
    rest = map(env.read, eqn.invars[2:])
    # BF16 holds what FP32 does, and XLA's CPU backend has no BF16 product with an FP32 result.
    result = np.dtype(np.float32) if store.has_own_range(dtype) else dtype
    out = eqn.primitive.bind(a.data, b.data, *rest, **{**eqn.params, "preferred_element_type": result})
    return [store.scaled_by(storage.as_float32(out), a.scale, b.scale)]


@kind("convert")
def _convert(step: Step, env: Operands) -> Sequence[Any]:
    """A cast to a narrow dtype is the user's wish to round: the value is stored."""
    x, dtype = env.wide(step.eqn.invars[0]), np.dtype(step.eqn.params["new_dtype"])
    return [store.stored(x, dtype) if dtype.itemsize < 4 else lax.convert_element_type(x, dtype)]
