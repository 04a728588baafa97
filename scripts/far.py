"""Keep a run with local steps going while machines come and go. Start this on each of them, under a name of its own:

python -m scripts.far member=a host=10.0.0.1 members=4 \\
    trainer="run_dir=/shared/far parallel=local parallel.local=4 parallel.local_quorum=3"

A process of the trainer runs on every machine. When one is lost, the others are stopped and go on from the newest
checkpoint with the replicas that are left, if those are at least `parallel.local_quorum`; when it is back, all stop
after a checkpoint and go on with it, its replicas from the outer weights. Each such start is a round.

What members know of each other is in RUN_DIR/members, on the disk that they share: a file NAME, which its member
writes every second, with the round whose process it runs; N.json, who is in round N, written once, by the first of
those that are there; and N-NAME.ended, an exit code. Ages of files are compared with that of the own one, so that
clocks may differ.

Exit codes are the trainer's; 4 where a round ended as no machine could help.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from scripts.arguments import argument, read, usage
from trainer.config.composition import compose_or_explain
from trainer.errors import UserError, to_readers
from trainer.text import laid_over

FINAL = (0, 2, 3)  # exit codes: done, bad configuration or data, diverged; starting again would not help
TOGETHER = (*FINAL, 143)  # those that all processes end with by themselves; 143: stopped by SIGTERM
HUNG = 4


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    member: str = argument("the name of this machine, unlike all others'")
    members: int = argument("how many machines there are when all are there")
    trainer: str = argument("arguments of the trainer, the same on all machines, separated by spaces")
    host: str = argument("where the others reach this machine", "127.0.0.1")
    port: int = argument("the first of 64 ports, of which each round takes one", 8476)
    beat_seconds: float = argument("how often a machine says that it is there", 1)
    gone_seconds: float = argument("after so long without a word it is gone", 20)
    settle_seconds: float = argument("how long those that are there wait for the others before they start", 60)
    rounds: int = argument("after so many starts this gives up", 100)


class Round(NamedTuple):
    """One start of all processes.

    Attributes:
      number: from 1.
      members: their names, sorted; the first one's machine has the coordinator.
      address: of the coordinator.
    """

    number: int
    members: tuple[str, ...]
    address: str


class Members:
    """What one member knows of the others, through a directory that all share.

    Attributes:
      running: the round whose process runs here; 0: none does.
    """

    def __init__(self, folder: Path, name: str, gone: float) -> None:
        self.folder, self.name, self.gone = folder, name, gone
        self.running = 0
        folder.mkdir(parents=True, exist_ok=True)

    def beat(self) -> None:
        """Say that this one is there, and what it runs."""
        draft = self.folder / f"{self.name}.{threading.get_ident()}.beat"
        draft.write_text(str(self.running))
        draft.replace(self.folder / self.name)

    def run(self, number: int) -> None:
        """Say so at once when a process begins, or, with 0, is gone."""
        self.running = number
        self.beat()

    def are_free(self, number: int) -> bool:
        """Whether none of those that are there runs a process of a round before this one."""
        return all(int((self.folder / name).read_text()) in (0, number) for name in self.present())

    def leave(self) -> None:
        """Say that this one is gone."""
        (self.folder / self.name).unlink(missing_ok=True)

    def present(self) -> list[str]:
        """The names of those that are there, sorted."""
        times = {}
        for path in self.folder.iterdir():
            if not path.suffix:
                with contextlib.suppress(FileNotFoundError):  # it has just left
                    times[path.name] = path.stat().st_mtime
        newest = times.get(self.name, 0.0)
        return sorted(name for name, then in times.items() if newest - then <= self.gone)

    def newest(self) -> Round | None:
        """The newest round."""
        numbers = [int(path.stem) for path in self.folder.glob("*.json")]
        if not numbers:
            return None
        found = json.loads((self.folder / f"{max(numbers)}.json").read_text())
        return Round(max(numbers), tuple(found["members"]), found["address"])

    def propose(self, proposed: Round) -> None:
        """Begin a round, unless another member was faster."""
        draft = self.folder / f"{self.name}.draft"
        draft.write_text(json.dumps({"members": proposed.members, "address": proposed.address}))
        with contextlib.suppress(FileExistsError):
            os.link(draft, self.folder / f"{proposed.number}.json")  # whole, or not at all
        draft.unlink()  # else the next draft would be written into this round

    def end(self, number: int, code: int) -> None:
        """Say how this member's process of a round has ended."""
        (self.folder / f"{number}-{self.name}.ended").write_text(str(code))

    def ended(self, of: Round) -> dict[str, int]:
        """How the processes of a round have ended, by member."""
        found = {}
        for name in of.members:
            with contextlib.suppress(FileNotFoundError, ValueError):  # not yet, or not wholly written
                found[name] = int((self.folder / f"{of.number}-{name}.ended").read_text())
        return found


class Supervisor:
    """Starts the trainer's process of one member in round after round.

    Args:
      members: the directory.
      count: of members when all are there.
      quorum: members without which nothing starts.
      start: starts the process of a round.
      times: see `Arguments`.
      say: is told what happens.
    """

    def __init__(
        self,
        members: Members,
        count: int,
        quorum: int,
        start: Callable[[Round], "subprocess.Popen[bytes]"],
        times: Arguments,
        say: Callable[[str], None],
    ) -> None:
        self.members, self.count, self.quorum, self.start = members, count, quorum, start
        self.times, self.say = times, say
        self.signal = 0
        # Of rounds that began before this supervisor nothing runs here any more (`end_orphan`); the others wait for it.
        newest = members.newest()
        self.before = newest.number if newest else 0
        if newest and members.name in newest.members and members.name not in members.ended(newest):
            members.end(newest.number, HUNG)

    def run(self) -> int:
        """Round after round, until one ends for good; the exit code."""
        last, code = self.before, HUNG
        for _ in range(self.times.rounds):
            this = self.gathered(last)
            if this is None:
                return 128 + self.signal
            self.say(self.description(this))
            self.members.run(this.number)
            process, last = self.start(this), this.number
            code = self.watched(process, this)
            self.members.end(this.number, code)
            self.members.run(0)
            if code in FINAL or self.signal:
                return code
            self.say(f"round {this.number} ended here with exit code {code}; going on from the newest checkpoint")
        return HUNG

    def description(self, this: Round) -> str:
        """A line about a round."""
        without = self.count - len(this.members)
        left = f", without {without} that are gone" if without else ""
        return f"round {this.number}: {len(this.members)} of {self.count} machines ({', '.join(this.members)}){left}"

    def gathered(self, last: int) -> Round | None:
        """The next round with this member after round `last`, once no process of one before it is left.

        None: a signal came.
        """
        begun, told = time.monotonic(), False
        while not self.signal:
            found, there = self.members.newest(), self.members.present()
            if not told and len(there) < self.quorum and time.monotonic() - begun >= self.times.settle_seconds:
                self.say(f"waiting: {len(there)} of {self.count} machines are there, at least {self.quorum} are needed")
                told = True
            if found and found.number > last and self.members.name in found.members:
                with contextlib.suppress(FileNotFoundError):  # one has just left
                    if self.members.are_free(found.number):
                        return found
            elif len(there) == self.count or time.monotonic() - begun >= self.times.settle_seconds:
                self.lead(there, found)
            time.sleep(self.times.beat_seconds)
        return None

    def lead(self, there: Sequence[str], found: Round | None) -> None:
        """Propose a round of all that are there, where this is the first of them and they are enough."""
        if there and there[0] == self.members.name and len(there) >= self.quorum:
            number = found.number + 1 if found else 1
            address = f"{self.times.host}:{self.times.port + number % 64}"
            self.members.propose(Round(number, tuple(there), address))

    def watched(self, process: "subprocess.Popen[bytes]", this: Round) -> int:
        """The exit code of a process: ended when others of its round are gone, asked to stop when one is back."""
        told = False
        while (code := process.poll()) is None:
            time.sleep(self.times.beat_seconds)
            there, found = self.members.present(), self.members.newest()
            ended = self.members.ended(this)
            gone = [name for name in this.members if name not in there and ended.get(name) not in TOGETHER]
            failed = [name for name, how in ended.items() if how not in TOGETHER]
            if gone or failed:
                what = f"{', '.join(gone)} not heard of" if gone else f"the process of {', '.join(failed)} is gone"
                self.say(f"{what}: ending this one")
                process.kill()  # it waits for them; a checkpoint that exists is complete
                return process.wait()
            elif self.signal or (found and found.number > this.number):
                if not told:
                    process.terminate()  # all stop together, after a checkpoint
                told = True
            elif set(there) > set(this.members):
                self.lead(there, found)
        return code


@contextlib.contextmanager
def beating(members: Members, every: float) -> Iterator[None]:
    """Inside, a member says that it is there, whatever else its process waits for."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(every):
            members.beat()

    members.beat()
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        members.leave()


class Plan(NamedTuple):
    """What a machine's arguments come to.

    Attributes:
      words: arguments of the trainer.
      run_dir: of the run.
      each: replicas of a machine.
      fewest: machines that have at least a quorum of replicas.
    """

    words: list[str]
    run_dir: Path
    each: int
    fewest: int


def planned(args: Arguments) -> Plan:
    """The plan. Raises UserError for what could not go on with fewer machines: now, and not when one is lost."""
    if not args.member or "." in args.member or "/" in args.member:
        raise UserError(f"member={args.member}: expected a name without dots and slashes")
    if args.members < 1 or min(args.beat_seconds, args.gone_seconds, args.settle_seconds) <= 0 or args.rounds < 1:
        raise UserError(
            f"members={args.members}, beat_seconds={args.beat_seconds:g}, gone_seconds={args.gone_seconds:g}, "
            f"settle_seconds={args.settle_seconds:g}, rounds={args.rounds}: expected numbers above zero"
        )
    words = shlex.split(args.trainer)
    whole = compose_or_explain(words)
    replicas, quorum = whole.parallel.local, whole.parallel.local_quorum
    if replicas is None or quorum is None or replicas % args.members:
        raise UserError(
            f"members={args.members} need parallel=local with parallel.local, a multiple of {args.members}, and "
            f"parallel.local_quorum; found parallel.local={replicas}, parallel.local_quorum={quorum}"
        )
    each = replicas // args.members
    fewest = -(-quorum // each)
    for count in range(fewest, args.members):
        compose_or_explain(laid_over(words, [f"parallel.local={count * each}"]))
    return Plan(words, Path(whole.run_dir), each, fewest)


def end_orphan(pid: Path, words: Sequence[str]) -> None:
    """End the process that a supervisor of this machine left behind when it was killed itself, and wait until it has.

    Args:
      pid: the file with its number.
      words: arguments that it was started with, by which it is told from another process of that number.

    Where processes are not files below /proc (not on Linux) it ends nothing.
    """
    with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
        number = int(pid.read_text())
        command = Path(f"/proc/{number}/cmdline")
        while {"trainer", *words} <= set(command.read_text().split("\0")):  # a process that has ended has none
            os.kill(number, signal.SIGKILL)
            time.sleep(0.1)


def main(args: Arguments) -> int:
    """Supervise this machine's process; the exit code. Raises UserError."""
    plan = planned(args)

    pid = plan.run_dir / "members" / f"{args.member}.pid"

    def start(this: Round) -> "subprocess.Popen[bytes]":
        own = [f"parallel.local={len(this.members) * plan.each}", "parallel.distributed=true"]
        variables = {
            "JAX_COORDINATOR_ADDRESS": this.address,
            "JAX_NUM_PROCESSES": str(len(this.members)),
            "JAX_PROCESS_ID": str(this.members.index(args.member)),
        }
        command = [sys.executable, "-m", "trainer", *laid_over(plan.words, own)]
        process = subprocess.Popen(command, env=os.environ | variables)
        pid.write_text(str(process.pid))
        return process

    members = Members(plan.run_dir / "members", args.member, args.gone_seconds)
    end_orphan(pid, [word for word in plan.words if not word.startswith("parallel.")])  # those change by round
    supervisor = Supervisor(members, args.members, plan.fewest, start, args, lambda text: print(text, flush=True))

    def note_signal(number: int, _: object) -> None:
        supervisor.signal = number

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note_signal)
    with beating(members, args.beat_seconds):
        return supervisor.run()


def of_arguments() -> int:
    """Read the command line and supervise."""
    argv = sys.argv[1:]
    if "--help" in argv or "-h" in argv:
        print(usage(Arguments, "far", __doc__ or ""))
        return 0
    try:
        return main(read(Arguments, argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(to_readers(of_arguments))
