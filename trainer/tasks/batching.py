"""Sequences of any length in batches of few shapes, so that a handful of programs is
compiled.

Legend: B sequences of a batch, T tokens of each, C of them scored, the last ones of
each sequence.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

MULTIPLE = 16  # of T: what FP8 products take
LENGTHS = 4  # different T for each C


class Sized(NamedTuple):
    """How many tokens go in, and for how many of the last the next one is looked at."""

    tokens: int
    scored: int


class PaddedBatch(NamedTuple):
    """A batch of one shape.

    Attributes:
      rows: numbers of its sequences, at most B.
      length: T.
      scored: C, at most T.
    """

    rows: tuple[int, ...]
    length: int
    scored: int


def batches_of(sizes: Sequence[Sized], batch: int, context: int) -> list[PaddedBatch]:
    """Batches of `batch` sequences of about the same length, the longest first; the
    last ones may be smaller.

    C is 16, 64, 256, ..., or all of T; for each there are at most `LENGTHS` different
    T, multiples of 16 unless that is more than `context`.
    """
    groups: dict[int, list[int]] = {}
    for row, size in enumerate(sizes):
        groups.setdefault(tail_of(size.scored), []).append(row)
    found = []
    for scored, rows in groups.items():
        rows.sort(key=lambda row: -sizes[row].tokens)
        parts = [tuple(rows[i : i + batch]) for i in range(0, len(rows), batch)]
        rounded = [
            min(-(-sizes[part[0]].tokens // MULTIPLE) * MULTIPLE, context)
            for part in parts
        ]
        lengths = few(rounded)
        found += [
            PaddedBatch(part, t, min(scored, t))
            for part, t in zip(parts, lengths, strict=True)
        ]
    return found


def tail_of(scored: int) -> int:
    """The least of 16, 64, 256, ... that is not smaller."""
    tail = MULTIPLE
    while tail < scored:
        tail *= 4
    return tail


def few(lengths: Sequence[int]) -> list[int]:
    """The lengths, raised until there are at most `LENGTHS` different ones: first those
    that it costs the least.
    """
    found = list(lengths)
    while len(different := sorted(set(found))) > LENGTHS:
        cost = [
            (above - below) * found.count(below)
            for below, above in itertools.pairwise(different)
        ]
        cheapest = cost.index(min(cost))
        found = [
            different[cheapest + 1] if t == different[cheapest] else t for t in found
        ]
    return found
