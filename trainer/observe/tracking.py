"""Where rows, events and samples go: metrics.jsonl and samples.txt in the run directory, and W&B.

Exactly once, over any number of kills and resumes:
- A run that resumes after n steps cuts what its files say of later steps and produces it again, with the same values.
  Every row of a step <= n is there, because the loop calls `flush` before it saves checkpoint n.
- W&B keeps its own files, of which a kill loses the last block (32 KiB), and takes no step twice. So on resume we look
  up the last step W&B holds, send what it lacks from our files, and from then on skip the steps it has.
"""

import atexit
import json
import logging
import netrc
import os
import queue
import shlex
import struct
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jax
import numpy as np

from trainer.errors import UserError
from trainer.observe.records import Sample, cut_rows, cut_samples, encode_row, encode_sample, read_rows, read_samples
from trainer.text import interpreter, redact

Row = Mapping[str, float | int | str]

WAITING = 1000  # calls to W&B that may wait for it
PATIENCE = 10.0  # seconds that a call waits for its place among them, before W&B is given up
FINISH_SECONDS = 60

# W&B shows a section for each prefix, in the order of the alphabet: these come first, and answer what a person asks.
FIRST_SCREEN = {
    "1 is it learning/training loss": "train/loss",
    "1 is it learning/validation loss": "val/loss",
    "1 is it learning/learning rate": "lr",
    "2 is it healthy/gradient norm": "grad_norm",
    "2 is it healthy/steps skipped": "watchdog/skipped",
    "2 is it healthy/rollbacks": "watchdog/rollbacks",
    "3 is it fast/tokens per second": "perf/tokens_per_s",
    "3 is it fast/share of the peak": "perf/mfu",
    "3 is it fast/ms waiting for data": "perf/data_ms",
}
HIDDEN = ("lr", "grad_norm", "tokens")  # would make a section of their own, before all others

MAKE_ROOM = "make room, then continue with the same run_dir"

logger = logging.getLogger(__name__)


class Tracker:
    """Takes everything and keeps nothing (tracker=none); the others override what they keep.

    `step` means: after that many steps. Steps of `log` grow; `event`, `sample` and `image` belong to the row of their
    step, or to a row of their own where that step has none.
    """

    id: str | None = None

    def log(self, step: int, row: Row) -> None:
        """The scalars of a step, once a step."""

    def event(self, step: int, text: str) -> None:
        """Something worth a line: a skipped step, a damaged checkpoint."""

    def text(self, step: int, name: str, text: str) -> None:
        """A text, such as one the model wrote."""

    def image(self, step: int, name: str, path: Path) -> None:
        """A picture that exists as a file."""

    def summary(self, values: Row) -> None:
        """Figures of the run as a whole."""

    def alert(self, title: str, text: str) -> None:
        """Something that somebody should be told who does not look at the dashboard."""

    def flush(self) -> None:
        """Make everything so far survive a kill. Call before saving a checkpoint that covers it."""

    def close(self, exit_code: int = 0) -> None:
        """Flush and end. Nothing may follow."""


class MultiTracker(Tracker):
    """Passes everything on to each of several trackers, in order."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = tuple(trackers)
        self.id = next((tracker.id for tracker in trackers if tracker.id), None)

    def log(self, step: int, row: Row) -> None:
        for tracker in self.trackers:
            tracker.log(step, row)

    def event(self, step: int, text: str) -> None:
        for tracker in self.trackers:
            tracker.event(step, text)

    def text(self, step: int, name: str, text: str) -> None:
        for tracker in self.trackers:
            tracker.text(step, name, text)

    def image(self, step: int, name: str, path: Path) -> None:
        for tracker in self.trackers:
            tracker.image(step, name, path)

    def summary(self, values: Row) -> None:
        for tracker in self.trackers:
            tracker.summary(values)

    def alert(self, title: str, text: str) -> None:
        for tracker in self.trackers:
            tracker.alert(title, text)

    def flush(self) -> None:
        for tracker in self.trackers:
            tracker.flush()

    def close(self, exit_code: int = 0) -> None:
        for tracker in self.trackers:
            tracker.close(exit_code)


class JsonlTracker(Tracker):
    """`metrics.jsonl`, one object a line, and `samples.txt`. Each line is one write, so that a kill leaves whole lines.

    Args:
      run_dir: exists.
      start: steps the run has taken; what the files hold of later steps is cut.
      again: whether the row of step `start` itself comes again, with its sample.

    Raises:
      UserError: a line in the middle is not JSON, or the disk is full.
    """

    def __init__(self, run_dir: Path, *, start: int, again: bool = False) -> None:
        self.path, self.samples_path = run_dir / "metrics.jsonl", run_dir / "samples.txt"
        try:
            self._logged = cut_rows(self.path, start, again=again)
            cut_samples(self.samples_path, start - again)
            self._rows = FileIO(self.path, "ab")
            self._samples = FileIO(self.samples_path, "ab")
        except OSError as error:
            raise UserError(f"cannot write to {run_dir}: {error.strerror}; choose another run_dir") from error

    def log(self, step: int, row: Row) -> None:
        if step <= self._logged:
            raise ValueError(f"row of step {step} after the row of step {self._logged}")
        _append(self._rows, encode_row(step, row))
        self._logged = step

    def event(self, step: int, text: str) -> None:
        _append(self._rows, encode_row(step, {"event": text}))

    def text(self, step: int, name: str, text: str) -> None:
        _append(self._samples, encode_sample(Sample(step, name, text)))

    def flush(self) -> None:
        try:
            os.fsync(self._rows.fileno())
            os.fsync(self._samples.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}; {MAKE_ROOM}") from error

    def close(self, exit_code: int = 0) -> None:
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
                tracker.text(*record)
            elif "event" in record:
                tracker.event(step, record["event"])
            else:
                tracker.log(step, {name: value for name, value in record.items() if name != "step"})


def _append(file: FileIO, data: bytes) -> None:
    """One write, unbuffered."""
    try:
        written = file.write(data)
        reason = "the disk is full" if written != len(data) else None
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise UserError(f"cannot write {file.name}: {reason}; {MAKE_ROOM}")


class WandbTracker(Tracker):
    """A W&B run: online when somebody is logged in and the server answers, else offline in `run_dir/wandb`.

    Nothing that happens to W&B stops the training or holds it up: a thread of its own talks to it, what goes wrong is
    reported once, and metrics.jsonl has the scalars. Of the numerics W&B gets what `without_layers` leaves, and the
    pictures.

    Args:
      run_dir: exists.
      run_id: of W&B; the same id continues the same run.
      kept: the run's own record, from which W&B gets what it has not.
      config: shown with the run, after `redact`.
      init: further arguments of `wandb.init`: project, entity, group, name, tags.
    """

    def __init__(
        self, run_dir: Path, *, run_id: str, kept: JsonlTracker, config: Mapping[str, Any], init: Mapping[str, Any]
    ) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its one look-up in the network when offline
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_INIT_TIMEOUT", "30")  # seconds until an online run goes on offline
        # W&B logs to debug.log in the run directory: on a full disk every record would become a traceback on stderr.
        logging.raiseExceptions = False
        import wandb  # costs half a second; not everyone tracks with it

        self._wandb = wandb
        self.id = run_id
        self._lock = threading.Lock()  # of the row: the guard's thread reports a stall beside the loop
        self._step = -1
        self._row: dict[str, Any] = {}
        self._events: list[str] = []
        self._texts: dict[str, list[str]] = {}
        self._sent = last_local_step(run_dir, run_id)
        arguments = dict(init) | {"dir": run_dir, "id": run_id, "resume": "allow", "config": redact(config)}
        online = os.environ.get("WANDB_MODE", "online" if logged_in() else "offline") == "online"
        self._run: Any = self._start(arguments, online=online)
        self._calls: queue.Queue[Callable[[], Any] | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()
        kept.replay(self, after=self._sent)

    def _start(self, arguments: Mapping[str, Any], *, online: bool) -> Any:
        settings = self._wandb.Settings(console="off", silent=True, finish_timeout=FINISH_SECONDS)
        if online:
            try:
                run = self._wandb.init(**arguments, mode="online", settings=settings)
            except self._wandb.errors.Error as error:
                self._wandb.teardown()  # the id is taken until then
                logger.warning("W&B cannot be reached (%s): going on offline", str(error).splitlines()[0])
                online = False
            else:
                self._sent = run.starting_step - 1  # what the server holds counts, not what is in the local files
                logger.info("W&B run: %s", run.url)
        if not online:
            try:
                run = self._wandb.init(**arguments, mode="offline", settings=settings)
            except (self._wandb.errors.Error, OSError) as error:
                raise UserError(f"W&B does not start: {error}; tracker=jsonl does without") from error
            parts = [path.parent for path in wandb_files(Path(arguments["dir"]), str(self.id))]
            newest = Path(run.dir).parent  # whose file may not be there yet
            before = [p for p in parts if p.name.startswith("offline-") and p.name != newest.name]
            where = shlex.join(map(str, [*before, newest]))
            logger.info("W&B run, offline; to upload it, its parts in order: %s -m wandb sync %s", interpreter(), where)
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        for name in HIDDEN:
            run.define_metric(name, step_metric="step", hidden=True)
        run.define_metric("val/loss", summary="min")
        return run

    def log(self, step: int, row: Row) -> None:
        with self._lock:
            self._begin(step)
            self._row |= without_layers(row)

    def event(self, step: int, text: str) -> None:
        with self._lock:
            self._begin(step)
            self._events.append(text)

    def text(self, step: int, name: str, text: str) -> None:
        with self._lock:
            self._begin(step)
            self._texts.setdefault(name, []).append(text)

    def image(self, step: int, name: str, path: Path) -> None:
        picture = self._wandb.Image(str(path))
        with self._lock:
            self._begin(step)
            self._row[name] = picture

    def summary(self, values: Row) -> None:
        self._guarded(lambda run: run.summary.update(dict(values)))

    def alert(self, title: str, text: str) -> None:
        self._guarded(lambda run: run.alert(title=title, text=text, level="ERROR", wait_duration=0))

    def flush(self) -> None:
        """Nothing: what W&B loses in a kill, it gets from metrics.jsonl when the run resumes."""

    def close(self, exit_code: int = 0) -> None:
        with self._lock:
            if self._row or self._texts:  # events alone are of a step whose row a resumed run will send
                self._send()
        self._guarded(lambda run: run.finish(exit_code=exit_code))
        self._put(None)
        self._thread.join(FINISH_SECONDS + PATIENCE if self._run is not None else 0)
        if self._thread.is_alive():
            self._give_up("does not finish")
            atexit.register(_leave, exit_code)  # before W&B's own hook, which would wait for ever

    def _begin(self, step: int) -> None:
        """Collect this step's row from here on; W&B takes a step only once, so it is sent when the next one begins.

        What comes late, a stall that is told while the loop goes on, belongs to the row that is being collected.
        """
        if step > self._step:
            self._send()
            self._step = step

    def _send(self) -> None:
        if self._step > self._sent:
            row, step = self._whole_row(), self._step
            self._guarded(lambda run: run.log(row, step=step, commit=True))
            self._sent = self._step
        self._row, self._events, self._texts = {}, [], {}

    def _whole_row(self) -> dict[str, Any]:
        events = {"events": "\n".join(self._events)} if self._events else {}
        tables = {
            name: self._wandb.Table(columns=["step", "text"], data=[[self._step, text] for text in texts])
            for name, texts in self._texts.items()
        }
        first = {panel: self._row[name] for panel, name in FIRST_SCREEN.items() if name in self._row}
        return {"step": self._step} | first | self._row | events | tables

    def _guarded(self, call: Callable[[Any], Any]) -> None:
        """Have the thread call this with the run."""
        self._put(lambda: call(self._run))

    def _put(self, call: Callable[[], Any] | None) -> None:
        if self._run is not None:
            try:
                self._calls.put(call, timeout=PATIENCE)
            except queue.Full:
                self._give_up("does not answer")

    def _work(self) -> None:
        while self._run is not None:
            call = self._calls.get()
            if call is None:
                return
            try:
                call()
            except Exception as error:  # W&B's own process may die in any way: that must not end a training run
                self._give_up(type(error).__name__)

    def _give_up(self, why: str) -> None:
        if self._run is not None:
            self._run = None
            logger.warning("W&B failed (%s): going on without; metrics.jsonl has it all", why)


def _leave(exit_code: int) -> None:
    """End the process without the rest of its hooks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def without_layers(row: Row) -> dict[str, float | int | str]:
    """The row with extremes over the layers in place of each layer's `numerics/CLASS/LAYER/FIGURE`.

    They are `numerics/CLASS/` and `underflow_max`, `saturated_max`, `rms_min`, `rms_max`, `exponent_min` and
    `exponent_max`; NaN where a layer has it. RMS and exponents are those of layers that are not all zeros, if any.
    """
    kept: dict[str, float | int | str] = {}
    figures: dict[str, dict[str, list[float]]] = {}  # by class and figure, of the layers in their order
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


def logged_in() -> bool:
    """Whether W&B has credentials for its server, in the environment, a settings file or netrc; asks no server."""
    import wandb

    settings = wandb.setup().settings
    if settings.api_key or os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    candidates = [Path(os.environ["NETRC"])] if "NETRC" in os.environ else [Path("~/.netrc"), Path("~/_netrc")]
    host = urlsplit(settings.base_url).hostname or ""
    return any(netrc.netrc(p.expanduser()).authenticators(host) for p in candidates if p.expanduser().exists())


BLOCK = 32768
HEADER = struct.Struct("<IHB")  # checksum, length, type: 1 whole, 2 first, 3 middle, 4 last part of a record


def _history_records(path: Path) -> Iterator[Any]:
    """The history records of a W&B transaction log (`*.wandb`), in order, up to where a kill cut it.

    The file is a LevelDB log (https://github.com/google/leveldb/blob/main/doc/log_format.md) after a header of 7 bytes,
    and each record a `wandb_internal_pb2.Record`.
    """
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    position, parts = HEADER.size, b""
    while position + HEADER.size <= len(data):
        room = BLOCK - position % BLOCK
        if room < HEADER.size:
            position += room
            continue
        _, length, kind = HEADER.unpack_from(data, position)
        part = data[position + HEADER.size : position + HEADER.size + length]
        if kind == 0 or len(part) < length:
            return
        position += HEADER.size + length
        parts = part if kind in (1, 2) else parts + part
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            try:
                record.ParseFromString(parts)
            except DecodeError:
                return
            if record.WhichOneof("record_type") == "history":
                yield record.history


def read_history(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a W&B transaction log, as W&B will show them; `_step` is the step."""
    for history in _history_records(path):
        yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item}


def wandb_files(run_dir: Path, run_id: str) -> list[Path]:
    """The transaction logs of all parts of a run, oldest first."""
    files = (run_dir / "wandb").glob(f"*run-*-{run_id}/run-{run_id}.wandb")
    return sorted(files, key=lambda path: path.parent.name.removeprefix("offline-"))


def last_local_step(run_dir: Path, run_id: str) -> int:
    """The last step in W&B's local files; -1: none."""
    return max((row.step.num for path in wandb_files(run_dir, run_id) for row in _history_records(path)), default=-1)


def make_tracker(
    kind: str,
    run_dir: Path,
    *,
    start: int,
    again: bool = False,
    config: Mapping[str, Any],
    run_id: str | None = None,
    init: Mapping[str, Any] | None = None,
) -> Tracker:
    """The tracker of a run that has taken `start` steps (0: a new run). Only the first of several processes tracks.

    Args:
      kind: wandb (with metrics.jsonl), jsonl, or none.
      run_dir: exists.
      start: steps of later rows are cut: they will come again.
      again: whether that of step `start` will come again, too.
      config: nested plain values.
      run_id: of W&B, from the checkpoint; None: the one this run directory began with, or a new one.
      init: further arguments of `wandb.init`: project, entity, group, name, tags.
    """
    if kind == "none" or jax.process_index() > 0:
        return Tracker()
    kept = JsonlTracker(run_dir, start=start, again=again)
    if kind == "jsonl" or os.environ.get("WANDB_MODE") == "disabled":
        return kept
    # Also in a file, for a run that is killed before its first checkpoint.
    id_file = run_dir / "wandb" / "run_id"
    id_file.parent.mkdir(exist_ok=True)
    run_id = run_id or (id_file.read_text() if id_file.exists() else "") or uuid.uuid4().hex[:8]
    id_file.write_text(run_id)
    return MultiTracker([kept, WandbTracker(run_dir, run_id=run_id, kept=kept, config=config, init=init or {})])
