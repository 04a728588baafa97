"""The search for the largest micro-batch that fits, by needs that are known."""

import pytest

from trainer.cli.plan import describe_fitting
from trainer.plan.plan import TRIES, Fitting, largest_that_fits


def affine(fixed, each):
    calls = []

    def need(b):
        calls.append(b)
        return fixed + each * b

    return need, calls


@pytest.mark.parametrize(
    ("fixed", "each", "limit"),
    [(10, 3, 1000), (10, 3, 1001), (500, 1, 600), (0, 7, 49)],
)
def test_the_largest_micro_batch_is_found_in_a_few_compilations(fixed, each, limit):
    need, calls = affine(fixed, each)
    best = (limit - fixed) // each
    assert largest_that_fits(need, 8, limit) == (best, best)
    assert len(calls) <= 4


@pytest.mark.parametrize("limit", range(500, 2001, 50))
def test_a_search_with_slack_ends_once_no_more_than_that_can_be_missing(limit):
    # grows faster than linearly, as the whole search is told nothing of
    need = lambda b: 100 + 10 * b + b**2 // 20
    best = max(b for b in range(200) if need(b) <= limit)

    def searched(slack):
        calls = []
        actual = largest_that_fits(
            lambda b: calls.append(b) or need(b), 8, limit, 80, slack
        )
        return actual, len(calls)

    (fits, bound), calls = searched(0.1)
    assert fits <= best <= bound <= 1.1 * fits
    exactly, more_calls = searched(0)
    assert exactly == (best, best)
    assert calls <= more_calls


def test_a_need_that_once_falls_is_searched_on():
    need = lambda b: {1: 100, 2: 99}.get(b, 98 + 2 * b)  # as continued figures may
    assert largest_that_fits(need, 1, 202) == (52, 52)


def test_where_the_search_ends_first_the_largest_is_only_known_to_be_at_least_that():
    actual = largest_that_fits(lambda b: 10 * b, 8, 10**9)
    assert actual == (4096, None)
    assert (
        describe_fitting(actual) == "at least 4096 sequences (the search ended there)"
    )
    assert (
        describe_fitting(largest_that_fits(lambda b: 10 * b, 8, 40_000))
        == "4000 sequences"
    )
    assert describe_fitting(Fitting(90, 95)) == "90 to 95 sequences"


def test_nothing_fits_where_the_state_alone_does_not():
    need, _ = affine(1000, 1)
    assert largest_that_fits(need, 8, 900) == (0, 0)


def test_a_need_that_bends_is_searched_to_the_end():
    # the optimiser's moment decides for small batches
    need = lambda b: max(400, 100 + 30 * b)
    assert largest_that_fits(need, 2, 1000) == (30, 30)
    assert largest_that_fits(need, 8, 399) == (0, 0)
    assert largest_that_fits(need, 8, 400) == (10, 10)


@pytest.mark.parametrize("bend", [20, 300, 1000, 3000])
@pytest.mark.parametrize("room", [1_000, 17_000, 500_000, 5_000_000])
def test_a_need_that_is_flat_and_then_steep_takes_few_compilations(bend, room):
    need = lambda b: 3_000_000 + 10 * b + max(0, 5_000 * (b - bend))
    measured = []
    actual, bound = largest_that_fits(
        lambda b: measured.append(b) or need(b), 8, 3_000_000 + room
    )
    best = max(b for b in range(1, 4097) if need(b) <= 3_000_000 + room)
    assert len(measured) <= TRIES  # lines alone: up to 385
    assert 0.8 * best <= actual <= best <= bound
