"""Batches of sequences of any length in few shapes, so that few programs are compiled.

Legend: B sequences of a batch, T tokens of each, C of them scored, the last ones of
each sequence.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

MULTIPLE = 16  # of T, for FP8 matmuls
LENGTHS = 4  # different T for each C


class Sized(NamedTuple):
    """The length of a sequence, and the number of its last tokens that are scored."""

    tokens: int
    scored: int


class PaddedBatch(NamedTuple):
    """A batch of one shape.

    rows: indices of its sequences, at most B.
    """

    rows: tuple[int, ...]
    length: int
    scored: int


def make_batches(sizes: Sequence[Sized], batch: int, context: int) -> list[PaddedBatch]:
    """Return batches of up to `batch` sequences of similar length, the longest first.

    C is 16, 64, 256, ..., or all of T. For each C there are at most `LENGTHS` different
    T, multiples of 16 unless that exceeds `context`.
    """
    groups: dict[int, list[int]] = {}
    for row, size in enumerate(sizes):
        groups.setdefault(round_scored(size.scored), []).append(row)
    batches = []
    for scored, rows in groups.items():
        # Rows of similar length share a batch, whose first row is the longest.
        rows.sort(key=lambda row: -sizes[row].tokens)
        parts = [tuple(rows[i : i + batch]) for i in range(0, len(rows), batch)]
        rounded = [
            # A model has no positions beyond its context, which need not be a multiple
            # of 16.
            min(-(-sizes[part[0]].tokens // MULTIPLE) * MULTIPLE, context)
            for part in parts
        ]
        for part, length in zip(parts, merge_lengths(rounded), strict=True):
            batches.append(PaddedBatch(part, length, min(scored, length)))
    return batches


def rows_at_once(batch: int, sequences: int) -> int:
    """Return B for a number of sequences: at most `batch`.

    Fewer sequences need no more than the next power of two of rows, so that few shapes
    are compiled.
    """
    return max(1, min(batch, 1 << (sequences - 1).bit_length()))


def round_scored(scored: int) -> int:
    """Round up to 16, 64, 256, ..."""
    rounded = MULTIPLE
    while rounded < scored:
        # By fours, a context of 4,096 has five C. Each C is compiled for up to
        # `LENGTHS` lengths, and steps of 16 would have 256.
        rounded *= 4
    return rounded


def merge_lengths(lengths: Sequence[int]) -> list[int]:
    """Raise lengths until at most `LENGTHS` differ, with the least padding first."""
    merged = list(lengths)
    while len(different := sorted(set(merged))) > LENGTHS:
        padding = [
            # Padding counts once for each batch of this length.
            (above - below) * merged.count(below)
            for below, above in itertools.pairwise(different)
        ]
        cheapest = padding.index(min(padding))
        below, above = different[cheapest : cheapest + 2]
        merged = [above if length == below else length for length in merged]
    return merged
