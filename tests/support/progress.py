"""Which tests run, instead of dots; at the end where the processor's time went.

Seconds are of the processor, with those of the programs that a test starts: how many
others use the machine changes them little.
"""

import os
import sys
import time
from typing import Any

import pytest

SLOWEST = 10
INTERVAL = 15.0  # seconds between two lines where they go to a file


def processor_seconds() -> float:
    """Return the seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


class Seconds:
    """In the process that runs tests: each test's processor time, with what its
    fixtures took."""

    def __init__(self) -> None:
        self._since = processor_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Any:
        report = yield
        now = processor_seconds()
        report.user_properties = [("processor_seconds", now - self._since)]
        self._since = now
        return report


class Progress:
    """In the first process: the line, and the summary."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._running: dict[str, None] = {}
        self._done, self._total = 0, 0
        self._written = time.monotonic()
        self._terminal = sys.stdout.isatty()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._total = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._total = len(ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = None
        self._write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = dict(report.user_properties).get("processor_seconds", 0.0)
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + seconds
        if report.when == "teardown":
            self._running.pop(report.nodeid, None)
            self._done += 1

    def _write(self) -> None:
        now = time.monotonic()
        if now - self._written < (0.1 if self._terminal else INTERVAL):
            return
        self._written = now
        names = ", ".join(nodeid.removeprefix("tests/") for nodeid in self._running)
        line = f"{self._done:,} of {self._total:,}: {names}"
        if self._terminal:
            width = os.get_terminal_size(sys.stdout.fileno()).columns - 1
            sys.stdout.write(f"\r\x1b[K{line[:width]}")
        else:
            sys.stdout.write(line + "\n")
        sys.stdout.flush()

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        """No dot for what passes; a failure begins a line of its own."""
        if report.passed:
            return ("passed" if report.when == "call" else ""), "", ""
        return None

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        total = sum(self._seconds.values())
        terminalreporter.section(
            f"{SLOWEST} slowest of {total:.0f} s of processor time"
        )
        slowest = sorted(self._seconds, key=self._seconds.__getitem__, reverse=True)
        for nodeid in slowest[:SLOWEST]:
            terminalreporter.write_line(f"{self._seconds[nodeid]:6.1f} s  {nodeid}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """A worker of xdist measures; the first process, which may do both, shows."""
    config.pluginmanager.register(Seconds(), "scalify-seconds")
    if not hasattr(config, "workerinput") and config.pluginmanager.has_plugin(
        "terminalreporter"
    ):
        config.pluginmanager.register(Progress(), "scalify-progress")
