"""The loop behind `scalify`: evaluate a jaxpr with scales.

An equation that neither reads a `Value` nor casts to fewer than 32 bits is evaluated
as it stands (`registry.plain`). For all others the scale policy decides. With
`scales="static"`, rules propagate scales (`registry`). With `scales="auto"`, scales are
measured where values are stored (`measured.policy`). Control flow is evaluated by the
same rules under both.
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

import scalify_core.interpreter.measured.composites
import scalify_core.interpreter.rules  # noqa: F401  (fills the table)
from scalify_core.array.scaled_array import is_scaled_array, with_scale
from scalify_core.interpreter import registry
from scalify_core.interpreter.measured import policy as measuring
from scalify_core.interpreter.measured.products import Reading
from scalify_core.interpreter.reference_trace import Program
from scalify_core.interpreter.value import Value, exact, narrow, value
from scalify_core.numerics.formats import materialize
from scalify_core.numerics.jaxprs import per_jaxpr, scope_of, within
from scalify_core.numerics.scales import broadcast_scale


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """An evaluator of jaxprs under a scale policy; call it with a jaxpr and operands.

    Attributes:
        measures: whether scales are measured where values are stored; else rules
            propagate them.
        observer: sees jaxprs and equations, for `explain`: its `Recorder`.
        cache_key: tells evaluators with an observer apart, in caches of traces. A trace
            inside an equation has the equation's observations, and must not be reused
            for another.
        stacks: for each result of the jaxpr, the granularity of scales that later
            products want of it, if only scans read it, slice by slice (a residual of
            the backward pass); else None. A scan's body stores such results narrow.
    """

    measures: bool
    observer: Any = None
    cache_key: object = None
    stacks: tuple[Reading | None, ...] = ()

    def __call__(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        """Return the results of a jaxpr on operands that are `Value`s or plain."""
        if self.observer is None:
            return self._evaluated(jaxpr, args)
        return self.observer.jaxpr(jaxpr, args, lambda: self._evaluated(jaxpr, args))

    def _evaluated(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        # NumPy arrays of one number are constants, as literals are: `value.lift` says
        # which scale they have.
        env = dict(zip(jaxpr.constvars, map(registry.known, jaxpr.consts), strict=True))
        env |= dict(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            if isinstance(atom, Literal):
                return atom.val
            return env[atom]

        # Entered once for a run of equations: each entry costs tracing time, and scopes
        # change with layers, not with equations.
        for scope, eqns in itertools.groupby(jaxpr.eqns, scope_of):
            with within(*scope):
                for eqn in eqns:
                    operands = list(map(read, eqn.invars))
                    if self.observer is None:
                        out = self.results(eqn, operands, jaxpr)
                    else:
                        run = functools.partial(self.results, eqn, jaxpr=jaxpr)
                        out = self.observer.equation(eqn, operands, run)
                    env |= zip(eqn.outvars, out, strict=True)
        return list(map(read, jaxpr.outvars))

    def results(self, eqn: Any, operands: Sequence[Any], jaxpr: Any) -> list[Any]:
        """Return the results of one equation of a jaxpr."""
        inner = self
        if self.observer is not None:
            # A body that is traced for one equation must not be reused for another: its
            # callbacks hold the equation's place.
            inner = dataclasses.replace(self, cache_key=object())
        if is_plain(eqn, operands):
            return registry.plain(eqn, *operands)
        if any(eqn.params.get("donated_invars", ())):
            eqn = _donating_arguments(eqn, jaxpr)
        if self.measures:
            return measuring.results(eqn, operands, jaxpr, evaluate=inner)
        rule = registry.rule_of(eqn)
        operands = list(map(rule.as_read, operands))
        if rule.control:
            out = rule.fun(eqn, *operands, evaluate=inner)
        else:
            out = rule.fun(eqn, *operands)
        stored = stored_variables(jaxpr)
        for i, (x, var) in enumerate(zip(out, eqn.outvars, strict=True)):
            # A scalar is no memory to save, so it keeps FP32's digits.
            is_scaled = isinstance(x, Value) and x.shape and not x.is_fill_value
            if is_scaled and var in stored:
                # Still known: a sum that starts from before the rescale changes the
                # scale once (without it a step takes 1.2% longer).
                out[i] = dataclasses.replace(narrow(x), pre_rescale=x.pre_rescale)
        return out

    def stacked(self, jaxpr: Any, ys: list[Any]) -> list[Any]:
        """Return the last results of a scan's body as their stacks hold them."""
        if not ys or not self.stacks:
            return ys
        first = -len(ys)
        made = zip(ys, self.stacks[first:], jaxpr.outvars[first:], strict=True)
        return [
            y if reading is None else measuring.stacked(y, reading, var, jaxpr)
            for y, reading, var in made
        ]

    def arrays(self, program: Program, leaves: Sequence[Any]) -> list[Any]:
        """Return the results of a program of arrays and ScaledArrays, as such."""
        args = list(map(as_operand, leaves))
        out = self(program.jaxpr, args)
        if self.measures:
            out = measuring.leaving(program.jaxpr, args, out, program.dtypes)
            given = {id(x): leaf for x, leaf in zip(args, leaves, strict=True)}
            out = [given.get(id(x), x) for x in out]
        return list(map(_as_result, out))


def is_plain(eqn: Any, operands: Sequence[Any]) -> bool:
    """Return whether an equation neither reads nor stores a scaled value."""
    # Asked of each equation in each trace, so not by `isinstance` in a loop, which is
    # slower.
    return Value not in map(type, operands) and not registry.casts_to_narrow(
        eqn, *operands
    )


def _donating_arguments(eqn: Any, jaxpr: Any) -> Any:
    """Return a call that donates arguments of the program alone.

    A computed value may have the data of an argument, as `x * 2` has at another scale:
    donated, it would delete the argument.
    """
    donated = tuple(
        given and atom in jaxpr.invars
        for given, atom in zip(eqn.params["donated_invars"], eqn.invars, strict=True)
    )
    return eqn.replace(params={**eqn.params, "donated_invars": donated})


@per_jaxpr
def stored_variables(jaxpr: Any) -> frozenset[Any]:
    """Return the variables that static scales round where they are computed.

    Several equations read such a variable, and one of them needs narrow data, so the
    narrow array exists anyway. A variable with only elementwise readers stays in FP32:
    rounding an optimizer's second moment before its root is taken would flush it to
    zero. So do fill values: a divisor's 1e-12 would become a zero.
    """
    readers: Counter = Counter()
    narrow_readers = set()
    for eqn in reversed(jaxpr.eqns):
        rule = registry.rule_of(eqn)
        if rule.passes is not None:  # readers of the result read the variable
            variable, new = eqn.invars[rule.passes[0]], eqn.outvars[rule.passes[1]]
            readers[variable] += readers[new]
            if new in narrow_readers:
                narrow_readers.add(variable)
            continue
        variables = {atom for atom in eqn.invars if not isinstance(atom, Literal)}
        readers.update(variables)
        if not rule.wide:
            narrow_readers |= variables
    # With one reader its own rounding is the only one, and the compiler fuses it.
    return frozenset(var for var in narrow_readers if readers[var] > 1)


def as_operand(x: Any) -> Any:
    """Return an argument as an operand: a ScaledArray as a `Value`."""
    if not is_scaled_array(x):
        # As it is: `jnp.asarray` returns the same array, but takes its time to, and
        # does not take a reference.
        if isinstance(x, (jax.Array, jax.Ref)):
            return x
        return jnp.asarray(x)
    scale = x.scale
    if not x.is_static:
        scale = broadcast_scale(jnp.asarray(scale, jnp.float32), x)
        if scale.size == 1:
            # Of shape (1, 1) it would count as one that differs along axes, of which
            # rules take the largest first: a reduction.
            scale = scale.reshape(())
    return value(jnp.asarray(x.data), scale)


def _as_result(x: Any) -> Any:
    """Return a result of a program; a value, in its format, as a ScaledArray.

    An FP32 scalar is returned plain, since losses are compared, averaged and branched
    on.
    """
    if isinstance(x, Value):
        x = exact(x)  # its scale alone would saturate
        x = with_scale(narrow(x).data, x.scale)
    if not is_scaled_array(x):
        return jnp.asarray(materialize(x))
    if x.shape == () and x.dtype == jnp.float32:
        return x.unscale()
    return x
