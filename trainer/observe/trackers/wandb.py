"""The Weights & Biases tracker, which never stops or delays the training.

A kill loses the last block (32 KiB) of W&B's files, and W&B accepts each step only
once. So on resume we look up the last step that W&B has, send the missing ones from the
run's log, and skip later steps that W&B has.
"""

import atexit
import logging
import netrc
import os
import queue
import re
import shlex
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainer.errors import UserError, exit_at_once
from trainer.files import path_of, read_file, write_atomically
from trainer.observe.records import without_layers
from trainer.observe.trackers.protocol import Row, Tracker, TrackerStart
from trainer.observe.trackers.wandb_files import last_local_step
from trainer.text import python_command, redact

QUEUE_SIZE = 1000  # calls that wait for W&B
# The form of the ids that W&B makes, which are random. An id in a stranger's run
# directory could be one that the user chose, whose run would then be continued.
RUN_ID = re.compile(r"[a-z0-9]{8}")
ENQUEUE_SECONDS = 10.0  # if the queue is full for longer, W&B hangs
FINISH_SECONDS = 60

logger = logging.getLogger(__name__)


class WandbTracker(Tracker):
    """A W&B run: online after a login and if the server answers, else offline.

    An offline run is in `run_dir/wandb`. A thread talks to W&B, so its failures neither
    stop nor delay the training: one warning reports them, and metrics.jsonl has the
    scalars. Numerics are sent as extremes over the layers (`without_layers`) and as
    heat maps.

    Args:
      init: further arguments of `wandb.init`: project, entity, group, name, tags.

    Attributes:
      id: the id of the W&B run, which continues it on resume.
    """

    def __init__(self, init: Mapping[str, Any]) -> None:
        self._init = init

    def start(self, start: TrackerStart) -> None:
        run_dir = start.run_dir
        self._wandb = import_wandb()
        self.id = run_id = choose_run_id(run_dir, start.id, is_fork=start.is_fork)
        # The watchdog's thread may record an event while the loop fills the row.
        self._lock = threading.Lock()
        self._step = -1
        self._row: dict[str, Any] = {}
        self._events: list[str] = []
        self._texts: dict[str, list[str]] = {}
        self._sent = last_local_step(run_dir, run_id)
        # "allow" continues the run of this id if there is one, and makes it if not.
        arguments = dict(self._init) | {"dir": run_dir, "id": run_id, "resume": "allow"}
        # The configuration goes to a server.
        arguments["config"] = redact(start.config)
        mode = os.environ.get("WANDB_MODE") or ("online" if logged_in() else "offline")
        self._run: Any = self._connect(arguments, online=mode == "online")
        self._calls: queue.Queue[Callable[[Any], Any] | None] = queue.Queue(QUEUE_SIZE)
        # Daemon: W&B may hang in a call, and must not hold up the end of the process.
        self._thread = threading.Thread(
            target=self._run_calls, name="wandb", daemon=True
        )
        self._thread.start()
        if self._sent > start.step and not start.is_new:
            logger.warning(
                "W&B already has steps %d to %d from a killed attempt and cannot"
                " replace them; metrics.jsonl has the values of this attempt",
                start.step + 1,
                self._sent,
            )
        if start.log is not None:
            start.log.replay(self, after=self._sent)

    def _connect(self, arguments: Mapping[str, Any], *, online: bool) -> Any:
        # W&B would run git in the run directory, which somebody else may have made, and
        # git runs the programs that a .git/config names.
        settings = self._wandb.Settings(
            console="off",
            silent=True,
            finish_timeout=FINISH_SECONDS,
            disable_git=True,
        )
        wandb_error: type[Exception] = self._wandb.errors.Error

        def init(mode: str) -> Any:
            return self._wandb.init(**arguments, mode=mode, settings=settings)

        run = None
        try:
            if online:
                try:
                    run = init("online")
                except wandb_error as error:
                    self._wandb.teardown()  # it frees the id for the offline run
                    logger.warning(
                        "W&B refused or did not answer (%s): continuing offline",
                        str(error).splitlines()[0],
                    )
                else:
                    # The server's last step replaces that of the local files.
                    self._sent = run.starting_step - 1
                    logger.info("W&B run: %s", run.url)
            if run is None:
                run = init("offline")
                # Earlier parts of the run are not named here. In a stranger's run they
                # may name the stranger's entity and, as an artifact, a private file of
                # this machine, which `wandb sync` would upload.
                logger.info(
                    "W&B run, offline; to upload what this start records:"
                    " %s -m wandb sync %s",
                    python_command(),
                    shlex.quote(str(Path(run.dir).parent)),
                )
        except (OSError, ValueError, wandb_error) as error:
            raise UserError(
                f"cannot start W&B: {' '.join(str(error).split())}; set tracker=jsonl"
                " to train without it"
            ) from error
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        # If it were not hidden, its chart would be before all others.
        run.define_metric("tokens", step_metric="step", hidden=True)
        run.define_metric("val/loss", summary="min")
        return run

    def row(self, step: int, row: Row) -> None:
        with self._lock:
            self._start_row(step)
            self._row |= without_layers(row)

    def event(self, step: int, text: str) -> None:
        with self._lock:
            self._start_row(step)
            self._events.append(text)

    def sample(self, step: int, name: str, text: str) -> None:
        with self._lock:
            self._start_row(step)
            self._texts.setdefault(name, []).append(text)

    def picture(self, step: int, name: str, path: Path) -> None:
        picture = self._wandb.Image(str(path))
        with self._lock:
            self._start_row(step)
            self._row[name] = picture

    def summary(self, values: Row) -> None:
        self._enqueue(lambda run: run.summary.update(dict(values)))

    def alert(self, title: str, text: str) -> None:
        self._enqueue(
            # W&B takes 0 seconds for its default, a minute within which it drops a
            # second alert of the same title. It counts in milliseconds.
            lambda run: run.alert(
                title=title, text=text, level="ERROR", wait_duration=0.001
            )
        )

    def flush(self) -> None:
        """Do nothing: on resume W&B gets from metrics.jsonl what a kill lost."""

    def finish(self, exit_code: int = 0) -> None:
        with self._lock:
            # Do not send a row that has only events: the resumed run sends that step,
            # and W&B accepts a step once.
            if self._row or self._texts:
                self._send_row()
        self._enqueue(lambda run: run.finish(exit_code=exit_code))
        self._enqueue(None)
        has_failed = self._run is None
        # After a failure the thread may hang in a call, so nobody waits for it.
        self._thread.join(0 if has_failed else FINISH_SECONDS + ENQUEUE_SECONDS)
        if self._thread.is_alive():
            self._give_up("does not finish")
            # It runs before W&B's hook, which would wait forever.
            atexit.register(exit_at_once, exit_code)

    def _start_row(self, step: int) -> None:
        """Start the row of a step, and send the previous one.

        W&B accepts each step only once, so a row is sent when the next one starts. A
        late event, such as a stall, goes into the current row.
        """
        if step > self._step:
            self._send_row()
            self._step = step

    def _send_row(self) -> None:
        # Steps that W&B has are not sent: it would refuse them.
        if self._step > self._sent:
            row = self._collected_row()
            step = self._step
            self._enqueue(lambda run: run.log(row, step=step, commit=True))
            self._sent = self._step
        self._row = {}
        self._events = []
        self._texts = {}

    def _collected_row(self) -> dict[str, Any]:
        events = {"events": "\n".join(self._events)} if self._events else {}
        tables = {
            name: self._wandb.Table(
                columns=["step", "text"], data=[[self._step, text] for text in texts]
            )
            for name, texts in self._texts.items()
        }
        return {"step": self._step} | self._row | events | tables

    def _enqueue(self, call: Callable[[Any], Any] | None) -> None:
        """Queue `call(run)` for the thread that talks to W&B; None ends the thread."""
        if self._run is not None:
            try:
                self._calls.put(call, timeout=ENQUEUE_SECONDS)
            except queue.Full:
                self._give_up("does not answer")

    def _run_calls(self) -> None:
        while self._run is not None:
            call = self._calls.get()
            if call is None:
                return
            try:
                call(self._run)
            # Any failure of W&B's process must not end a training run.
            except Exception as error:
                self._give_up(type(error).__name__)

    def _give_up(self, reason: str) -> None:
        """Drop the W&B run: all later records go to metrics.jsonl alone."""
        if self._run is not None:
            self._run = None
            logger.warning(
                "W&B failed (%s): continuing without it; metrics.jsonl has all rows",
                reason,
            )


def import_wandb() -> Any:
    """Set W&B's environment as far as the user has not, and return the package.

    The import takes half a second.
    """
    # Error reporting is W&B's only network access when offline.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_SILENT", "true")
    # Seconds after which W&B falls back to offline.
    os.environ.setdefault("WANDB_INIT_TIMEOUT", "30")
    # W&B logs to debug.log in the run directory: on a full disk every record would
    # become a traceback on stderr.
    logging.raiseExceptions = False
    import wandb

    return wandb


def choose_run_id(run_dir: Path, run_id: str | None, *, is_fork: bool = False) -> str:
    """Return the W&B id of a run: the checkpoint's, the directory's, or a new one.

    A file stores it too, for a run that is killed before its first checkpoint. A fork
    ignores the file, which may belong to another attempt, and gets a new id, because
    W&B accepts each step only once. An id that does not match RUN_ID is replaced.
    """
    file = run_dir / "wandb" / "run_id"
    file.parent.mkdir(exist_ok=True)
    chosen_id = run_id or ""
    # A link could make a secret file's content the id, which is public.
    if not chosen_id and not is_fork and file.is_file() and not file.is_symlink():
        chosen_id = read_file(file).decode(errors="replace")
    if not RUN_ID.fullmatch(chosen_id):
        chosen_id = uuid.uuid4().hex[:8]
    write_atomically(file, chosen_id)
    return chosen_id


def logged_in() -> bool:
    """Return whether the environment, W&B's settings or netrc have its credentials.

    No server is asked.
    """
    import wandb

    settings = wandb.setup().settings
    if (
        settings.api_key
        or os.environ.get("WANDB_API_KEY")
        or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")
    ):
        return True
    if "NETRC" in os.environ:
        candidates = [Path(os.environ["NETRC"])]
    else:
        candidates = [Path("~/.netrc"), Path("~/_netrc")]
    host = urlsplit(settings.base_url).hostname or ""
    paths = map(path_of, candidates)
    return any(has_login(path, host) for path in paths if path.exists())


def has_login(path: Path, host: str) -> bool:
    """Return whether a netrc file has a login of a host; warn if it cannot be read."""
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, UnicodeError, netrc.NetrcParseError) as error:
        # The text of the error may have a part of a password.
        logger.warning(
            "cannot read %s (%s): looking for W&B's login elsewhere",
            path,
            type(error).__name__,
        )
        return False
