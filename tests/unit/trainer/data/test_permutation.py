import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.permutation import permute


def epoch_of(seed, epoch, n):
    return permute(seed, np.full(n, epoch), np.arange(n), n)


@settings(max_examples=50, deadline=None)
@given(
    n=st.integers(1, 5000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**40)
)
def test_it_is_a_bijection_for_any_seed_and_epoch(n, seed, epoch):
    assert np.array_equal(np.sort(epoch_of(seed, epoch, n)), np.arange(n))


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 2**48), data=st.data())
def test_huge_domains_stay_inside_and_do_not_collide(n, data):
    positions = np.array(
        sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=50))), np.int64
    )
    actual = permute(1, np.zeros(len(positions)), positions, n)
    assert len(set(actual.tolist())) == len(positions)
    assert np.all((actual >= 0) & (actual < n))


@pytest.mark.parametrize("n", [5, 16, 37])
def test_a_window_may_come_at_any_place_of_the_epoch(n):
    # Counts of (place, window) over E epochs are near E/n: chi square of n(n-1) cells
    # within 5 standard deviations.
    epochs = 4000
    epoch, position = np.divmod(np.arange(epochs * n), n)
    counts = np.zeros((n, n))
    np.add.at(counts, (position, permute(0, epoch, position, n)), 1)
    expected = epochs / n
    chi2 = ((counts - expected) ** 2 / expected).sum()
    freedom = (n - 1) ** 2
    assert abs(chi2 - freedom) < 5 * math.sqrt(2 * freedom)


def test_neighbours_do_not_stay_neighbours():
    n = 10_000
    order = epoch_of(0, 0, n)
    # A random permutation has about 2 pairs of neighbours in order, either way;
    # Poisson.
    assert (np.abs(np.diff(order)) == 1).sum() < 2 + 6 * math.sqrt(2)


def test_the_order_is_that_of_every_version():
    """A run that is resumed reads on where it was."""
    assert epoch_of(7, 3, 1000)[:8].tolist() == [649, 687, 23, 563, 614, 420, 874, 694]
