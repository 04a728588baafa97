"""Rows of finished work as JSON lines, of which a kill loses one, and their table."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def read(path: Path) -> list[dict[str, Any]]:
    """Return a file's complete rows; torn ones are left out, no file has none."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def append(path: Path, row: dict[str, Any]) -> None:
    """Append a row, on a line of its own even behind a torn one.

    Raises ValueError for numbers that JSON does not have.
    """
    text = json.dumps(row, allow_nan=False)
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, 2)
            text = text if file.read(1) == b"\n" else "\n" + text
        file.write(text.encode() + b"\n")


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(row)} |" for row in (head, *body)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]) + "\n"
