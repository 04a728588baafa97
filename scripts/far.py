"""Keep a DiLoCo run going while machines come and go.

Start this on each machine, under a name of its own:

    python -m scripts.far member=a host=10.0.0.1 members=4 \\
        trainer="run_dir=/shared/far parallel=diloco diloco.replicas=4 \\
        diloco.quorum=3"

A process of the trainer runs on every machine. When one is lost, the others are stopped
and go on from the newest checkpoint with the replicas that are left, if those are at
least `diloco.quorum`; when it is back, all stop after a checkpoint and go on with it,
its replicas from the outer weights. Each such start is a round.

Rounds that fail one after the other without a new checkpoint wait longer and longer
before the next, and are given up after `failures` of them; a machine whose process is
the first to fail in half as many leaves, and the others go on.

What members know of each other is in RUN_DIR/members, on the disk that they share
(scripts/members.py).

Exit codes are the trainer's; 4 where a round ended as no machine could help.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from scripts.members import Members, Round, beating, name_is_taken
from trainer.cli.arguments import argument, read, usage
from trainer.config.composition import compose_config
from trainer.errors import UserError, run_and_flush
from trainer.text import merge_overrides

# exit codes: done, bad configuration or data, diverged; starting again would not help
FINAL = (0, 2, 3)
# those that all processes end with by themselves; 143: stopped by SIGTERM
TOGETHER = (*FINAL, 143)
HUNG = 4


@dataclass(frozen=True)
class Arguments:
    """Settings of a machine; see `--help`."""

    member: str = argument("the name of this machine, unlike all others'")
    members: int = argument("how many machines there are when all are there")
    trainer: str = argument(
        "arguments of the trainer, the same on all machines, separated by spaces"
    )
    host: str = argument("where the others reach this machine", "127.0.0.1")
    port: int = argument("the first of 64 ports, of which each round takes one", 8476)
    beat_seconds: float = argument("how often a machine says that it is there", 1)
    gone_seconds: float = argument("after so long without a word it is gone", 20)
    settle_seconds: float = argument(
        "how long those that are there wait for the others before they start", 60
    )
    rounds: int = argument("after so many starts this gives up", 100)
    failures: int = argument(
        "after so many failed starts in a row without a new checkpoint this gives up",
        10,
    )
    pause_seconds: float = argument(
        "the longest pause before a start after failed ones", 60
    )


class Supervisor:
    """A supervisor that starts one member's trainer process in round after round.

    Args:
      members: the shared directory, in which this member's name is taken.
      count: number of members when all are present.
      quorum: number of members without which nothing starts.
      start: starts the process of a round.
      saved: returns the newest checkpoint's step.
      times: the settings.
      say: logs a line.
      settings: the trainer's arguments, the same on all machines.
    """

    def __init__(
        self,
        members: Members,
        count: int,
        quorum: int,
        start: Callable[[Round], "subprocess.Popen[bytes]"],
        saved: Callable[[], int],
        times: Arguments,
        say: Callable[[str], None],
        settings: str = "",
    ) -> None:
        self.members, self.count, self.quorum, self.start = (
            members,
            count,
            quorum,
            start,
        )
        self.settings = settings
        self.saved, self.times, self.say = saved, times, say
        self.signal = 0
        self.failures = self.first_failures = 0  # starts in a row
        self.paused_until = 0.0
        # Of rounds that began before this supervisor nothing runs here any more
        # (`end_orphan`); the others wait for it.
        previous = members.previous
        self.previous = previous.number if previous else 0
        if (
            previous
            and members.name in previous.members
            and members.name not in members.ended(previous)
        ):
            members.end(previous.number, HUNG)

    def run(self) -> int:
        """Run rounds until one ends for good; return the exit code.

        Raises UserError where another machine has the name.
        """
        last, ran, code = self.previous, None, HUNG
        for _ in range(self.times.rounds):
            this = self.gathered(last, ran)
            if this is None:
                return 128 + self.signal
            self.check_settings(this)
            self.say(self.description(this))
            self.members.run(this.number)
            saved = self.saved()
            process = self.start(this)
            last = ran = this.number
            try:
                code, is_for_others = self.watched(process, this)
            finally:
                # of one that has ended nothing is left; nobody would watch another
                process.kill()
                process.wait()
            self.members.end(this.number, code)
            self.members.run(0)
            if code in FINAL or self.signal:
                return code
            self.say(
                f"round {this.number} ended here with exit code {code}; going on from"
                " the newest checkpoint"
            )
            if self.saved() != saved:
                self.failures = self.first_failures = 0
            elif (
                code not in TOGETHER and not is_for_others and self.gives_up(this, code)
            ):
                return HUNG
        self.say(
            f"giving up after {self.times.rounds} starts, the last of which ended here"
            f" with exit code {code}"
        )
        return HUNG

    def gives_up(self, this: Round, code: int) -> bool:
        """Count a failed start without a new checkpoint, and set a pause.

        Returns whether it was one too many. Where one machine's process is always the
        first to fail, the others may do better without it.
        """
        most = self.times.failures
        self.failures += 1
        is_first = self.members.first_ended(this) == self.members.name
        self.first_failures = self.first_failures + 1 if is_first else 0
        many = f"{self.failures} starts in a row failed without a new checkpoint"
        if self.failures >= most:
            self.say(
                f"giving up: {many}; the last ended here with exit code {code}, and"
                " what it said is above"
            )
            return True
        if self.first_failures >= -(-most // 2) and len(this.members) > self.quorum:
            self.say(
                f"leaving: {many}, and the process here was the first to fail; the"
                " others go on without it"
            )
            return True
        if self.failures > 1:
            pause = min(2.0**self.failures, self.times.pause_seconds)
            self.paused_until = time.monotonic() + pause
            self.say(
                f"{many}: waiting {pause:g} s before the next; {most - self.failures}"
                " more, and this gives up"
            )
        return False

    def description(self, this: Round) -> str:
        """Describe a round in a line."""
        without = self.count - len(this.members)
        left = f", without {without} that are gone" if without else ""
        return (
            f"round {this.number}: {len(this.members)} of {self.count} machines"
            f" ({', '.join(this.members)}){left}"
        )

    def gathered(self, last: int, ran: int | None) -> Round | None:
        """Wait for the next round with this member after round `last`.

        Args:
          last: number of the last round that has ended.
          ran: the round whose process has ended here; another member's process of it
            may still be running.

        Returns:
          The round, once no process of an earlier one runs; None after a signal.

        Raises:
          UserError: another machine has the name.
        """
        begun, told = time.monotonic(), False
        while not self.signal:
            self.check_name()
            newest, there = self.members.newest(), self.members.present()
            if newest and self.members.is_running(newest.number):
                self.check_settings(newest)
            if (
                not told
                and len(there) < self.quorum
                and time.monotonic() - begun >= self.times.settle_seconds
            ):
                self.say(
                    f"waiting: {len(there)} of {self.count} machines are there, at"
                    f" least {self.quorum} are needed"
                )
                told = True
            if newest and newest.number > last and self.members.name in newest.members:
                if self.members.are_free(newest.number):
                    return newest
            elif (
                time.monotonic() >= self.paused_until
                and (
                    len(there) >= self.count
                    or time.monotonic() - begun >= self.times.settle_seconds
                )
                and not (ran is not None and self.members.is_running(ran))
            ):
                taking_part = self.lead(there, newest)
                if not told and self.members.name not in taking_part:
                    self.say(
                        f"waiting: {', '.join(taking_part)} are there, which are all"
                        f" {self.count}; one must leave"
                    )
                    told = True
            time.sleep(self.times.beat_seconds)
        return None

    def lead(self, there: Sequence[str], newest: Round | None) -> list[str]:
        """Propose a round if this member is the first of those present and they are
        enough.

        Returns its members. Where more than `count` are present, those of the newest
        round come first.
        """
        preferred = newest.members if newest else ()
        taking_part = sorted(
            sorted(there, key=lambda name: (name not in preferred, name))[: self.count]
        )
        if (
            taking_part
            and taking_part[0] == self.members.name
            and len(taking_part) >= self.quorum
        ):
            number = newest.number + 1 if newest else 1
            address = f"{self.times.host}:{self.times.port + number % 64}"
            self.members.propose(
                Round(number, tuple(taking_part), address, self.settings)
            )
        return taking_part

    def check_settings(self, this: Round) -> None:
        """Raise UserError where a round trains with other settings."""
        if this.settings != self.settings:
            raise UserError(
                f"trainer= of {self.members.name} says {self.settings!r}, but round"
                f" {this.number} ({', '.join(this.members)}) was begun with"
                f" {this.settings!r}; give all machines the same"
            )

    def check_name(self) -> None:
        """Raise UserError where another machine has the name of this member."""
        if self.members.other is not None:
            raise UserError(name_is_taken(self.members.name, self.members.other))

    def watched(
        self, process: "subprocess.Popen[bytes]", this: Round
    ) -> tuple[int, bool]:
        """Wait for a process; return its exit code, and whether others ended it.

        It is killed when another process is gone, and asked to stop when a machine is
        back.
        """
        told = False
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(self.times.beat_seconds), told
            there, newest = self.members.present(), self.members.newest()
            ended = self.members.ended(this)
            gone = [
                name
                for name in this.members
                if name not in there and ended.get(name) not in TOGETHER
            ]
            failed = [name for name, how in ended.items() if how not in TOGETHER]
            self.check_name()
            if gone or failed:
                what = (
                    f"{', '.join(gone)} not heard of"
                    if gone
                    else f"the process of {', '.join(failed)} is gone"
                )
                self.say(f"{what}: ending this one")
                # it waits for them; a checkpoint that exists is complete
                process.kill()
                return process.wait(), bool(gone)
            elif self.signal or (newest and newest.number > this.number):
                if not told:
                    process.terminate()  # all stop together, after a checkpoint
                told = True
            elif len(this.members) < self.count and set(there) > set(this.members):
                self.lead(there, newest)


class FarPlan(NamedTuple):
    """The parsed arguments of a machine.

    Attributes:
      words: arguments of the trainer.
      run_dir: directory of the run.
      each: replicas of a machine.
      fewest: machines that have at least a quorum of replicas.
    """

    words: list[str]
    run_dir: Path
    each: int
    fewest: int


def planned(args: Arguments) -> FarPlan:
    """Return the plan.

    Raises UserError at once for a configuration that fewer machines could not continue.
    """
    if not args.member or "." in args.member or "/" in args.member:
        raise UserError(
            f"member={args.member}: expected a name without dots and slashes"
        )
    names = (
        "members",
        "beat_seconds",
        "gone_seconds",
        "settle_seconds",
        "rounds",
        "failures",
        "pause_seconds",
    )
    wrong = [
        f"{name}={getattr(args, name):g}"
        for name in names
        if not getattr(args, name) > 0
    ]
    if wrong:
        raise UserError(f"{', '.join(wrong)}: expected numbers above zero")
    words = shlex.split(args.trainer)
    config = compose_config(words)
    if not any(word.startswith(("run_dir=", "resume=")) for word in words):
        raise UserError(
            "trainer= names no run_dir, so every machine would make one of its own;"
            " give run_dir=DIR, on the disk that they share"
        )
    replicas, quorum = config.diloco.replicas, config.diloco.quorum
    if replicas is None or quorum is None or replicas % args.members:
        raise UserError(
            f"members={args.members} need parallel=diloco with diloco.replicas, a"
            f" multiple of {args.members}, and diloco.quorum; found"
            f" diloco.replicas={replicas}, diloco.quorum={quorum}"
        )
    each = replicas // args.members
    fewest = -(-quorum // each)
    for count in range(fewest, args.members):
        compose_config(merge_overrides(words, [f"diloco.replicas={count * each}"]))
    return FarPlan(words, Path(config.run_dir), each, fewest)


def end_orphan(
    pid: Path,
    words: Sequence[str],
    say: Callable[[str], None],
    processes: Path = Path("/proc"),
) -> None:
    """Kill the process that a killed supervisor of this machine left behind.

    Args:
      pid: the file with its number.
      words: arguments that it was started with, which tell it from another process of
          that number.
      say: logs a line where that cannot be found out.
      processes: the directory of processes, which only Linux has; elsewhere nothing is
          killed.
    """
    with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
        number = int(pid.read_text())
        if not processes.is_dir():
            os.kill(number, 0)  # raises where there is none
            say(
                f"process {number} has the number of the trainer that an earlier start"
                " left here; only on Linux it is found out whether it is that one, and"
                " ended: if it is, end it yourself"
            )
            return
        command = processes / str(number) / "cmdline"
        # a process that has ended has none
        while {"trainer", *words} <= set(command.read_text().split("\0")):
            os.kill(number, signal.SIGKILL)
            time.sleep(0.1)


def main(args: Arguments) -> int:
    """Supervise this machine's process; return the exit code. Raises UserError."""
    plan = planned(args)

    def say(text: str) -> None:
        print(text, flush=True)

    def saved() -> int:
        names = (path.name for path in (plan.run_dir / "checkpoints").glob("*"))
        return max((int(name) for name in names if name.isdigit()), default=0)

    pid = plan.run_dir / "members" / f"{args.member}.pid"

    def start(this: Round) -> "subprocess.Popen[bytes]":
        overrides = [
            f"diloco.replicas={len(this.members) * plan.each}",
            "parallel.distributed=true",
        ]
        variables = {
            "JAX_COORDINATOR_ADDRESS": this.address,
            "JAX_NUM_PROCESSES": str(len(this.members)),
            "JAX_PROCESS_ID": str(this.members.index(args.member)),
        }
        command = [
            sys.executable,
            "-m",
            "trainer",
            *merge_overrides(plan.words, overrides),
        ]
        process = subprocess.Popen(command, env=os.environ | variables)
        pid.write_text(str(process.pid))
        return process

    members = Members(plan.run_dir / "members", args.member, args.gone_seconds)
    with beating(members, args.beat_seconds):
        # those change by round
        end_orphan(
            pid, [word for word in plan.words if not word.startswith("parallel.")], say
        )
        # Where things are may differ from machine to machine, what is trained not.
        places = ("run_dir=", "resume=", "data.", "compile_cache=")
        settings = " ".join(
            sorted(word for word in plan.words if not word.startswith(places))
        )
        supervisor = Supervisor(
            members, args.members, plan.fewest, start, saved, args, say, settings
        )

        def note_signal(number: int, _: object) -> None:
            supervisor.signal = number

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, note_signal)
        return supervisor.run()


def run_command_line() -> int:
    """Read the command line and supervise."""
    argv = sys.argv[1:]
    if "--help" in argv or "-h" in argv:
        print(usage(Arguments, "python -m scripts.far", __doc__ or ""))
        return 0
    try:
        return main(read(Arguments, argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(run_and_flush(run_command_line))
