"""The logs of a run, metrics.jsonl and samples.txt: write, read and cut them.

Each record is one write, so a kill leaves complete records; only a failing machine or a
full disk can tear the last one. On resume the later records are cut off, and rows that
are out of order are sorted.
"""

import itertools
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.errors import UserError
from trainer.files import (
    LOG_BYTES,
    own_copy,
    parse_json,
    read_file,
    well_formed,
    write_atomically,
)

# Every layer has these figures. Only some also have `blocks.BLOCK_FIGURES`.
FIGURE_NAMES = ("exponent", "rms", "underflow", "saturated")
NOT_FINITE = ("NaN", "Infinity", "-Infinity")


class Sample(NamedTuple):
    """A text that a callback, such as `sample`, recorded after `step` steps."""

    step: int
    name: str
    text: str


def encode_row(step: int, row: Mapping[str, Any]) -> bytes:
    """Return a line of metrics.jsonl.

    JSON has no NaN and no infinities, so they become text that `float` reads.
    """
    values = {"step": step} | {k: _finite_or_text(v) for k, v in row.items()}
    # `allow_nan=False`: a NaN that got past fails here, and not in a reader of the log.
    return json.dumps(values, allow_nan=False).encode() + b"\n"


def decode_row(line: str) -> dict[str, Any]:
    """Return the numbers of a line of metrics.jsonl, without its step."""
    return row_values(parse_json(line))


def row_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a parsed row, without its step."""
    return {
        name: float(value) if isinstance(value, str) else value  # NaN or an infinity
        for name, value in row.items()
        if name != "step"
    }


def read_log(path: Path) -> bytes:
    """Return the content of a log; empty if there is no file.

    Raises:
      UserError: as `read_file` does.
    """
    if path.exists():
        return read_file(path, LOG_BYTES)
    return b""


def _finite_or_text(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return json.dumps(value)  # one of NOT_FINITE


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl; none when there is no file.

    NaN and infinities are text, which `float` reads. A torn last line is left out.

    Raises:
      UserError: a damaged line before the last one.
    """
    return [row for row, _ in _rows_and_lines(path, read_log(path))]


def _rows_and_lines(path: Path, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield each complete row in the content of a log, and its line.

    Half of a surrogate pair, which no tracker could write, is replaced by `?`.
    """
    # The text after the last newline is empty, or a torn row.
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if not is_row(row):
            raise UserError(
                f"{path}:{number} is not a row of metrics; move the file away, or"
                " choose another run_dir"
            )
        # Only such escapes, in either case, are encoded again: most rows have none.
        if b"\\ud" in line.lower():
            encoded = json.dumps(row, ensure_ascii=False).encode(errors="replace")
            row = json.loads(encoded)
        yield row, line + b"\n"


def cut_rows(
    path: Path, start: int, *, size: int = sys.maxsize, redo_row: bool = False
) -> int:
    """Drop the rows that a run resuming after step `start` will write again.

    The other rows are sorted by step.

    Args:
      path: the log; its rows may be out of order or duplicated.
      start: the last step that stays.
      size: the log's size in bytes when step `start` was saved. What is beyond it is
        dropped: the checkpoint's digest does not cover it, so anybody may have added
        it.
      redo_row: drop the metrics row of step `start` too, and everything behind it,
        because the callbacks of this step are called again.

    Returns:
      the last step with a row of metrics; -1: none.
    """
    remaining: list[tuple[int, bytes]] = []
    logged: set[int] = set()
    end = 0
    data = read_log(path)
    for row, line in _rows_and_lines(path, data):
        step, is_event = row["step"], "event" in row
        end += len(line)
        if redo_row and step == start and not is_event:
            break
        # The size counts here in the order of the file, before any sorting: it is a
        # position in the log.
        is_later = step > start or end > size
        is_duplicate = not is_event and step in logged
        if is_later or is_duplicate:
            continue
        remaining.append((step, line))
        if not is_event:
            logged.add(step)
    # The sort is stable: the events of a step stay before or after its row.
    remaining.sort(key=lambda pair: pair[0])
    new_data = b"".join(line for _, line in remaining)
    # Cutting needs no room on the disk, and rewrites no log that is in order already.
    if data.startswith(new_data):
        _truncate(path, len(new_data))
    else:
        write_atomically(path, new_data)
    return max(logged, default=-1)


def is_row(row: Any) -> bool:
    """Return whether parsed JSON is a row of metrics.

    It has a step of 0 or more, and either numbers (`NaN` and infinities as text) or an
    event.
    """
    if (
        not isinstance(row, dict)
        or not _is_number(row.get("step"))
        # 1.0 and 1e3 are floats in JSON, and no step is written so.
        or not isinstance(row["step"], int)
        or row["step"] < 0
    ):
        return False
    if "event" in row:
        return isinstance(row["event"], str)
    return all(
        (_is_number(value) or value in NOT_FINITE)
        and (is_metric(name) or name == "step")
        for name, value in row.items()
    )


def is_metric(name: str) -> bool:
    """Return whether a row can have a number of this name."""
    if name.startswith("numerics/"):
        # `without_layers` splits such a name into four parts.
        return name.count("/") == 3
    return name not in ("step", "event")


def _is_number(value: Any) -> bool:
    # A boolean is an int in Python, and would be taken for a number.
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max  # JSON has integers that no float holds
    )


# At most 18 digits: Python refuses to read an integer of more than 4,300, and a file
# can hold anything.
SAMPLE = re.compile(rb'^step (\d{1,18}) \| (".*")\n((?:  .*\n)*)', re.MULTILINE)


def encode_sample(sample: Sample) -> bytes:
    """Return a heading and the text, indented so that no line looks like a heading."""
    # Not `splitlines`, which also splits at form feeds and other characters: a text
    # must be read back as it was.
    body = "".join(f"  {line}\n" for line in sample.text.split("\n"))
    # As JSON, so that a line break in a name stays within the heading.
    name = json.dumps(sample.name, ensure_ascii=False)
    # Half of a surrogate pair cannot be encoded; a sample with one must not end the
    # run.
    return f"step {sample.step} | {name}\n{body}".encode(errors="replace")


def read_samples(path: Path) -> list[Sample]:
    """Return the samples of a samples.txt; none when there is no file."""
    data = read_log(path)
    samples = []
    with well_formed(path, "move the file away"):
        for match in SAMPLE.finditer(data):
            # Behind the last line break there is an empty part.
            lines = match[3].decode().split("\n")[:-1]
            text = "\n".join(line[2:] for line in lines)
            name = parse_json(match[2]).encode(errors="replace").decode()
            samples.append(Sample(int(match[1]), name, text))
    return samples


def cut_samples(path: Path, start: int, size: int = sys.maxsize) -> None:
    """Truncate a samples.txt after its last sample of a step <= `start`.

    What is beyond `size` bytes is dropped too, as in `cut_rows`.
    """
    data = read_log(path)
    # Whole samples alone: a part of a text would be read as one.
    ends = [m.end() for m in SAMPLE.finditer(data) if int(m[1]) <= start]
    _truncate(path, max((end for end in ends if end <= size), default=0))


def _truncate(path: Path, size: int) -> None:
    # A shorter log stays: `truncate` would fill it up with zeros.
    if path.exists() and path.stat().st_size > size:
        with open(path, "r+b", opener=own_copy) as file:
            file.truncate(size)


def without_layers(row: Mapping[str, Any]) -> dict[str, float | int | str]:
    """Return the row with extremes over the layers in place of each layer's numerics.

    `numerics/CLASS/LAYER/FIGURE` become `numerics/CLASS/` and `underflow_max`,
    `saturated_max`, `rms_min`, `rms_max`, `exponent_min`, `exponent_max`, and the
    maximum of each of `blocks.BLOCK_FIGURES` that a layer has. They are NaN if a layer
    has NaN, or lacks one of FIGURE_NAMES. RMS and exponents leave out layers that are
    all zeros.
    """
    short_row: dict[str, float | int | str] = {}
    figures_by_class: dict[str, dict[str, dict[str, float]]] = {}
    for name, value in row.items():
        if name.startswith("numerics/"):
            # Four parts: `is_metric` has refused other names.
            _, kind, layer, figure = name.split("/")
            layers = figures_by_class.setdefault(kind, {})
            layers.setdefault(layer, {})[figure] = float(value)
        else:
            short_row[name] = value
    for kind, layers in figures_by_class.items():
        tensors = list(layers.values())
        # The RMS of zeros says nothing of a format, and the exponent of their scale is
        # the least of all.
        nonzero = [figures for figures in tensors if figures.get("rms") != 0]
        for figure in sorted({*FIGURE_NAMES, *itertools.chain(*tensors)}):
            has_minimum = figure in ("rms", "exponent")
            values = [
                figures.get(figure, math.nan)
                for figures in (nonzero if has_minimum else tensors)
                if figure in figures or figure in FIGURE_NAMES
            ]
            if not values:
                continue
            name = f"numerics/{kind}/{figure}"
            # `np.max`, because Python's `max` drops a NaN that is not the first value.
            short_row[f"{name}_max"] = float(np.max(values))
            if has_minimum:
                short_row[f"{name}_min"] = float(np.min(values))
    return short_row
