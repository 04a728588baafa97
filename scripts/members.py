"""The state of a run's machines, in a directory that all of them share.

The file NAME is written every second by that member, with the round that its process
runs and an identifier. N.json has the members of round N, written once, by the first of
those present. N-NAME.ended has an exit code. Ages of files are compared with that of
the own file, so that clocks may differ.
"""

import contextlib
import functools
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, cast

from trainer.errors import UserError

BEATS = 4  # that are waited for before a name is thought to be free


class Round(NamedTuple):
    """One start of all processes.

    Attributes:
      number: from 1.
      members: their names, sorted; the first one's machine has the coordinator.
      address: host and port of the coordinator.
      settings: the trainer's arguments, which must be the same on all.
    """

    number: int
    members: tuple[str, ...]
    address: str
    settings: str = ""


def patient[**P, T](method: Callable[P, T]) -> Callable[P, T]:
    """Let a method of Members retry while the disk fails, until the others would count
    this member as gone. Raises UserError after that.
    """

    @functools.wraps(method)
    def tried(*args: P.args, **kwargs: P.kwargs) -> T:
        members = cast(Members, args[0])
        end = time.monotonic() + members.gone
        while True:
            try:
                return method(*args, **kwargs)
            except OSError as error:
                if time.monotonic() >= end:
                    raise UserError(
                        f"{members.folder} could not be used for {members.gone:g} s"
                        f" ({error.strerror}): the disk that the machines share is"
                        " gone; start again when it is there"
                    ) from error
            time.sleep(members.gone / 20)

    return tried


class Members:
    """The members as one of them sees them.

    Attributes:
      running: the round whose process runs here; 0: none does.
      previous: the newest round when the name was taken; in it and earlier ones an
          earlier process had the name.
      other: the identifier of a process that has taken the name since, or None.
    """

    def __init__(self, folder: Path, name: str, gone: float) -> None:
        self.folder, self.name, self.gone = folder, name, gone
        self.running = 0
        self.previous: Round | None = None
        self.other: str | None = None
        self._self = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex}"
        folder.mkdir(parents=True, exist_ok=True)

    def take(self, seconds: float) -> None:
        """Take the name, also one whose file nobody has written for `seconds`.

        Raises UserError where another process has it.
        """
        file, self.previous = self.folder / self.name, self.newest()
        while not self._put(os.link):  # one alone can, of several that try
            with contextlib.suppress(FileNotFoundError):  # it has just left
                written, end = file.stat().st_mtime_ns, time.monotonic() + seconds
                while time.monotonic() < end:
                    time.sleep(seconds / 20)
                    if file.stat().st_mtime_ns != written:
                        raise UserError(
                            name_is_taken(self.name, self._owner() or "another machine")
                        )
                file.unlink()

    def beat(self) -> None:
        """Write this member's file, unless another has its name or the disk fails."""
        with contextlib.suppress(OSError):
            owner = self._owner()
            if owner in (None, self._self):
                self._put(os.replace)
            else:
                self.other = owner

    def _owner(self) -> str | None:
        """Return the identifier of the process that has this name, or None."""
        try:
            return (self.folder / self.name).read_text().split()[1]
        except (FileNotFoundError, IndexError):
            return None

    def _put(self, move: Callable[[Path, Path], None]) -> bool:
        """Write the file of this name, all or nothing; return whether that worked."""
        draft = self.folder / f"{self.name}.{self._self}.{threading.get_ident()}.beat"
        draft.write_text(f"{self.running} {self._self}")
        try:
            move(draft, self.folder / self.name)
        except FileExistsError:
            return False
        finally:
            draft.unlink(missing_ok=True)
        return True

    def run(self, number: int) -> None:
        """Publish that a process of a round runs here, or with 0 that it has ended."""
        self.running = number
        self.beat()

    @patient
    def are_free(self, number: int) -> bool:
        """Return whether no present member runs a process of another round."""
        return all(
            int((self.folder / name).read_text().split()[0]) in (0, number)
            for name in self.present()
        )

    @patient
    def is_running(self, number: int) -> bool:
        """Return whether a present member runs a process of this round."""
        return any(
            int((self.folder / name).read_text().split()[0]) == number
            for name in self.present()
        )

    def leave(self) -> None:
        """Remove this member's file."""
        with contextlib.suppress(OSError):  # it is not heard of, then
            if self.other is None:
                (self.folder / self.name).unlink(missing_ok=True)

    @patient
    def present(self) -> list[str]:
        """Return the names of the present members, sorted."""
        times = {}
        for path in self.folder.iterdir():
            if not path.suffix:
                with contextlib.suppress(FileNotFoundError):  # it has just left
                    times[path.name] = path.stat().st_mtime
        newest = times.get(self.name, 0.0)
        return sorted(
            name for name, then in times.items() if newest - then <= self.gone
        )

    @patient
    def newest(self) -> Round | None:
        """Return the newest round, or None."""
        numbers = [int(path.stem) for path in self.folder.glob("*.json")]
        if not numbers:
            return None
        fields = json.loads((self.folder / f"{max(numbers)}.json").read_text())
        return Round(
            max(numbers),
            tuple(fields["members"]),
            fields["address"],
            fields.get("settings", ""),
        )

    @patient
    def propose(self, proposed: Round) -> None:
        """Start a round, unless another member was faster."""
        draft = self.folder / f"{self.name}.draft"
        draft.write_text(
            json.dumps({k: v for k, v in proposed._asdict().items() if k != "number"})
        )
        with contextlib.suppress(FileExistsError):
            # whole, or not at all
            os.link(draft, self.folder / f"{proposed.number}.json")
        draft.unlink()  # else the next draft would be written into this round

    @patient
    def end(self, number: int, code: int) -> None:
        """Write the exit code of this member's process of a round."""
        (self.folder / f"{number}-{self.name}.ended").write_text(str(code))

    @patient
    def ended(self, this: Round) -> dict[str, int]:
        """Return the exit codes of a round's processes by member."""
        codes = {}
        for name in this.members:
            # not yet, or not wholly written
            with contextlib.suppress(FileNotFoundError, ValueError):
                codes[name] = int(
                    (self.folder / f"{this.number}-{name}.ended").read_text()
                )
        return codes

    @patient
    def first_ended(self, this: Round) -> str | None:
        """Return the member whose process of a round ended first, by the disk's clock,
        or None.
        """
        times = {}
        for name in this.members:
            with contextlib.suppress(FileNotFoundError):
                times[name] = (
                    (self.folder / f"{this.number}-{name}.ended").stat().st_mtime_ns
                )
        return min(times, key=lambda name: (times[name], name), default=None)


@contextlib.contextmanager
def beating(members: Members, every: float) -> Iterator[None]:
    """Write this member's file every `every` seconds while the context is open.

    Raises UserError where another machine has its name.
    """
    members.take(BEATS * every)
    over = threading.Event()

    def beat() -> None:
        while not over.wait(every):
            members.beat()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        members.leave()


def name_is_taken(name: str, owner: str) -> str:
    """Return the message about two members with one name."""
    host, number = (*owner.split(":"), "")[:2]
    return (
        f"member={name} is the name of another machine, too, which is there: {host}"
        + f", process {number}" * bool(number)
        + "; give each a name of its own"
    )
