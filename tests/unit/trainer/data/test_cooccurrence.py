"""Tokens that stand in like surroundings have like vectors."""

import numpy as np
import pytest
from scipy import sparse

from trainer.data.cooccurrence import cooccurrence_counts, token_vectors, truncated_svd

END, CATS, DOGS, OTHERS = 0, 1, 2, range(3, 30)


def text(seed, size=4000):
    """Tokens 1 and 2 stand between the same pairs of neighbors; the others between
    their own."""
    rng = np.random.default_rng(seed)
    tokens = []
    for _ in range(size):
        middle = rng.choice([CATS, DOGS, *OTHERS])
        place = 3 if middle in (CATS, DOGS) else middle
        tokens += [30 + place, middle, 60 + place, END]
    return np.array(tokens, np.uint16)


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def test_what_stands_in_the_same_places_is_alike_and_the_rest_is_not():
    vectors = token_vectors(text(0), 100, end=END, width=64)
    alike = cosine(vectors[CATS], vectors[DOGS])
    assert alike > 0.99
    assert max(cosine(vectors[CATS], vectors[i]) for i in OTHERS if i != 3) < 0.5
    assert not vectors[END].any()
    assert not vectors[95:].any()  # which the text does not have


def test_the_end_of_a_text_is_no_neighbour():
    tokens = text(1, 500)
    assert cooccurrence_counts(tokens.astype(np.int64), 100, END, 5)[[END]].sum() == 0
    pair = np.array([1, 2, END, 3])
    assert cooccurrence_counts(pair, 4, END, 3).nnz == 2
    np.testing.assert_array_equal(
        cooccurrence_counts(pair, 4, None, 2).toarray(),
        [[0, 0.5, 1, 1], [0.5, 0, 1, 0], [1, 1, 0, 0.5], [1, 0, 0.5, 0]],
    )


@pytest.mark.parametrize("tokens", [[], [5], [5, 5, 5], [1, 2]])
def test_a_text_of_almost_nothing_has_vectors_too(tokens):
    vectors = token_vectors(np.array(tokens, np.uint16), 8)
    assert vectors.shape == (8, 128)
    assert np.isfinite(vectors).all()


def test_the_first_singular_vectors_are_those_of_the_whole_decomposition():
    rng = np.random.default_rng(2)
    matrix = (rng.random((60, 60)) < 0.2) * rng.exponential(1, (60, 60))
    left, values = truncated_svd(sparse.csr_array(matrix.astype(np.float32)), 4)
    exact, all_values, _ = np.linalg.svd(matrix)
    np.testing.assert_allclose(values, all_values[:4], rtol=1e-2)
    assert abs(left[:, 0] @ exact[:, 0]) > 0.999
