"""The tracker of a run directory's own files: metrics.jsonl and samples.txt.

A run that resumes after n steps cuts the records of later steps and writes them again,
with the same values. The log has every row of a step <= n, because the loop calls
`flush` before it saves checkpoint n.
"""

import logging
import os
import threading
import zlib
from collections.abc import Mapping
from io import FileIO
from typing import Any, NamedTuple, Self

from trainer.errors import MAKE_ROOM, UserError
from trainer.files import no_follow, write_atomically
from trainer.observe.records import (
    Sample,
    cut_rows,
    cut_samples,
    encode_row,
    encode_sample,
    filter_rows,
    read_rows,
    read_samples,
)
from trainer.observe.trackers.protocol import Row, Tracker, TrackerStart

logger = logging.getLogger(__name__)


class Digest(NamedTuple):
    """The fingerprint of a log: its size in bytes, its rows, and its CRC-32."""

    size: int
    rows: int
    crc32: int

    @classmethod
    def from_data(cls, data: bytes) -> Self:
        """Return the digest of the content of a file."""
        return cls(len(data), data.count(b"\n"), zlib.crc32(data))

    @classmethod
    def from_checkpoint(cls, saved: object) -> Self | None:
        """Return the saved `JsonlTracker.written`, or None for anything else."""
        if not isinstance(saved, dict) or saved.keys() != set(cls._fields):
            return None
        # bool is an int, but not a count
        if any(type(value) is not int for value in saved.values()):
            return None
        return cls(**saved)

    def extended(self, data: bytes) -> Self:
        """Return the digest of the content followed by `data`."""
        rows = self.rows + data.count(b"\n")
        return type(self)(self.size + len(data), rows, zlib.crc32(data, self.crc32))


class JsonlTracker(Tracker):
    """`metrics.jsonl`, one object per line, and `samples.txt`.

    Each line is one write, so that a kill leaves complete lines. On resume both files
    are cut after the step that the run resumes from.
    """

    def start(self, start: TrackerStart) -> None:
        """Open the files, cut after the step that the run resumes from.

        Raises:
          UserError: a line in the middle is not JSON, or the disk is full.
        """
        self._lock = threading.Lock()
        run_dir, step = start.run_dir, start.step
        self.path = run_dir / "metrics.jsonl"
        self.samples_path = run_dir / "samples.txt"
        try:
            expected = Digest.from_checkpoint(start.written)
            data = self.path.read_bytes() if self.path.exists() else b""
            actual = Digest.from_data(data[: expected.size]) if expected else None
            cut = cut_rows if actual == expected else filter_rows
            self._logged = cut(self.path, step, redo_row=start.redo_row)
            cut_samples(self.samples_path, step - start.redo_row)
            self._rows = FileIO(self.path, "ab+", opener=no_follow)
            self._samples = FileIO(self.samples_path, "ab", opener=no_follow)
            self._digest = Digest.from_data(self._read())
        except OSError as error:
            raise UserError(
                f"cannot write to {run_dir}: {error.strerror}; choose another run_dir"
            ) from error
        if expected and actual != expected:
            self._warn(
                step,
                f"{self.path} is not what the run wrote up to step {step}: it has"
                f" {Digest.from_data(data).rows} rows, {expected.rows} were written;"
                " the missing rows are lost, the weights are complete",
            )

    def _warn(self, step: int, text: str) -> None:
        logger.warning("%s", text)
        self.event(step, text)

    def _read(self) -> bytes:
        self._rows.seek(0)
        return self._rows.readall()

    def _append(self, data: bytes) -> None:
        with self._lock:  # the watchdog's thread reports a stall beside the loop
            _append(self._rows, data)
            self._digest = self._digest.extended(data)

    def row(self, step: int, row: Row) -> None:
        if step <= self._logged:
            raise ValueError(f"row of step {step} after the row of step {self._logged}")
        self._append(encode_row(step, row))
        self._logged = step

    def event(self, step: int, text: str) -> None:
        self._append(encode_row(step, {"event": text}))

    def sample(self, step: int, name: str, text: str) -> None:
        _append(self._samples, encode_sample(Sample(step, name, text)))

    def written(self) -> Mapping[str, int]:
        return self._digest._asdict()

    def _restore(self) -> None:
        """Restore the file, or warn, when somebody changed it during the run."""
        mine = os.fstat(self._rows.fileno())
        try:
            there = os.lstat(self.path)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            # The open descriptor still reads the removed file.
            write_atomically(self.path, self._read())
            self._rows.close()
            self._rows = FileIO(self.path, "ab+", opener=no_follow)
            self._warn(
                self._logged,
                f"{self.path} was removed or replaced while the run wrote it; it was"
                " restored",
            )
        elif mine.st_size != self._digest.size:
            lost, self._digest = self._digest, Digest.from_data(self._read())
            self._warn(
                self._logged,
                f"{self.path} was changed while the run wrote it: it has"
                f" {self._digest.rows} of {lost.rows} rows",
            )

    def flush(self) -> None:
        try:
            self._restore()
            os.fsync(self._rows.fileno())
            os.fsync(self._samples.fileno())
        except OSError as error:
            raise UserError(
                f"cannot write {self.path}: {error.strerror}; {MAKE_ROOM}"
            ) from error

    def finish(self, exit_code: int = 0) -> None:
        self.flush()
        self._rows.close()
        self._samples.close()

    def replay(self, tracker: Tracker, *, after: int) -> None:
        """Send another tracker all records of steps > `after`, in order of steps."""
        records: list[tuple[int, Mapping[str, Any] | Sample]] = [
            (row["step"], row) for row in read_rows(self.path)
        ]
        records += [(sample.step, sample) for sample in read_samples(self.samples_path)]
        # The sort is stable: the rows of a step come before its samples.
        for step, record in sorted(records, key=lambda pair: pair[0]):
            if step <= after:
                continue
            if isinstance(record, Sample):
                tracker.sample(*record)
            elif "event" in record:
                tracker.event(step, record["event"])
            else:
                tracker.row(
                    step,
                    {name: value for name, value in record.items() if name != "step"},
                )


def _append(file: FileIO, data: bytes) -> None:
    """Append by one unbuffered write."""
    try:
        written = file.write(data)
        reason = "the disk is full" if written != len(data) else None
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise UserError(f"cannot write {file.name}: {reason}; {MAKE_ROOM}")
