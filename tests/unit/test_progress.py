"""The line of a run of the tests, and how they are handed out."""

import re
from pathlib import Path
from types import SimpleNamespace

from progress import Progress

ROOT = Path(__file__).resolve().parents[2]


def test_the_time_left_is_that_of_the_tests_that_are_left_at_the_speed_of_this_run():
    seconds = {"tests/unit/test_a.py::dear": 90.0}
    shown = Progress(SimpleNamespace(cache=SimpleNamespace(get=lambda *_: seconds)))
    shown.pytest_xdist_node_collection_finished(
        None, ["tests/unit/test_a.py::dear", *map(str, range(40))]
    )
    shown.pytest_runtest_logstart("tests/unit/test_a.py::dear")
    for name in range(30):
        properties = [("processor_seconds", 1.0)]
        shown.pytest_runtest_logreport(
            SimpleNamespace(
                nodeid=str(name), when="teardown", user_properties=properties
            )
        )
    shown._began -= 15  # two processors: 30 seconds of them in 15
    assert 45 <= shown.left() < 51  # 90 + 10 seconds of processor time
    assert re.fullmatch(r"30 of 41, 0:(49|50) left: unit/test_a.py::dear", shown.line())
