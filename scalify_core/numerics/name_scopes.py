"""Where an equation stands in its program: what the compiler and a profile are told of
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax


def scope_of(eqn: Any) -> tuple[Any, Any]:
    """Where an equation stands: its named scopes, and its context where that says
    something to the compiler.
    """
    ctx = eqn.ctx
    return (
        eqn.source_info.name_stack,
        ctx if ctx.xla_metadata or ctx.compute_type else None,
    )


@contextlib.contextmanager
def within(scopes: Any, ctx: Any) -> Iterator[None]:
    name = str(scopes)
    with (
        jax.named_scope(name) if name else contextlib.nullcontext(),
        ctx.manager if ctx else contextlib.nullcontext(),
    ):
        yield
