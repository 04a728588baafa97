"""The policy of measured scales: FP32 between stores, a measured power of two at each.

Every equation runs on logical values in FP32, but for products, attention and moves of
stored data. These read narrow formats; the scale of a stored value follows from its
largest magnitude. A `Value` is either *wide*, FP32 data at scale 1, or data as it is
stored. It keeps the copies that were stored of it, so that one rounding serves all
products that read it alike.

A value is stored narrow here:

- as an operand: `quantized_copy`, for `_product`, `composites` and, ahead of a move, a
  call or a loop, `quantize_for_products`;
- by the user's cast: `_convert`;
- in the stack of a scan: `_stacks` says which, `stacked` stores it;
- as a result of the program: `leaving`.

The format of a product is decided here:

- `_product`: 16 bits (FP8 data counts as FP16), or FP32. It is FP32
    - where plain code has it in FP32, which `reference_trace` marks by the precision
      `IN_FULL`;
    - where it may select elements (`_may_select_elements`);
    - with FP32 data, where a sum has one term and where a convolution has groups
      (`products.is_narrow_product`), all at the default precision.
- FP8 is the user's choice, `ops.matmul.Fp8DotGeneral`: `composites._fp8`.
- Attention has 16 bits (`composites._attention`). Other composites without a rule in
  `composites`, as `linear_cross_entropy`, have FP32 products.

Under propagated scales no product is FP32 on request: `rules.matmul._product` has the
format of the data, `_forward` FP8. Attention and the head's loss have that of the data
at static scales, and FP32 at others (`rules.composites.kernel_operands`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from scalify_core.interpreter import registry
from scalify_core.interpreter import value as v
from scalify_core.interpreter.measured import masks, quantize, uses
from scalify_core.interpreter.measured.products import (
    KEEP_AXES,
    MOVES,
    Reading,
    is_finer,
    is_narrow_product,
    operand_readings,
    readings,
    reads_in,
    scaled_result,
)
from scalify_core.interpreter.reference_trace import narrow_results
from scalify_core.interpreter.value import Value, logical
from scalify_core.numerics import formats
from scalify_core.numerics.amax import Parts
from scalify_core.numerics.formats import is_float
from scalify_core.numerics.jaxprs import CALLS, IN_FULL, PRODUCTS

_F32 = np.dtype(np.float32)
# Products inside or behind these may read their operands. Not shard_map: a device
# quantizes its own shard.
_READ_FURTHER_ON = (CALLS | MOVES | {"scan"}) - {"shard_map"}

composite_rules: dict[str, Callable] = {}  # by `registry.key_of` the equation


def measured_composite(*names: str) -> Callable:
    """Return a decorator that registers the rule of the composite calls of these names.

    The rule takes the call, the equation and its operands.
    """

    def register(fun: Callable) -> Callable:
        composite_rules.update((registry.COMPOSITE + name, fun) for name in names)
        return fun

    return register


def results(
    eqn: Any, operands: Sequence[Any], jaxpr: Any, *, evaluate: Any
) -> list[Any]:
    """Return the results of an equation that is not plain (`evaluator.is_plain`).

    Args:
        eqn: the equation.
        operands: values and plain operands; a cast, a call or a loop may have plain
            ones only.
        jaxpr: the jaxpr that contains the equation.
        evaluate: the evaluator of inner jaxprs.
    """
    quantize_for_products(eqn, operands, jaxpr)
    if eqn.primitive.name == "convert_element_type":
        return _convert(eqn, operands[0], jaxpr)
    if eqn.primitive.name in MOVES:
        return _move(eqn, *operands)
    if eqn.primitive.name in PRODUCTS:
        return _product(eqn, operands, jaxpr)
    rule = registry.rule_of(eqn)
    if rule.control:  # the same under both policies
        stacks: tuple[Reading | None, ...] = ()
        # Results of a call may be stacks of a scan inside it. Those of branches and
        # while loops have one form, FP32 (`carries.wide_form`).
        if eqn.primitive.name in CALLS | {"scan"}:
            stacks = _stacks(eqn, jaxpr, evaluate.stacks)
        inner = dataclasses.replace(evaluate, stacks=stacks)
        return rule.fun(eqn, *operands, evaluate=inner)
    if eqn.primitive.name == "scalify_composite":
        fun = composite_rules.get(registry.key_of(eqn))
        if fun is not None:
            return fun(eqn.params["call"], eqn, *operands)
    return wide_results(eqn, *operands)


def _stacks(
    eqn: Any, jaxpr: Any, of_results: tuple[Reading | None, ...]
) -> tuple[Reading | None, ...]:
    """Return `Evaluator.stacks` for the bodies of an equation.

    A result is stored narrow if scans read it only slice by slice, in this jaxpr or
    behind its own results. `of_results` is the evaluator's `stacks` for the jaxpr.
    """
    of_results = of_results or (None,) * len(jaxpr.outvars)
    # Losses that a user stacks and computes with would lose digits: whatever is not
    # sliced alone stays FP32.
    read_whole = uses.marked(
        jaxpr, tuple(r is None for r in of_results), uses.reads_beside_loops
    )
    outside = {
        atom: reading
        for atom, reading in zip(jaxpr.outvars, of_results, strict=True)
        if not isinstance(atom, Literal)
    }
    reads = reads_in(jaxpr)
    stacks: list[Reading | None] = []
    for var in eqn.outvars:
        if var in read_whole:
            stacks.append(None)
            continue
        # A stack that no product reads has one scale for each iteration.
        ones = (1,) * len(var.aval.shape)
        reading = reads.get(var) or outside.get(var) or Reading(ones, ones)
        if eqn.primitive.name == "scan":  # an iteration makes a slice
            reading = Reading(reading.must[1:], reading.may[1:])
        stacks.append(reading)
    if eqn.primitive.name == "scan":
        # Results that plain code has in FP32, by a cast or promotion, stay FP32.
        narrow = narrow_results(eqn.params["jaxpr"])
        return tuple(
            reading if is_narrow else None
            for reading, is_narrow in zip(stacks, narrow, strict=True)
        )
    return tuple(stacks)


def quantize_for_products(eqn: Any, operands: Sequence[Any], jaxpr: Any) -> None:
    """Store the operands that products read behind a move, or inside a call or a loop.

    An operand is stored before it moves, and outside the call. So products inside and
    outside read the same copy, and a loop does not store it in every iteration.
    """
    name = eqn.primitive.name
    if name not in _READ_FURTHER_ON:
        return
    reads = reads_in(jaxpr)
    of_operands = operand_readings(eqn, [reads.get(var) for var in eqn.outvars])
    for atom, x, reading in zip(eqn.invars, operands, of_operands, strict=True):
        # Stored data moves as it is: another rounding would only lose digits.
        if isinstance(x, Value) and reading is not None and not is_stored(x):
            dtype = v.result_dtype(x)
            if dtype.itemsize < 4:
                quantized_copy(
                    x, dtype, reading, reads[atom], operand_mask_limit(atom, jaxpr)
                )


def operand_mask_limit(atom: Any, jaxpr: Any) -> float:
    """Return the limit at or below which an operand's elements are masks: `LOWEST`.

    A -1e9 is a term of the product's sums like any other.
    """
    return min(masks.limit_of(masks.limits_in(jaxpr), atom), masks.LOWEST)


def wide_value(data: Any, dtype: Any) -> Value:
    """Return a value of format `dtype` that is not stored: FP32 data at scale 1."""
    return v.value(formats.at_least_float32(data), 1.0, v.MEASURED, dtype)


def like(x: Any, data: Any) -> Any:
    """Return a result that is a value where `x` is one."""
    if isinstance(x, Value):
        return wide_value(data, x.dtype)
    return data


def is_stored(x: Value) -> bool:
    """Return whether the data of a value is in a narrow format, at a scale."""
    return x.data.dtype.itemsize < 4


def wide_results(eqn: Any, *operands: Any) -> list[Any]:
    """Return the results of an equation on the logical values, in FP32."""
    dtype = v.result_dtype(*operands)
    return [
        wide_value(x, dtype) if is_float(x) else x
        for x in registry.in_float32(eqn, *operands)
    ]


def quantized_copy(
    x: Any,
    dtype: np.dtype,
    reading: Reading,
    common: Reading,
    limit: float = masks.NO_MASK,
) -> Value:
    """Return an operand in a narrow format, at a measured scale.

    Args:
        x: a value or a plain operand.
        dtype: the format.
        reading: the granularity that this reader must have, and may have.
        common: the granularity that suits all readers of the operand.
        limit: elements at or below are masks.
    """
    # One copy for all readers, if its scales suit this one; else one of its own. An
    # operand that is stored twice is read and written twice.
    common_suits = is_finer(common.may, reading.must)
    parts = common.may if common_suits else reading.may
    if not isinstance(x, Value):
        # A plain operand has no place for copies, so each product stores it by itself.
        x = formats.as_float32(formats.materialize(x))
        return quantize.quantized(x, dtype, parts, limit=limit)
    # An argument in FP16 that only moved is read as it is: no amax, no second rounding.
    if is_stored(x) and x.data.dtype == dtype and quantize.scaled_in(x, reading.may):
        return x
    # Any copy serves whose scales are at least as fine as this reader must have, and no
    # finer than it can multiply out after its sum.
    for (name, copy_parts), copy in x.copies.items():
        is_fine_enough = is_finer(copy_parts, reading.must)
        if name == dtype.name and is_fine_enough and is_finer(reading.may, copy_parts):
            return copy
    copy = quantize.quantized(x, dtype, parts, limit=limit)
    x.copies[dtype.name, parts] = copy
    return copy


def stacked(x: Any, reading: Reading, var: Any, jaxpr: Any) -> Any:
    """Return a result of an iteration in its format, in the parts of its readers."""
    # FP32 is the program's wish, by a cast or by promotion; stored data is rounded.
    if not isinstance(x, Value) or x.dtype.itemsize >= 4 or is_stored(x):
        return x
    dtype = v.result_dtype(x)
    return quantized_copy(x, dtype, reading, reading, operand_mask_limit(var, jaxpr))


def _move(eqn: Any, x: Value, *rest: Any) -> list[Any]:
    fill = eqn.params.get("fill_value")
    keeps = fill is None or fill == 0 or np.isnan(fill)  # FP8 may have no infinity
    if is_stored(x) and keeps:
        scale = _moved_scale(eqn, x)
        if scale is not None:
            dtype = v.result_dtype(x)  # of FP8 data: FP16, for later arithmetic
            out = registry.bind_all(eqn, x.data, *rest)
            return [v.value(y, scale, v.MEASURED, dtype) for y in out]
    # Behind a move, too, all readers but products want every digit: the FP32 data moves
    # beside its copies.
    out = wide_results(eqn, x, *rest)
    # A product behind the move reads the same copy as one in front of it: else it would
    # be measured and written once more.
    if keeps and not eqn.primitive.multiple_results:
        for (name, parts), copy in x.copies.items():
            scale = _moved_scale(eqn, copy)
            moved = _moved_parts(eqn, parts)
            if scale is not None and moved is not None:
                y = registry.bind(eqn, copy.data, *map(formats.materialize, rest))
                out[0].copies[name, moved] = quantize.stored_value(y, scale)
    return out


def _moved_parts(eqn: Any, parts: Parts) -> Parts | None:
    if eqn.primitive.name in KEEP_AXES:
        return parts
    if eqn.primitive.name == "transpose":
        return tuple(parts[i] for i in eqn.params["permutation"])
    # One scale for all is one wherever elements go. Finer ones would have to be
    # followed through each reshape.
    is_whole = max(parts, default=1) == 1
    if is_whole:
        return (1,) * len(eqn.outvars[0].aval.shape)
    return None


def _moved_scale(eqn: Any, x: Value) -> Any:
    """Return the scale of `x`, moved as its elements are; None if that is unknown."""
    if jnp.ndim(x.scale) == 0 or eqn.primitive.name in KEEP_AXES:
        return x.scale
    if eqn.primitive.name == "transpose" and jnp.ndim(x.scale) == x.data.ndim:
        return lax.transpose(x.scale, eqn.params["permutation"])
    return None


def _product(eqn: Any, operands: Sequence[Any], jaxpr: Any) -> list[Any]:
    a, b, *rest = operands
    aval = eqn.outvars[0].aval
    if getattr(eqn.params["precision"], "accumulation_type", None) == np.float16:
        # Stored operands are near FP16's largest number, so the sum must be in FP32.
        eqn = eqn.replace(params={**eqn.params, "precision": None})
    # A plain operand has no part in the format: where plain code promotes by it, the
    # precision says so (`IN_FULL`).
    fmt = v.result_dtype(a, b)
    if fmt.itemsize >= 4 or not is_float(aval) or not is_narrow_product(eqn):
        return wide_results(eqn, *operands)
    if _may_select_elements(eqn, operands):
        # At the default precision a GPU reads FP32 in TF32, with FP16's 11 bits: a copy
        # would not equal its source.
        precision = eqn.params["precision"] or IN_FULL
        eqn = eqn.replace(params={**eqn.params, "precision": precision})
        return wide_results(eqn, *operands)
    reads, copies = reads_in(jaxpr), []
    for atom, x, reading in zip(eqn.invars, (a, b), readings(eqn), strict=False):
        common = reading if isinstance(atom, Literal) else reads.get(atom, reading)
        copies.append(
            quantized_copy(x, fmt, reading, common, operand_mask_limit(atom, jaxpr))
        )
    # The products of stored data are summed in FP32; both scales come after the sum, so
    # FP16 data cannot leave the range of FP32 in the product or the sum.
    stored_a, stored_b = copies
    others = list(map(formats.materialize, rest))
    out = eqn.primitive.bind(
        *registry.as_traced(eqn, [stored_a.data, stored_b.data]),
        *others,
        **{**eqn.params, "preferred_element_type": _F32},
    )
    out = scaled_result(eqn, formats.as_float32(out), stored_a, stored_b, *others)
    # The user asked for a wider result, by preferred_element_type.
    wider = aval.dtype.itemsize > max(x.aval.dtype.itemsize for x in eqn.invars[:2])
    return [wide_value(out, np.dtype(aval.dtype) if wider else fmt)]


def _may_select_elements(eqn: Any, operands: Sequence[Any]) -> bool:
    """Return whether a product may select elements of an operand, as `one_hot @ x`.

    Selected elements are often compared with `x`, so they must be exact. A product may
    select where one operand is a plain FP32 array, and the other is not rounded yet.
    """
    precision = eqn.params["precision"]
    names_algorithm = precision is not None and not isinstance(precision, tuple)
    # A named algorithm reads a format of its own, for which only stored operands have
    # scales.
    if eqn.primitive.name == "ragged_dot_general" or names_algorithm:
        return False
    pairs = zip(eqn.invars[:2], operands[:2], operands[1::-1], strict=True)
    return any(
        not isinstance(x, Value)
        and atom.aval.dtype == _F32
        and not (isinstance(other, Value) and is_stored(other))
        for atom, x, other in pairs
    )


def _convert(eqn: Any, x: Any, jaxpr: Any) -> list[Any]:
    dtype = np.dtype(eqn.params["new_dtype"])
    if not isinstance(x, Value):
        # A cast of a plain array is a store, too: the cotangent of a bare sum behind it
        # is FP16 without a scale, and 1e-9 of it zeros.
        x = wide_value(formats.materialize(x), eqn.invars[0].aval.dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        # The integer of the number as the user cast it: int(float16(2049)) is 2048.
        integers = formats.saturating_cast(logical(x), eqn.invars[0].aval.dtype)
        return registry.bind_all(eqn, integers)
    if dtype.itemsize < 4:  # the user's wish to round
        limit = masks.limit_of(masks.limits_in(jaxpr), eqn.invars[0])
        if limit > masks.NO_MASK:  # a mask is not to set the scale
            return [quantize.result(x, dtype, limit)]
        return [quantize.quantized(x, dtype)]
    # Widened, the value has all digits that it has between stores, not those of a copy.
    return [wide_value(lax.convert_element_type(logical(x), dtype), dtype)]


def leaving(
    jaxpr: Any,
    args: Sequence[Any],
    out: Sequence[Any],
    dtypes: Sequence[np.dtype | None],
) -> list[Any]:
    """Return the results of a program in storage form: values and arrays.

    An argument that is returned is the same object, unless plain code widens it.

    Args:
        jaxpr: the program.
        args: its operands.
        out: its results, values and plain arrays.
        dtypes: the dtypes of the results in plain code; None where they are unknown.
    """
    # By identity: an argument that only passes through keeps its bits and its scale.
    given = {id(x) for x in args}
    limits = masks.limits_of_results(jaxpr, [not isinstance(x, Value) for x in args])
    # Of a second moment in FP16 the elements that underflow would be zeros, and the
    # next step 1,000 times too large.
    nonzero = uses.marked(jaxpr, (False,) * len(out), uses.needs_nonzero)
    made = []
    for i, x in enumerate(out):
        if not isinstance(x, Value):
            made.append(x if id(x) in given else formats.materialize(x))
            continue
        dtype = result_format(x.dtype, dtypes[i] if i < len(dtypes) else None)
        # Not an FP16 argument that the program casts to FP32: plain code returns FP32.
        if id(x) in given and x.dtype.itemsize >= dtype.itemsize:
            made.append(x)
            continue
        var = jaxpr.outvars[i]
        is_nonzero = not isinstance(var, Literal) and var in nonzero
        made.append(quantize.result(x, dtype, limits[i], nonzero=is_nonzero))
    return made


def result_format(dtype: np.dtype, plain: np.dtype | None) -> np.dtype:
    """Return the format of a result: the dtype of plain code, if it is known.

    Formats of 8 bits count as FP16 in plain code.
    """
    if plain is None or not jnp.issubdtype(plain, jnp.floating):
        return dtype
    if dtype.itemsize == 1 and plain.itemsize < 4:
        return dtype
    return plain
