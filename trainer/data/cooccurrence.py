"""Token vectors from co-occurrence in a text, to compare the tokens of two tokenizers.

The positive pointwise mutual information of nearby tokens is factorized by a truncated
SVD, as skip-gram with negative sampling does implicitly (Levy and Goldberg 2014, Neural
Word Embedding as Implicit Matrix Factorization). The smoothed distribution of contexts
is that of their 2015 paper, Improving Distributional Similarity.
"""

import numpy as np
import numpy.typing as npt
from scipy import sparse

WIDTH, WINDOW = 128, 5
SMOOTHING = 0.75  # exponent of the contexts' counts
MAX_TOKENS = 5_000_000
OVERSAMPLING, ITERATIONS = 16, 4

Array = npt.NDArray[np.float32]


def token_vectors(
    tokens_N: npt.NDArray[np.integer],
    vocab_size: int,
    *,
    end: int | None = None,
    width: int = WIDTH,
) -> Array:
    """Return a vector for each id, similar for tokens with similar neighbors.

    The same text gives the same vectors.

    Args:
      tokens_N: ids in the order of the text; the first `MAX_TOKENS` are read.
      vocab_size: ids are below it.
      end: the id that ends a document; tokens of two documents are no neighbors. None:
          the text is one document.
      width: length of a vector; its elements beyond the rank of the matrix are 0.

    Returns:
      FP32 [vocab_size, width]; the vectors of ids that the text lacks are 0.
    """
    counts = cooccurrence_counts(
        np.asarray(tokens_N[:MAX_TOKENS], np.int64), vocab_size, end, WINDOW
    )
    # A matrix of a whole vocabulary would be mostly empty rows, and the products below
    # are as long as it.
    present = np.flatnonzero(counts.sum(axis=1))
    vectors = np.zeros((vocab_size, width), np.float32)
    rank = min(width, len(present) - 1)
    if rank < 1:
        return vectors
    information = positive_information(counts[present][:, present])
    left, values = truncated_svd(information, rank)
    # The square root is the symmetric factor, whose vectors Levy and Goldberg (2014)
    # measured better than those with the full singular values.
    vectors[present, :rank] = left * np.sqrt(values)
    return vectors


def truncated_svd(matrix: sparse.csr_array, rank: int) -> tuple[Array, Array]:
    """Return the first left singular vectors [n, rank] and their values, largest first.

    It is deterministic: subspace iteration from a fixed random start (Halko, Martinsson
    and Tropp 2011, arXiv 0909.4061, algorithm 4.4).
    """
    start = np.random.default_rng(0).standard_normal(
        (matrix.shape[1], min(rank + OVERSAMPLING, matrix.shape[1]))
    )
    # Without a QR after each product all columns turn to the first singular vector, and
    # FP32 loses the others.
    basis, _ = np.linalg.qr(matrix @ start.astype(np.float32))
    for _ in range(ITERATIONS):
        basis, _ = np.linalg.qr(matrix.T @ basis)
        basis, _ = np.linalg.qr(matrix @ basis)
    left, values, _ = np.linalg.svd((matrix.T @ basis).T, full_matrices=False)
    return (basis @ left)[:, :rank], values[:rank]


def cooccurrence_counts(
    tokens_N: npt.NDArray[np.int64], vocab_size: int, end: int | None, window: int
) -> sparse.csr_array:
    """Return the weighted co-occurrences of tokens.

    The matrix is FP32 [vocab_size, vocab_size] and symmetric.
    """
    if end is not None:
        document_N = np.cumsum(tokens_N == end)
    counts = sparse.csr_array((vocab_size, vocab_size), dtype=np.float32)
    for distance in range(1, min(window, len(tokens_N) - 1) + 1):
        left, right = tokens_N[:-distance], tokens_N[distance:]
        if end is not None:
            same_document = document_N[:-distance] == document_N[distance:]
            # An end has the number of the document after it, so it is never on the
            # right of a pair within a document.
            is_pair = (left != end) & same_document
            left, right = left[is_pair], right[is_pair]
        # Nearer neighbors count more: 1 / distance is GloVe's weight.
        weight = np.full(len(left), 1 / distance, np.float32)
        pairs = sparse.coo_array(
            (weight, (left, right)), shape=(vocab_size, vocab_size)
        )
        counts = counts + pairs.tocsr()
    return (counts + counts.T).tocsr()


def positive_information(counts: sparse.csr_array) -> sparse.csr_array:
    """Return max(0, log p(token, context) / p(token) q(context)); no row is empty."""
    pairs = counts.tocoo()
    token_counts = np.asarray(counts.sum(axis=1)).ravel()
    smoothed = np.asarray(counts.sum(axis=0)).ravel() ** SMOOTHING
    expected = token_counts[pairs.row] * (smoothed / smoothed.sum())[pairs.col]
    values = np.maximum(np.log(pairs.data / expected), 0).astype(np.float32)
    information = sparse.coo_array(
        (values, (pairs.row, pairs.col)), shape=counts.shape
    ).tocsr()
    # Where max(0, ...) is 0 the entry would be stored, and multiplied in each product.
    information.eliminate_zeros()
    return information
