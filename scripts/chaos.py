"""Random faults over one training run, whose end is compared, bit by bit, with that of a run that nothing happened to.

python -m scripts.chaos out=runs/chaos faults=50 seed=0

Both runs are of a tiny model on the embedded corpus, on CPU, and meet the same bad data: a batch with an id that no
token has, which is skipped, and weights that turn large, from which the watchdog goes back. Only one of them is killed,
told to stop, starved of disk, and so on (the functions of this file whose names FAULTS lists), and started again.
"""

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.arguments import argument, run
from trainer.errors import UserError
from trainer.fields import nearest
from trainer.records import read_rows

TINY = [
    "model.n_layer=2",
    "model.n_head=2",
    "model.d_model=32",
    "model.context=32",
    "model.dropout=0.1",
    "train.batch_tokens=512",
    "optimizer.lr=6e-4",
    "train.eval_every=100",
    "train.eval_batches=2",
    "train.final_eval_batches=4",
    "sample.max_new=8",
    "metrics.numerics_every=0",
    "checkpoint.every=20",
    "watchdog.max_skips=5",
    "watchdog.spike_window=16",
    "watchdog.spike_steps=3",
    "watchdog.stop_seconds=60",
    "watchdog.hang_seconds=90",
]
PATIENCE = 600  # seconds that anything may take


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    out: str = argument("a directory that does not exist yet; chaos.json in it gets the result")
    faults: int = argument("how many", 50)
    steps: int = argument("of each run; at least 30 for each fault", 1500)
    seed: int = argument("of the faults", 0)
    precision: str = argument("of both runs", "scalify_fp8_fp16")
    tracker: str = argument("of both runs: wandb (offline) or jsonl", "wandb")
    kinds: str = argument("names of faults, separated by commas; empty: all of them", "")


@dataclass
class Chaos:
    """The run that is disturbed.

    Attributes:
      target: the step from which on the next fault may happen.
      settings: for `scripts.faulty`, of the next start.
      notes: what went otherwise than it should.
      frozen: processes that were stopped and not woken.
    """

    args: Arguments
    folder: Path
    rng: random.Random
    settings: dict[str, Any]
    target: int = 0
    process: subprocess.Popen[str] | None = None
    starts: int = 0
    notes: list[str] = field(default_factory=list)
    frozen: list[int] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        """Its directory."""
        return self.folder / "disturbed"

    @property
    def log(self) -> Path:
        """What the last start has printed."""
        return self.folder / "output.log"

    def start(self, **more: Any) -> subprocess.Popen[str]:
        """Start it, or go on."""
        self.starts += 1
        self.process = launch(self.args, self.folder, "disturbed", self.settings | more, self.log)
        return self.process

    def running(self) -> subprocess.Popen[str]:
        """The process, started if need be."""
        if self.process is None or self.process.poll() is not None:
            return self.start()
        return self.process

    def reach(self) -> subprocess.Popen[str]:
        """The process, at the target."""
        process, end = self.running(), time.monotonic() + PATIENCE
        while process.poll() is None and last_step(self.run_dir) < self.target:
            if time.monotonic() > end:
                process.kill()
            time.sleep(0.01)
        time.sleep(self.rng.random() * 0.1)
        return process

    def ended(self, *codes: int, saying: str = "") -> None:
        """Wait for its end, and note it if that is not one of `codes`, or without the words."""
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
        if code not in codes or saying not in output or ("Traceback" in output and code != -signal.SIGKILL):
            expected = f"expected {codes} and {saying!r}"
            self.notes.append(f"start {self.starts}: exit code {code}, {expected}: ...{output[-1500:]}")
        self.process = None


def launch(args: Arguments, folder: Path, name: str, settings: dict[str, Any], log: Path) -> subprocess.Popen[str]:
    """A trainer in `folder` with faults of its own. It prints to a file: a pipe would outlive it in W&B's process."""
    file = folder / f"{name}.json"
    file.write_text(json.dumps(settings), encoding="utf-8")
    overrides = [*TINY, f"precision={args.precision}", f"train.steps={args.steps}", f"tracker={args.tracker}"]
    overrides += [f"run_dir={name}", f"compile_cache={folder}/cache"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "XLA_", "JAX_"))}
    root = str(Path(__file__).resolve().parent.parent)
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "scripts.faulty", str(file), *overrides],
            cwd=folder,
            env=kept | {"JAX_PLATFORMS": "cpu", "WANDB_MODE": "offline", "PYTHONPATH": root},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )


def last_step(run_dir: Path) -> int:
    """The step of the last whole line of metrics.jsonl; 0: none."""
    with contextlib.suppress(OSError, ValueError, IndexError), (run_dir / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4000))
        return int(json.loads(file.read().split(b"\n")[-2])["step"])
    return 0


def checkpoints(run_dir: Path) -> list[int]:
    """Steps of those that are whole or were."""
    return sorted(int(path.name) for path in (run_dir / "checkpoints").glob("*") if path.name.isdigit())


# --- faults: each happens to a run at work, and leaves it running, ended, or damaged on disk ---


def kill(chaos: Chaos) -> None:
    """SIGKILL at any moment."""
    chaos.reach().kill()
    chaos.ended(-signal.SIGKILL, 0)


def kill_while_starting(chaos: Chaos) -> None:
    """SIGKILL before there is a step."""
    kill(chaos)
    process = chaos.start()
    time.sleep(chaos.rng.random() * 6)
    process.kill()
    chaos.ended(-signal.SIGKILL, 0)


def kill_while_saving(chaos: Chaos) -> None:
    """SIGKILL while there is an unfinished checkpoint."""
    process, folder = chaos.reach(), chaos.run_dir / "checkpoints"
    while process.poll() is None and not any("tmp" in path.name for path in folder.glob("*")):
        time.sleep(0.001)
    process.kill()
    chaos.ended(-signal.SIGKILL, 0)


def terminate(chaos: Chaos) -> None:
    """SIGTERM, which saves."""
    chaos.reach().terminate()
    chaos.ended(128 + signal.SIGTERM, 0)


def interrupt(chaos: Chaos) -> None:
    """Ctrl-C, which saves."""
    chaos.reach().send_signal(signal.SIGINT)
    chaos.ended(128 + signal.SIGINT, 0)


def terminate_in_a_validation(chaos: Chaos) -> None:
    """SIGTERM during a validation, which is broken off, and taken up again."""
    kill(chaos)
    process = chaos.start(validation=0.5)
    every = 100
    step = chaos.target - chaos.target % every + every
    while process.poll() is None and last_step(chaos.run_dir) < step - 1:
        time.sleep(0.01)
    time.sleep(0.3)
    process.terminate()
    chaos.ended(128 + signal.SIGTERM, 0)


def terminate_without_mercy(chaos: Chaos) -> None:
    """SIGTERM, and SIGKILL before it can have saved."""
    process = chaos.reach()
    process.terminate()
    time.sleep(chaos.rng.random() * 0.3)
    process.kill()
    chaos.ended(-signal.SIGKILL, 128 + signal.SIGTERM, 0)


def fill_the_disk(chaos: Chaos) -> None:
    """No file of the process may grow any more."""
    process = chaos.reach()
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, 1000))
    chaos.ended(UserError.exit_code, 0, saying="")


def flip_a_bit(chaos: Chaos) -> None:
    """Of the newest checkpoint, while nobody is looking."""
    kill(chaos)
    damage(chaos, lambda data: bytes([data[0] ^ 1 << chaos.rng.randrange(8)]) + data[1:])


def truncate(chaos: Chaos) -> None:
    """A file of the newest checkpoint."""
    kill(chaos)
    damage(chaos, lambda data: b"")


def damage(chaos: Chaos, change: Callable[[bytes], bytes]) -> None:
    """Change the bytes of a random file of the newest of several checkpoints, from a random place on."""
    steps = checkpoints(chaos.run_dir)
    if len(steps) > 1:
        files = [p for p in sorted((chaos.run_dir / "checkpoints" / str(steps[-1])).rglob("*")) if p.is_file()]
        path = chaos.rng.choice([p for p in files if p.stat().st_size])
        data = path.read_bytes()
        at = chaos.rng.randrange(len(data))
        path.write_bytes(data[:at] + change(data[at:]))


def tear_the_log(chaos: Chaos) -> None:
    """The last line of metrics.jsonl is half written."""
    kill(chaos)
    path = chaos.run_dir / "metrics.jsonl"
    if path.exists():
        data = path.read_bytes()
        path.write_bytes(data[: len(data) - chaos.rng.randrange(200)])


def tear_the_cache(chaos: Chaos) -> None:
    """A compiled program is half written."""
    kill(chaos)
    entries = sorted((chaos.folder / "cache").glob("*-cache"))
    if entries:
        entry = chaos.rng.choice(entries)
        os.truncate(entry, chaos.rng.randrange(entry.stat().st_size))


def starve(chaos: Chaos) -> None:
    """The data do not come."""
    kill(chaos)
    (chaos.folder / "disturbed.json.hung").unlink(missing_ok=True)
    chaos.start(hang=last_step(chaos.run_dir) + 5)
    chaos.ended(4, 0)


def freeze(chaos: Chaos) -> None:
    """The process gets no time for a while."""
    process = chaos.reach()
    process.send_signal(signal.SIGSTOP)
    time.sleep(1)
    process.send_signal(signal.SIGCONT)


def start_twice(chaos: Chaos) -> None:
    """A second trainer is started on the same directory."""
    first = chaos.reach()
    if first.poll() is None:
        log = chaos.folder / "second.log"
        second = launch(chaos.args, chaos.folder, "disturbed", chaos.settings, log)
        second.wait(timeout=PATIENCE)
        output = log.read_text(encoding="utf-8", errors="replace")
        errors = [line for line in output.splitlines() if line.startswith("error:")]
        refused = second.returncode == UserError.exit_code and "is in use by process" in output and len(errors) == 1
        if not refused and first.poll() is None:
            chaos.notes.append(f"the second trainer was not refused: {second.returncode} {output[-500:]}")


def kill_the_tracker(chaos: Chaos) -> None:
    """W&B's own process dies."""
    signal_tracker(chaos.reach(), signal.SIGKILL)


def hang_the_tracker(chaos: Chaos) -> None:
    """W&B's own process does not answer any more."""
    chaos.frozen += signal_tracker(chaos.reach(), signal.SIGSTOP)


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


def turn_the_clock(chaos: Chaos) -> None:
    """The wall clock jumps to and fro."""
    kill(chaos)
    after = last_step(chaos.run_dir)
    chaos.start(clock=[after + chaos.rng.randrange(30) for _ in range(4)])


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


def chosen(names: str) -> list[Callable[[Chaos], None]]:
    """The faults of these names; all where there are none."""
    by_name = {fault.__name__: fault for fault in FAULTS}
    for name in names.split(",") if names else ():
        if name not in by_name:
            raise UserError(f"kinds={name}: no such fault; {nearest(name, list(by_name))}")
    return [by_name[name] for name in names.split(",")] if names else list(FAULTS)


# --- the comparison ---


def figures(run_dir: Path) -> list[dict[str, Any]]:
    """All rows and events, without what a clock or the machine's memory decides."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("perf/", "memory/"))}
        for row in read_rows(run_dir / "metrics.jsonl")
    ]


def compare(args: Arguments, folder: Path) -> dict[str, Any]:
    """What is the same in both runs."""
    from trainer.checkpoint import Checkpointer
    from trainer.libraries import hide_missing_gpu
    from trainer.tracking import read_history, wandb_files

    hide_missing_gpu()
    states, rows = [], []
    for name in ("undisturbed", "disturbed"):
        with Checkpointer.reading(folder / name / "checkpoints") as checkpointer:
            states.append(checkpointer.described())
        rows.append(figures(folder / name))
    steps = [row["step"] for row in rows[1] if "event" not in row]
    result = {
        "state_equal": states[0] == states[1],
        "leaves": len(states[0]),
        "rows_equal": rows[0] == rows[1],
        "every_step_logged_once": steps == list(range(1, args.steps + 1)),
        "newest_checkpoint": checkpoints(folder / "disturbed")[-1],
        "skipped": rows[1][-1]["watchdog/skipped"],
        "rollbacks": rows[1][-1]["watchdog/rollbacks"],
        "damaged_set_aside": len(list((folder / "disturbed" / "checkpoints" / "damaged").glob("*"))),
    }
    if args.tracker == "wandb":
        run_id = (folder / "disturbed" / "wandb" / "run_id").read_text()
        sent = [row["step"] for path in wandb_files(folder / "disturbed", run_id) for row in read_history(path)]
        result["every_step_in_wandb_once"] = sorted(sent) == list(range(1, args.steps + 1))
    return result


def main(args: Arguments) -> None:
    """Both runs, the comparison, a line for docs/results.md. UserError when something is not as it should be."""
    folder = Path(args.out).resolve()
    if args.steps < 30 * args.faults:
        raise UserError(f"steps={args.steps} is little for {args.faults} faults; valid: {30 * args.faults} or more")
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"out={folder} exists; choose another directory") from None
    kinds = chosen(args.kinds)
    started, rng = time.monotonic(), random.Random(args.seed)
    bad = {"nan": [args.steps // 3], "corrupt": [args.steps // 2 + 13]}
    calm = Chaos(args, folder, rng, bad)
    calm.process = launch(args, folder, "undisturbed", bad, calm.log)
    calm.ended(0, saying="done: ")
    if calm.notes:
        raise UserError(f"the undisturbed run failed: {calm.notes[0]}")
    alone = time.monotonic() - started

    chaos = Chaos(args, folder, rng, bad)
    order = [kinds[i % len(kinds)] for i in range(args.faults)]
    rng.shuffle(order)
    for i, fault in enumerate(order):
        chaos.target = args.steps * i // args.faults + rng.randrange(args.steps // args.faults)
        print(f"fault {i + 1} of {args.faults}, from step {chaos.target} on: {fault.__name__}", flush=True)
        fault(chaos)
        chaos.notes, notes = [], chaos.notes
        for note in notes:
            print(f"  {note}", flush=True)
            calm.notes.append(f"{fault.__name__}: {note}")
    while checkpoints(chaos.run_dir)[-1:] != [args.steps] and chaos.starts < 3 * args.faults + 10:
        chaos.running()
        chaos.ended(0, -signal.SIGKILL, saying="done: ")
    if chaos.process is not None:
        chaos.ended(0)
    chaos.start()  # a finished run is left alone, but for what W&B has not got
    chaos.ended(0, saying="done: ")
    counted = Counter(fault.__name__ for fault in order)
    result = compare(args, folder) | {"faults": args.faults, "kinds": dict(counted), "starts": chaos.starts}
    result |= {"unexpected": calm.notes + chaos.notes, "seconds": round(time.monotonic() - started)}
    result |= {"seconds_undisturbed": round(alone)}
    (folder / "chaos.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    held = [k for k, v in result.items() if v is True]
    failed = [k for k, v in result.items() if v is False]
    done = f"{args.faults} faults of {len(counted)} kinds, {chaos.starts} starts"
    course = f"{args.steps} steps, {result['skipped']} skipped, {result['rollbacks']} rolled back"
    print(f"| {args.precision} | {done} | {course} | {', '.join(held)} | {', '.join(failed) or 'nothing'} |")
    if failed or result["unexpected"]:
        raise UserError(f"not all held: {', '.join(failed)} {len(result['unexpected'])} unexpected; see {folder}")


if __name__ == "__main__":
    sys.exit(run(Arguments, "chaos", __doc__ or "", main))
