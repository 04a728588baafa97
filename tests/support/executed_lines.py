"""A pytest plugin: which test executes which line, for `scripts.mutants`.

    coverage run --rcfile=... -m pytest -p executed_lines ...

Lines count for the test function that runs; those of a fixture for the first test that
needs it; those of a program that a test starts for that test, through the environment.
"""

import os
from collections.abc import Iterator

import pytest
from coverage import Coverage

RUNNING = "SCALIFY_RUNNING_TEST"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    name = item.nodeid.split("[")[0]
    coverage = Coverage.current()
    if coverage is not None:
        coverage.switch_context(name)
    os.environ[RUNNING] = name
    return (yield)
