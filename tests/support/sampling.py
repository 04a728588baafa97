"""`--cases=N`: of each large family of tests about N cases run, spread evenly, the same ones every time.

A family is a test function with its parametrised cases. Its axes are its parameters, those of its fixtures too. Each
value of each axis is in the sample: a rule, a dtype, a preset never drops out. What stands for a value on an axis can
be coarser than the value: `@pytest.mark.kind(case="add")` says that this `case` is one of those of "add".
"""

import zlib
from collections.abc import Hashable, Mapping
from typing import Any

import pytest

type Axes = Mapping[str, Hashable]

COUNTS = pytest.StashKey[list[int]]()  # cases that run, and all


def sampled(cases: Mapping[str, Axes], count: int) -> set[str]:
    """The ids of about `count` of these cases, in which every value of every axis occurs.

    Cases are taken one by one: that which has most values that no taken one has, the first by the hash of its id among
    equals. Once all values are there, they are covered anew. So there are more than `count` where covering all takes
    more, and all where there are no more than `count`.
    """
    left = sorted(cases, key=lambda case: (zlib.crc32(case.encode()), case))
    values = {case: set(axes.items()) for case, axes in cases.items()}
    every = set().union(*values.values())
    taken: set[str] = set()
    missing, covered = set(every), False
    while left and not (covered and len(taken) >= count):
        case = max(left, key=lambda case: len(values[case] & missing))  # the first of the largest
        left.remove(case)
        taken.add(case)
        missing -= values[case]
        if not missing:
            missing, covered = set(every), True
    return taken


def standing_for(value: Any) -> Hashable:
    """What is equal for equal values, 1 and 1.0 apart; arrays and what holds them are equal to themselves alone."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def axes_of(item: pytest.Item) -> Axes:
    """What a case has for each parameter, or the kind of that."""
    kinds = {axis: kind for mark in item.iter_markers("kind") for axis, kind in mark.kwargs.items()}
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return {axis: standing_for(value) for axis, value in parameters.items()} | kinds


def chosen(items: list[pytest.Item], count: int) -> set[pytest.Item]:
    """Those that run where about `count` of a family do: none marked `whole`, and a sample of each family's others."""
    families: dict[tuple[str, str], dict[str, pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("whole") is None:
            name, _, case = item.name.partition("[")
            families.setdefault((item.parent.nodeid if item.parent else "", name), {})[case] = item
    taken = set()
    for family in families.values():
        ids = sampled({case: axes_of(item) for case, item in family.items()}, count)
        taken |= {family[case] for case in ids}
    return taken


def that_run(request: pytest.FixtureRequest, parameter: str) -> set[str]:
    """The values, texts, that this parameter has in the tests of the fixture's module that run."""
    mine = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return {item.callspec.params[parameter] for item in mine if parameter in item.callspec.params}


def number_of_cases(text: str) -> int | None:
    """The value of `--cases`; None: all. It raises `UsageError` for what is neither."""
    if text == "all":
        return None
    if not text.isdecimal() or int(text) == 0:
        raise pytest.UsageError(f"--cases={text}: a number of cases, 1 or more, or all")
    return int(text)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        default="all",
        metavar="N|all",
        help="of a test function with more than N parametrised cases run about N, in which every value of every "
        "parameter occurs, and nothing that is marked `whole`; all (the default): everything. Of what is named, by a "
        "path, a node id, -k or -m, everything runs",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Workers of xdist, which are given paths, are told by the first process's option."""
    config.addinivalue_line("markers", "whole: dear, and what it shows others show smaller; not part of a sample.")
    config.addinivalue_line("markers", "kind(axis=kind): what this case's value on an axis counts as, for a sample.")
    number_of_cases(config.option.cases)
    named = config.args_source is not config.ArgsSource.TESTPATHS or config.option.keyword or config.option.markexpr
    if named and not hasattr(config, "workerinput"):
        config.option.cases = "all"
    config.stash[COUNTS] = [0, 0]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is not in the sample is deselected."""
    every, count = list(items), number_of_cases(config.option.cases)
    if count is not None:
        taken = chosen(every, count)
        items[:] = [item for item in every if item in taken]
        config.hook.pytest_deselected(items=[item for item in every if item not in taken])
    config.stash[COUNTS] = [len(items), len(every)]
    if hasattr(config, "workeroutput"):
        config.workeroutput["cases"] = config.stash[COUNTS]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """The first process of xdist collects nothing; each of its workers, which end here, has collected all."""
    node.config.stash[COUNTS] = getattr(node, "workeroutput", {}).get("cases", [0, 0])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    ran, every = config.stash[COUNTS]
    if ran < every:
        terminalreporter.write_line(f"a sample ran, {ran:,} of {every:,} cases; all of them: make test-all", bold=True)
