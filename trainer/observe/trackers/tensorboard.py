"""The TensorBoard tracker: event files in the run directory's `tensorboard/`.

tensorboardX writes them (extra `tensorboard`). Each start or resume of a run writes a
new file, numbered so that TensorBoard reads them in order. On resume, events of later
steps are cut from the files, because they will be written again. A running TensorBoard
drops these events at the START mark of the new file; to drop texts it has to be
restarted. Events are not queued, so `flush` loses nothing.
"""

import contextlib
import importlib.util
import logging
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainer.errors import MAKE_ROOM, UserError
from trainer.files import (
    LOG_BYTES,
    explain_unwritable,
    read_file,
    write_atomically,
)
from trainer.observe.records import without_layers
from trainer.observe.trackers.protocol import Row, Tracker, TrackerStart
from trainer.text import how_to_install

PACKAGE = "tensorboardX"
HEADER = struct.Struct("<QI")
LENGTH_BYTES = 8
CHECKSUM_BYTES = 4

logger = logging.getLogger(__name__)


def check_installed() -> None:
    """Raise UserError if tensorboardX is not installed."""
    # `find_spec` does not import the package, which brings protobuf.
    if importlib.util.find_spec(PACKAGE) is None:
        raise UserError(
            f"tracker=tensorboard needs package {PACKAGE}, which is not installed;"
            f" {how_to_install('tensorboard')}, or choose tracker=jsonl"
        )


class TensorboardTracker(Tracker):
    """Scalars, texts and pictures for TensorBoard.

    Numerics are sent as extremes over the layers (`without_layers`) and as heat maps.
    Events are texts called `events`. If an older run has no event files yet, its log is
    replayed first.
    """

    def start(self, start: TrackerStart) -> None:
        check_installed()
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self._summary = summary
        self._summary_pb2 = summary_pb2
        self._event = event_pb2.Event
        # The watchdog's thread may write while the loop does.
        self._lock = threading.Lock()
        self._folder = folder = start.run_dir / "tensorboard"
        with explain_unwritable(f"to {folder}", MAKE_ROOM):
            folder.mkdir(exist_ok=True)
            # By number, the order in which they were written; other files in the folder
            # are not touched.
            files = sorted(path for path in folder.iterdir() if "tfevents" in path.name)
            first_step = start.last_valid_step + 1
            for path in files:
                remove_later_events(path, first_step, event_pb2.Event.FromString)
            self._writer = EventsWriter(str(folder / f"part-{len(files):05d}"))
        if files:
            self._write(
                first_step,
                session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START),
            )
        if start.log is not None:
            # With files, it has at most events from before a row that is sent again.
            # Without files all rows are missing, also those from before this start.
            start.log.replay(self, after=start.last_valid_step if files else -1)
        self.flush()

    def row(self, step: int, row: Row) -> None:
        for name, value in without_layers(row).items():
            # TensorBoard has floats alone; a count of a row is an int.
            self._write(step, summary=self._summary.scalar(name, float(value)))

    def event(self, step: int, text: str) -> None:
        self._write(step, summary=self._summary.text("events", text))

    def sample(self, step: int, name: str, text: str) -> None:
        # TensorBoard renders Markdown, where four spaces mean verbatim text.
        text = "".join(f"    {line}\n" for line in text.splitlines())
        self._write(step, summary=self._summary.text(name, text))

    def picture(self, step: int, name: str, path: Path) -> None:
        # With a bound, as all files of a run directory are read.
        data = read_file(path)
        width, height = struct.unpack(">II", data[16:24])  # of a PNG's header
        image = self._summary_pb2.Summary.Image(
            height=height, width=width, colorspace=3, encoded_image_string=data
        )
        value = self._summary_pb2.Summary.Value(tag=name, image=image)
        self._write(step, summary=self._summary_pb2.Summary(value=[value]))

    def flush(self) -> None:
        with self._locked_writing():
            self._writer.flush()

    def finish(self, exit_code: int = 0) -> None:
        with self._locked_writing():
            self._writer.close()

    @contextlib.contextmanager
    def _locked_writing(self) -> Iterator[None]:
        """Hold the lock, and raise UserError if the disk is full."""
        target = f"to {self._folder}"
        with self._lock, explain_unwritable(target, MAKE_ROOM):
            yield

    def _write(self, step: int, **content: Any) -> None:
        event = self._event(step=step, wall_time=time.time(), **content)
        with self._locked_writing():
            self._writer.write_event(event)


def read_records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the complete records of an event file, each with its content.

    A record consists of length, checksum, content, and checksum. Only the checksum of
    the length is compared: a wrong length would skip records without a word.

    Raises:
      ValueError: a length is damaged.
    """
    from tensorboardX.record_writer import masked_crc32c

    position = 0
    while position + HEADER.size <= len(data):
        length, checksum = HEADER.unpack_from(data, position)
        if masked_crc32c(data[position : position + LENGTH_BYTES]) != checksum:
            raise ValueError("a record's length is damaged")
        end = position + HEADER.size + length + CHECKSUM_BYTES
        # A kill tore the last record.
        if end > len(data):
            return
        yield data[position:end], data[position + HEADER.size : end - CHECKSUM_BYTES]
        position = end


def remove_later_events(path: Path, step: int, parse: Callable[[bytes], Any]) -> None:
    """Remove events of `step` and later ones from a file, and a torn last record.

    A damaged record and all behind it are removed too, with a warning. `parse` returns
    the event in the content of a record.
    """
    # Imported here, because protobuf comes with an extra.
    from google.protobuf.message import DecodeError

    data = read_file(path, LOG_BYTES)
    remaining: list[bytes] = []
    number = 0
    try:
        for record, content in read_records(data):
            # The step of a START mark is the first one that is written again, so old
            # marks go with their events.
            if parse(content).step < step:
                remaining.append(record)
            number += 1
    except (DecodeError, ValueError):
        logger.warning(
            "%s is damaged after %d events: the rest was removed; to have all rows in"
            " TensorBoard again, remove %s before a resume",
            path,
            number,
            path.parent,
        )
    new_data = b"".join(remaining)
    if new_data != data:
        write_atomically(path, new_data)
