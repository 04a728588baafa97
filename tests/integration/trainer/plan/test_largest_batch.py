"""The search for the largest micro-batch that fits, by needs that are known."""

import pytest

from trainer.cli.plan import describe_largest
from trainer.plan.plan import TRIES, BatchSizeBounds, largest_that_fits


@pytest.mark.parametrize(
    ("fixed", "each", "limit"),
    [(10, 3, 1000), (10, 3, 1001), (500, 1, 600), (0, 7, 49), (1000, 1, 900)],
)
def test_the_largest_micro_batch_is_found_in_a_few_compilations(fixed, each, limit):
    compiled = []
    need = lambda b: compiled.append(b) or fixed + each * b
    best = max(0, (limit - fixed) // each)
    assert largest_that_fits(need, 8, limit) == (best, best)
    assert len(compiled) <= 4


def test_a_search_with_slack_ends_once_no_more_than_that_can_be_missing():
    # grows faster than linearly, which the search does not know
    need = lambda b: 100 + 10 * b + b**2 // 20
    for limit in range(500, 2001, 50):
        best = max(b for b in range(200) if need(b) <= limit)
        fits, bound = largest_that_fits(need, 8, limit, 80, 0.1)
        assert fits <= best <= bound <= 1.1 * fits
        assert largest_that_fits(need, 8, limit, 80, 0) == (best, best)


def test_where_the_search_ends_first_the_largest_is_only_known_to_be_at_least_that():
    actual = largest_that_fits(lambda b: 10 * b, 8, 10**9)
    assert actual == (4096, None)
    at_least = "at least 4,096 sequences (the search ended there)"
    assert describe_largest(actual) == at_least
    assert describe_largest(BatchSizeBounds(90, 95)) == "90 to 95 sequences"


@pytest.mark.parametrize("bend", [20, 300, 3000])
@pytest.mark.parametrize("room", [1_000, 500_000, 5_000_000])
def test_a_need_that_is_flat_and_then_steep_takes_few_compilations(bend, room):
    need = lambda b: 3_000_000 + 10 * b + max(0, 5_000 * (b - bend))
    compiled, limit = [], 3_000_000 + room
    fits, bound = largest_that_fits(lambda b: compiled.append(b) or need(b), 8, limit)
    best = max(b for b in range(1, 4097) if need(b) <= limit)
    assert len(compiled) <= TRIES  # lines alone: up to 385
    assert 0.8 * best <= fits <= best <= bound
