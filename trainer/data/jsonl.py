"""Documents in JSON lines, and in files with one JSON list of objects, with one object,
or with an object that has one such list.

Rows may have different keys, and only the text column is checked. A reader of tables,
such as Arrow's, would need one schema for all rows.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

from trainer.data.files import NoColumn
from trainer.errors import UserError
from trainer.text import note

BOM = b"\xef\xbb\xbf"
MAX_ROWS_WITHOUT_COLUMN = 1000  # from the start of a file
# A row, a function that returns its place in words, and the position after it. The
# function reads the file again to count lines, so it is only called for a message.
JsonRow = tuple[dict[str, Any], Callable[[], str], int]


def read_jsonl(
    files: Sequence[Path],
    column: str,
    max_documents: int | None,
    position: Any,
    rows: int,
) -> Iterator[tuple[list[str], Any]]:
    """Yield the texts of a column, up to `rows` at a time, and the position after them.

    Null and a missing key are empty texts.

    Args:
      files: the files.
      column: the key of the text.
      max_documents: stop after this many.
      position: where to continue, as it was yielded; None: the start.
      rows: texts at a time.

    Raises:
      UserError: a row that is not an object, a value that is not text, or a file whose
          first `MAX_ROWS_WITHOUT_COLUMN` rows lack the column.
    """
    # the number of the file, the position in it, documents left
    first, start, left = position or (0, 0, max_documents)
    texts: list[str] = []
    for number, path in enumerate(files[first:], first):
        if left == 0:
            return
        for value, after in _values(path, column, start if number == first else 0):
            if left == 0:
                break
            left = None if left is None else left - 1
            texts.append(value)
            if len(texts) == rows:
                yield texts, [number, after, left]
                texts = []
        if texts:  # the rest of the file
            yield texts, [number + 1, 0, left]
            texts = []


def _values(path: Path, column: str, start: int) -> Iterator[tuple[str, int]]:
    """Yield the texts of a file from a position on, each with the position after it.

    A position is an offset in lines, or an index in a list.
    """
    with path.open("rb") as file:
        if file.read(len(BOM)) != BOM:
            file.seek(0)
        if _is_single_value(file, column):
            rows = _rows_of_list(path, file, column, start)
        else:
            rows = _rows_of_lines(path, file, start)
        keys: dict[str, None] = {}  # of rows without the column
        has_column, number = start > 0, 0
        for row, place, after in rows:
            has_column, number = has_column or column in row, number + 1
            if not has_column:
                keys |= dict.fromkeys(row)
                if number == MAX_ROWS_WITHOUT_COLUMN:
                    break
            value = row.get(column)
            if value is not None and (problem := _text_problem(value)):
                raise UserError(f"{path}, {place()}: column {column!r} holds {problem}")
            yield value or "", after
        # Without this check all texts of the file would be empty.
        if number and not has_column:
            raise NoColumn(column, keys, f"{path}: ")


def _rows_of_lines(path: Path, file: BinaryIO, start: int) -> Iterator[JsonRow]:
    """Yield the objects of the lines from an offset on."""
    end = start or file.tell()
    file.seek(end)
    for line in file:
        end += len(line)
        if not line.strip():
            continue
        place = partial(_line, path, end)
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{path}, {place()}: cannot be read as jsonl ({error})"
            ) from error
        if not isinstance(row, dict):
            raise UserError(
                f"{path}, {place()}: cannot be read as jsonl (expected an object, found"
                f" {kind_of(row)})"
            )
        yield row, place, end


def _rows_of_list(
    path: Path, file: BinaryIO, column: str, start: int
) -> Iterator[JsonRow]:
    """Yield the objects of a list from an index on; an object is a row or has them."""
    try:
        rows = json.load(file)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: cannot be read as jsonl, nor as a list of objects ({error})"
        ) from error
    if isinstance(rows, dict):
        rows = [rows] if column in rows else _only_list(path, rows)
    for i, row in enumerate(rows[start:], start + 1):
        if not isinstance(row, dict):
            raise UserError(
                f"{path}, row {i}: expected an object, found {kind_of(row)}"
            )
        yield row, partial("row {}".format, i), i


def _only_list(path: Path, value: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of an object; UserError unless it has one list of objects."""
    lists = [key for key, rows in value.items() if _is_list_of_objects(rows)]
    if len(lists) != 1:
        raise UserError(
            f"{path}: holds one object with {len(lists)} lists of objects; expected"
            " JSON lines, a list of objects, or an object with one such list"
        )
    texts = {key: len(text) for key, text in value.items() if isinstance(text, str)}
    if texts:
        _note_list(lists[0], max(texts, key=lambda key: texts[key]))
    return value[lists[0]]


@cache  # once for all files, which are read twice
def _note_list(rows: str, column: str) -> None:
    """Print that a text of an object is left out, beside the list that is read."""
    note(
        f"data.paths: a JSON file of one object is read by its list {rows!r}, without"
        f" {column!r} beside that; data.column={column} would read {column!r} alone"
    )


def _is_single_value(file: BinaryIO, column: str) -> bool:
    """Return whether the file is one JSON value and not JSON lines; rewind the file.

    A line that is an object with the column is a row, whatever lists it has. A line
    that is a list of something else than objects is a broken JSON line.
    """
    begin = file.tell()
    line = next((line for line in file if line.strip()), b"")
    file.seek(begin)
    if not line.lstrip().startswith((b"[", b"{")):
        return False
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        # The first line of a value over several lines. But a line from { to } is a
        # broken JSON line.
        return line.lstrip().startswith(b"[") or not line.rstrip().endswith(b"}")
    if isinstance(value, dict):
        has_list = column not in value and any(map(_is_list_of_objects, value.values()))
        return has_list and _is_only_line(file, line)
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def _is_list_of_objects(value: Any) -> bool:
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(isinstance(row, dict) for row in value)


def _is_only_line(file: BinaryIO, line: bytes) -> bool:
    """Return whether no other line than this has content; rewind the file."""
    begin = file.tell()
    lines = (line for line in file if line.strip())
    is_only = next(lines, b"") == line and next(lines, b"") == b""
    file.seek(begin)
    return is_only


def _text_problem(value: Any) -> str:
    """Describe a value that should be text and is not; empty: it is text."""
    if not isinstance(value, str):
        return f"{kind_of(value)}, not text; choose another data.column"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "half a character (a surrogate without its other); leave this row out"
    return ""


def kind_of(value: Any) -> str:
    """Return JSON's name of a value's type."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(type(value), "a number")


def _line(path: Path, end: int) -> str:
    """Return "line N" for the line that ends at an offset."""
    count, left, last = 0, end, b""
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            count += block.count(b"\n")
            left -= len(block)
            last = block[-1:]
    return f"line {count + (last != b'\n')}"
