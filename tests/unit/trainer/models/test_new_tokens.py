"""Rows for other tokens: which are kept, and what the others are made of."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trainer.models.new_tokens import RowMixture, SharedTokens, new_rows, sparsemax

NUMBERS = st.floats(-50, 50, width=32)


@settings(deadline=None, max_examples=60)
@given(
    arrays.arrays(
        np.float32, st.tuples(st.integers(1, 3), st.integers(1, 9)), elements=NUMBERS
    )
)
def test_sparsemax_is_the_projection_to_the_simplex(z):
    actual = sparsemax(z)
    assert (actual >= 0).all()
    np.testing.assert_allclose(actual.sum(axis=1), 1, rtol=1e-4)
    # The conditions of optimality: all that is positive is equally far below z, the
    # rest no further.
    for row, p in zip(z, actual, strict=True):
        distance = row - p
        threshold = distance[p > 0].mean()
        np.testing.assert_allclose(distance[p > 0], threshold, atol=1e-4)
        assert (row[p == 0] <= threshold + 1e-4).all()


def test_tokens_of_the_same_bytes_are_shared_and_so_are_the_ends_of_documents():
    new = {b"a": 0, b"b": 1, b"the": 3, b"<|end|>": 4}
    old = {b"the": 0, b"a": 7, b"<|end|>": 2}
    shared = SharedTokens.match(new, old, 5, 1)
    assert shared.new.tolist() == [0, 3, 4, 5]
    assert shared.old.tolist() == [7, 0, 2, 1]
    # whose end nothing tells
    assert SharedTokens.match(new, old, 4, None).new.tolist() == [0, 3]
    assert SharedTokens.match({b"x": 0}, old, 1, None).new.size == 0


def tables(n_old=40, n_new=30, width=16):
    rng = np.random.default_rng(3)
    old = rng.normal(2.0, 0.5, (n_old, width)).astype(np.float32)
    return old, rng.normal(0, 0.02, (n_new, width)).astype(np.float32)


SHARED = SharedTokens(np.arange(10), np.arange(20, 30))


@pytest.mark.parametrize("method", ["focus", "mean", "gaussian", "copy", "random"])
def test_shared_tokens_keep_their_rows_and_the_others_are_made_as_named(method):
    old, fresh = tables()
    weights = np.zeros((1, 10), np.float32)
    weights[0, [2, 4]] = 0.25, 0.75
    mixture = RowMixture(np.array([15]), weights) if method == "focus" else None
    rows, repeated = (
        new_rows(method, old, fresh, SHARED, mixture, 0) for _ in range(2)
    )
    np.testing.assert_array_equal(rows, repeated)
    shared = fresh[:10] if method == "random" else old[20:30]
    np.testing.assert_array_equal(rows[:10], shared)
    others = rows[16:]
    if method in ("copy", "random"):
        np.testing.assert_array_equal(others, fresh[16:])
    elif method == "mean":
        mean = np.tile(old.mean(axis=0), (14, 1))
        np.testing.assert_allclose(others, mean, rtol=1e-6)
    else:
        assert abs(others.mean() - 2.0) < 0.2
        assert 0.3 < others.std() < 0.7
    if method == "focus":
        np.testing.assert_allclose(rows[15], 0.25 * old[22] + 0.75 * old[24], rtol=1e-6)


def test_a_mixture_is_of_the_shared_tokens_that_are_alike():
    vectors = np.eye(6, dtype=np.float32)[[0, 1, 2, 0, 1, 5]]
    vectors[5] = 0  # never seen
    vectors[3] = 4 * vectors[3]  # lengths do not count
    mixture = RowMixture.from_vectors(
        vectors, SharedTokens(np.array([0, 1]), np.array([8, 9]))
    )
    assert mixture.ids.tolist() == [2, 3, 4]
    np.testing.assert_allclose(mixture.weights, [[0.5, 0.5], [1, 0], [0, 1]], atol=1e-6)
    # nothing was seen, or not the only shared one
    for seen, shared in ((0, 0), (1, 5)):
        nothing = SharedTokens(np.array([shared]), np.array([0]))
        mixture = RowMixture.from_vectors(seen * vectors, nothing)
        assert mixture.ids.size == 0
        assert mixture.weights.shape == (0, 1)
