"""Evaluate a function by small programs, one for all outputs that are computed alike.

Compiled as one program, the initial state of a model takes longer with every layer: XLA
compiles the random numbers of each parameter again, though most have the shape and the
distribution of another. Here a function is traced as a whole, and the equations behind
each output become a jaxpr. Equal jaxprs, such as those of the kernels of two layers,
are one program that runs with different keys.

Operations on PRNG keys are evaluated one by one, and every program gets its keys as
arguments: programs depend neither on the layer nor on the seed.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import Sharding

from trainer.step.state_tree import is_key


@dataclasses.dataclass(frozen=True)
class LeafProgram:
    """A program of some outputs; it is equal to one with equal equations.

    Attributes:
      jaxpr: the equations; it has no constants.
      signature: the equations as a value; see `signature_of`.
      key_impls: the PRNG implementation of each argument that holds the data of keys;
        None for the other arguments.
    """

    # A jaxpr equals only itself, so `signature` is compared in its place.
    jaxpr: Any = dataclasses.field(compare=False)
    signature: tuple[Any, ...]
    key_impls: tuple[Any, ...]


class Trace:
    """The equations of a function, in order.

    Calls of jitted functions with several results are inlined: each result may belong
    to another output.

    Attributes:
      given: the arrays that the function takes or closes over, by variable.
      outputs: variables and literals.
    """

    def __init__(self, closed: Any, args: Sequence[Any]) -> None:
        self.given = dict(zip(closed.jaxpr.invars, args, strict=True))
        self._eqns: list[Any] = []
        self.outputs = self._inline(closed, closed.jaxpr.invars)
        self._producers = {
            x: i for i, eqn in enumerate(self._eqns) for x in eqn.outvars
        }

    def _inline(self, closed: Any, operands: Sequence[Any]) -> list[Any]:
        """Append the equations of a jaxpr, with variables of their own, and return its
        outputs.
        """
        jaxpr = closed.jaxpr
        for var, x in zip(jaxpr.constvars, closed.consts, strict=True):
            # An array of one process cannot be an argument beside arrays of all.
            self.given[var] = x if is_key(x) else np.asarray(x)
        atoms = dict(zip(jaxpr.constvars, jaxpr.constvars, strict=True))
        atoms |= zip(jaxpr.invars, operands, strict=True)

        def renamed(atom: Any) -> Any:
            return atom if isinstance(atom, core.Literal) else atoms[atom]

        for eqn in jaxpr.eqns:
            # A function that is called twice may have one jaxpr, with the same
            # variables, for both calls; so each call gets new ones.
            inputs = list(map(renamed, eqn.invars))
            if eqn.primitive.name == "jit" and len(eqn.outvars) > 1:
                results = self._inline(eqn.params["jaxpr"], inputs)
            else:
                results = [core.Var(var.aval) for var in eqn.outvars]
                self._eqns.append(eqn.replace(invars=inputs, outvars=results))
            atoms |= zip(eqn.outvars, results, strict=True)
        return list(map(renamed, jaxpr.outvars))

    def jaxpr_of(self, outputs: Iterable[Any], *, through_keys: bool = False) -> Any:
        """Return a jaxpr of the equations that outputs depend on.

        Its arguments are given arrays, and PRNG keys instead of the equations that
        compute them. `through_keys`: it has these equations, too.
        """
        indices, pending = set[int](), variables(outputs)
        while pending:
            x = pending.pop()
            index = self._producers.get(x)
            # Keys are arguments; else the seed and the index of the layer would be
            # constants of its program, which no other layer could share.
            is_argument = is_key(x.aval) and not through_keys
            if index is not None and index not in indices and not is_argument:
                indices.add(index)
                pending += variables(self._eqns[index].invars)
        eqns = [self._eqns[index] for index in sorted(indices)]
        used = variables([*(x for eqn in eqns for x in eqn.invars), *outputs])
        computed = {x for eqn in eqns for x in eqn.outvars}
        # In order of first use. The order of a set of variables depends on their
        # addresses, so the arguments would have another order in each process.
        arguments = [x for x in dict.fromkeys(used) if x not in computed]
        return core.Jaxpr((), arguments, list(outputs), eqns)


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Return the atoms of a jaxpr that are no literals."""
    return [x for x in atoms if not isinstance(x, core.Literal)]


def evaluate_leafwise(
    fun: Callable[..., Any], *args: Any, place: Callable[[Any], Any]
) -> Any:
    """Return `fun(*args)`, evaluated by one program for all outputs computed alike.

    Every output has the bits that `jax.jit(fun)` gives. No array exists whole on a
    device that holds a part of it.

    Args:
      fun: a function of pytrees, as `jax.jit` takes it.
      args: its arguments, on the devices of the result.
      place: takes shapes and dtypes of the result, and returns its shardings.
    """
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    shardings = jax.tree.leaves(place(shapes))
    trace = Trace(closed, jax.tree.leaves(args))
    groups = outputs_by_shared_array(trace)
    jaxprs = [trace.jaxpr_of([trace.outputs[i] for i in group]) for group in groups]
    key_data, key_impls = evaluate_keys(trace, jaxprs)
    arguments = trace.given | key_data
    leaves: list[Any] = [None] * len(shardings)
    for group, jaxpr in zip(groups, jaxprs, strict=True):
        program = LeafProgram(
            jaxpr, signature_of(jaxpr), tuple(map(key_impls.get, jaxpr.invars))
        )
        compiled = jitted(program, tuple(shardings[i] for i in group))
        results = compiled(*(arguments[x] for x in jaxpr.invars))
        if len(shardings[group[0]].device_set) > 1:
            # A program of several devices may communicate, such as one that pads an
            # array. Many such programs in flight can deadlock.
            jax.block_until_ready(results)
        for i, leaf in zip(group, results, strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


# JAX finds a compiled program by the identity of its function, so equal programs must
# get the same function.
@functools.lru_cache(maxsize=512)
def jitted(
    program: LeafProgram, shardings: tuple[Sharding, ...]
) -> Callable[..., list[Any]]:
    """Return a program under `jax.jit`; its outputs get these shardings."""

    def leaf(*arguments: Any) -> list[Any]:
        inputs = [
            x if impl is None else jax.random.wrap_key_data(x, impl=impl)
            for x, impl in zip(arguments, program.key_impls, strict=True)
        ]
        return jax.core.eval_jaxpr(program.jaxpr, (), *inputs)

    return jax.jit(leaf, out_shardings=list(shardings))


def outputs_by_shared_array(trace: Trace) -> list[list[int]]:
    """Return groups of outputs that share an intermediate array.

    One program computes the array once. Scalars do not count: all outputs may share
    one, and it is cheap to compute again.
    """
    parents = list(range(len(trace.outputs)))  # a forest, with a tree for each group
    first_uses: dict[Any, int] = {}

    def root(i: int) -> int:
        while parents[i] != i:
            i = parents[i]
        return i

    for i, output in enumerate(trace.outputs):
        for eqn in trace.jaxpr_of([output]).eqns:
            for x in eqn.outvars:
                if x.aval.size > 1:
                    roots = root(i), root(first_uses.setdefault(x, i))
                    parents[max(roots)] = min(roots)  # groups are in order of outputs
    groups: dict[int, list[int]] = {}
    for i in range(len(parents)):
        groups.setdefault(root(i), []).append(i)
    return list(groups.values())


def evaluate_keys(
    trace: Trace, jaxprs: Iterable[Any]
) -> tuple[dict[Any, np.ndarray], dict[Any, Any]]:
    """Return data and PRNG implementations of the keys that jaxprs take, by variable.

    Data are on the host: in a run of several processes, all have them.
    """
    arguments = dict.fromkeys(x for jaxpr in jaxprs for x in jaxpr.invars)
    keys = [x for x in arguments if is_key(x.aval)]
    jaxpr = trace.jaxpr_of(keys, through_keys=True)
    given = (trace.given[x] for x in jaxpr.invars)
    arrays = jax.core.eval_jaxpr(jaxpr, (), *given)
    # One transfer for all keys; a copy for each would wait for the device each time.
    data = jax.device_get([jax.random.key_data(x) for x in arrays])
    impls = map(jax.random.key_impl, arrays)
    return dict(zip(keys, data, strict=True)), dict(zip(keys, impls, strict=True))


def signature_of(jaxpr: Any) -> tuple[Any, ...]:
    """Return a value that is equal for jaxprs that compute the same.

    It has numbers for variables, and bits for literals (0.0 is not -0.0).
    """
    results = (x for eqn in jaxpr.eqns for x in eqn.outvars)
    numbers = {x: i for i, x in enumerate((*jaxpr.invars, *results))}

    # Variables are compared by identity, so their numbers in order stand for them.
    def value(atom: Any) -> Any:
        if not isinstance(atom, core.Literal):
            return numbers[atom]
        bits = np.asarray(atom.val)
        # The type tells a Python number, which has a weak dtype, from a NumPy scalar.
        return type(atom.val), bits.dtype, bits.shape, bits.tobytes()

    eqns = (
        # `ctx` has settings of the trace that change results, such as
        # `threefry_partitionable`.
        (eqn.primitive, tuple(eqn.params.items()), eqn.ctx, *map(value, eqn.invars))
        for eqn in jaxpr.eqns
    )
    return (*eqns, *map(value, jaxpr.outvars))
