"""Evaluating a jaxpr by its plan: FP32 between stores, a measured scale at each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from scalify_core import registry, storage
from scalify_core.array import ScaledArray
from scalify_core.measured import store
from scalify_core.measured.plan import Format, Plan, Step, is_float, plan_of, product_format
from scalify_core.places import place_of, within

Kind = Callable[[Step, "Operands"], Any]
kinds: dict[str, Kind] = {}


def kind(*names: str) -> Callable[[Kind], Kind]:
    """Decorator: how steps of these kinds are done; the function gives a list of results."""

    def register(fun: Kind) -> Kind:
        kinds.update(dict.fromkeys(names, fun))
        return fun

    return register


def evaluate(jaxpr: Any, args: Sequence[Any], formats: tuple[Format, ...]) -> tuple[list[Any], tuple[Format, ...]]:
    """The results of a jaxpr, each a ScaledArray or an array of logical values, and their formats.

    Args:
        jaxpr: traced with float32 for what is scaled.
        args: ScaledArrays of any scales, and arrays: logical values.
        formats: of the arguments: that of the data of what is scaled, None of what is plain.
    """
    plan = plan_of(jaxpr, formats)
    return run(jaxpr, plan, args), plan.out_formats


def run(jaxpr: Any, plan: Plan, args: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr by its plan."""
    env = Operands(jaxpr, args)
    for place, steps in itertools.groupby(plan.steps, lambda step: place_of(step.eqn)):
        with within(*place):
            for step in steps:
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

    def wide(self, atom: Any) -> Any:
        """The logical value, in FP32 where it is scaled."""
        return store.wide(self.read(atom))

    def stored(self, atom: Any, dtype: np.dtype) -> ScaledArray:
        """In a narrow format; once for all who read it so."""
        x = self.read(atom)
        if type(atom) is Literal:
            return store.stored(x, dtype)
        if (atom, dtype) not in self.copies:
            self.copies[atom, dtype] = store.stored(x, dtype)
        return self.copies[atom, dtype]

    def write(self, step: Step, results: Sequence[Any]) -> None:
        """The results of a step, stored where its plan says so."""
        for var, x, dtype in zip(step.eqn.outvars, results, step.store, strict=True):
            self.values[var] = x if dtype is None else store.stored(x, dtype)


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
    return [x if f is None or not _is_narrow(x) else storage.as_float32(x) for x, f in zip(out, step.out_formats, strict=True)]


def _as_traced(x: Any, aval: Any) -> Any:
    return storage.saturating_cast(jnp.asarray(x), aval.dtype) if is_float(aval) else x


def _is_narrow(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4


@kind("move")
def _move(step: Step, env: Operands) -> Sequence[Any]:
    eqn = step.eqn
    x, *rest = map(env.read, eqn.invars)
    if type(x) is not ScaledArray or not (x.is_static or jnp.ndim(x.scale) == 0) or x.dtype.itemsize >= 4:
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
    """A cast to a narrow dtype is the user's wish to round; the value is stored, at a scale if that has not FP32's range."""
    (atom,), dtype = step.eqn.invars, step.out_formats[0]
    x = env.read(atom)
    if dtype.itemsize < 4:
        return [store.stored(store.wide(x), dtype)]
    return [lax.convert_element_type(store.wide(x), dtype)]
