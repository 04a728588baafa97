"""The trace of a function in the formats of its data, the reference of plain code.

`scalify` traces with FP32 arrays, where a cast to FP32 leaves no equation. So the
function is traced once more, with arrays as narrow as the data, and the products of
both traces are paired by position. A product with an FP32 operand in the reference, by
a cast or by promotion, is FP32 in the program.
"""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr

from scalify_core.array.scaled_array import is_scaled_array
from scalify_core.numerics.formats import is_narrow
from scalify_core.numerics.jaxprs import CONTROL, IN_FULL, PRODUCTS, needed, per_jaxpr
from scalify_core.numerics.precision_warnings import PrecisionWarning

# The folders of JAX and of this library, whose lines are none of the user's.
LIBRARIES = tuple(
    os.path.dirname(path) + os.sep for path in (jax.__file__, os.path.dirname(__file__))
)


class TraceError(Exception):
    """A function cannot be traced with arrays in the formats of its data."""


class DifferentProductsError(Exception):
    """Two traces of a function do not have the same products in the same order."""


def aval_of(x: Any) -> Any:
    """Return the abstract value of a leaf in the FP32 trace."""
    if is_scaled_array(x):
        # The type of the data, so that its sharding and its axes under shard_map stay.
        return jax.typeof(x.data).update(dtype=np.dtype(np.float32), weak_type=False)
    return jax.typeof(x)


def aval_in_format(x: Any) -> Any:
    """Return the abstract value of a leaf in plain code.

    JAX has no arithmetic in 8 bits, so these formats count as FP16.
    """
    if not is_scaled_array(x):
        return aval_of(x)
    dtype = np.dtype(x.dtype)
    if dtype.itemsize == 1:
        dtype = np.dtype(np.float16)
    return aval_of(x).update(dtype=dtype)


def trace_of(fun: Callable, avals: Sequence[Any]) -> Any:
    """Return the trace of `jax.jit(fun)` for arguments like these."""
    # Not make_jaxpr: what a function closes over in a transformation around it is then
    # found (`_closed_over`).
    return jax.jit(fun).trace(*avals)


def reference_trace(fun: Callable, leaves: Sequence[Any]) -> Any:
    """Return the trace of a function of arrays in the formats of these leaves.

    Raises:
        TraceError: it needs more than a narrow format has, as `jnp.linalg` does.
    """
    try:
        # Warnings about narrow numbers in this trace do not concern the user.
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return trace_of(fun, list(map(aval_in_format, leaves)))
    # A trace of user code may raise anything for another dtype; the warning says what.
    except Exception as error:
        raise TraceError(_reason(error)) from error


def _reason(error: Exception) -> str:
    # The last frame is JAX's own, as a line of its linalg.py: it does not filter what
    # `trace` raises.
    frames = [
        frame
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(LIBRARIES)
    ]
    place = ""
    if frames:
        name = os.path.basename(frames[-1].f_code.co_filename)
        place = f" at {name}:{frames[-1].f_lineno}"
    text = str(error).strip().partition("\n")[0]
    return (
        f"it cannot be traced with arrays in the formats of its data{place}"
        f" ({type(error).__name__}: {text})"
    )


def with_fp32_products(jaxpr: Any, reference: Any) -> Any:
    """Return a jaxpr whose products are FP32 where the reference's are.

    They get the highest precision, which marks FP32 in a jaxpr: at the default
    precision GPUs read FP32 operands in TF32, with as few digits as FP16.

    Args:
        jaxpr: traced with FP32 arrays. It is returned as the same object if nothing
            changes, so that calls that share it still share it.
        reference: the trace of the same function, with arrays in the formats of the
            data.

    Raises:
        DifferentProductsError: they do not have the same products.
    """
    return _replaced(jaxpr, reference) or jaxpr


@per_jaxpr
def _replaced(jaxpr: Any, reference: Any) -> Any:
    """Return `with_fp32_products`' result, or None where nothing changes.

    A cache must not hold its key.
    """
    products, reference_products = _products(jaxpr), _products(reference)
    if [key for _, key in products] != [key for _, key in reference_products]:
        raise DifferentProductsError
    eqns = list(jaxpr.eqns)
    for (i, _), (j, _) in zip(products, reference_products, strict=True):
        eqns[i] = _as_in(eqns[i], reference.eqns[j])
    if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return None
    return jaxpr.replace(eqns=eqns)


@per_jaxpr
def _products(jaxpr: Any) -> tuple[tuple[int, Any], ...]:
    """Return the equations that are or contain products: numbers and signatures."""
    products: list[tuple[int, Any]] = []
    for i, eqn in enumerate(jaxpr.eqns):
        name = eqn.primitive.name
        if name in PRODUCTS:
            # Not the dtypes, in which the two traces differ.
            shapes = tuple(x.aval.shape for x in eqn.invars)
            # Products of square matrices have equal shapes whichever axes they sum
            # over.
            dims = [x for key, x in eqn.params.items() if key.endswith("_numbers")]
            products.append((i, (name, shapes, dims[0])))
        else:
            # Calls are compared whole: a cast adds equations to a trace, so products
            # are found by their order, not by the number of their equation.
            inner = [x for _, x in _inner_jaxprs(eqn)]
            if any(map(has_products, inner)):
                products.append((i, (name, len(inner))))
    return tuple(products)


def has_products(jaxpr: Any) -> bool:
    """Return whether a jaxpr contains a product, also in inner jaxprs."""
    return bool(_products(jaxpr))


def _inner_jaxprs(eqn: Any) -> list[tuple[str, Any]]:
    if eqn.primitive.name not in CONTROL:
        return []
    return [
        (key, x)
        for key, value in eqn.params.items()
        # A cond has its branches in a tuple.
        for x in (value if isinstance(value, tuple) else (value,))
        if isinstance(x, Jaxpr)
    ]


def _reads_less(precision: Any) -> bool:
    """Return whether a precision is an algorithm that reads less than FP32."""
    if precision is None or isinstance(precision, (tuple, jax.lax.Precision)):
        return False
    return not str(getattr(precision, "name", precision)).startswith(("F32", "F64"))


def _as_in(eqn: Any, reference: Any) -> Any:
    if eqn.primitive.name in PRODUCTS:
        # Numbers of Python are FP32 arrays of a weak type, which takes part in no
        # promotion.
        is_fp32 = any(
            x.aval.dtype.itemsize >= 4 and not x.aval.weak_type
            for x in reference.invars[:2]
        )
        precisions = (eqn.params["precision"], reference.params["precision"])
        # A named algorithm defines its operands' precision, also in gradients: that of
        # jax.nn.dot_product_attention reads FP16.
        if not is_fp32 or any(map(_reads_less, precisions)):
            return eqn
        # In a jaxpr of FP32 arrays only the precision can tell the product's dtype.
        return eqn.replace(params={**eqn.params, "precision": IN_FULL})
    pairs = zip(_inner_jaxprs(eqn), _inner_jaxprs(reference), strict=True)
    new: dict[str, list[Any]] = {}
    changed = False
    for (key, jaxpr), (_, other) in pairs:
        new.setdefault(key, []).append(with_fp32_products(jaxpr, other))
        # The same object where nothing changes: caches are keyed by jaxprs, and calls
        # that share one are traced once.
        changed |= new[key][-1] is not jaxpr
    if eqn.primitive.name == "scan":
        body, other = new["jaxpr"][0], reference.params["jaxpr"]
        marked = _with_narrow_results(body, other)
        new["jaxpr"] = [marked]
        changed |= marked is not body
    if not changed:
        return eqn
    params = {
        key: tuple(jaxprs) if isinstance(eqn.params[key], tuple) else jaxprs[0]
        for key, jaxprs in new.items()
    }
    return eqn.replace(params={**eqn.params, **params})


# The name that a reference trace gives to a narrow result of a scan's body, in the
# body's debug information: a jaxpr of FP32 arrays has no other place for it.
_NARROW = "fewer than 32 bits"


def narrow_results(jaxpr: Any) -> tuple[bool, ...]:
    """Return which results of a scan's body plain code has in fewer than 32 bits.

    Those of a scan without products are not known: False.
    """
    names = jaxpr.debug_info.result_paths
    if not isinstance(names, tuple) or len(names) != len(jaxpr.outvars):
        return (False,) * len(jaxpr.outvars)
    return tuple(name == _NARROW for name in names)


def _with_narrow_results(jaxpr: Any, reference: Any) -> Any:
    """Return the body of a scan that names the results which are narrow in the
    reference; see `narrow_results`.

    No result is named if the two bodies have results of different shapes, as after a
    differentiation with other residuals.
    """
    ours, theirs = ([x.aval for x in j.outvars] for j in (jaxpr, reference))
    narrow = list(map(is_narrow, theirs))
    if not any(narrow) or [x.shape for x in ours] != [x.shape for x in theirs]:
        return jaxpr
    names = tuple(_NARROW if is_narrow else "" for is_narrow in narrow)
    info = jaxpr.debug_info._replace(result_paths=names)
    return jaxpr.replace(debug_info=info)


def dtypes_of_results(reference: Any) -> list[np.dtype | None]:
    """Return the dtypes of the results of a reference trace; None for typed keys."""
    return [
        (
            None
            if jnp.issubdtype(aval.dtype, jax.dtypes.extended)
            else np.dtype(aval.dtype)
        )
        for aval in reference.out_avals
    ]


# A program keeps both of its traces, because which products of its gradient are FP32 is
# found in the same way: the backward passes of both are laid beside each other.

_DIFFERENT = (
    "with arrays in the formats of its data it has other products, or in another order"
)


class Program(NamedTuple):
    """A traced function.

    Attributes:
        name: the name of the function, for warnings.
        jaxpr: the jaxpr, traced with FP32 arrays for scaled arguments. Products that
            are FP32 in plain code are FP32. Closed-over values precede the arguments.
        dtypes: the dtypes of the results in plain code; None where they are unknown or
            not needed.
        unknown: the reason why the FP32 products of plain code are unknown; None: they
            are known.
        traces: the jaxprs of the function, with FP32 arrays and in the formats of the
            data. The latter is None without narrow data or measured scales, or if the
            trace fails.
    """

    name: str
    jaxpr: Any
    dtypes: Sequence[np.dtype | None]
    unknown: str | None
    traces: tuple[Any, Any]

    def vjp(self, wanted: Sequence[int], given: Sequence[int]) -> Program:
        """Return the backward pass, of the arguments and of cotangents.

        Args:
            wanted: the arguments whose gradients it returns.
            given: the results that have a cotangent. Others need no gradient, as those
                of a loop of unknown length, which has none.
        """
        # Both traces: a product of the backward pass is FP32 by promotion where plain
        # code's is.
        wide, narrow = (x and _trace_vjp(x, wanted, given) for x in self.traces)
        return _compared(f"{self.name}, backward pass", wide, narrow)

    def warn(self) -> None:
        """Warn (`PrecisionWarning`) if the FP32 operands of plain code are unknown."""
        if self.unknown is not None:
            text = (
                f"{self.name}: {self.unknown}, so products that plain code has in FP32,"
                " by a cast or by promotion, are "
                f'read in the format of the data; precision="highest" keeps FP32'
            )
            warnings.warn(text, PrecisionWarning, stacklevel=2)


def traced(
    fun: Callable, leaves: Sequence[Any], *, narrow: bool
) -> tuple[Program, list[Any]]:
    """Trace a function of leaves, with FP32 arrays for scaled ones.

    Args:
        fun: function of the leaves.
        leaves: arrays and ScaledArrays.
        narrow: whether to find the FP32 results of plain code in the data's formats.

    Returns:
        The program, and the values that it closes over, which are its first arguments.
    """
    wide = trace_of(fun, list(map(aval_of, leaves)))
    closed_over = _closed_over(wide)
    name = getattr(fun, "__name__", "scalified")
    program = _compared(name, wide.jaxpr, None)
    # Only narrow data may be FP32 in plain code.
    if not narrow or not any(is_scaled_array(x) and is_narrow(x) for x in leaves):
        return program, closed_over
    try:
        second = reference_trace(fun, leaves)
    except TraceError as error:
        if has_products(wide.jaxpr):
            # Without products nothing is read in a narrow format, so there is nothing
            # to warn of.
            program = program._replace(unknown=str(error))
        return program, closed_over
    # They are arguments by position, so both traces must read the same objects in the
    # same order.
    if list(map(id, _closed_over(second))) != list(map(id, closed_over)):
        return program._replace(unknown=_DIFFERENT), closed_over
    return _compared(name, wide.jaxpr, second.jaxpr), closed_over


def _compared(name: str, wide: Any, narrow: Any) -> Program:
    """Return the program of two traces, of which the second may be None."""
    wide, narrow = needed(wide), narrow and needed(narrow)
    unknown: tuple[None, ...] = (None,) * len(wide.outvars)
    if narrow is None:
        return Program(name, wide, unknown, None, (wide, None))
    dtypes = dtypes_of_results(narrow)
    try:
        return Program(
            name, with_fp32_products(wide, narrow), dtypes, None, (wide, narrow)
        )
    except DifferentProductsError:
        return Program(name, wide, dtypes, _DIFFERENT, (wide, narrow))


def _closed_over(traced: Any) -> list[Any]:
    """Return the values of surrounding transformations that a traced function reads."""
    return list(traced.closure_convert()[0][len(traced.jaxpr.consts) :])


def _trace_vjp(jaxpr: Any, wanted: Sequence[int], given: Sequence[int]) -> Any:
    count = len(jaxpr.invars)

    # Of the jaxpr, not of the user's function: that has run once for each trace, and
    # may print or count.
    def pulled(*operands: Any) -> Any:
        leaves, cotangents = operands[:count], operands[count:]

        def of_wanted(*some: Any) -> list[Any]:
            inputs = list(leaves)
            for i, x in zip(wanted, some, strict=True):
                inputs[i] = x
            out = jax.core.eval_jaxpr(jaxpr, jaxpr.consts, *inputs)
            return [out[i] for i in given]

        _, pullback = jax.vjp(of_wanted, *(leaves[i] for i in wanted))
        return pullback(list(cotangents))

    # A cotangent comes as an array, and arrays have no weak type.
    avals = [jaxpr.out_avals[i].update(weak_type=False) for i in given]
    return trace_of(pulled, [*jaxpr.in_avals, *avals]).jaxpr
