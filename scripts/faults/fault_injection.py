"""Faults from outside a training run, each a function of the run.

A fault leaves the run running, ended, or damaged on disk; the next one restarts it if
necessary. `scripts.faults.chaos` injects them. Faults of data and memory, from inside,
are in `scripts.faults.faulty`.
"""

import contextlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.run.shutdown import HUNG
from trainer.text import nearest

VALIDATIONS = 100  # steps between two validations
PATIENCE = 3600  # seconds that anything may take
# files of a checkpoint with checksums of their own
NEEDED = (Path("manifest/metadata"), Path("state/manifest.ocdbt"))


@dataclass
class Victim:
    """The disturbed run.

    Attributes:
      overrides: of its command.
      folder: its parent directory.
      rng: for the faults.
      settings: of `scripts.faults.faulty` at the next start.
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
    rng: random.Random
    settings: dict[str, Any]
    target: int = 0
    process: subprocess.Popen[str] | None = None
    starts: int = 0
    notes: list[str] = field(default_factory=list)
    frozen: list[int] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self.folder / "disturbed"

    @property
    def log(self) -> Path:
        """The output of the last start."""
        return self.folder / "output.log"

    def start(self, *overrides: str, **more: Any) -> subprocess.Popen[str]:
        """Start or resume the run."""
        self.starts += 1
        overrides = (*self.overrides, *overrides)
        self.process = launch(
            overrides, self.folder, "disturbed", self.settings | more, self.log
        )
        return self.process

    def running(self) -> subprocess.Popen[str]:
        """Return the process, started if necessary."""
        if self.process is not None and self.process.poll() is not None:
            self.ended(0)  # it finished by itself
        return self.process or self.start()

    def reach(self) -> subprocess.Popen[str]:
        """Return the process when it runs and has reached the target."""
        process, end = self.running(), time.monotonic() + PATIENCE
        while process.poll() is None and (
            last_step(self.run_dir) < self.target or not self.at_work
        ):
            if time.monotonic() > end:
                self.notes.append(
                    f"start {self.starts} did not reach step {self.target}"
                )
                process.kill()
            time.sleep(0.01)
        time.sleep(self.rng.random() * 0.1)
        return process

    @property
    def at_work(self) -> bool:
        """Return whether a step was taken; before that, signals end it at once."""
        return "\nstep " in self.log.read_text(encoding="utf-8", errors="replace")

    def ended(self, *codes: int, saying: str = "") -> None:
        """Wait for the end, and note an exit code or output that is not expected."""
        assert self.process is not None
        late = ""
        try:
            code = self.process.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            late = "\n(did not end)"
            self.process.kill()
            code = self.process.wait()
        output = self.log.read_text(encoding="utf-8", errors="replace") + late
        for pid in self.frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.frozen.clear()
        # Between its last step and its end, a signal ends it at once.
        if code in (-signal.SIGTERM, -signal.SIGINT) and re.search(
            r"^step (\d+)/\1 ", output, re.MULTILINE
        ):
            code = 0
        if (
            code not in codes
            or saying not in output
            or ("Traceback" in output and code != -signal.SIGKILL)
        ):
            expected = f"expected {codes} and {saying!r}"
            self.notes.append(
                f"start {self.starts}: exit code {code}, {expected}:"
                f" ...{output[-1500:]}"
            )
        self.process = None


def launch(
    overrides: Sequence[str],
    folder: Path,
    name: str,
    settings: dict[str, Any],
    log: Path,
) -> subprocess.Popen[str]:
    """Start a trainer in `folder` with faults of `settings`.

    It prints to a file, because a pipe would be held open by W&B's process.
    """
    file = folder / f"{name}.json"
    file.write_text(json.dumps(settings), encoding="utf-8")
    overrides = [*overrides, f"run_dir={name}", f"compile_cache={folder}/cache"]
    environment = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("WANDB_", "XLA_", "JAX_"))
    }
    root = str(Path(__file__).resolve().parents[2])
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "scripts.faults.faulty", str(file), *overrides],
            cwd=folder,
            env=environment
            | {
                "JAX_PLATFORMS": "cpu",
                "WANDB_MODE": "offline",
                "PYTHONPATH": root,
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )


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


# --- faults: each disturbs a run at work, and leaves it running, ended, or damaged ---


def kill(run: Victim) -> None:
    """Send SIGKILL at a random moment."""
    run.reach().kill()
    run.ended(-signal.SIGKILL, 0)


def kill_while_starting(run: Victim) -> None:
    """Send SIGKILL before the first step."""
    kill(run)
    process = run.start()
    time.sleep(run.rng.random() * 6)
    process.kill()
    run.ended(-signal.SIGKILL, 0)


def kill_while_saving(run: Victim) -> None:
    """Send SIGKILL while a checkpoint is unfinished."""
    process, folder = run.reach(), run.run_dir / "checkpoints"
    while process.poll() is None and not any(
        "tmp" in path.name for path in folder.glob("*")
    ):
        time.sleep(0.001)
    process.kill()
    run.ended(-signal.SIGKILL, 0)


def terminate(run: Victim) -> None:
    """Send SIGTERM, upon which the run saves."""
    run.reach().terminate()
    run.ended(128 + signal.SIGTERM, 0)


def interrupt(run: Victim) -> None:
    """Send SIGINT (Ctrl-C), upon which the run saves."""
    run.reach().send_signal(signal.SIGINT)
    run.ended(128 + signal.SIGINT, 0)


def terminate_in_a_validation(run: Victim) -> None:
    """Send SIGTERM during a validation, which is interrupted and repeated."""
    kill(run)
    run.start(validation=0.5)
    step = last_step(run.run_dir)
    run.target = step - step % VALIDATIONS + VALIDATIONS - 1
    process = run.reach()
    time.sleep(0.3)
    process.terminate()
    run.ended(128 + signal.SIGTERM, 0)


def terminate_without_mercy(run: Victim) -> None:
    """Send SIGTERM, and SIGKILL before the run can have saved."""
    process = run.reach()
    process.terminate()
    time.sleep(run.rng.random() * 0.3)
    process.kill()
    run.ended(-signal.SIGKILL, 128 + signal.SIGTERM, 0)


def fill_the_disk(run: Victim) -> None:
    """Forbid the process to extend any file."""
    process = run.reach()
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, 1000))
    run.ended(UserError.exit_code, 0, saying="")


def flip_a_bit(run: Victim) -> None:
    """Flip a bit of the newest checkpoint while the run is down."""
    kill(run)
    damage(run, lambda data: bytes([data[0] ^ 1 << run.rng.randrange(8)]) + data[1:])


def truncate(run: Victim) -> None:
    """Truncate a file of the newest checkpoint."""
    kill(run)
    damage(run, lambda data: b"")


def damage(run: Victim, change: Callable[[bytes], bytes]) -> None:
    """Change a random file of the newest of several checkpoints from a random byte on.

    Every other time it is one of the files that no checkpoint is valid without, whose
    damage the run has to notice. Other files are partly never read; where they are, a
    run that does not notice the damage ends differently.
    """
    steps = checkpoints(run.run_dir)
    if len(steps) > 1:
        folder = run.run_dir / "checkpoints" / str(steps[-1])
        files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
        needed = [path for path in files if path.relative_to(folder) in NEEDED]
        path = run.rng.choice(
            run.rng.choice([needed, [p for p in files if p.stat().st_size]])
        )
        data = path.read_bytes()
        at = run.rng.randrange(len(data))
        path.write_bytes(data[:at] + change(data[at:]))
        if path in needed:
            run.damaged.append(steps[-1])


def unnoticed(run: Victim) -> list[int]:
    """Return the steps of damaged checkpoints that the run has not set aside."""
    aside = [
        path.name.split("-")
        for path in (run.run_dir / "checkpoints" / "damaged").glob("*")
    ]
    # A checkpoint that lost its validation loss has three parts.
    noticed = Counter(int(parts[0]) for parts in aside if len(parts) == 2)
    return sorted((Counter(run.damaged) - noticed).elements())


def tear_the_log(run: Victim) -> None:
    """Tear the last line of metrics.jsonl."""
    kill(run)
    path = run.run_dir / "metrics.jsonl"
    if path.exists():
        data = path.read_bytes()
        path.write_bytes(data[: len(data) - run.rng.randrange(200)])


def tear_the_cache(run: Victim) -> None:
    """Truncate a compiled program in the cache."""
    kill(run)
    entries = sorted((run.folder / "cache").glob("*-cache"))
    if entries:
        entry = run.rng.choice(entries)
        os.truncate(entry, run.rng.randrange(entry.stat().st_size))


def starve(run: Victim) -> None:
    """Withhold the data, so that the watchdog ends the run."""
    kill(run)
    (run.folder / "disturbed.json.hung").unlink(missing_ok=True)
    run.start("watchdog.hang_seconds=20", hang=last_step(run.run_dir) + 5)
    run.ended(HUNG, 0)


def freeze(run: Victim) -> None:
    """Stop the process for a while."""
    process = run.reach()
    process.send_signal(signal.SIGSTOP)
    time.sleep(1)
    process.send_signal(signal.SIGCONT)


def start_twice(run: Victim) -> None:
    """Start a second trainer on the same directory, which must be refused."""
    first = run.reach()
    if first.poll() is None:
        first.send_signal(signal.SIGSTOP)  # or it might finish meanwhile
        log = run.folder / "second.log"
        second = launch(run.overrides, run.folder, "disturbed", run.settings, log)
        second.wait(timeout=PATIENCE)
        output = log.read_text(encoding="utf-8", errors="replace")
        errors = [line for line in output.splitlines() if line.startswith("error:")]
        refused = (
            second.returncode == UserError.exit_code
            and "is in use by process" in output
            and len(errors) == 1
        )
        first.send_signal(signal.SIGCONT)
        if not refused:
            run.notes.append(
                f"the second trainer was not refused: {second.returncode}"
                f" {output[-500:]}"
            )


def kill_the_tracker(run: Victim) -> None:
    """Kill W&B's own process."""
    signal_tracker(run.reach(), signal.SIGKILL)


def hang_the_tracker(run: Victim) -> None:
    """Stop W&B's own process."""
    run.frozen += signal_tracker(run.reach(), signal.SIGSTOP)


def signal_tracker(process: subprocess.Popen[str], number: int) -> list[int]:
    """Send a signal to the trainer's children of W&B, and return their ids."""
    ids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = stat.read_text().partition(")")
            if int(rest.split()[1]) == process.pid and "wandb" in name:
                os.kill(int(stat.parent.name), number)
                ids.append(int(stat.parent.name))
    return ids


def turn_the_clock(run: Victim) -> None:
    """Let the wall clock jump forth and back."""
    kill(run)
    step = last_step(run.run_dir)
    run.start(clock=[step + run.rng.randrange(30) for _ in range(4)])


FAULTS = (
    kill,
    kill_while_starting,
    kill_while_saving,
    terminate,
    interrupt,
    terminate_in_a_validation,
    terminate_without_mercy,
    fill_the_disk,
    flip_a_bit,
    truncate,
    tear_the_log,
    tear_the_cache,
    starve,
    freeze,
    start_twice,
    kill_the_tracker,
    hang_the_tracker,
    turn_the_clock,
)


def choose_faults(names: str) -> list[Callable[[Victim], None]]:
    """Return the faults of these names; all where no name is given."""
    by_name = {fault.__name__: fault for fault in FAULTS}
    for name in names.split(",") if names else ():
        if name not in by_name:
            raise UserError(
                f"kinds={name}: no such fault; {nearest(name, list(by_name))}"
            )
    return [by_name[name] for name in names.split(",")] if names else list(FAULTS)
