"""New rows of the tables that a vocabulary has, for other tokens than those that they
were trained with.

Tokens that both vocabularies have keep their rows. The others are made of those
(`METHODS`); the best known way is FOCUS (Dobler and de Melo 2023, arXiv 2305.14481): a
weighted mean of the rows of similar shared tokens, the weights being the sparsemax
(Martins and Astudillo 2016, arXiv 1602.02068) of their cosines in vectors that know
both.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

Method = Literal["focus", "mean", "gaussian", "copy", "random"]

Array = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

ROWS_AT_ONCE = 512


class Shared(NamedTuple):
    """The tokens of two vocabularies that are the same bytes: their ids in the new one
    and in the old one, [n] each.
    """

    new: Ids
    old: Ids

    @classmethod
    def of(
        cls,
        new: Mapping[bytes, int],
        old: Mapping[bytes, int],
        ends: tuple[int, int | None],
    ) -> Self:
        """Of ordinary tokens, and the ids that end a document in each, which are the
        same whatever they are called.
        """
        pairs = [
            (i, old[token])
            for token, i in new.items()
            if token in old and i != ends[0] and old[token] != ends[1]
        ]
        if ends[1] is not None:
            pairs.append((ends[0], ends[1]))
        pairs.sort()
        both = np.array(pairs, np.int64).reshape(-1, 2)
        return cls(both[:, 0], both[:, 1])


class Mixture(NamedTuple):
    """What the rows of tokens that are not shared are made of.

    Attributes:
      ids: of the tokens that have similar ones, [m].
      weights: of the shared tokens' rows, FP32 [m, shared]; non-negative, the sum of
          each row is 1.
    """

    ids: Ids
    weights: Array

    @classmethod
    def of(cls, vectors_VxW: Array, shared: Shared) -> Self:
        """By the likeness of the new vocabulary's vectors; tokens whose vector is zero
        are in no mixture.
        """
        length = np.linalg.norm(vectors_VxW, axis=1)
        unit = vectors_VxW / np.where(length > 0, length, 1).astype(np.float32)[:, None]
        known = length[shared.new] > 0
        ids = np.setdiff1d(np.flatnonzero(length > 0), shared.new)
        weights = np.zeros(
            (len(ids) if known.any() else 0, len(shared.new)), np.float32
        )
        for start in range(0, len(weights), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            weights[part, known] = sparsemax(
                unit[ids[part]] @ unit[shared.new[known]].T
            )
        return cls(ids[: len(weights)], weights)


def sparsemax(z_NxM: Array) -> Array:
    """The point of the simplex that is next to each row: as softmax, but most of it is
    zero.
    """
    ordered = -np.sort(-z_NxM, axis=1)
    total = np.cumsum(ordered, axis=1) - 1
    rank = np.arange(1, z_NxM.shape[1] + 1)
    support = np.sum(ordered * rank > total, axis=1)
    threshold = total[np.arange(len(z_NxM)), support - 1] / support
    return np.maximum(z_NxM - threshold[:, None], 0).astype(np.float32)


def new_rows(
    method: Method,
    old_VxD: Array,
    fresh_NxD: Array,
    shared: Shared,
    mixture: Mixture | None,
    seed: int,
) -> Array:
    """The rows of a table for another vocabulary.

    Args:
      method: `random`: all are fresh; else shared tokens keep theirs, and the others
        are: `copy`: fresh; `mean`: the mean of all old rows; `gaussian`: normal with
        the mean and deviation of the old rows in each dimension; `focus`: as `mixture`
        says, and where it says nothing as `gaussian`.
      old_VxD: rows of the old vocabulary, without padding.
      fresh_NxD: what an untrained model has.
      seed: of what is drawn.

    Returns:
      FP32 [N, D].
    """
    if method == "random":
        return fresh_NxD.astype(np.float32)
    drawn = np.random.default_rng(seed).standard_normal(fresh_NxD.shape, np.float32)
    gaussian = old_VxD.mean(axis=0) + old_VxD.std(axis=0) * drawn
    rows = {
        "copy": fresh_NxD,
        "mean": np.broadcast_to(old_VxD.mean(axis=0), fresh_NxD.shape),
    }.get(method, gaussian)
    rows = np.array(rows, np.float32)
    kept = old_VxD[shared.old]
    if mixture is not None:
        rows[mixture.ids] = mixture.weights @ kept
    rows[shared.new] = kept
    return rows
