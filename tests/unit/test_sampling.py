"""A sample of a family has every value of every axis, is the same every time, and leaves small families alone."""

import itertools
import re
from pathlib import Path

import pytest
from sampling import number_of_cases, sampled

TESTS = Path(__file__).parents[1] / "support"


def family(**axes):
    rows = itertools.product(*axes.values())
    return {"-".join(map(str, row)): dict(zip(axes, row, strict=True)) for row in rows}


LARGE = family(rule=range(20), dtype=("fp16", "fp32", "bf16"), scale=(1.0, None))


def values(cases, ids):
    return {pair for case in ids for pair in cases[case].items()}


@pytest.mark.parametrize("count", [1, 8, 30, 119])
def test_every_value_of_every_axis_occurs(count):
    taken = sampled(LARGE, count)
    assert values(LARGE, taken) == values(LARGE, LARGE)
    assert len(taken) == max(count, 20)  # the longest axis takes as many


def test_what_comes_beyond_the_first_cover_is_spread_evenly():
    taken = sampled(LARGE, 40)
    assert all(sum(LARGE[case]["rule"] == rule for case in taken) == 2 for rule in range(20))


def test_no_case_of_a_small_family_is_left_out():
    assert sampled(LARGE, len(LARGE)) == set(LARGE)
    assert sampled(family(dtype=("fp16", "fp32")), 8) == {"fp16", "fp32"}
    assert sampled({"the only one": {}}, 8) == {"the only one"}


def test_a_value_that_one_case_alone_has_keeps_that_case():
    assert "alone" in sampled(LARGE | {"alone": {"rule": 0, "dtype": "fp8", "scale": 1.0}}, 8)


def test_the_sample_is_the_same_whatever_the_order_of_collection():
    assert sampled(LARGE, 30) == sampled(dict(reversed(LARGE.items())), 30)


FAMILIES = """
import numpy as np
import pytest

@pytest.fixture(params=["auto", "static"])
def scales(request):
    return request.param

@pytest.mark.parametrize("dtype", ["fp16", "fp32", "bf16", "fp8"])
def test_large(dtype, scales):
    pass

@pytest.mark.parametrize("case", [pytest.param(np.ones(i), marks=pytest.mark.kind(case=i % 3)) for i in range(9)])
def test_kinds(case):
    pass

@pytest.mark.parametrize("value", [1, 1.0, True, "1"])
def test_of_one_axis(value):
    pass

@pytest.mark.whole
def test_dear():
    pass

def test_single():
    pass
"""


@pytest.fixture
def outcome(pytester):
    """Run pytest on the families above, and return how many passed and what it printed."""
    found = f"import sys; sys.path.insert(0, {str(TESTS)!r})"  # by a worker, too
    pytester.makeconftest(f'{found}\npytest_plugins = ["sampling"]\n')
    pytester.makeini("[pytest]\ntestpaths = .\n")
    pytester.makepyfile(test_families=FAMILIES)

    def run(*arguments):
        result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)
        return result.parseoutcomes().get("passed", 0), result.stdout.str() + result.stderr.str()

    return run


def test_what_a_sample_leaves_out_is_told_at_the_end(outcome):
    passed, said = outcome("--cases=2")
    assert passed == 4 + 3 + 4 + 1
    assert "a sample ran, 12 of 23 cases; all of them: make test-all" in said


def test_workers_take_one_sample_and_the_tests_of_a_file_stay_in_one(outcome, pytester):
    """With pytest and xdist as `make test` uses them: what a file's tests share is made once."""
    pytester.makepyfile(test_other=FAMILIES)
    (options,) = re.findall(r"^RUN_TESTS .* -m pytest (.*)$", (TESTS.parents[1] / "Makefile").read_text(), re.MULTILINE)
    passed, said = outcome("--cases=2", "-v", *options.split())
    assert passed == 24
    assert "a sample ran, 24 of 46 cases" in said
    ran = set(re.findall(r"\[(gw\d)\].* PASSED (test_\w+)\.py", said))
    assert {file for _, file in ran} == {"test_families", "test_other"}
    assert len(ran) == 2


@pytest.mark.parametrize(
    ("named", "count"),
    [
        ((), 23),
        (("--cases=all",), 23),
        (("test_families.py", "--cases=2"), 23),
        (("test_families.py::test_dear", "--cases=2"), 1),
        (("test_families.py::test_large[auto-fp8]", "--cases=2"), 1),
        (("-k", "large", "--cases=2"), 8),
        (("-m", "whole", "--cases=2"), 1),
    ],
)
def test_all_of_what_is_named_runs(outcome, named, count):
    passed, said = outcome(*named)
    assert passed == count
    assert "a sample" not in said


ASKED = """
import pytest
from sampling import that_run

@pytest.fixture(scope="module")
def made(request):
    return that_run(request, "name")

@pytest.mark.parametrize("name", ["a", "b", pytest.param("c", marks=pytest.mark.whole)])
def test_one(made, name):
    assert made == {"a", "b"}
"""


@pytest.mark.parametrize("asked", ["--cases=2", "-ktest_one[a] or test_one[b]"])
def test_a_fixture_is_told_which_of_its_tests_run(outcome, pytester, asked):
    pytester.makepyfile(test_families=ASKED)
    assert outcome(asked)[0] == 2


@pytest.mark.parametrize("text", ["few", "0", "-3", "1.5", ""])
def test_what_is_no_number_of_cases_is_refused(text):
    with pytest.raises(pytest.UsageError, match="a number of cases, 1 or more, or all"):
        number_of_cases(text)
