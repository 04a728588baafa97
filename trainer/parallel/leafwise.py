"""Evaluate a function by small programs, one for all outputs that are computed alike.

Compiled as one program, the initial state of a model takes longer with every layer: XLA
compiles the random numbers of each parameter again, though most have the shape and the
distribution of another. Here a function is traced as a whole, then cut into the
operations behind each output. Outputs with equal operations, such as the kernels of two
layers, run one program with different keys.

Operations on PRNG keys are evaluated one by one, and every program gets its keys as
arguments: programs depend neither on the layer nor on the seed.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core
from jax.sharding import Sharding

from trainer.step.state_tree import is_key


@dataclasses.dataclass(frozen=True, eq=False)
class Given:
    """An array that the function takes or closes over."""

    value: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """An equation of the traced function.

    Attributes:
      number: its position; operations that it depends on have smaller numbers.
      eqn: the equation.
      operands: a Given, Result or `Literal` for each operand.
    """

    number: int
    eqn: Any
    operands: tuple[Any, ...]


class Result(NamedTuple):
    """One result of an operation."""

    operation: Operation
    output: int

    @property
    def aval(self) -> Any:
        """Its shape and dtype."""
        return self.operation.eqn.outvars[self.output].aval


@dataclasses.dataclass(frozen=True)
class Constant:
    """A literal; constants are equal if their bits are (0.0 is not -0.0)."""

    value: Any = dataclasses.field(compare=False)
    kind: type
    dtype: np.dtype
    shape: tuple[int, ...]
    bits: bytes


class Position(NamedTuple):
    """A numbered argument of a program (`step` is None), or result of a step."""

    step: int | None
    number: int


class Step(NamedTuple):
    """An equation of a program; `operands` are Positions and Constants."""

    primitive: Any
    params: tuple[tuple[str, Any], ...]
    ctx: Any
    operands: tuple[Any, ...]


class Program(NamedTuple):
    """A function of arrays as a value: equal programs are compiled once.

    Attributes:
      steps: equations in order.
      outputs: Positions and Constants.
      key_impls: for each argument, the implementation of the PRNG keys whose data it
        is; None: it is no such data.
    """

    steps: tuple[Step, ...]
    outputs: tuple[Any, ...]
    key_impls: tuple[Any, ...]

    def __call__(self, *arguments: Any) -> list[Any]:
        """Evaluate the program."""
        inputs = [
            x if impl is None else jax.random.wrap_key_data(x, impl=impl)
            for x, impl in zip(arguments, self.key_impls, strict=True)
        ]
        results: list[Sequence[Any]] = []

        def read(operand: Any) -> Any:
            if isinstance(operand, Constant):
                return operand.value
            source = inputs if operand.step is None else results[operand.step]
            return source[operand.number]

        for step in self.steps:
            values = list(map(read, step.operands))
            results.append(bind(step.primitive, dict(step.params), step.ctx, values))
        return list(map(read, self.outputs))


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
    placed = jax.tree.leaves(place(shapes))
    given = list(map(Given, jax.tree.leaves(args)))
    outputs = trace_results(closed, given, itertools.count())
    keys = evaluate_keys(outputs)
    leaves: list[Any] = [None] * len(outputs)
    for group in outputs_by_shared_array(outputs):
        program, arguments = make_program([outputs[i] for i in group], keys)
        compiled = jitted(program, tuple(placed[i] for i in group))
        results = compiled(*arguments)
        if len(placed[group[0]].device_set) > 1:
            # Padding may communicate, and many small programs that do can deadlock.
            jax.block_until_ready(results)
        for i, leaf in zip(group, results, strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


@functools.lru_cache(maxsize=512)
def jitted(program: Program, placed: tuple[Sharding, ...]) -> Callable[..., Any]:
    """Return a compiled program; its outputs get these shardings."""

    def leaf(*arguments: Any) -> list[Any]:
        return program(*arguments)

    return jax.jit(leaf, out_shardings=list(placed))


def bind(primitive: Any, params: dict[str, Any], ctx: Any, values: Any) -> list[Any]:
    """Return the results of an equation."""
    with ctx.manager:
        results = primitive.bind(*values, **primitive.get_bind_params(params))
    return list(results) if primitive.multiple_results else [results]


def trace_results(
    closed: Any, arguments: Sequence[Any], numbers: Iterator[int]
) -> list[Any]:
    """Return the outputs of a closed jaxpr as Results, Givens and Literals.

    Calls of jitted functions with several results are inlined: each may belong to
    another output.
    """
    jaxpr = closed.jaxpr
    # An array of one process cannot be an argument beside arrays of all.
    consts = (x if is_key(x) else np.asarray(x) for x in closed.consts)
    values = dict(zip(jaxpr.constvars, map(Given, consts), strict=True))
    values |= zip(jaxpr.invars, arguments, strict=True)

    def read(var: Any) -> Any:
        return var if isinstance(var, core.Literal) else values[var]

    for eqn in jaxpr.eqns:
        operands = tuple(map(read, eqn.invars))
        if eqn.primitive.name == "jit" and len(eqn.outvars) > 1:
            results = trace_results(eqn.params["jaxpr"], operands, numbers)
        else:
            operation = Operation(next(numbers), eqn, operands)
            results = [Result(operation, i) for i in range(len(eqn.outvars))]
        values |= zip(eqn.outvars, results, strict=True)
    return list(map(read, jaxpr.outvars))


def operations_of(
    outputs: Sequence[Any], stop: Callable[[Result], bool] = lambda result: False
) -> list[Operation]:
    """Return the operations that outputs depend on, in order; none behind results at
    which to `stop`.
    """
    found: dict[int, Operation] = {}
    pending = list(outputs)
    while pending:
        operand = pending.pop()
        if not isinstance(operand, Result) or stop(operand):
            continue
        operation = operand.operation
        if operation.number not in found:
            found[operation.number] = operation
            pending += operation.operands
    return [found[number] for number in sorted(found)]


def is_key_array(operand: Any) -> bool:
    """Return whether an operand is an array of PRNG keys."""
    if isinstance(operand, core.Literal):
        return False
    return is_key(operand.aval if isinstance(operand, Result) else operand.value)


def evaluate_keys(outputs: Sequence[Any]) -> dict[Any, tuple[np.ndarray, Any]]:
    """Return data and implementation of the PRNG keys that programs take.

    Data are on the host: in a run of several processes, all have them.
    """
    operands = list(outputs)
    for operation in operations_of(outputs, stop=is_key_array):
        operands += operation.operands
    keys = list(filter(is_key_array, operands))
    results: dict[int, list[Any]] = {}

    def read(operand: Any) -> Any:
        if isinstance(operand, Result):
            return results[operand.operation.number][operand.output]
        return operand.val if isinstance(operand, core.Literal) else operand.value

    for operation in operations_of(keys):
        eqn = operation.eqn
        operands = list(map(read, operation.operands))
        results[operation.number] = bind(eqn.primitive, eqn.params, eqn.ctx, operands)
    arrays = {key: read(key) for key in keys}
    data = jax.device_get([jax.random.key_data(x) for x in arrays.values()])
    impls = map(jax.random.key_impl, arrays.values())
    return dict(zip(arrays, zip(data, impls, strict=True), strict=True))


def outputs_by_shared_array(outputs: Sequence[Any]) -> list[list[int]]:
    """Return groups of outputs that share an intermediate array.

    One program computes the array once. Scalars do not count: all outputs may share
    one, and it is cheap to compute again.
    """
    groups: dict[int, list[int]] = {}
    group_of: dict[int, int] = {}  # by the number of an operation
    for i, output in enumerate(outputs):
        arrays = [
            operation.number
            for operation in operations_of([output], stop=is_key_array)
            if any(var.aval.size > 1 for var in operation.eqn.outvars)
        ]
        shared = {group_of[number] for number in arrays if number in group_of}
        group = min(shared, default=i)
        groups[group] = [*itertools.chain(*(groups.pop(n) for n in sorted(shared))), i]
        if len(shared) > 1:
            for number, other in group_of.items():
                if other in shared:
                    group_of[number] = group
        group_of |= dict.fromkeys(arrays, group)
    return list(groups.values())


def make_program(
    outputs: Sequence[Any], keys: dict[Any, tuple[np.ndarray, Any]]
) -> tuple[Program, list[Any]]:
    """Return the program of these outputs, and its arguments.

    `keys`: the result of `evaluate_keys`.
    """
    arguments: list[Any] = []
    key_impls: list[Any] = []
    inputs: dict[Any, Position] = {}
    steps: dict[int, int] = {}

    def position(operand: Any) -> Any:
        if isinstance(operand, core.Literal):
            bits = np.asarray(operand.val)
            return Constant(
                operand.val, type(operand.val), bits.dtype, bits.shape, bits.tobytes()
            )
        if isinstance(operand, Result) and operand not in keys:
            return Position(steps[operand.operation.number], operand.output)
        if operand not in inputs:
            inputs[operand] = Position(None, len(arguments))
            value, impl = keys.get(operand) or (operand.value, None)
            arguments.append(value)
            key_impls.append(impl)
        return inputs[operand]

    program_steps: list[Step] = []
    for operation in operations_of(outputs, stop=is_key_array):
        eqn = operation.eqn
        operands = tuple(map(position, operation.operands))
        steps[operation.number] = len(program_steps)
        program_steps.append(
            Step(eqn.primitive, tuple(eqn.params.items()), eqn.ctx, operands)
        )
    positions = tuple(map(position, outputs))
    return Program(tuple(program_steps), positions, tuple(key_impls)), arguments
