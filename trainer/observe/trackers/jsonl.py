"""The files of a run directory: metrics.jsonl and samples.txt.

A run that resumes after n steps cuts what they say of later steps and produces it
again, with the same values. Every row of a step <= n is there, because the loop calls
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
    keep_rows,
    read_rows,
    read_samples,
)
from trainer.observe.trackers.protocol import Beginning, Row, Tracker

logger = logging.getLogger(__name__)


class Digest(NamedTuple):
    """What a log holds: its size in bytes, rows, and the CRC-32 of the bytes."""

    size: int
    rows: int
    crc32: int

    @classmethod
    def of(cls, data: bytes) -> Self:
        """Describe the content of a file."""
        return cls(len(data), data.count(b"\n"), zlib.crc32(data))

    @classmethod
    def of_saved(cls, saved: object) -> Self | None:
        """Read what `JsonlTracker.written` gave to a checkpoint; None: nothing of the
        kind.
        """
        if not isinstance(saved, dict) or saved.keys() != set(cls._fields):
            return None
        return (
            cls(**saved)
            if all(type(value) is int for value in saved.values())
            else None
        )

    def then(self, data: bytes) -> Self:
        """Describe the content with more data behind it."""
        rows = self.rows + data.count(b"\n")
        return type(self)(self.size + len(data), rows, zlib.crc32(data, self.crc32))


class JsonlTracker(Tracker):
    """`metrics.jsonl`, one object a line, and `samples.txt`. Each line is one write, so
    that a kill leaves whole lines.

    When a run goes on, the files are cut after the step that it goes on from.
    """

    def start(self, beginning: Beginning) -> None:
        """Raises UserError where a line in the middle is not JSON, or the disk is
        full.
        """
        self._lock = threading.Lock()
        run_dir, step, again = beginning.run_dir, beginning.step, beginning.again
        self.path, self.samples_path = (
            run_dir / "metrics.jsonl",
            run_dir / "samples.txt",
        )
        try:
            expected = Digest.of_saved(beginning.written)
            data = self.path.read_bytes() if self.path.exists() else b""
            found = Digest.of(data[: expected.size]) if expected else None
            cut = cut_rows if found == expected else keep_rows
            self._logged = cut(self.path, step, again=again)
            cut_samples(self.samples_path, step - again)
            self._rows = FileIO(self.path, "ab+", opener=no_follow)
            self._samples = FileIO(self.samples_path, "ab", opener=no_follow)
            self._digest = Digest.of(self._read())
        except OSError as error:
            raise UserError(
                f"cannot write to {run_dir}: {error.strerror}; choose another run_dir"
            ) from error
        if expected and found != expected:
            there = Digest.of(data).rows
            self._say(
                step,
                f"{self.path} is not what the run wrote up to step {step}: {there} rows"
                f" are there, {expected.rows} were written; what is lost of them is"
                " lost, the weights are whole",
            )

    def _say(self, step: int, text: str) -> None:
        logger.warning("%s", text)
        self.event(step, text)

    def _read(self) -> bytes:
        self._rows.seek(0)
        return self._rows.readall()

    def _append(self, data: bytes) -> None:
        with self._lock:  # the guard's thread reports a stall beside the loop
            _append(self._rows, data)
            self._digest = self._digest.then(data)

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
        """Notice that somebody removed, replaced or shortened the file under the run,
        and say so.
        """
        mine = os.fstat(self._rows.fileno())
        try:
            there = os.lstat(self.path)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            # What was written is still behind the open descriptor.
            write_atomically(self.path, self._read())
            self._rows.close()
            self._rows = FileIO(self.path, "ab+", opener=no_follow)
            self._say(
                self._logged,
                f"{self.path} was removed or replaced while the run wrote it; it was"
                " restored",
            )
        elif mine.st_size != self._digest.size:
            lost, self._digest = self._digest, Digest.of(self._read())
            self._say(
                self._logged,
                f"{self.path} was changed while the run wrote it: {self._digest.rows}"
                f" rows of {lost.rows} are there",
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
        """Tell another tracker what the files hold of steps > `after`, in order of
        steps.
        """
        records: list[tuple[int, Mapping[str, Any] | Sample]] = [
            (row["step"], row) for row in read_rows(self.path)
        ]
        records += [(sample.step, sample) for sample in read_samples(self.samples_path)]
        # stable: rows before samples
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
    """One write, unbuffered."""
    try:
        written = file.write(data)
        reason = "the disk is full" if written != len(data) else None
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise UserError(f"cannot write {file.name}: {reason}; {MAKE_ROOM}")
