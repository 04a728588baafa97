"""The disturbed run: its process, its directory, and how it is expected to end."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.text import merge_overrides

PATIENCE = 3600  # seconds that anything may take
KILLED = -signal.SIGKILL
TERMINATED = 128 + signal.SIGTERM
INTERRUPTED = 128 + signal.SIGINT
REFUSED = UserError.exit_code
FAULTY = ("scripts.faults.faulty",)


@dataclass
class Victim:
    """The disturbed run.

    Attributes:
      overrides: of its command.
      folder: its parent directory.
      name: of its directory in `folder`.
      settings: of `scripts.faults.faulty` at the next start.
      rng: for the faults.
      target: the step from which on the next fault may happen.
      process: the running process, or None.
      starts: number of starts.
      notes: unexpected events.
      frozen: processes that were stopped and not continued.
      damaged: steps of checkpoints that no longer hold what was saved; the run has to
          notice.
    """

    overrides: list[str]
    folder: Path
    name: str
    settings: dict[str, Any]
    rng: random.Random = field(default_factory=random.Random)
    target: int = 0
    process: subprocess.Popen[str] | None = None
    starts: int = 0
    notes: list[str] = field(default_factory=list)
    frozen: list[int] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self.folder / self.name

    @property
    def log(self) -> Path:
        """The output of the last start."""
        return self.folder / f"{self.name}.log"

    def start(
        self, *overrides: str, program: Sequence[str] = FAULTY, **more: Any
    ) -> subprocess.Popen[str]:
        """Start or resume the run."""
        self.starts += 1
        self.process = self.launch(self.name, overrides, program, **more)
        return self.process

    def launch(
        self,
        name: str,
        overrides: Sequence[str] = (),
        program: Sequence[str] = FAULTY,
        **more: Any,
    ) -> subprocess.Popen[str]:
        """Start a trainer in `folder / name`, with `more` faults from inside.

        It prints to a file, because a pipe would be held open by W&B's process.
        """
        faults = self.folder / f"{name}.json"
        faults.write_text(json.dumps(self.settings | more), encoding="utf-8")
        environment = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("WANDB_", "XLA_", "JAX_"))
        }
        places = [f"run_dir={name}", f"compile_cache={self.folder}/cache"]
        command = [sys.executable, "-m", *program]
        if program == FAULTY:
            command.append(str(faults))
        command += merge_overrides(self.overrides, [*places, *overrides])
        with (self.folder / f"{name}.log").open("w") as output:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment
                | {
                    "JAX_PLATFORMS": "cpu",
                    # most time of a start is that of small compilations
                    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                    "WANDB_MODE": "offline",
                    "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
                },
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def running(self) -> subprocess.Popen[str]:
        """Return the process, started if necessary."""
        if self.process is not None and self.process.poll() is not None:
            self.ended(0)  # it finished by itself
        return self.process or self.start()

    def reach(self) -> subprocess.Popen[str]:
        """Return the process when it runs and has reached the target."""
        process, end = self.running(), time.monotonic() + PATIENCE
        while process.poll() is None and (
            last_step(self.run_dir) < self.target or not is_at_work(self.log)
        ):
            if time.monotonic() > end:
                self.notes.append(
                    f"start {self.starts} did not reach step {self.target}"
                )
                process.kill()
            time.sleep(0.01)
        time.sleep(self.rng.random() * 0.1)
        return process

    def ended(self, *codes: int, saying: str = "") -> int:
        """Wait for the end, and note an exit code or output that is not expected.

        Returns:
          The exit code.
        """
        assert self.process is not None
        process, self.process = self.process, None
        code = self.check(process, self.log, codes, saying)
        for pid in self.frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.frozen.clear()
        return code

    def check(
        self,
        process: subprocess.Popen[str],
        log: Path,
        codes: Sequence[int],
        saying: str = "",
    ) -> int:
        """Wait for the end of any process, and note what is not expected of it."""
        late = ""
        try:
            code = process.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            late = "\n(did not end)"
            process.kill()
            code = process.wait()
        output = log.read_text(encoding="utf-8", errors="replace") + late
        # Between its last step and its end, a signal ends it at once.
        if code in (-signal.SIGTERM, -signal.SIGINT) and re.search(
            r"^step (\d+)/\1 ", output, re.MULTILINE
        ):
            code = 0
        errors = re.findall(r"^error: ", output, re.MULTILINE)
        if (
            code not in codes
            or saying not in output
            or ("Traceback" in output and code != KILLED)
            # Where the disk is full, the line may not be in the log.
            or (code == REFUSED and saying and len(errors) != 1)
        ):
            expected = f"expected {codes}, {saying!r} and no traceback"
            self.notes.append(
                f"{log.name}, start {self.starts}: exit code {code}, {expected}:"
                f" ...{output[-1500:]}"
            )
        return code

    @contextlib.contextmanager
    def copied(self) -> Iterator[Path]:
        """Let the run reach its target and pause, and yield a copy of its directory.

        The copy is called `trial`; nothing that happens to it changes the run.
        """
        process, copy = self.reach(), self.folder / "trial"
        process.send_signal(signal.SIGSTOP)
        try:
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(self.run_dir, copy, ignore=shutil.ignore_patterns("wandb"))
            yield copy
        finally:
            process.send_signal(signal.SIGCONT)

    def trial(
        self,
        change: Callable[[Path], str],
        code: int,
        saying: str,
        *overrides: str,
    ) -> str:
        """Change a copy of the run, and check what a trainer says of it.

        Args:
          change: changes the copy, and describes how; "": it could not.
          code: `REFUSED`, or `TERMINATED` for one that goes on; it is stopped then.
          saying: expected in the output.
          overrides: of the trainer.

        Returns:
          What `change` returned.
        """
        with self.copied() as copy:
            what = change(copy)
            if what:
                process = self.launch("trial", ["tracker=jsonl", *overrides])
                log = self.folder / "trial.log"
                wait_for_work(process, log)
                process.terminate()
                self.check(process, log, [code], saying)
        return what


def is_at_work(log: Path) -> bool:
    """Return whether a step was taken; before that, signals end a run at once."""
    return "\nstep " in log.read_text(encoding="utf-8", errors="replace")


def wait_for_work(
    process: subprocess.Popen[str], log: Path, seconds: float = PATIENCE
) -> None:
    """Wait for the first step or the end of a process, at most so many seconds."""
    end = time.monotonic() + seconds
    while process.poll() is None and not is_at_work(log) and time.monotonic() < end:
        time.sleep(0.01)


def last_step(run_dir: Path) -> int:
    """Return the step of the last complete line of metrics.jsonl; 0: none."""
    with (
        contextlib.suppress(OSError, ValueError, IndexError),
        (run_dir / "metrics.jsonl").open("rb") as file,
    ):
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4000))
        return int(json.loads(file.read().split(b"\n")[-2])["step"])
    return 0


def checkpoints(run_dir: Path) -> list[int]:
    """Return the steps of the checkpoints."""
    return sorted(
        int(path.name)
        for path in (run_dir / "checkpoints").glob("*")
        if path.name.isdigit()
    )
