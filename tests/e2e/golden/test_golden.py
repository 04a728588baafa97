"""The trainer does what it did: metrics and final bits of small runs, against figures
that were kept."""

import json

import numpy as np
import pytest

from golden.cases import CASES, FIGURES, machine, measure, with_their_beginnings

KEPT = json.loads(FIGURES.read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory, request):
    """Those that were asked for, so that a process runs several of them."""
    mine = [
        item
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    return measure(
        tmp_path_factory.mktemp("golden"),
        {item.callspec.params["name"] for item in mine},
    )


def test_a_case_brings_what_it_begins_with():
    assert [case.name for case in with_their_beginnings(["resume", "bf16"])] == [
        "bf16",
        "flagship",
        "resume",
    ]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(c.name, marks=[pytest.mark.smoke] if c.name == "accum" else [])
        for c in CASES
    ],
)
def test_metrics_and_final_bits_are_those_that_were_kept(found, name):
    """If a change of the arithmetic is meant: run tests/e2e/golden/cases.py, and say
    which cases changed and why."""
    figures = KEPT["cases"][name]
    if machine() == KEPT["machine"]:
        assert found[name] == figures
        return
    # Another processor or version adds up in another order, and four updates amplify
    # that; another batch or another arithmetic would be 1e-1 off.
    for figure in ("train/loss", "val/loss"):
        np.testing.assert_allclose(
            found[name][figure], figures[figure], rtol=1e4 * np.finfo(np.float32).eps
        )
