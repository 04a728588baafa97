"""The two files a run writes its results to: metrics.jsonl (rows) and samples.txt, and
how to read and shorten them.

Both only grow, in order of steps, by one write a record; shortening is one truncation.
So a kill leaves whole records, but for a torn last one when the machine or the disk
gave up in the middle of a write.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.errors import UserError
from trainer.files import well_formed, write_atomically


class Sample(NamedTuple):
    """A text from after `step` steps, under a name such as `sample`."""

    step: int
    name: str
    text: str


def encode_row(step: int, row: Mapping[str, Any]) -> bytes:
    """A line of metrics.jsonl. JSON has no NaN and no infinities: they become text,
    which `float` reads back.
    """
    return (
        json.dumps(
            {"step": step} | {k: _finite_or_text(v) for k, v in row.items()},
            allow_nan=False,
        ).encode()
        + b"\n"
    )


def decode_row(line: str) -> dict[str, Any]:
    """The values of a row of numbers, without its step."""
    row = json.loads(line)
    return {
        k: float(v) if isinstance(v, str) else v for k, v in row.items() if k != "step"
    }


NOT_FINITE = ("NaN", "Infinity", "-Infinity")


def _finite_or_text(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; none when there is no file.

    A torn last line is left out. Raises UserError for a damaged line before that.
    """
    return [row for row, _ in _rows(path)]


def _rows(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Each whole row, and the byte where it ends."""
    end, lines = 0, path.read_bytes().split(b"\n") if path.exists() else [b""]
    # what follows the last newline is nothing, or torn
    for number, line in enumerate(lines[:-1], 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not is_row(row):
            raise UserError(
                f"{path}:{number} is not a row of metrics; move the file away, or"
                " choose another run_dir"
            )
        end += len(line) + 1
        yield row, end


def keep_rows(path: Path, start: int, *, again: bool = False) -> int:
    """As `cut_rows`, for a log in which rows may be out of order: each is kept or
    dropped by its own step.
    """
    kept, begin, last = [], 0, -1
    data = path.read_bytes() if path.exists() else b""
    for row, end in list(_rows(path)):
        if row["step"] < start or (
            row["step"] == start and not (again and "event" not in row)
        ):
            kept.append(data[begin:end])
            last = last if "event" in row else row["step"]
        begin = end
    write_atomically(path, b"".join(kept))
    return last


def is_row(row: Any) -> bool:
    """Whether parsed JSON is a row of metrics: a step with numbers (`NaN` and
    infinities as text), or with an event.
    """
    if (
        not isinstance(row, dict)
        or not _is_number(row.get("step"))
        or not isinstance(row["step"], int)
    ):
        return False
    if "event" in row:
        return isinstance(row["event"], str)
    return all(
        (_is_number(value) or value in NOT_FINITE)
        and (not name.startswith("numerics/") or name.count("/") == 3)
        for name, value in row.items()
    )


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < 2**1023
    )


def cut_rows(path: Path, start: int, *, again: bool = False) -> int:
    """Shorten a metrics.jsonl to the rows of steps <= `start`. The last step with a row
    of figures; -1: none.

    `again`: of step `start` only the events before its row of figures, which comes
    again.
    """
    last, size = -1, 0
    for row, end in _rows(path):
        figures = "event" not in row
        if row["step"] > start or (again and figures and row["step"] == start):
            break
        last, size = row["step"] if figures else last, end
    _truncate(path, size)
    return last


SAMPLE = re.compile(rb'^step (\d+) \| (".*")\n((?:  .*\n)*)', re.MULTILINE)


def encode_sample(sample: Sample) -> bytes:
    """A heading, then the text, each line indented by two spaces, so that no text can
    look like a heading.
    """
    body = "".join(f"  {line}\n" for line in sample.text.split("\n"))
    name = json.dumps(sample.name, ensure_ascii=False)
    return f"step {sample.step} | {name}\n{body}".encode()


def read_samples(path: Path) -> list[Sample]:
    """The samples of a samples.txt; none when there is no file."""
    found = SAMPLE.finditer(path.read_bytes()) if path.exists() else iter(())
    with well_formed(path, "move the file away"):
        return [
            Sample(
                int(m[1]),
                json.loads(m[2]),
                "\n".join(line[2:] for line in m[3].decode().split("\n")[:-1]),
            )
            for m in found
        ]


def cut_samples(path: Path, start: int) -> None:
    """Shorten a samples.txt to the samples of steps <= `start`."""
    ends = (
        [m.end() for m in SAMPLE.finditer(path.read_bytes()) if int(m[1]) <= start]
        if path.exists()
        else []
    )
    _truncate(path, max(ends, default=0))


def _truncate(path: Path, size: int) -> None:
    if path.exists() and path.stat().st_size > size:
        os.truncate(path, size)


def without_layers(row: Mapping[str, Any]) -> dict[str, float | int | str]:
    """The row with extremes over the layers in place of each layer's
    `numerics/CLASS/LAYER/FIGURE`.

    They are `numerics/CLASS/` and `underflow_max`, `saturated_max`, `rms_min`,
    `rms_max`, `exponent_min` and `exponent_max`; NaN where a layer has it. RMS and
    exponents are those of layers that are not all zeros, if any.
    """
    kept: dict[str, float | int | str] = {}
    # by class and figure, of the layers in their order
    figures: dict[str, dict[str, list[float]]] = {}
    for name, value in row.items():
        if name.startswith("numerics/"):
            _, kind, _, figure = name.split("/")
            figures.setdefault(kind, {}).setdefault(figure, []).append(float(value))
        else:
            kept[name] = value
    for kind, of_layers in figures.items():
        arrays = {figure: np.array(values) for figure, values in of_layers.items()}
        real = arrays["rms"] != 0
        for figure in ("underflow", "saturated"):
            kept[f"numerics/{kind}/{figure}_max"] = float(arrays[figure].max())
        for figure in ("rms", "exponent") if real.any() else ():
            kept[f"numerics/{kind}/{figure}_min"] = float(arrays[figure][real].min())
            kept[f"numerics/{kind}/{figure}_max"] = float(arrays[figure][real].max())
    return kept
