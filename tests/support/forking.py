"""Programs of this package in processes of their own that do not each import JAX and the trainer: they are forked.

A server imports once, before any backend of JAX starts, and then waits. Each `python -m MODULE` asked of it is a fork
with a directory, an environment, an output and an exit code of its own, as if it had been started. One whose
environment differs in more than what is read late is started.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Read when a backend or a cluster starts, or by pytest alone.
LATE = {"XLA_FLAGS", "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "PYTEST_CURRENT_TEST"}
IMPORTED = ("hydra", "trainer.config.composition", "trainer.assembly.run")  # not what runs as the program itself
NUMBER = struct.Struct("i")


class Forked:
    """A program at work in a fork: of `subprocess.Popen`, what the tests use. Both outputs come together."""

    def __init__(self, connection: socket.socket, output: int) -> None:
        self._connection, self._output = connection, output
        self.returncode: int | None = None
        (self.pid,) = NUMBER.unpack(connection.recv(NUMBER.size, socket.MSG_WAITALL))

    def poll(self) -> int | None:
        """The exit code, or None while the program is at work."""
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        """The exit code, once it has ended; negative: the signal that ended it."""
        if self.returncode is None:
            (self.returncode,) = NUMBER.unpack(self._connection.recv(NUMBER.size, socket.MSG_WAITALL))
            self._connection.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """All that it printed, once it ended. It raises `TimeoutExpired`, and leaves it at work, if that is late."""
        deadline, pieces = time.monotonic() + (timeout or float("inf")), [b""]
        while pieces[-1] or len(pieces) == 1:
            left = max(0.0, deadline - time.monotonic()) if timeout else None
            if not select.select([self._output], [], [], left)[0]:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0, b"".join(pieces))
            pieces.append(os.read(self._output, 2**16))
        os.close(self._output)
        self.wait()
        return b"".join(pieces).decode(), None

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Server:
    """The process that forks, started by the first program, and the environment in which it has imported."""

    def __init__(self) -> None:
        self._environment: dict[str, str] = {}
        self._folder = Path()
        self._asked = 0

    def run(self, module: str, args: list[str], cwd: Path, environment: dict[str, str]) -> Forked | None:
        """`python -m module args` in a fork; None where a fork would not be the same."""
        if not self._environment:
            self._start(environment)
        theirs = self._environment
        if {key for key in environment | theirs if environment.get(key) != theirs.get(key)} - LATE:
            return None
        self._asked += 1
        asked = self._folder / f"{self._asked}.json"
        asked.write_text(json.dumps({"module": module, "args": args, "cwd": str(cwd), "environment": environment}))
        reads, writes = os.pipe()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self._folder / "socket"))
        socket.send_fds(connection, [str(asked).encode()], [writes])
        os.close(writes)
        return Forked(connection, reads)

    def _start(self, environment: dict[str, str]) -> None:
        """It ends when its standard input does: with this process, whatever ends that."""
        folder = tempfile.TemporaryDirectory(prefix="scalify-forks-")
        self._folder, self._environment = Path(folder.name), environment
        command = [sys.executable, str(Path(__file__).resolve()), str(self._folder / "socket")]
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n", "the server of forks did not start"

        def stop() -> None:
            process.communicate()
            folder.cleanup()

        atexit.register(stop)


SERVER = Server()


def started(module: str, args: list[str], cwd: Path, environment: dict[str, str]) -> "Forked | subprocess.Popen[str]":
    """`python -m module args` at work: forked where that is the same."""
    return SERVER.run(module, args, cwd, environment) or fresh(module, args, cwd, environment)


def fresh(module: str, args: list[str], cwd: Path, environment: dict[str, str]) -> "subprocess.Popen[str]":
    """`python -m module args` at work, as users start it."""
    command = [sys.executable, "-m", module, *args]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=cwd, env=environment, text=True, **both)


def serve(address: str) -> None:
    """Import, then have a keeper, forked for each connection, fork the program. It returns in that and at the end."""
    for module in IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what was imported stays in pages that all share
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    os.write(1, b"ready\n")
    while sys.stdin.fileno() not in (ready := select.select([0, listener.fileno()], [], [], 5.0)[0]):
        while reaped_one():
            pass
        if not ready:
            continue
        connection, _ = listener.accept()
        text, (output,), *_ = socket.recv_fds(connection, 4096, 1)
        if os.fork() == 0:
            listener.close()
            if keep(connection, output):
                return program(**json.loads(Path(text.decode()).read_bytes()))
        connection.close()
        os.close(output)


def reaped_one() -> bool:
    """Whether a keeper had ended."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def keep(connection: socket.socket, output: int) -> bool:
    """Fork the program, where this is True, with its outputs; in the keeper tell its number and exit code, and end."""
    if (number := os.fork()) == 0:
        connection.close()
        for inner, outer in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
            os.dup2(inner, outer)
        os.close(output)
        return True
    os.close(output)
    os.close(1)
    connection.send(NUMBER.pack(number))
    connection.send(NUMBER.pack(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])))
    os._exit(0)


def program(module: str, args: list[str], cwd: str, environment: dict[str, str]) -> None:
    """What `python -m module args` does in this directory with this environment."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path[0] = [module, *args], cwd
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve(sys.argv[1])
