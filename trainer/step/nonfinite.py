"""Find the first operation that makes a number that is not finite.

The function is evaluated operation by operation on the arrays of the bad step. The
result is the first operation whose output is not finite although its operands are
finite.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.source_info_util import summarize

from trainer.step.state_tree import leaf_names

# Primitive -> the name of its parameter with the jaxpr that it calls, in JAX 0.11.2.
# `cond`, `scan` and `while` are searched inside too; any other primitive that calls a
# jaxpr is searched as one operation.
CALLED_JAXPR = {
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


@dataclass(frozen=True)
class NonFinite:
    """The first operation that made a number that is not finite.

    Attributes:
      operation: the primitive, or `argument`.
      path: name scopes, with the iteration of every loop on the way, or the argument's
        name.
      source: file, line and function; empty if unknown.
      result: shape, dtype, and the numbers of nan, inf and -inf.
      operands: shape, dtype and amax of each operand.
    """

    operation: str
    path: str
    source: str
    result: str
    operands: tuple[str, ...]

    def __str__(self) -> str:
        operands = f" from {', '.join(self.operands)}" if self.operands else ""
        path = f" in {self.path}" if self.path else ""
        source = f" ({self.source})" if self.source else ""
        return f"{self.operation}{path}{source}: {self.result}{operands}"


def first_nonfinite_operation(
    fn: Callable[..., Any],
    *args: Any,
    compiler_options: Mapping[str, Any] | None = None,
) -> NonFinite | None:
    """Return the first operation of `fn(*args)` whose result is not finite; None: there
    is none.

    Descends into jit, remat, custom_jvp, custom_vjp, cond, scan and while; any other
    primitive is one operation. A result that is not finite because an operand is not (a
    mask of -inf) does not count. A NaN from infinite operands counts if there is no
    other finding. The search takes seconds to minutes, and the memory of all live
    intermediates.

    Args:
      fn: the function.
      args: its arguments.
      compiler_options: options of the program whose operations these are. Each
        operation is compiled with them.
    """
    # Readers of a bad argument have an operand that is not finite: the search passes
    # them.
    for name, leaf in zip(leaf_names(args), jax.tree.leaves(args), strict=True):
        if not _is_finite(leaf):
            return NonFinite("argument", name, "", _describe(leaf), ())
    closed = jax.make_jaxpr(fn)(*args)
    search = _Search(compiler_options)
    try:
        search.eval_jaxpr(closed, jax.tree.leaves(args), "")
    except _Stop as error:
        return error.finding
    return search.nan_from_infinite


class _Stop(Exception):
    def __init__(self, finding: NonFinite) -> None:
        self.finding = finding


class _Search:
    def __init__(self, compiler_options: Mapping[str, Any] | None) -> None:
        self.nan_from_infinite: NonFinite | None = None
        self._options = compiler_options
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def eval_jaxpr(self, jaxpr: Any, args: Sequence[Any], path: str) -> list[Any]:
        """Evaluate a (closed) jaxpr; raise _Stop with a finding."""
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        last_use = {}
        for n, eqn in enumerate(inner.eqns):
            for v in eqn.invars:
                if not isinstance(v, core.Literal):
                    last_use[v] = n
        values = dict(zip(inner.constvars, jaxpr.consts, strict=True)) | dict(
            zip(inner.invars, args, strict=True)
        )
        result_vars = {v for v in inner.outvars if not isinstance(v, core.Literal)}

        def read(v: Any) -> Any:
            if isinstance(v, core.Literal):
                return v.val
            return values[v]

        for n, eqn in enumerate(inner.eqns):
            outputs = self.eval_eqn(eqn, [read(v) for v in eqn.invars], path)
            values |= zip(eqn.outvars, outputs, strict=True)
            for v in [v for v in eqn.invars if not isinstance(v, core.Literal)]:
                if last_use[v] == n and v not in result_vars:
                    values.pop(v, None)  # bounds the memory to live values
        return [read(v) for v in inner.outvars]

    def eval_eqn(self, eqn: Any, inputs: list[Any], path: str) -> list[Any]:
        scope = str(eqn.source_info.name_stack)
        path = "/".join(part for part in (path, scope) if part)
        name, params = eqn.primitive.name, eqn.params
        if name == "cond":
            # Only the branch that runs is searched: in the others a NaN may be normal.
            index = int(jnp.clip(inputs[0], 0, len(params["branches"]) - 1))
            return self.eval_jaxpr(params["branches"][index], inputs[1:], path)
        if name in CALLED_JAXPR:
            return self.eval_jaxpr(params[CALLED_JAXPR[name]], inputs, path)
        # Searching a loop iteration by iteration is slow, so it is first evaluated as
        # one operation.
        # The context holds the mesh under which the equation was traced, and whether
        # its random bits are partitionable: outside of it they could be others.
        with eqn.ctx.manager:
            outputs = self.operation(
                eqn.primitive, eqn.primitive.get_bind_params(params)
            )(*inputs)
        outputs = outputs if eqn.primitive.multiple_results else [outputs]
        bad = [output for output in outputs if not _is_finite(output)]
        if not bad:
            return outputs
        # These raise _Stop with an operation inside, or return: evaluated one by one,
        # operations round otherwise than in the compiled loop, and may all be finite.
        if name == "scan":
            self.scan(params, inputs, path)
        elif name == "while":
            self.while_loop(params, inputs, path)
        finding = NonFinite(
            name,
            path,
            summarize(eqn.source_info),
            _describe(bad[0]),
            tuple(map(_describe, inputs)),
        )
        if all(map(_is_finite, inputs)):
            raise _Stop(finding)
        if any(map(_has_nan, bad)) and not any(map(_has_nan, inputs)):
            # inf - inf is a NaN of its own making, but an infinity may be a mask: this
            # is reported only if no operation on finite numbers is bad.
            self.nan_from_infinite = self.nan_from_infinite or finding
        return outputs

    def operation(
        self, primitive: Any, params: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """Return an operation as a function, compiled if there are options."""
        bound = functools.partial(primitive.bind, **params)
        if self._options is None:
            return bound
        compile_ = functools.partial(
            jax.jit, bound, compiler_options=dict(self._options)
        )
        key = (primitive, tuple(sorted(params.items(), key=lambda item: item[0])))
        try:
            is_compiled = key in self._compiled
        except TypeError:  # a parameter is not hashable
            return compile_()
        if not is_compiled:
            # Layers repeat their operations, and a compilation takes longer than an
            # operation.
            self._compiled[key] = compile_()
        return self._compiled[key]

    def scan(self, params: Mapping[str, Any], inputs: list[Any], path: str) -> None:
        # `ft_in` has the structure (consts, carry, xs) of the operands.
        consts, carry, xs = (
            list(part) for part in params["ft_in"].update(inputs).unpack()
        )
        order = range(params["length"])
        for i in reversed(order) if params["reverse"] else order:
            arguments = [*consts, *carry, *(x[i] for x in xs)]
            carry = self.eval_jaxpr(
                params["jaxpr"], arguments, f"{path}/scan[{i}]".lstrip("/")
            )[: len(carry)]

    def while_loop(
        self, params: Mapping[str, Any], inputs: list[Any], path: str
    ) -> None:
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, inputs = inputs[:n_cond], inputs[n_cond:]
        body_consts, carry = inputs[:n_body], inputs[n_body:]
        i = 0
        while self.eval_jaxpr(params["cond_jaxpr"], [*cond_consts, *carry], path)[0]:
            carry = self.eval_jaxpr(
                params["body_jaxpr"],
                [*body_consts, *carry],
                f"{path}/while[{i}]".lstrip("/"),
            )
            i += 1


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


@jax.jit
def _counts(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    x = x.astype(jnp.float32)
    # Without `initial`, the maximum of an empty array is an error.
    amax = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), initial=0)
    return jnp.sum(jnp.isnan(x)), jnp.sum(x == jnp.inf), jnp.sum(x == -jnp.inf), amax


def _is_finite(x: Any) -> bool:
    return not _is_float(x) or not any(
        int(count) for count in _counts(jnp.asarray(x))[:3]
    )


def _has_nan(x: Any) -> bool:
    return _is_float(x) and int(_counts(jnp.asarray(x))[0]) > 0


def _describe(x: Any) -> str:
    """Describe an array: `float32[4,8] with 3 nan of 32`, or `float32[4,8] |x| <= 1.5`
    if all elements are finite.
    """
    dtype_and_shape = f"{jnp.result_type(x).name}[{','.join(map(str, jnp.shape(x)))}]"
    if not _is_float(x):
        return dtype_and_shape
    *counts, amax = _counts(jnp.asarray(x))
    bad = [
        f"{int(count)} {name}"
        for count, name in zip(counts, ("nan", "inf", "-inf"), strict=True)
        if int(count)
    ]
    if bad:
        return f"{dtype_and_shape} with {', '.join(bad)} of {jnp.size(x)}"
    return f"{dtype_and_shape} |x| <= {float(amax):.3g}"
