"""`scalify` by its rules alone: what the tests of single rules are of."""

import functools

import scalify_core

scalify = functools.partial(scalify_core.scalify, scales="static")
