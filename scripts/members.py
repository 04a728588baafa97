"""What the machines of a run with local steps know of each other, through a directory
that all share.

It holds a file NAME, which its member writes every second, with the round whose process
it runs and who it is; N.json, who is in round N, written once, by the first of those
that are there; and N-NAME.ended, an exit code. Ages of files are compared with that of
the own one, so that clocks may differ.
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
      address: of the coordinator.
      settings: what the one that began it trains; all must train the same.
    """

    number: int
    members: tuple[str, ...]
    address: str
    settings: str = ""


def patient[**P, T](method: Callable[P, T]) -> Callable[P, T]:
    """A method of Members that tries again while the disk fails, for as long as others
    wait for this one.

    Raises UserError after that.
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
    """What one member knows of the others.

    Attributes:
      running: the round whose process runs here; 0: none does.
      before: the newest round when the name was not yet taken: in this one and earlier
          ones an earlier process had it.
      other: who has taken this one's name since, in words; None: nobody.
    """

    def __init__(self, folder: Path, name: str, gone: float) -> None:
        self.folder, self.name, self.gone = folder, name, gone
        self.running = 0
        self.before: Round | None = None
        self.other: str | None = None
        self._self = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex}"
        folder.mkdir(parents=True, exist_ok=True)

    def take(self, seconds: float) -> None:
        """Take the name. One that nobody writes for so many seconds was left by who is
        gone, and is taken over.

        Raises UserError where another has it.
        """
        file, self.before = self.folder / self.name, self.newest()
        while not self._put(os.link):  # one alone can, of several that try
            with contextlib.suppress(FileNotFoundError):  # it has just left
                before, end = file.stat().st_mtime_ns, time.monotonic() + seconds
                while time.monotonic() < end:
                    time.sleep(seconds / 20)
                    if file.stat().st_mtime_ns != before:
                        raise UserError(
                            name_is_taken(self.name, self._owner() or "another machine")
                        )
                file.unlink()

    def beat(self) -> None:
        """Say that this one is there, and what it runs; unless another has its name
        now, or the disk fails.
        """
        with contextlib.suppress(OSError):
            owner = self._owner()
            if owner in (None, self._self):
                self._put(os.replace)
            else:
                self.other = owner

    def _owner(self) -> str | None:
        """Who writes under this name; None: nobody."""
        try:
            return (self.folder / self.name).read_text().split()[1]
        except (FileNotFoundError, IndexError):
            return None

    def _put(self, move: Callable[[Path, Path], None]) -> bool:
        """Write the file of this name, whole or not at all; whether it could be put
        there.
        """
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
        """Say so at once when a process begins, or, with 0, is gone."""
        self.running = number
        self.beat()

    @patient
    def are_free(self, number: int) -> bool:
        """Return whether none of those that are there runs a process of a round before
        this one.
        """
        return all(
            int((self.folder / name).read_text().split()[0]) in (0, number)
            for name in self.present()
        )

    @patient
    def is_running(self, number: int) -> bool:
        """Return whether one of those that are there runs a process of this round."""
        return any(
            int((self.folder / name).read_text().split()[0]) == number
            for name in self.present()
        )

    def leave(self) -> None:
        """Say that this one is gone."""
        with contextlib.suppress(OSError):  # it is not heard of, then
            if self.other is None:
                (self.folder / self.name).unlink(missing_ok=True)

    @patient
    def present(self) -> list[str]:
        """The names of those that are there, sorted."""
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
        """The newest round."""
        numbers = [int(path.stem) for path in self.folder.glob("*.json")]
        if not numbers:
            return None
        found = json.loads((self.folder / f"{max(numbers)}.json").read_text())
        return Round(
            max(numbers),
            tuple(found["members"]),
            found["address"],
            found.get("settings", ""),
        )

    @patient
    def propose(self, proposed: Round) -> None:
        """Begin a round, unless another member was faster."""
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
        """Say how this member's process of a round has ended."""
        (self.folder / f"{number}-{self.name}.ended").write_text(str(code))

    @patient
    def ended(self, of: Round) -> dict[str, int]:
        """How the processes of a round have ended, by member."""
        found = {}
        for name in of.members:
            # not yet, or not wholly written
            with contextlib.suppress(FileNotFoundError, ValueError):
                found[name] = int(
                    (self.folder / f"{of.number}-{name}.ended").read_text()
                )
        return found

    @patient
    def first_ended(self, of: Round) -> str | None:
        """Whose process of a round ended first, by the clock of the disk; None: none
        has.
        """
        times = {}
        for name in of.members:
            with contextlib.suppress(FileNotFoundError):
                times[name] = (
                    (self.folder / f"{of.number}-{name}.ended").stat().st_mtime_ns
                )
        return min(times, key=lambda name: (times[name], name), default=None)


@contextlib.contextmanager
def beating(members: Members, every: float) -> Iterator[None]:
    """Inside, a member says that it is there, whatever else its process waits for.

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
    """What to say of two members with one name."""
    host, number = (*owner.split(":"), "")[:2]
    return (
        f"member={name} is the name of another machine, too, which is there: {host}"
        + f", process {number}" * bool(number)
        + "; give each a name of its own"
    )
