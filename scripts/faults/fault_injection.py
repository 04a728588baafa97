"""Faults from outside a training run, each a function of the run.

A fault returns what it did, or "" if it could not be done. It leaves the run running,
ended, or damaged on disk; the next one restarts it if necessary. Damage that a run
cannot survive is done to a copy (`Victim.trial`). Faults of data and memory, from
inside, are in `scripts.faults.faulty`.
"""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

from scripts.faults.victim import (
    INTERRUPTED,
    KILLED,
    REFUSED,
    TERMINATED,
    Victim,
    checkpoints,
    last_step,
    wait_for_work,
)
from trainer.errors import UserError
from trainer.run.shutdown import HUNG_EXIT_CODE
from trainer.text import nearest

VALIDATIONS = 100  # steps between two validations
# files of a checkpoint with checksums of their own
NEEDED = (Path("manifest/metadata"), Path("state/manifest.ocdbt"))
LOG_CHANGED = "is not what the run wrote"
TRIAL_DATA = "trial-data"


# --- signals and the machine ---


def kill(run: Victim) -> str:
    """Send SIGKILL at a random moment."""
    run.reach().kill()
    killed = run.ended(KILLED, 0) == KILLED
    return f"killed after step {last_step(run.run_dir)}" if killed else ""


def start_and_signal(run: Victim, number: int) -> str:
    """Kill the run, and signal the next start before or in its first step."""
    kill(run)
    # Without faults from inside: JAX is imported as late as in the trainer.
    process, seconds = run.start(program=("trainer",)), 0.5 + run.rng.random() * 9
    wait_for_work(process, run.log, seconds)
    process.send_signal(number)
    return f"signal {number} within {seconds:.1f} s of its start"


def kill_while_starting(run: Victim) -> str:
    """Send SIGKILL before the first step."""
    what = start_and_signal(run, signal.SIGKILL)
    run.ended(KILLED)
    return what


def interrupt_while_starting(run: Victim) -> str:
    """Send SIGINT (Ctrl-C) before the first step."""
    what = start_and_signal(run, signal.SIGINT)
    run.ended(INTERRUPTED)
    return what


def kill_while_saving(run: Victim) -> str:
    """Send SIGKILL while a checkpoint is unfinished."""
    process, folder = run.reach(), run.run_dir / "checkpoints"
    unfinished: list[Path] = []
    while process.poll() is None and not unfinished:
        unfinished = [path for path in folder.glob("*") if "tmp" in path.name]
        time.sleep(0.001)
    process.kill()
    run.ended(KILLED, 0)
    return f"killed while {unfinished[0].name} was there" if unfinished else ""


def terminate(run: Victim) -> str:
    """Send SIGTERM, upon which the run saves."""
    run.reach().terminate()
    return ended_after(run, TERMINATED)


def terminate_twice(run: Victim) -> str:
    """Send SIGTERM twice, as schedulers do; the run saves nevertheless."""
    process = run.reach()
    process.terminate()
    time.sleep(run.rng.random() * 0.1)
    process.terminate()
    return ended_after(run, TERMINATED)


def interrupt(run: Victim) -> str:
    """Send SIGINT (Ctrl-C), upon which the run saves."""
    run.reach().send_signal(signal.SIGINT)
    return ended_after(run, INTERRUPTED)


def interrupt_twice(run: Victim) -> str:
    """Send SIGINT twice, upon which the run may end without saving."""
    process = run.reach()
    process.send_signal(signal.SIGINT)
    time.sleep(run.rng.random() * 0.05)
    process.send_signal(signal.SIGINT)
    return ended_after(run, INTERRUPTED)


def ended_after(run: Victim, code: int) -> str:
    """Wait for the end by a signal; "" if the run was done before."""
    ended = run.ended(code, 0) == code
    return f"ended after step {last_step(run.run_dir)}" if ended else ""


def terminate_in_a_validation(run: Victim) -> str:
    """Send SIGTERM during a validation, which is interrupted and repeated."""
    kill(run)
    run.start(validation=0.5)
    step = last_step(run.run_dir)
    run.target = step - step % VALIDATIONS + VALIDATIONS - 1
    process = run.reach()
    time.sleep(0.3)
    process.terminate()
    return ended_after(run, TERMINATED)


def terminate_without_mercy(run: Victim) -> str:
    """Send SIGTERM, and SIGKILL before the run can have saved."""
    process = run.reach()
    process.terminate()
    time.sleep(run.rng.random() * 0.3)
    process.kill()
    code = run.ended(KILLED, TERMINATED, 0)
    return f"exit code {code} after step {last_step(run.run_dir)}" if code else ""


def fill_the_disk(run: Victim) -> str:
    """Forbid the process to extend any file."""
    process = run.reach()
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, 1000))
    return ended_after(run, REFUSED)


def starve(run: Victim) -> str:
    """Withhold the data, so that the watchdog ends the run."""
    kill(run)
    (run.folder / f"{run.name}.json.hung").unlink(missing_ok=True)
    run.start("watchdog.hang_seconds=8", hang=last_step(run.run_dir) + 5)
    return ended_after(run, HUNG_EXIT_CODE)


def freeze(run: Victim) -> str:
    """Stop the process for a while."""
    process = run.reach()
    process.send_signal(signal.SIGSTOP)
    time.sleep(1)
    process.send_signal(signal.SIGCONT)
    return f"frozen after step {last_step(run.run_dir)}"


def turn_the_clock(run: Victim) -> str:
    """Let the wall clock jump forth and back."""
    kill(run)
    step = last_step(run.run_dir)
    clock = [step + 1 + run.rng.randrange(30) for _ in range(4)]
    run.start(clock=clock)
    run.target = max(clock)
    run.reach()
    return f"jumps before steps {clock}"


def start_twice(run: Victim) -> str:
    """Start a second trainer on the same directory, which must be refused."""
    first = run.reach()
    first.send_signal(signal.SIGSTOP)  # or it might finish meanwhile
    output = run.log.read_bytes()
    second = run.launch(run.name)
    try:
        run.check(second, run.log, [REFUSED], "is in use by process")
    finally:
        run.log.write_bytes(output)
        first.send_signal(signal.SIGCONT)
    return f"refused beside process {first.pid}"


def kill_the_tracker(run: Victim) -> str:
    """Kill W&B's own process."""
    killed = signal_tracker(run.reach(), signal.SIGKILL)
    return f"killed {killed}" if killed else ""


def hang_the_tracker(run: Victim) -> str:
    """Stop W&B's own process."""
    stopped = signal_tracker(run.reach(), signal.SIGSTOP)
    run.frozen += stopped
    return f"stopped {stopped}" if stopped else ""


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


# --- damage from which the run itself goes on ---


def flip_a_bit(run: Victim) -> str:
    """Flip a bit of the newest checkpoint while the run is down."""
    kill(run)

    def flip(data: bytes) -> bytes:
        return bytes([data[0] ^ 1 << run.rng.randrange(8)]) + data[1:]

    return damage(run, flip)


def truncate(run: Victim) -> str:
    """Truncate a file of the newest checkpoint."""
    kill(run)
    return damage(run, lambda data: b"")


def damage(run: Victim, change: Callable[[bytes], bytes]) -> str:
    """Change a random file of the newest of several checkpoints from a random byte on.

    Every other time it is one of the files that no checkpoint is valid without, whose
    damage the run has to notice. Other files are partly never read; where they are, a
    run that does not notice the damage ends differently.
    """
    steps = checkpoints(run.run_dir)
    if len(steps) < 2:
        return ""
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
    return f"byte {at} of {path.relative_to(run.folder)}"


def unnoticed(run: Victim) -> list[int]:
    """Return the steps of damaged checkpoints that the run has not set aside."""
    aside = [
        path.name.split("-")
        for path in (run.run_dir / "checkpoints" / "damaged").glob("*")
    ]
    # A checkpoint that lost its validation loss has three parts.
    noticed = Counter(int(parts[0]) for parts in aside if len(parts) == 2)
    return sorted((Counter(run.damaged) - noticed).elements())


def tear_the_log(run: Victim) -> str:
    """Tear the last line of metrics.jsonl."""
    kill(run)
    path, lost = run.run_dir / "metrics.jsonl", run.rng.randrange(1, 200)
    os.truncate(path, path.stat().st_size - lost)
    return f"the last {lost} bytes"


def remove_the_log(run: Victim) -> str:
    """Remove metrics.jsonl during the run, which restores it."""
    process, step = run.reach(), last_step(run.run_dir)
    log = run.run_dir / "metrics.jsonl"
    log.unlink()
    while process.poll() is None and not log.exists():
        time.sleep(0.01)
    return f"removed after step {step}, restored"


def tear_the_cache(run: Victim) -> str:
    """Truncate a compiled program in the cache."""
    kill(run)
    entry = run.rng.choice(sorted((run.folder / "cache").glob("*-cache")))
    os.truncate(entry, run.rng.randrange(entry.stat().st_size))
    return entry.name


# --- damage of a copy, which is refused or reported ---


def empty_the_log(run: Victim) -> str:
    """Empty metrics.jsonl while the run is down."""

    def change(copy: Path) -> str:
        os.truncate(copy / "metrics.jsonl", 0)
        return "emptied"

    return run.trial(change, TERMINATED, LOG_CHANGED)


def edit_the_log(run: Victim) -> str:
    """Remove, repeat or change a row of metrics.jsonl while the run is down."""

    def change(copy: Path) -> str:
        log = copy / "metrics.jsonl"
        rows = log.read_bytes().splitlines(keepends=True)
        counted = [i for i, row in enumerate(rows[:20]) if b"train/loss" in row]
        row = run.rng.choice(counted)
        new = {
            "removed": b"",
            "repeated": rows[row] * 2,
            "changed": rows[row].replace(b'"train/loss": ', b'"train/loss": 1'),
        }
        how = run.rng.choice(list(new))
        log.write_bytes(b"".join([*rows[:row], new[how], *rows[row + 1 :]]))
        return f"row {row + 1} {how}"

    return run.trial(change, TERMINATED, LOG_CHANGED)


def empty_the_configuration(run: Victim) -> str:
    """Truncate config.yaml, which the newest checkpoint repairs."""

    def change(copy: Path) -> str:
        os.truncate(copy / "config.yaml", 0)
        return "emptied"

    saying = "taking the configuration of the newest checkpoint"
    return run.trial(change, TERMINATED, saying)


def edit_the_configuration(run: Victim) -> str:
    """Change a value of config.yaml."""

    def change(copy: Path) -> str:
        path = copy / "config.yaml"
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace("n_layer: 2", "n_layer: 3"), encoding="utf-8")
        return "another number of layers"

    return run.trial(change, REFUSED, "belongs to another configuration")


def plant_a_link(run: Victim) -> str:
    """Replace a file of the run by a link to a file outside."""
    outside = run.folder / "outside"
    outside.write_text("not to be changed")

    def change(copy: Path) -> str:
        path = copy / run.rng.choice(("samples.txt", "metrics.jsonl", "config.yaml"))
        path.unlink(missing_ok=True)
        path.symlink_to(outside)
        return path.name

    what = run.trial(change, REFUSED, "is a symbolic link")
    if outside.read_text() != "not to be changed":
        run.notes.append(f"the target of the link {what} was changed")
    return what


def damage_every_checkpoint(run: Victim) -> str:
    """Damage all checkpoints, so that there is none to resume from."""

    def change(copy: Path) -> str:
        for path in copy.glob(f"checkpoints/*/{NEEDED[0]}"):
            os.truncate(path, 5)
        return f"checkpoints {checkpoints(copy)}"

    return run.trial(change, REFUSED, "no usable checkpoint")


def replace_the_metadata(run: Victim) -> str:
    """Replace a JSON file of the newest checkpoint by a list."""

    def change(copy: Path) -> str:
        folder = copy / "checkpoints" / str(checkpoints(copy)[-1])
        files = [
            *folder.rglob("*METADATA"),
            *folder.rglob("_sharding"),
            folder / NEEDED[0],
        ]
        path = run.rng.choice(sorted(files))
        path.write_text("[1]")
        return str(path.relative_to(copy))

    return run.trial(change, TERMINATED, "")


def truncate_a_shard(run: Victim) -> str:
    """Truncate a shard of the data while the run is down."""
    return shard_trial(run, lambda data: data[:-1])


def edit_a_shard(run: Victim) -> str:
    """Change a byte of a shard of the data while the run is down."""
    return shard_trial(run, lambda data: data[:-1] + bytes([data[-1] ^ 1]))


def shard_trial(run: Victim, edit: Callable[[bytes], bytes]) -> str:
    """Check that a copy of the data with an edited shard is refused."""

    def change(copy: Path) -> str:
        data = run.folder / TRIAL_DATA
        shutil.rmtree(data, ignore_errors=True)
        shutil.copytree(run.folder / "runs" / "data", data)
        shard = run.rng.choice(sorted(data.rglob("*.bin")))
        shard.write_bytes(edit(shard.read_bytes()))
        return shard.name

    return run.trial(change, REFUSED, "shard ", f"data.cache_dir={TRIAL_DATA}")


def remove_the_directory(run: Victim) -> str:
    """Remove the run directory under the run."""
    with run.copied() as copy:
        process = run.launch(copy.name, ["tracker=jsonl"])
        log = run.folder / "trial.log"
        wait_for_work(process, log)
        copy.rename(copy.with_name("removed"))
        shutil.rmtree(copy.with_name("removed"))
        run.check(process, log, [REFUSED], "error: ")
    return "removed"


FAULTS = (
    kill,
    kill_while_starting,
    kill_while_saving,
    terminate,
    terminate_twice,
    terminate_in_a_validation,
    terminate_without_mercy,
    interrupt,
    interrupt_twice,
    interrupt_while_starting,
    fill_the_disk,
    starve,
    freeze,
    turn_the_clock,
    start_twice,
    flip_a_bit,
    truncate,
    replace_the_metadata,
    damage_every_checkpoint,
    tear_the_log,
    remove_the_log,
    empty_the_log,
    edit_the_log,
    empty_the_configuration,
    edit_the_configuration,
    truncate_a_shard,
    edit_a_shard,
    plant_a_link,
    remove_the_directory,
    tear_the_cache,
    kill_the_tracker,
    hang_the_tracker,
)
OF_WANDB = (kill_the_tracker, hang_the_tracker)


def choose_faults(
    names: str, without: Collection[Callable[[Victim], str]] = ()
) -> list[Callable[[Victim], str]]:
    """Return the faults of these names; all but `without` where no name is given."""
    by_name = {fault.__name__: fault for fault in FAULTS if fault not in without}
    for name in names.split(",") if names else ():
        if name not in by_name:
            raise UserError(
                f"kinds={name}: no such fault; {nearest(name, list(by_name))}"
            )
    return [by_name[name] for name in names.split(",") if names] or [*by_name.values()]
