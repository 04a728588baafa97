"""What runs and how long it still takes, instead of dots; at the end where the
processor's time went.

Each test's seconds are kept in pytest's cache, and expected of it the next time; of one
that has not run yet what tests of its kind usually take. They are of the processor,
with those of the programs that a test starts: how many others use the machine changes
them little.
"""

import collections
import os
import sys
import time
from typing import Any

import pytest

KEPT = "scalify/seconds"
SLOWEST = 10
EVERY = 15.0  # seconds between two lines where they go to a file


def processor_seconds() -> float:
    """Of this process and of its children that have ended."""
    return sum(os.times()[:4])


def usual(nodeid: str) -> float:
    """Seconds that a test of this kind takes."""
    return {"unit": 0.1, "integration": 1.0, "e2e": 10.0}.get(
        nodeid.split("/")[1] if "/" in nodeid else "", 1.0
    )


class Seconds:
    """In the process that runs tests: each test's processor time, with what its
    fixtures took; and the order of files.
    """

    def __init__(self) -> None:
        self._since = processor_seconds()

    @pytest.hookimpl(trylast=True)  # after tests are deselected
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """A worker takes the dearest files first: the last ones, which may leave the
        other worker idle, are short."""
        cache = getattr(config, "cache", None)
        if not hasattr(config, "workerinput") or cache is None:
            return
        expected, seconds = cache.get(KEPT, {}), collections.Counter()
        for item in items:
            seconds[item.path] += expected.get(item.nodeid, usual(item.nodeid))
        items.sort(key=lambda item: -seconds[item.path])  # stable: files stay whole

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Any:
        report = yield
        now = processor_seconds()
        report.user_properties = [("processor_seconds", now - self._since)]
        self._since = now
        return report


class Progress:
    """In the first process: the line, and the summary."""

    def __init__(self, config: pytest.Config) -> None:
        # absent with `-p no:cacheprovider`
        self._cache = getattr(config, "cache", None)
        self._expected: dict[str, float] = (
            self._cache.get(KEPT, {}) if self._cache else {}
        )
        self._took: dict[str, float] = {}
        self._running: dict[str, float] = {}  # and when it began
        self._left: set[str] = set()
        self._done = 0
        self._began = self._written = time.monotonic()
        self._terminal = sys.stdout.isatty()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._left = {item.nodeid for item in session.items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._left = set(ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = time.monotonic()
        self._write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = dict(report.user_properties).get("processor_seconds", 0.0)
        self._took[report.nodeid] = self._took.get(report.nodeid, 0.0) + seconds
        if report.when == "teardown":
            self._running.pop(report.nodeid, None)
            self._left.discard(report.nodeid)
            self._done += 1

    def left(self) -> float:
        """Seconds until the end, at the speed of this run."""
        speed = sum(self._took.values()) / (time.monotonic() - self._began)
        return sum(
            self._expected.get(nodeid, usual(nodeid)) for nodeid in self._left
        ) / max(speed, 1e-3)

    def line(self) -> str:
        """How many have ended, the time left, and what runs."""
        left, known = self.left(), self._done > 20
        names = ", ".join(nodeid.removeprefix("tests/") for nodeid in self._running)
        when = f"{left // 60:.0f}:{left % 60:02.0f} left" if known else "-:-- left"
        return f"{self._done:,} of {self._done + len(self._left):,}, {when}: {names}"

    def _write(self) -> None:
        now = time.monotonic()
        if now - self._written < (0.1 if self._terminal else EVERY):
            return
        self._written = now
        if self._terminal:
            width = os.get_terminal_size(sys.stdout.fileno()).columns - 1
            sys.stdout.write(f"\r\x1b[K{self.line()[:width]}")
        else:
            sys.stdout.write(self.line() + "\n")
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
        if self._cache:
            self._cache.set(KEPT, self._expected | self._took)
        total = sum(self._took.values())
        terminalreporter.section(
            f"{SLOWEST} slowest of {total:.0f} s of processor time"
        )
        for nodeid in sorted(self._took, key=self._took.__getitem__, reverse=True)[
            :SLOWEST
        ]:
            terminalreporter.write_line(f"{self._took[nodeid]:6.1f} s  {nodeid}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """A worker of xdist measures; the first process, which may do both, shows."""
    config.pluginmanager.register(Seconds(), "scalify-seconds")
    if not hasattr(config, "workerinput") and config.pluginmanager.has_plugin(
        "terminalreporter"
    ):
        config.pluginmanager.register(Progress(config), "scalify-progress")
