"""Faults of one line: what is planted, and a sample that is kept by content."""

import ast
from pathlib import Path

from scripts.mutants.__main__ import read_faults
from scripts.mutants.faults import faults_of

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
