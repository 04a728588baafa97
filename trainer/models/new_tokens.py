"""New embedding rows for a model whose tokenizer is replaced.

Tokens in both vocabularies keep their rows, except in the method `random`. A `Method`
decides how the other rows are made.
The best known method is FOCUS (Dobler and de Melo 2023, arXiv 2305.14481): a weighted
mean of the rows of similar shared tokens. The weights are the sparsemax (Martins and
Astudillo 2016, arXiv 1602.02068) of cosines between token vectors of the new text.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

Method = Literal["focus", "mean", "gaussian", "copy", "random"]

Array = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

# Bounds the memory of cosines: 512 rows of 150,000 shared tokens take 0.3 GB.
ROWS_AT_ONCE = 512


class SharedTokens(NamedTuple):
    """Tokens with equal bytes in two vocabularies: their new and old ids, [n] each."""

    new: Ids
    old: Ids

    @classmethod
    def match(
        cls,
        new: Mapping[bytes, int],
        old: Mapping[bytes, int],
        new_end: int,
        old_end: int | None,
    ) -> Self:
        """Match ordinary tokens, and the ids that end a document.

        `new_end` and `old_end` end a document, and match whatever their bytes are.
        """
        pairs = [
            (i, old[token])
            for token, i in new.items()
            if token in old and i != new_end and old[token] != old_end
        ]
        if old_end is not None:
            # The ends may have other bytes in each vocabulary, and mean the same.
            pairs.append((new_end, old_end))
        pairs.sort()
        ids_Nx2 = np.array(pairs, np.int64).reshape(-1, 2)
        return cls(ids_Nx2[:, 0], ids_Nx2[:, 1])

    @classmethod
    def none(cls) -> Self:
        """Return no shared tokens, with which all rows are random."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.int64))


class RowMixture(NamedTuple):
    """The mixtures of shared rows for tokens that are not shared.

    Attributes:
      ids: the ids of tokens that resemble shared tokens, [m].
      weights: the weights of the shared tokens' rows, FP32 [m, shared]; non-negative,
        each row sums to 1.
    """

    ids: Ids
    weights: Array

    @classmethod
    def from_vectors(cls, vectors_VxW: Array, shared: SharedTokens) -> Self:
        """Return mixtures weighted by the cosines of token vectors.

        Tokens whose vector is zero are left out.
        """
        length = np.linalg.norm(vectors_VxW, axis=1)
        # A token may have a vector of zeros, for which 0 / 0 would be NaN.
        unit = vectors_VxW / np.where(length > 0, length, 1).astype(np.float32)[:, None]
        has_vector = length[shared.new] > 0
        ids = np.setdiff1d(np.flatnonzero(length > 0), shared.new)
        # `sparsemax` needs a column at least.
        count = len(ids) if has_vector.any() else 0
        weights = np.zeros((count, len(shared.new)), np.float32)
        for start in range(0, count, ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            cosines = unit[ids[rows]] @ unit[shared.new[has_vector]].T
            weights[rows, has_vector] = sparsemax(cosines)
        return cls(ids[:count], weights)


def sparsemax(z_NxM: Array) -> Array:
    """Return the closest point of the simplex to each row: a sparse softmax."""
    ordered = -np.sort(-z_NxM, axis=1)
    cumsum_minus_1 = np.cumsum(ordered, axis=1) - 1
    rank = np.arange(1, z_NxM.shape[1] + 1)
    support = np.sum(ordered * rank > cumsum_minus_1, axis=1)
    last = np.arange(len(z_NxM)), support - 1
    threshold = cumsum_minus_1[last] / support
    return np.maximum(z_NxM - threshold[:, None], 0).astype(np.float32)


def new_rows(
    method: Method,
    old_VxD: Array,
    fresh_NxD: Array,
    shared: SharedTokens,
    mixture: RowMixture | None,
    seed: int,
) -> Array:
    """Return the rows of a table for another vocabulary.

    Args:
      method: with `random` all rows are fresh. Otherwise shared tokens keep their rows,
        and other rows are fresh (`copy`), the mean of all old rows (`mean`), normal
        with the old rows' mean and deviation in each dimension (`gaussian`), or from
        `mixture` (`focus`). With `focus`, tokens without a mixture are as in
        `gaussian`.
      old_VxD: rows of the old vocabulary, without padding.
      fresh_NxD: initial rows of an untrained model.
      shared: tokens in both vocabularies.
      mixture: the mixtures of `focus`.
      seed: the seed of random rows.

    Returns:
      FP32 [N, D].
    """
    if method == "random":
        return fresh_NxD.astype(np.float32)
    if method == "copy":
        rows = fresh_NxD
    elif method == "mean":
        rows = np.broadcast_to(old_VxD.mean(axis=0), fresh_NxD.shape)
    else:
        random = np.random.default_rng(seed)
        # The old rows' mean and deviation: a row of another size would get logits that
        # stand out.
        normal = random.standard_normal(fresh_NxD.shape, np.float32)
        rows = old_VxD.mean(axis=0) + old_VxD.std(axis=0) * normal
    # A copy: `broadcast_to` gives a view that cannot be written.
    rows = np.array(rows, np.float32)
    shared_rows = old_VxD[shared.old]
    if mixture is not None:
        # Over the normal rows, which stay for tokens without a mixture.
        rows[mixture.ids] = mixture.weights @ shared_rows
    # Last, so that no method changes the rows of shared tokens.
    rows[shared.new] = shared_rows
    return rows
