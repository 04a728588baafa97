"""JSON lines of finished work: who is killed while it writes one loses that one."""

import json
from pathlib import Path
from typing import Any


def read(path: Path) -> list[dict[str, Any]]:
    """The whole rows of a file, none when there is no file; torn ones are left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def append(path: Path, row: dict[str, Any]) -> None:
    """Write a row; behind a torn one it begins a line of its own. ValueError for
    numbers that JSON does not have.
    """
    text = json.dumps(row, allow_nan=False)
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, 2)
            text = text if file.read(1) == b"\n" else "\n" + text
        file.write(text.encode() + b"\n")
