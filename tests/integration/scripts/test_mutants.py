"""Faults of one line: what is planted, and a sample that is kept by content."""

import ast
from pathlib import Path

import pytest

from scripts.mutants.__main__ import Arguments, Executed, measure, read_faults
from scripts.mutants.faults import draw, faults_of

ROOT = Path(__file__).resolve().parents[3]
TEXT = '''\
"""Says 3 + 4."""

def area(width: int = 2) -> int:
    if not width > 1:
        raise ValueError(f"{width + 1}")
    return width * max(width, 3)
'''


def test_each_fault_is_of_one_line_and_is_code_with_another_meaning():
    faults = list(faults_of("a.py", TEXT))
    assert {(f.kind, f.planted.strip()) for f in faults} == {
        ("number", "def area(width: int = 3) -> int:"),
        ("condition", "if width > 1:"),
        ("comparison", "if not width >= 1:"),
        ("number", "if not width > 2:"),
        ("operator", "return width / max(width, 3)"),
        ("number", "return width * max(width, 4)"),
    }
    for fault in faults:
        assert ast.dump(ast.parse(fault.plant(TEXT))) != ast.dump(ast.parse(TEXT))
        moved = fault.plant("x = 1\n" + TEXT)
        assert moved == "x = 1\n" + fault.plant(TEXT)
        assert fault.plant(TEXT.replace(fault.line, "")) is None


def test_a_sample_has_each_room_and_enough_arithmetic(tmp_path):
    for room in ("scalify_core/ops", "trainer/step", "trainer/run"):
        (tmp_path / room).mkdir(parents=True)
        (tmp_path / room / "area.py").write_text(TEXT)
    faults = draw(tmp_path, 10, 1)
    assert faults == draw(tmp_path, 10, 1) != draw(tmp_path, 10, 2)
    assert len({fault.name for fault in faults}) == 10
    assert {fault.room for fault in faults} == {
        "scalify_core/ops", "trainer/step", "trainer/run",
    }  # fmt: skip
    assert sum(fault.kind in ("number", "operator") for fault in faults) >= 3


def test_the_kept_sample_is_of_these_files():
    faults = read_faults()
    assert len(faults) == 100
    there = [
        fault
        for fault in faults
        if (ROOT / fault.file).exists()
        and fault.line_number((ROOT / fault.file).read_text()) is not None
    ]
    assert len(there) >= 60, "draw it anew: python -m scripts.mutants draw=100"


@pytest.mark.slow  # a pytest of its own; what is planted, the tests above show
def test_a_fault_is_caught_by_the_tests_of_its_line(tmp_path):
    file = "trainer/step/schedule.py"
    text = (ROOT / file).read_text()
    faults = [f for f in faults_of(file, text) if "steps + warmup" in f.planted]
    test = "tests/unit/trainer/step/test_schedule.py"
    for tests, caught in (
        ([f"{test}::test_an_unknown_schedule_lists_the_valid_ones"], "none"),
        ([f"{test}::test_wsd_is_stable_until_its_decay", test], "test"),
    ):
        lines = {(file, faults[0].line_number(text)): frozenset(tests)}
        end = measure(
            faults[0],
            Executed(lines, {}, {test: 1.0}),
            tmp_path,
            Arguments(out=str(tmp_path), whole=False),
        )
        assert end["caught"] == caught, end
