"""The files of a run directory: metrics.jsonl and samples.txt.

A run that resumes after n steps cuts what they say of later steps and produces it again, with the same values. Every
row of a step <= n is there, because the loop calls `flush` before it saves checkpoint n.
"""

import os
from collections.abc import Mapping
from io import FileIO
from typing import Any

from trainer.errors import MAKE_ROOM, UserError
from trainer.files import no_follow
from trainer.observe.records import Sample, cut_rows, cut_samples, encode_row, encode_sample, read_rows, read_samples
from trainer.observe.trackers.protocol import Beginning, Row, Tracker


class JsonlTracker(Tracker):
    """`metrics.jsonl`, one object a line, and `samples.txt`. Each line is one write, so that a kill leaves whole lines.

    When a run goes on, the files are cut after the step that it goes on from.
    """

    def start(self, beginning: Beginning) -> None:
        """Raises UserError where a line in the middle is not JSON, or the disk is full."""
        run_dir, step, again = beginning.run_dir, beginning.step, beginning.again
        self.path, self.samples_path = run_dir / "metrics.jsonl", run_dir / "samples.txt"
        try:
            self._logged = cut_rows(self.path, step, again=again)
            cut_samples(self.samples_path, step - again)
            self._rows = FileIO(self.path, "ab", opener=no_follow)
            self._samples = FileIO(self.samples_path, "ab", opener=no_follow)
        except OSError as error:
            raise UserError(f"cannot write to {run_dir}: {error.strerror}; choose another run_dir") from error

    def row(self, step: int, row: Row) -> None:
        if step <= self._logged:
            raise ValueError(f"row of step {step} after the row of step {self._logged}")
        _append(self._rows, encode_row(step, row))
        self._logged = step

    def event(self, step: int, text: str) -> None:
        _append(self._rows, encode_row(step, {"event": text}))

    def sample(self, step: int, name: str, text: str) -> None:
        _append(self._samples, encode_sample(Sample(step, name, text)))

    def flush(self) -> None:
        try:
            os.fsync(self._rows.fileno())
            os.fsync(self._samples.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}; {MAKE_ROOM}") from error

    def finish(self, exit_code: int = 0) -> None:
        self.flush()
        self._rows.close()
        self._samples.close()

    def replay(self, tracker: Tracker, *, after: int) -> None:
        """Tell another tracker what the files hold of steps > `after`, in order of steps."""
        records: list[tuple[int, Mapping[str, Any] | Sample]] = [(row["step"], row) for row in read_rows(self.path)]
        records += [(sample.step, sample) for sample in read_samples(self.samples_path)]
        for step, record in sorted(records, key=lambda pair: pair[0]):  # stable: rows before samples
            if step <= after:
                continue
            if isinstance(record, Sample):
                tracker.sample(*record)
            elif "event" in record:
                tracker.event(step, record["event"])
            else:
                tracker.row(step, {name: value for name, value in record.items() if name != "step"})


def _append(file: FileIO, data: bytes) -> None:
    """One write, unbuffered."""
    try:
        written = file.write(data)
        reason = "the disk is full" if written != len(data) else None
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise UserError(f"cannot write {file.name}: {reason}; {MAKE_ROOM}")
