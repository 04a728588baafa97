"""Documents of JSON lines, and of files that hold one JSON list: each row an object of
its own.

Rows of one file, or of several, need not have the same keys, and only the column with
the text is looked at; a reader of tables would want one schema for all.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from trainer.data.files import NoColumn
from trainer.errors import UserError

BOM = b"\xef\xbb\xbf"
# A row, where it is in words, and the place after it. The words cost a reading of the
# file: they are made when asked.
JsonRow = tuple[dict[str, Any], Callable[[], str], int]


def read_jsonl(
    files: Sequence[Path],
    column: str,
    max_documents: int | None,
    position: Any,
    rows: int,
) -> Iterator[tuple[list[str], Any]]:
    """The texts of a column, up to `rows` at a time, and the position after them; null
    and no such key are empty texts.

    Args:
      position: where to go on, as it was yielded; None: the start.

    Raises:
      UserError: a row that is no object, a column that is not text, or that the first
          row of a file does not have.
    """
    first, start, left = position or (0, 0, max_documents)
    texts: list[str] = []
    for number, path in enumerate(files[first:], first):
        if left == 0:
            return
        where = start if number == first else 0
        for value, after in _values(path, column, where):
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
    """The texts of a file from a place on, each with the place after it: an offset in
    lines, an index in a list.
    """
    with path.open("rb") as file:
        if file.read(len(BOM)) != BOM:
            file.seek(0)
        rows = (
            _rows_of_list(path, file, start)
            if _is_list(file)
            else _rows_of_lines(path, file, start)
        )
        for number, (row, place, after) in enumerate(rows):
            # the texts of all its rows would be empty
            if start == 0 and number == 0 and column not in row:
                raise NoColumn(column, row, f"{path}: ")
            value = row.get(column)
            if value is not None and (wrong := _wrong(value)):
                raise UserError(f"{path}, {place()}: column {column!r} holds {wrong}")
            yield value or "", after


def _rows_of_lines(path: Path, file: BinaryIO, start: int) -> Iterator[JsonRow]:
    """The objects of the lines from an offset on."""
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


def _rows_of_list(path: Path, file: BinaryIO, start: int) -> Iterator[JsonRow]:
    """The objects of a list from an index on."""
    try:
        rows = json.load(file)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: cannot be read as jsonl, nor as a list of objects ({error})"
        ) from error
    for i, row in enumerate(rows[start:], start + 1):
        if not isinstance(row, dict):
            raise UserError(
                f"{path}, row {i}: expected an object, found {kind_of(row)}"
            )
        yield row, partial("row {}".format, i), i


def _is_list(file: BinaryIO) -> bool:
    """Return whether the file is a list of rows: its first line is no row. The file is
    then at its beginning.
    """
    begin = file.tell()
    line = file.readline()
    file.seek(begin)
    if not line.lstrip().startswith(b"["):
        return False
    try:
        whole = json.loads(line)
    except ValueError:
        return True
    # in one line; a list of others is a line that is no object
    return all(isinstance(row, dict) for row in whole)


def _wrong(value: Any) -> str:
    """What a value that should be text is instead; empty: it is text."""
    if not isinstance(value, str):
        return f"{kind_of(value)}, not text; choose another data.column"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "half a character (a surrogate without its other); leave this row out"
    return ""


def kind_of(value: Any) -> str:
    """What JSON calls a value."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(type(value), "a number")


def _line(path: Path, end: int) -> str:
    """The number of the line that ends at an offset, in words."""
    count, left, last = 0, end, b""
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            count += block.count(b"\n")
            left -= len(block)
            last = block[-1:]
    return f"line {count + (last != b'\n')}"
