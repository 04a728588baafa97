"""TensorBoard: event files in the run directory's `tensorboard/`, written by
tensorboardX (extra `tensorboard`).

Each part of a run, from a start or resumption to its end, has a file of its own,
numbered so that TensorBoard reads them in order. When a run goes on after n steps, what
the files hold of later steps is cut out of them, since it comes again; a TensorBoard
that has read them already forgets it at the mark with which the new file begins (of
texts it does not: it has to be started again). Nothing is queued, so `flush` loses
nothing.
"""

import contextlib
import importlib.util
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainer.errors import MAKE_ROOM, UserError
from trainer.files import write_atomically
from trainer.observe.records import without_layers
from trainer.observe.trackers.protocol import Beginning, Row, Tracker

PACKAGE = "tensorboardX"
HEADER, CHECKSUM = struct.Struct("<QI"), 4


def check_installed() -> None:
    """Raise UserError where the writer is not there."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise UserError(
            f"tracker=tensorboard needs package {PACKAGE}, which is not installed; "
            "pip install 'scalify-trainer[tensorboard]', or choose tracker=jsonl"
        )


class TensorboardTracker(Tracker):
    """Scalars, texts and pictures for TensorBoard. Of the numerics it gets what
    `without_layers` leaves, and pictures.

    Events are texts called `events`. A run that was not tracked here before is told
    from its own record first.
    """

    def start(self, beginning: Beginning) -> None:
        check_installed()
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self._make, self._proto, self._event = summary, summary_pb2, event_pb2.Event
        # the guard's thread reports a stall beside the loop
        self._lock = threading.Lock()
        self._folder = folder = beginning.run_dir / "tensorboard"
        with written_to(folder):
            folder.mkdir(exist_ok=True)
            before = sorted(
                path for path in folder.iterdir() if "tfevents" in path.name
            )
            again = beginning.step if beginning.again else beginning.step + 1
            for path in before:
                cut(path, again, event_pb2.Event.FromString)
            self._writer = EventsWriter(str(folder / f"part-{len(before):05d}"))
        if before:
            self._write(
                again,
                session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START),
            )
        elif beginning.kept is not None:
            beginning.kept.replay(self, after=-1)
        self.flush()

    def row(self, step: int, row: Row) -> None:
        for name, value in without_layers(row).items():
            self._write(step, summary=self._make.scalar(name, float(value)))

    def event(self, step: int, text: str) -> None:
        self._write(step, summary=self._make.text("events", text))

    def sample(self, step: int, name: str, text: str) -> None:
        # It would be read as Markdown, where four spaces in front mean: as it is.
        self._write(
            step,
            summary=self._make.text(
                name, "".join(f"    {line}\n" for line in text.splitlines())
            ),
        )

    def picture(self, step: int, name: str, path: Path) -> None:
        data = path.read_bytes()
        width, height = struct.unpack(">II", data[16:24])  # of a PNG's header
        image = self._proto.Summary.Image(
            height=height, width=width, colorspace=3, encoded_image_string=data
        )
        self._write(
            step,
            summary=self._proto.Summary(
                value=[self._proto.Summary.Value(tag=name, image=image)]
            ),
        )

    def flush(self) -> None:
        with self._lock, written_to(self._folder):
            self._writer.flush()

    def finish(self, exit_code: int = 0) -> None:
        with self._lock, written_to(self._folder):
            self._writer.close()

    def _write(self, step: int, **what: Any) -> None:
        """One event of a step."""
        with self._lock, written_to(self._folder):
            self._writer.write_event(
                self._event(step=step, wall_time=time.time(), **what)
            )


def records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The whole records of an event file, each with its content: length, checksum,
    content, checksum.
    """
    position = 0
    while position + HEADER.size <= len(data):
        length, _ = HEADER.unpack_from(data, position)
        end = position + HEADER.size + length + CHECKSUM
        if end > len(data):
            return
        yield data[position:end], data[position + HEADER.size : end - CHECKSUM]
        position = end


def cut(path: Path, step: int, parse: Callable[[bytes], Any]) -> None:
    """Take events of `step` and later ones out of a file, and a record that a kill
    tore; `parse` reads an event.
    """
    whole = path.read_bytes()
    kept = b"".join(
        record for record, content in records(whole) if parse(content).step < step
    )
    if kept != whole:
        write_atomically(path, kept)


@contextlib.contextmanager
def written_to(folder: Path) -> Iterator[None]:
    """Turn what goes wrong with a file into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror}; {MAKE_ROOM}"
        ) from error
