"""What can happen to a training run: faults from outside, each a function of the run
that it happens to.

A fault leaves the run at work, ended, or damaged on disk; the next one starts it again
where need be. `scripts.faults.chaos` throws them at a run. Those of data and memory,
from inside, are in `scripts.faults.faulty`.
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

VALIDATIONS = 100  # steps between two
PATIENCE = 3600  # seconds that anything may take
# of a checkpoint; each with a checksum of its own
NEEDED = (Path("manifest/metadata"), Path("state/manifest.ocdbt"))


@dataclass
class Victim:
    """The run that is disturbed.

    Attributes:
      target: the step from which on the next fault may happen.
      settings: for `scripts.faults.faulty`, of the next start.
      notes: what went otherwise than it should.
      frozen: processes that were stopped and not woken.
      damaged: steps of checkpoints that no longer hold what was saved, which the run
          has to notice.
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
        """Its directory."""
        return self.folder / "disturbed"

    @property
    def log(self) -> Path:
        """What the last start has printed."""
        return self.folder / "output.log"

    def start(self, *overrides: str, **more: Any) -> subprocess.Popen[str]:
        """Start it, or go on."""
        self.starts += 1
        overrides = (*self.overrides, *overrides)
        self.process = launch(
            overrides, self.folder, "disturbed", self.settings | more, self.log
        )
        return self.process

    def running(self) -> subprocess.Popen[str]:
        """The process, started if need be."""
        if self.process is not None and self.process.poll() is not None:
            self.ended(0)  # by itself, and then at its last step
        return self.process or self.start()

    def reach(self) -> subprocess.Popen[str]:
        """The process, at work, and at the target."""
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
        """Return whether the last start has taken a step: before that a signal ends it
        as it ends any process.
        """
        return "\nstep " in self.log.read_text(encoding="utf-8", errors="replace")

    def ended(self, *codes: int, saying: str = "") -> None:
        """Wait for its end, and note it if that is not one of `codes`, or without the
        words.
        """
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
        # Between its last step and its end, a signal ends it as it ends any process.
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
    """A trainer in `folder` with faults of its own. It prints to a file: a pipe would
    outlive it in W&B's process.
    """
    file = folder / f"{name}.json"
    file.write_text(json.dumps(settings), encoding="utf-8")
    overrides = [*overrides, f"run_dir={name}", f"compile_cache={folder}/cache"]
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("WANDB_", "XLA_", "JAX_"))
    }
    root = str(Path(__file__).resolve().parents[2])
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "scripts.faults.faulty", str(file), *overrides],
            cwd=folder,
            env=kept
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
    """The step of the last whole line of metrics.jsonl; 0: none."""
    with (
        contextlib.suppress(OSError, ValueError, IndexError),
        (run_dir / "metrics.jsonl").open("rb") as file,
    ):
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4000))
        return int(json.loads(file.read().split(b"\n")[-2])["step"])
    return 0


def checkpoints(run_dir: Path) -> list[int]:
    """Steps of those that are whole or were."""
    return sorted(
        int(path.name)
        for path in (run_dir / "checkpoints").glob("*")
        if path.name.isdigit()
    )


# --- faults: each happens to a run at work, and leaves it running, ended, or damaged on
# disk ---


def kill(run: Victim) -> None:
    """SIGKILL at any moment."""
    run.reach().kill()
    run.ended(-signal.SIGKILL, 0)


def kill_while_starting(run: Victim) -> None:
    """SIGKILL before there is a step."""
    kill(run)
    process = run.start()
    time.sleep(run.rng.random() * 6)
    process.kill()
    run.ended(-signal.SIGKILL, 0)


def kill_while_saving(run: Victim) -> None:
    """SIGKILL while there is an unfinished checkpoint."""
    process, folder = run.reach(), run.run_dir / "checkpoints"
    while process.poll() is None and not any(
        "tmp" in path.name for path in folder.glob("*")
    ):
        time.sleep(0.001)
    process.kill()
    run.ended(-signal.SIGKILL, 0)


def terminate(run: Victim) -> None:
    """SIGTERM, which saves."""
    run.reach().terminate()
    run.ended(128 + signal.SIGTERM, 0)


def interrupt(run: Victim) -> None:
    """Ctrl-C, which saves."""
    run.reach().send_signal(signal.SIGINT)
    run.ended(128 + signal.SIGINT, 0)


def terminate_in_a_validation(run: Victim) -> None:
    """SIGTERM during a validation, which is broken off, and taken up again."""
    kill(run)
    run.start(validation=0.5)
    before = last_step(run.run_dir)
    run.target = before - before % VALIDATIONS + VALIDATIONS - 1
    process = run.reach()
    time.sleep(0.3)
    process.terminate()
    run.ended(128 + signal.SIGTERM, 0)


def terminate_without_mercy(run: Victim) -> None:
    """SIGTERM, and SIGKILL before it can have saved."""
    process = run.reach()
    process.terminate()
    time.sleep(run.rng.random() * 0.3)
    process.kill()
    run.ended(-signal.SIGKILL, 128 + signal.SIGTERM, 0)


def fill_the_disk(run: Victim) -> None:
    """No file of the process may grow any more."""
    process = run.reach()
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, 1000))
    run.ended(UserError.exit_code, 0, saying="")


def flip_a_bit(run: Victim) -> None:
    """Of the newest checkpoint, while nobody is looking."""
    kill(run)
    damage(run, lambda data: bytes([data[0] ^ 1 << run.rng.randrange(8)]) + data[1:])


def truncate(run: Victim) -> None:
    """A file of the newest checkpoint."""
    kill(run)
    damage(run, lambda data: b"")


def damage(run: Victim, change: Callable[[bytes], bytes]) -> None:
    """Change the bytes of a random file of the newest of several checkpoints, from a
    random place on.

    Every other time it is one of two that no checkpoint is whole without: those the run
    has to notice. What the others hold is in part never read, and where it is, a run
    that took it for whole would not end as the undisturbed one.
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
    """Steps of damaged checkpoints that the run has not set aside, so often as they
    were damaged.
    """
    aside = [
        path.name.split("-")
        for path in (run.run_dir / "checkpoints" / "damaged").glob("*")
    ]
    # a lost validation loss has three
    found = Counter(int(parts[0]) for parts in aside if len(parts) == 2)
    return sorted((Counter(run.damaged) - found).elements())


def tear_the_log(run: Victim) -> None:
    """The last line of metrics.jsonl is half written."""
    kill(run)
    path = run.run_dir / "metrics.jsonl"
    if path.exists():
        data = path.read_bytes()
        path.write_bytes(data[: len(data) - run.rng.randrange(200)])


def tear_the_cache(run: Victim) -> None:
    """A compiled program is half written."""
    kill(run)
    entries = sorted((run.folder / "cache").glob("*-cache"))
    if entries:
        entry = run.rng.choice(entries)
        os.truncate(entry, run.rng.randrange(entry.stat().st_size))


def starve(run: Victim) -> None:
    """The data do not come."""
    kill(run)
    (run.folder / "disturbed.json.hung").unlink(missing_ok=True)
    run.start("watchdog.hang_seconds=20", hang=last_step(run.run_dir) + 5)
    run.ended(HUNG, 0)


def freeze(run: Victim) -> None:
    """The process gets no time for a while."""
    process = run.reach()
    process.send_signal(signal.SIGSTOP)
    time.sleep(1)
    process.send_signal(signal.SIGCONT)


def start_twice(run: Victim) -> None:
    """A second trainer is started on the same directory."""
    first = run.reach()
    if first.poll() is None:
        first.send_signal(signal.SIGSTOP)  # or it is finished by the time
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
    """W&B's own process dies."""
    signal_tracker(run.reach(), signal.SIGKILL)


def hang_the_tracker(run: Victim) -> None:
    """W&B's own process does not answer any more."""
    run.frozen += signal_tracker(run.reach(), signal.SIGSTOP)


def signal_tracker(process: subprocess.Popen[str], number: int) -> list[int]:
    """To the children of the trainer that belong to W&B; their ids."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = stat.read_text().partition(")")
            if int(rest.split()[1]) == process.pid and "wandb" in name:
                os.kill(int(stat.parent.name), number)
                found.append(int(stat.parent.name))
    return found


def turn_the_clock(run: Victim) -> None:
    """The wall clock jumps to and fro."""
    kill(run)
    after = last_step(run.run_dir)
    run.start(clock=[after + run.rng.randrange(30) for _ in range(4)])


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


def chosen(names: str) -> list[Callable[[Victim], None]]:
    """The faults of these names; all where there are none."""
    by_name = {fault.__name__: fault for fault in FAULTS}
    for name in names.split(",") if names else ():
        if name not in by_name:
            raise UserError(
                f"kinds={name}: no such fault; {nearest(name, list(by_name))}"
            )
    return [by_name[name] for name in names.split(",")] if names else list(FAULTS)
