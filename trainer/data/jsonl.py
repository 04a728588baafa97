"""Documents in JSON lines, or in a file of one JSON value.

That value is a list of objects, an object, or an object that has one list of objects.
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
from trainer.files import bounded_json
from trainer.text import note

BOM = b"\xef\xbb\xbf"
# Rows may lack the column, but not the first thousand of a file: then data.column is
# likely a wrong name.
MAX_ROWS_WITHOUT_COLUMN = 1000
# Values of a row beside its text; see `bounded_json`. A list of rows may have more.
MAX_ROW_VALUES = 1 << 20
# A row, a function that returns its line or row number in words, and the position after
# it. The function reads the file again to count lines: it is only called for a message.
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
      rows: number of texts at a time.

    Raises:
      UserError: a row that is not an object, a value that is not text, or a file whose
          first `MAX_ROWS_WITHOUT_COLUMN` rows lack the column.
    """
    # A position is the number of a file, the position in it, and the documents left.
    first_file, start, remaining = position or (0, 0, max_documents)
    texts: list[str] = []
    for number, path in enumerate(files[first_file:], first_file):
        if remaining == 0:
            return
        for value, after in _values(path, column, start if number == first_file else 0):
            if remaining == 0:
                break
            remaining = None if remaining is None else remaining - 1
            texts.append(value)
            if len(texts) == rows:
                yield texts, [number, after, remaining]
                texts = []
        if texts:  # No batch spans two files, so a position names one file.
            yield texts, [number + 1, 0, remaining]
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
            rows = _rows_of_lines(path, file, column, start)
        keys: dict[str, None] = {}  # in order, for a message that lists valid names
        # A resumed file counts as one with the column: its first rows are not read
        # again.
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
        # Otherwise all texts of the file would be empty.
        if number and not has_column:
            raise NoColumn(column, keys, f"{path}: ")


def _rows_of_lines(
    path: Path, file: BinaryIO, column: str, start: int
) -> Iterator[JsonRow]:
    """Yield the objects of the lines from an offset on."""
    # The first row begins behind a byte order mark, if there is one.
    end = start or file.tell()
    file.seek(end)
    # Read as bytes, a row ends at a line feed alone. A text of JSON may hold U+2028,
    # where `str.splitlines` ends a line.
    for line in file:
        end += len(line)
        if not line.strip():
            continue
        place = partial(_line, path, end)
        try:
            row = load_once(line, column)
        # Python's reader of JSON calls itself for each level.
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
    """Yield the objects of a file's list from an index on.

    A file of one object has one row, or a list of rows in the object.
    """
    try:
        rows = load_once(file.read(), column)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: cannot be read as jsonl, nor as a list of objects ({error}); save"
            " each text as a row of JSON lines"
        ) from error
    if isinstance(rows, dict):
        # An object with the column is one document, whatever lists it has: files of
        # labels hold texts of their own.
        rows = [rows] if column in rows else _only_list(path, rows, column)
    for i, row in enumerate(rows[start:], start + 1):
        if not isinstance(row, dict):
            raise UserError(
                f"{path}, row {i}: expected an object, found {kind_of(row)}"
            )
        yield row, partial("row {}".format, i), i


def _only_list(path: Path, value: dict[str, Any], column: str) -> list[dict[str, Any]]:
    """Return the rows of an object; UserError unless it has one list of objects, and no
    other value whose texts would be left out.
    """
    lists = [key for key, rows in value.items() if _holds_rows(rows, column)]
    # With a second list, or a list with a damaged row, texts would be left out.
    if len(lists) != 1 or not _is_list_of_objects(value[lists[0]]):
        raise UserError(
            f"{path}: holds one object with {len(lists)} groups of objects; expected"
            " JSON lines, a list of objects, or an object with one such list"
        )
    texts = {key: len(text) for key, text in value.items() if isinstance(text, str)}
    if texts:
        _note_list(lists[0], max(texts, key=lambda key: texts[key]))
    return value[lists[0]]


def _holds_rows(value: Any, column: str) -> bool:
    """Return whether a list holds an object, or an object one with the column."""
    if isinstance(value, dict):
        return any(isinstance(row, dict) and column in row for row in value.values())
    return isinstance(value, list) and any(isinstance(row, dict) for row in value)


@cache  # print once, not for every file and not again when they are read again
def _note_list(rows: str, column: str) -> None:
    """Print that a text beside the list of an object is left out."""
    note(
        f"data.paths: a JSON file of one object is read by its list {rows!r}, without"
        f" {column!r} beside that; data.column={column} would read {column!r} alone"
    )


def _is_single_value(file: BinaryIO, column: str) -> bool:
    """Return whether the file is one JSON value and not JSON lines; rewind the file.

    A line that is an object with the column is a row, whatever lists it has. A line
    that is a list, but not of objects, is a broken JSON line.
    """
    begin = file.tell()
    line = next((line for line in file if line.strip()), b"")
    file.seek(begin)
    if not line.lstrip().startswith((b"[", b"{")):
        return False
    try:
        value = load_once(line, column)
    except (ValueError, RecursionError):
        # The line begins a value over several lines. But a line from { to } is a broken
        # JSON line.
        return line.lstrip().startswith(b"[") or not line.rstrip().endswith(b"}")
    if isinstance(value, dict):
        has_list = column not in value and any(map(_is_list_of_objects, value.values()))
        return has_list and _is_only_line(file, line)
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def _is_list_of_objects(value: Any) -> bool:
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(isinstance(row, dict) for row in value)


def _is_only_line(file: BinaryIO, line: bytes) -> bool:
    """Return whether `line` is the only one with content; rewind the file."""
    begin = file.tell()
    lines = (line for line in file if line.strip())
    is_only = next(lines, b"") == line and next(lines, b"") == b""
    file.seek(begin)
    return is_only


def load_once(text: str | bytes, column: str) -> Any:
    """Parse JSON whose objects have the key `column` once at most.

    Raises:
      ValueError: it is not JSON, has such an object, or so many values that they would
        take far more memory than the text.
      RecursionError: it is nested too deeply.
    """
    return json.loads(
        # A value may take 200 bytes of memory: 98 KB of .gz became 2.3 GB of objects.
        bounded_json(text, MAX_ROW_VALUES),
        object_pairs_hook=partial(object_once, column),
    )


def object_once(column: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; ValueError if it has a key `column` twice.

    A reader would take the last value only, and lose the text of the first.
    """
    tree = dict(pairs)
    # Keys that repeat beside the text lose no text.
    if len(tree) < len(pairs) and sum(key == column for key, _ in pairs) > 1:
        raise ValueError(f"an object has the key {column!r} twice")
    return tree


def _text_problem(value: Any) -> str:
    """Describe a value that should be text and is not; "" if it is text."""
    if not isinstance(value, str):
        return f"{kind_of(value)}, not text; choose another data.column"
    try:
        # JSON may escape one half of a surrogate pair, which is no UTF-8.
        value.encode()
    except UnicodeEncodeError:
        return "half a character (an unpaired surrogate); leave this row out"
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
    line_ends, remaining, last_byte = 0, end, b""
    with path.open("rb") as file:
        while remaining > 0 and (block := file.read(min(remaining, 1 << 20))):
            line_ends += block.count(b"\n")
            remaining -= len(block)
            last_byte = block[-1:]
    # The last line of a file may have no line feed.
    return f"line {line_ends + (last_byte != b'\n')}"
