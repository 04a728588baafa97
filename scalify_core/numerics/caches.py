"""Caches of facts about a jaxpr, kept as long as the jaxpr exists."""

from __future__ import annotations

import functools

from jax._src.util import weakref_lru_cache

# A jaxpr holds the arrays that a program closes over, such as parameters: it must be
# freed with its program. So cached results must not hold the jaxpr itself, except by a
# weak reference. They may hold equations, which do not hold their jaxpr.
per_jaxpr = functools.partial(
    weakref_lru_cache, maxsize=4096, trace_context_in_key=False
)
