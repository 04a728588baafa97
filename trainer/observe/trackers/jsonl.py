"""The tracker of the log files in a run directory: metrics.jsonl and samples.txt.

A run that resumes after n steps cuts the records of later steps and writes them again,
with the same values. The log has every row of a step <= n, because the loop calls
`flush` before it saves checkpoint n.
"""

import errno
import hashlib
import logging
import os
import sys
import threading
import zlib
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, Self

from trainer.errors import MAKE_ROOM, UserError
from trainer.files import (
    OTHER_RUN_DIR,
    explain_unwritable,
    own_copy,
    write_atomically,
)
from trainer.observe.records import (
    Sample,
    cut_rows,
    cut_samples,
    encode_row,
    encode_sample,
    read_log,
    read_rows,
    read_samples,
    row_values,
)
from trainer.observe.trackers.protocol import Row, Tracker, TrackerStart

logger = logging.getLogger(__name__)


class Digest(NamedTuple):
    """The fingerprint of a log: its size in bytes, its lines, and a hash.

    The hash is the BLAKE2b of the content as text. Checkpoints of earlier versions have
    its CRC-32, a number.
    """

    size: int
    rows: int
    hash: str | int

    @classmethod
    def from_checkpoint(cls, saved: object) -> Self | None:
        """Return the saved digest, or None for any other value."""
        if not isinstance(saved, dict):
            return None
        size, rows = saved.get("size"), saved.get("rows")
        content_hash = saved.get("hash", saved.get("crc32"))
        # bool is an int, but not a count
        if type(size) is not int or type(rows) is not int:
            return None
        # The type tells a CRC-32 of an earlier version from a hash.
        if type(content_hash) is not int and not isinstance(content_hash, str):
            return None
        return cls(size, rows, content_hash)

    def is_of(self, data: bytes) -> bool:
        """Return whether `data` is the content of this digest."""
        if isinstance(self.hash, int):
            return self == (len(data), data.count(b"\n"), zlib.crc32(data))
        return self == RunningDigest(data).digest


class RunningDigest:
    """The digest of a content that grows."""

    def __init__(self, data: bytes = b"") -> None:
        self._size = self._rows = 0
        self._hash = hashlib.blake2b(digest_size=32)
        self.extend(data)

    def extend(self, data: bytes) -> None:
        """Append `data` to the content."""
        self._size += len(data)
        self._rows += data.count(b"\n")
        self._hash.update(data)

    @property
    def digest(self) -> Digest:
        """The digest of the content so far."""
        return Digest(self._size, self._rows, self._hash.hexdigest())


class LogFile:
    """A log that grows by one write for each record, with the digest of its content."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        # Unbuffered, so that a record is one write; `own_copy`, so that a backup of
        # hard links keeps its content.
        self._file = FileIO(self.path, "ab+", opener=own_copy)
        self._running = RunningDigest(self._read())

    @property
    def digest(self) -> Digest:
        """The digest of the content that was read or written."""
        return self._running.digest

    def _read(self) -> bytes:
        self._file.seek(0)
        return self._file.readall()

    def append(self, data: bytes) -> None:
        """Append by one unbuffered write. Raises UserError if the disk is full."""
        with self._lock:  # the watchdog's thread may append while the loop does
            with explain_unwritable(self._file.name, MAKE_ROOM):
                # A raw write on a disk that fills up may store a part, and return its
                # length without an error.
                if self._file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, "the disk is full")
            self._running.extend(data)

    def check_and_restore(self) -> str | None:
        """Return how the file has changed since the last call; None: it has not.

        A file that was removed is restored.
        """
        open_file = os.fstat(self._file.fileno())
        try:
            # `lstat`: a link in its place is not the log.
            is_in_place = os.path.samestat(os.lstat(self.path), open_file)
        except FileNotFoundError:
            is_in_place = False
        if not is_in_place:
            # The open descriptor still reads the removed file.
            write_atomically(self.path, self._read())
            self._file.close()
            self._open()
            return "was removed or replaced while the run wrote it; it was restored"
        # The size alone, which is cheap at each checkpoint; a resume compares the
        # content with the digest.
        if open_file.st_size != self.digest.size:
            expected = self.digest
            # Read again, or every later checkpoint would report this change.
            self._running = RunningDigest(self._read())
            return (
                "was changed while the run wrote it: it has"
                f" {self.digest.rows} lines, {expected.rows} were written"
            )
        return None

    def sync(self) -> None:
        """Write the content to disk."""
        # A power cut must not take rows that the digest of a checkpoint covers.
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def check_log(path: Path, saved: object) -> tuple[int, str | None]:
    """Compare a log with its digest at a checkpoint.

    Args:
      path: the log.
      saved: the digest; any other value: the checkpoint has none.

    Returns:
      the size in bytes that the log had, and how it differs now. An unknown size is
      `sys.maxsize`; the log is then cut by the steps of its rows alone.
    """
    digest = Digest.from_checkpoint(saved)
    if digest is None:
        return sys.maxsize, None
    data = read_log(path)
    # Rows behind this size were written after the checkpoint, and are no damage.
    if digest.is_of(data[: digest.size]):
        return digest.size, None
    rows = data.count(b"\n")
    damage = "lines were changed, added or removed"
    if rows < digest.rows:
        damage = "the missing lines are lost"
    return sys.maxsize, (
        f"it has {rows} lines, {digest.rows} were written; {damage}; the checkpoint"
        " itself is not affected"
    )


def log_paths(run_dir: Path) -> tuple[Path, Path]:
    """Return the paths of a run's rows and samples."""
    return run_dir / "metrics.jsonl", run_dir / "samples.txt"


def set_logs_aside(run_dir: Path, step: int) -> None:
    """Rename the logs of an earlier attempt that left no checkpoint to `NAME.old`.

    They are not the history of the run that starts here. If `NAME.old` exists, the
    longer log is kept and the other deleted, because an attempt that is killed early
    only repeats rows of the attempt before it.

    Args:
      run_dir: the directory of the run, which has no checkpoint.
      step: the step of the state that it starts from.

    Raises:
      UserError: the log is damaged, or cannot be renamed.
    """
    log, samples = log_paths(run_dir)
    # Events alone are no history that is worth a file.
    steps = [row["step"] for row in read_rows(log) if "event" not in row]
    old_log = log.with_name(f"{log.name}.old")
    try:
        is_longest = bool(steps) and (
            # Of equal logs the newer one stays.
            not old_log.exists() or log.stat().st_size >= old_log.stat().st_size
        )
        for path in (log, samples):
            if is_longest and path.exists():
                path.replace(path.with_name(f"{path.name}.old"))
            path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot rename {log} to {old_log}: {error.strerror}; choose another"
            " run_dir"
        ) from error
    if steps:
        outcome = f"was deleted, because {old_log.name} is longer"
        if is_longest:
            outcome = f"is now {old_log.name}"
        logger.warning(
            "run_dir=%s has rows up to step %d, but no checkpoint of its own: starting"
            " after step %d; its old log %s",
            run_dir,
            max(steps),
            step,
            outcome,
        )


def cut_logs(start: TrackerStart) -> None:
    """Cut the logs after the step that the run resumes from.

    For tracker=none: the run takes the later steps without a log, and those of an
    earlier attempt are not its own.
    """
    with explain_unwritable(f"to {start.run_dir}", OTHER_RUN_DIR):
        log, samples = log_paths(start.run_dir)
        # By steps alone: this run does not append, so it compares no digest.
        cut_rows(log, start.step, redo_row=start.redo_row)
        cut_samples(samples, start.last_valid_step)


class JsonlTracker(Tracker):
    """`metrics.jsonl`, one object per line, and `samples.txt`.

    On resume both files are cut after the step that the run resumes from.
    """

    def start(self, start: TrackerStart) -> None:
        """Cut the files after the step that the run resumes from, and open them.

        Raises:
          UserError: a line before the last is not JSON, or the disk is full.
        """
        step = start.step
        self.path, self.samples_path = log_paths(start.run_dir)
        last_step = start.last_valid_step
        # The digest of the rows; that of the samples is its entry `samples`.
        state = start.checkpoint_state or {}
        with explain_unwritable(f"to {start.run_dir}", OTHER_RUN_DIR):
            # Compared before it is cut: the digest covers the bytes as they were saved.
            size, row_damage = check_log(self.path, state)
            self._logged = cut_rows(self.path, step, size=size, redo_row=start.redo_row)
            size, sample_damage = check_log(self.samples_path, state.get("samples"))
            cut_samples(self.samples_path, last_step, size)
            # Opened last: its digest is that of the content that stayed.
            self._rows = LogFile(self.path)
            self._samples = LogFile(self.samples_path)
        damages = {self.path: row_damage, self.samples_path: sample_damage}
        for path, damage in damages.items():
            if damage is not None:
                text = f"{path} is not what the run wrote up to step {step}: {damage}"
                self._warn(step, text)
        if start.checkpoint_state is None and 0 <= self._logged < last_step:
            # At the next step: a later resume from here cuts this event and repeats it.
            self._warn(
                last_step + 1,
                f"{self.path} has no rows after step {self._logged} up to step"
                f" {last_step}: the run took these steps without this log"
                " (tracker=none)",
            )

    def _warn(self, step: int, text: str) -> None:
        logger.warning("%s", text)
        self.event(step, text)

    def row(self, step: int, row: Row) -> None:
        # `cut_rows` drops the second row of a step, so none is written.
        if step <= self._logged:
            raise ValueError(f"row of step {step} after the row of step {self._logged}")
        self._rows.append(encode_row(step, row))
        self._logged = step

    def event(self, step: int, text: str) -> None:
        self._rows.append(encode_row(step, {"event": text}))

    def sample(self, step: int, name: str, text: str) -> None:
        self._samples.append(encode_sample(Sample(step, name, text)))

    def checkpoint_state(self) -> Mapping[str, Any]:
        return self._rows.digest._asdict() | {"samples": self._samples.digest._asdict()}

    def flush(self) -> None:
        with explain_unwritable(self.path, MAKE_ROOM):
            # Samples first: a warning about them is a line of the rows, which are
            # synced after them.
            for log in (self._samples, self._rows):
                problem = log.check_and_restore()
                if problem is not None:
                    self._warn(self._logged, f"{log.path} {problem}")
                log.sync()

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
                tracker.row(step, row_values(record))
