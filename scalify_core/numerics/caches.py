"""What is found of a jaxpr, remembered as long as the jaxpr is there."""

from __future__ import annotations

import functools

from jax._src.util import weakref_lru_cache

# A jaxpr holds the arrays that a program closes over, such as parameters: it must be
# forgotten with its program. So what is remembered must not hold the jaxpr itself, a
# function of it only by a weak reference. It may hold the equations, of which none
# holds the jaxpr that it stands in.
per_jaxpr = functools.partial(
    weakref_lru_cache, maxsize=4096, trace_context_in_key=False
)
