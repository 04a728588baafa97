"""The name scopes and compiler contexts of equations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax


def scope_of(eqn: Any) -> tuple[Any, Any]:
    """Return an equation's named scopes, and its context.

    The context is None unless it holds metadata for the compiler.
    """
    ctx = eqn.ctx
    return (
        eqn.source_info.name_stack,
        ctx if ctx.xla_metadata or ctx.compute_type else None,
    )


@contextlib.contextmanager
def within(scopes: Any, ctx: Any) -> Iterator[None]:
    """Trace inside these named scopes, and in this compiler context unless None."""
    name = str(scopes)
    with (
        jax.named_scope(name) if name else contextlib.nullcontext(),
        ctx.manager if ctx else contextlib.nullcontext(),
    ):
        yield
