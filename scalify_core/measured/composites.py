"""Composites: what acts on scales means what it says, FP8 products are FP8, all others
run in FP32 as written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalify_core import peaks, probe, storage
from scalify_core.array import ScaledArray, with_scale
from scalify_core.formats import FloatFormat
from scalify_core.matmul import dot_fp8, lhs_gradient, rhs_gradient
from scalify_core.measured import store
from scalify_core.measured.batches import (
    Labels,
    labels,
    labels_of_result,
    scale_for,
    shared,
)
from scalify_core.measured.evaluate import Operands, kind
from scalify_core.measured.plan import Step
from scalify_core.measured.products import Want, each_index
from scalify_core.rules.composites import in_order

_F32 = np.dtype(np.float32)
_composites: dict[str, Callable] = {}


@kind("composite")
def _composite(step: Step, env: Operands) -> Sequence[Any]:
    call = step.eqn.params["call"]
    special = _composites.get(call.name)
    if special is not None:
        return special(call, step, env)
    operands = [
        storage.as_float32(x) if _is_float(x) else x
        for x in map(env.wide, step.eqn.invars)
    ]
    return call.bind(*operands)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _defined(*names: str) -> Callable:
    def register(fun: Callable) -> Callable:
        _composites.update(dict.fromkeys(names, fun))
        return fun

    return register


_RESCALES = (
    "dynamic_rescale_rms",
    "dynamic_rescale_max",
    "dynamic_rescale_rms_grad",
    "dynamic_rescale_max_grad",
)
_SAME = (*_RESCALES, "rebalance", "rebalance_grad", "stop_scaling", "materialised")
_E4M3 = np.dtype(jnp.float8_e4m3fn)


@_defined(*(f"{name}{part}" for name in _SAME for part in ("", ".fwd", ".bwd")))
@_defined(
    "set_scaling.bwd", "cast_on_forward.bwd", "cast_on_backward", "cast_on_backward.fwd"
)
def _same(call: Any, step: Step, env: Operands) -> Sequence[Any]:
    """Scales are measured wherever they matter, so what rescales has nothing to do.
    Results are the last operand.
    """
    return [in_order(call, env.wide(step.eqn.invars[-1]))] * len(step.eqn.outvars)


@_defined("set_scaling", "set_scaling.fwd")
def _set_scaling(call: Any, step: Step, env: Operands) -> Sequence[Any]:
    x, dtype, scale = (
        in_order(call, env.wide(step.eqn.invars[0])),
        step.out_formats[0],
        dict(call.static)["scale"],
    )
    if dtype is None:
        return [x]
    return [ScaledArray(x, 1.0).rescale(scale).astype(dtype)]


@_defined("cast_on_forward", "cast_on_forward.fwd", "cast_on_backward.bwd")
def _quantised(call: Any, step: Step, env: Operands) -> Sequence[Any]:
    """Rounded to a format at a measured scale, as a store in it would be."""
    fmt: FloatFormat = dict(call.static)["fmt"]
    x = in_order(call, env.wide(step.eqn.invars[-1]))
    unit = peaks.unit_of(x, int(np.log2(fmt.max)) - 1)
    return [fmt.quantise(x * (1 / unit)) * unit]


@_defined("get_data_scale")
def _get_data_scale(call: Any, step: Step, env: Operands) -> Sequence[Any]:
    x = step.eqn.invars[0]
    dtype = step.formats[0]
    if dtype is None:
        return [env.read(x), jnp.float32(1)]
    found = store.result(in_order(call, env.wide(x)), dtype)
    return [storage.as_float32(found.data), jnp.asarray(found.scale, jnp.float32)]


@_defined("probe", "probe.fwd", "probe.bwd")
def _probe(call: Any, step: Step, env: Operands) -> Sequence[Any]:
    """The array passes as it is; the figures are those of what would be stored."""
    passed, *_ = step.out_formats
    atom = step.eqn.invars[1 if call.name == "probe.bwd" else 0]
    x = env.wide(atom)
    if call.name == "probe":
        return [x]
    seen = x if passed is None else store.result(x, passed)
    rest = [env.read(other) for other in step.eqn.invars if other is not atom]
    static = dict(call.static)
    if call.name == "probe.fwd":
        return [x, probe.fwd(seen, *rest, **static)[1]]
    (forward,) = rest
    return [x, probe.bwd(forward, seen, **static)[1]]


@_defined("fp8_dot_general", "fp8_dot_general.fwd")
def _fp8(call: Any, step: Step, env: Operands) -> Sequence[Any]:
    """Each entry of a batch, its own or that of a vmap of both operands, is cast at its
    own scale.
    """
    product = dict(call.static)["product"]
    of = _labels(call, step, product, (0, 1))
    lhs, rhs = (
        env.stored(x, Want(_E4M3, each_index(x.aval.shape, axes)))
        for x, axes in zip(step.eqn.invars, shared(of), strict=True)
    )

    unused = [
        jnp.float32(1) for scale in product.scaling[:2] if not isinstance(scale, float)
    ]

    def forward(lhs8: Any, rhs8: Any) -> Any:
        return dot_fp8(lhs8, rhs8, product.dims, _F32, fast=True), lhs8, rhs8, *unused

    # The residuals, too: under vmap all results have the axis of the batch in front,
    # whatever that of the operands is.
    out, lhs8, rhs8, *unused = _on_data(call, forward, lhs.data, rhs.data)
    batch, vmaps = len(product.dims[1][0]), len(call.in_axes)
    result = labels_of_result(
        [*range(batch), *[None] * (out.ndim - vmaps - batch)], vmaps
    )
    out = store.scaled_by(
        out,
        *(scale_for(x, axes, result) for x, axes in zip((lhs, rhs), of, strict=True)),
    )
    if call.name == "fp8_dot_general":
        return [out]
    kept = (
        with_scale(x8, scale_for(x, axes, labels_of_result(_own(axes), vmaps)))
        for x8, x, axes in zip((lhs8, rhs8), (lhs, rhs), of, strict=True)
    )
    return [out, *kept, *unused]


@_defined("fp8_dot_general.bwd")
def _fp8_bwd(call: Any, step: Step, env: Operands) -> Sequence[Any]:
    product, last = dict(call.static)["product"], len(step.eqn.invars) - 1
    of = _labels(call, step, product, (0, 1, last))
    formats, atoms = (
        (_E4M3, _E4M3, product.gradient.dtype),
        (*step.eqn.invars[:2], step.eqn.invars[last]),
    )
    lhs, rhs, gradient = (
        env.stored(x, Want(dtype, each_index(x.aval.shape, axes)))
        for x, dtype, axes in zip(atoms, formats, shared(of), strict=True)
    )
    unused = map(env.read, step.eqn.invars[2:-1])

    def backward(lhs8: Any, rhs8: Any, *rest: Any) -> tuple:
        d_lhs = lhs_gradient(rest[-1], rhs8, product.dims, _F32)
        return d_lhs, rhs_gradient(lhs8, rest[-1], product.dims, _F32)

    d_lhs, d_rhs = _on_data(call, backward, lhs.data, rhs.data, *unused, gradient.data)
    of_lhs, of_rhs, of_gradient = of
    out = []
    for found, like, other, of_other in (
        (d_lhs, of_lhs, rhs, of_rhs),
        (d_rhs, of_rhs, lhs, of_lhs),
    ):
        result = labels_of_result(_own(like), len(call.in_axes))
        scales = (
            scale_for(gradient, of_gradient, result),
            scale_for(other, of_other, result),
        )
        out.append(store.scaled_by(found, *scales))
    return out


def _labels(
    call: Any, step: Step, product: Any, operands: Sequence[int]
) -> list[Labels]:
    """Of the axes of the operands of these numbers: left, right and, if it is among
    them, the result's gradient.
    """
    _, (lhs, rhs) = product.dims
    own = (lhs, rhs, range(len(lhs)))
    mapped = ([axes[i] for axes in call.in_axes] for i in operands)
    ranks = (len(step.eqn.invars[i].aval.shape) for i in operands)
    return [labels(*each) for each in zip(ranks, own, mapped, strict=False)]


def _own(of: Labels) -> Labels:
    """The axes that are none of a vmap."""
    return [label for label in of if not isinstance(label, tuple)]


def _on_data(call: Any, fun: Callable, *operands: Any) -> list[Any]:
    """`fun` on the data, under the vmaps of the call."""
    in_tree = jax.tree.structure(operands)
    return call.replace(fun=fun, static={}, in_tree=in_tree)(*operands)
