"""What a forward pass keeps for a backward pass that is evaluated later, by itself: the same as within one program.

Within one program a value is stored where a product reads it, and is FP32 for all others. Of a gradient that is taken
outside, the forward pass has returned before the backward pass begins. So what it keeps is what that will read: stored
in a narrow format if products alone read it there, at scales that they can do with, and else FP32, without a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from scalify_core.array import ScaledArray, with_scale
from scalify_core.caches import per_jaxpr
from scalify_core.measured import store
from scalify_core.measured.plan import CALLS, Format, Step, inner_jaxpr, plan_of, scan_formats, scan_parts
from scalify_core.measured.products import Reading, Want, is_finer


@jax.tree_util.register_pytree_node_class
class Logical:
    """A logical value that is stored nowhere: `value`, FP32 or wider, counts as of the format `dtype`."""

    __slots__ = ("dtype", "value")

    def __init__(self, value: Any, dtype: np.dtype) -> None:
        self.value, self.dtype = value, dtype

    def tree_flatten(self) -> tuple[Any, Any]:
        """One leaf: the value."""
        return (self.value,), self.dtype

    @classmethod
    def tree_unflatten(cls, dtype: np.dtype, children: tuple) -> Logical:
        """No checks: JAX puts placeholders in trees."""
        return cls(children[0], dtype)


class Residuals(NamedTuple):
    """Which results of a forward pass are for a backward pass.

    Attributes:
        first: the number of the first; all after it are, too.
        backward: gives the jaxpr of the backward pass, of these and of the gradients of the results before them.
    """

    first: int
    backward: Callable[[], Any]

    def readings(self, out_formats: tuple[Format, ...]) -> list[Reading | None]:
        """Of each, how products read it, if nothing else does; by the formats of all results."""
        jaxpr, count = self.backward(), len(out_formats) - self.first
        formats = (*out_formats[self.first :], *out_formats[: self.first])
        if len(jaxpr.invars) != len(formats):
            return [None] * count
        reads, alone = plan_of(jaxpr, formats).reads, read_by_products_alone(jaxpr, formats)
        return [x if only else None for x, only in zip(reads[:count], alone[:count], strict=True)]


def kept(x: Any, dtype: np.dtype, reading: Reading | None, copies: dict[Want, ScaledArray]) -> ScaledArray | Logical:
    """A residual of this format as it is kept: `reading` says how products read it, `copies` how it is stored already.

    What is stored already for others does if it has scales enough.
    """
    if type(x) is not ScaledArray:
        if reading is None:
            return Logical(x, dtype)
        fits = (y for want, y in copies.items() if want.dtype == reading.dtype and _has(want, reading))
        x = next(fits, None) or store.stored(x, reading.dtype, reading.may)
    return with_scale(x.data, jnp.float32(x.scale)) if x.is_static else x


def _has(want: Want, reading: Reading) -> bool:
    return is_finer(want.parts or (1,) * len(reading.must), reading.must)


@per_jaxpr
def read_by_products_alone(jaxpr: Any, formats: tuple[Format, ...]) -> tuple[bool, ...]:
    """Of each argument, whether nothing but products reads it, here or further in, or what only moves it for them."""
    wide = {atom for atom in jaxpr.outvars if type(atom) is not Literal}
    for step in reversed(plan_of(jaxpr, formats).steps):
        for atom, alone in zip(step.eqn.invars, reads_for_products(step, wide), strict=True):
            if not alone and type(atom) is not Literal:
                wide.add(atom)
    return tuple(var not in wide for var in jaxpr.invars)


def reads_for_products(step: Step, wide: AbstractSet[Any] = frozenset()) -> Sequence[bool]:
    """Of each operand, whether this step reads it for products alone, `wide` being all that others read."""
    eqn = step.eqn
    others = [False] * len(eqn.invars)
    if step.kind == "product":
        return [not step.whole, not step.whole, *others[2:]]
    if step.kind == "move":
        return [step.wants[0] is not None and eqn.outvars[0] not in wide, *others[1:]]
    if step.kind == "scan":
        consts, carry, _ = scan_parts(eqn, eqn.invars)
        inner = read_by_products_alone(inner_jaxpr(eqn), scan_formats(eqn, step.formats)[0])
        n, m = len(consts), len(consts) + len(carry)
        return [*inner[:n], *[False] * len(carry), *inner[m:]]
    if step.kind in CALLS:
        return read_by_products_alone(inner_jaxpr(eqn), step.formats)
    return others
