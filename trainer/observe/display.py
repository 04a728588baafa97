"""What a person sees: a live line in a terminal, plain lines elsewhere. Nothing here
decides anything.
"""

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

SPARKS = "▁▂▃▄▅▆▇█"
PLAIN_SECONDS = 5.0  # between plain lines
SPEEDS = ("perf/step_ms", "perf/tokens_per_s", "perf/mfu")
RECENT = 64  # steps that the shown speed is the mean of


class Output(Console):
    """Standard output, by default; without anybody who reads it (`| head`), a run goes
    on quietly.
    """

    def on_broken_pipe(self) -> None:
        """Nothing more is shown; what is left to write goes nowhere. Rich itself would
        exit, with a crash's code.
        """
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)


class Display:
    """Shows the rows of a run. A context manager: what is printed or logged inside goes
    above the live line.

    Args:
      steps: where the run ends.
      console: by default standard output.
      clock: seconds; for tests.
    """

    def __init__(
        self,
        steps: int,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.steps = steps
        self.step = 0
        self.console = console or Output(soft_wrap=True)
        self._clock = clock
        self._row: dict[str, Any] = {}
        self._losses: deque[float] = deque(maxlen=4096)
        self._times: deque[tuple[float, int]] = deque(maxlen=RECENT)
        self._speeds: deque[dict[str, float]] = deque(maxlen=RECENT)
        self._printed = -math.inf
        self._live: Live | None = None
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self.render, console=self.console, refresh_per_second=4
            )
        self._handler = _Lines(self.message)

    def __enter__(self) -> Self:
        logger = logging.getLogger("trainer")
        self._before = logger.propagate, logger.level
        logger.propagate = False
        logger.setLevel(logging.INFO)
        logger.addHandler(self._handler)
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()  # before anybody prints a traceback
        logger = logging.getLogger("trainer")
        logger.removeHandler(self._handler)
        logger.propagate = self._before[0]
        # not the attribute: loggers remember what they let through
        logger.setLevel(self._before[1])

    def update(self, step: int, row: Mapping[str, Any]) -> None:
        """Show a step's row; in plain lines the first, the last, those with a
        validation, and one every few seconds.
        """
        self.step = step
        self._row |= row
        self._losses.append(row["train/loss"])
        if "perf/step_ms" in row:
            self._speeds.append({key: row[key] for key in SPEEDS if key in row})
        now = self._clock()
        self._times.append((now, step))
        due = (
            step == self.steps
            or "val/loss" in row
            or now - self._printed >= PLAIN_SECONDS
        )
        if self._live is None and due:
            self._printed = now
            self.message(
                f"step {step}/{self.steps} "
                f" {'  '.join(self._quality() + self._speed())}  eta {self.eta()}"
            )

    def event(self, step: int, text: str) -> None:
        """A line of its own that stays."""
        self.message(f"step {step}: {text}")

    def message(self, text: str) -> None:
        """A line without a step."""
        self.console.print(text, markup=False, highlight=False)

    def eta(self) -> str:
        """Time left at the mean speed of the last steps, h:mm:ss; unknown until two
        have been shown.
        """
        if len(self._times) < 2:
            return "-:--:--"
        (then, first), (now, last) = self._times[0], self._times[-1]
        return str(
            timedelta(
                seconds=round((self.steps - last) * (now - then) / (last - first))
            )
        )

    def render(self) -> Group:
        """The live part: progress, figures, and the losses so far."""
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            f"step {self.step}/{self.steps}",
            ProgressBar(total=self.steps, completed=self.step, width=30),
            f"{self.step / self.steps:.0%}",
            f"eta {self.eta()}",
        )
        # Two lines, which both fit into 80 columns.
        lines = [
            Text("  ".join(part), overflow="ellipsis", no_wrap=True)
            for part in (self._quality(), self._speed())
        ]
        return Group(bar, *lines, Text(sparkline(list(self._losses), 60), style="cyan"))

    def _quality(self) -> list[str]:
        row = self._row
        figures = [
            ("loss", row.get("train/loss"), "{:.4f}"),
            ("val", row.get("val/loss"), "{:.4f}"),
            ("lr", row.get("lr"), "{:.2e}"),
            ("norm", row.get("grad_norm"), "{:.3g}"),
            ("skipped", row.get("watchdog/skipped") or None, "{}"),
        ]
        return [
            f"{name} {form.format(value)}"
            for name, value, form in figures
            if value is not None
        ]

    def _speed(self) -> list[str]:
        row, figures = self._row, []
        if self._speeds:
            mean = mean_speed(self._speeds)
            share = f"{mean['perf/mfu']:.1%}" if "perf/mfu" in mean else "n/a"
            step = f"ms/step {mean['perf/step_ms']:.1f}"
            figures += [
                step,
                f"{short(mean['perf/tokens_per_s'])} tokens/s",
                f"mfu {share}",
            ]
            figures += (
                [f"(mean of {len(self._speeds)} steps)"]
                if len(self._speeds) > 1
                else []
            )
        peak = row.get("memory/device_peak_gib", row.get("memory/host_peak_gib"))
        return figures if peak is None else [*figures, f"GiB {peak:.2f}"]


def mean_speed(speeds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean milliseconds of steps; and their mean rates, each step counting as long
    as it took.
    """
    times = [speed["perf/step_ms"] for speed in speeds]
    rates = {
        key: math.sumprod(times, [speed[key] for speed in speeds]) / math.fsum(times)
        for key in SPEEDS
        if all(key in speed for speed in speeds)
    }
    return rates | {"perf/step_ms": math.fsum(times) / len(times)}


class _Lines(logging.Handler):
    """Log records as lines of the display."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show(self.format(record))


def short(number: float) -> str:
    """Three digits and a unit: 999, 1.23k, 45.6M."""
    units = ["", "k", "M", "G", "T"]
    while abs(number) >= 999.5 and len(units) > 1:
        number /= 1000
        del units[0]
    return f"{number:.3g}{units[0]}"


def sparkline(values: Sequence[float], width: int) -> str:
    """Means of `width` (or fewer) equal parts of `values`, from low ▁ to high █; x: a
    part that is not finite.
    """
    width = min(width, len(values))
    parts = [
        values[len(values) * i // width : len(values) * (i + 1) // width]
        for i in range(width)
    ]
    finite = [[v for v in part if math.isfinite(v)] for part in parts]
    means = [math.fsum(part) / len(part) if part else None for part in finite]
    known = [mean for mean in means if mean is not None]
    low, span = (
        min(known, default=0.0),
        max(known, default=0.0) - min(known, default=0.0),
    )
    return "".join(
        (
            "x"
            if mean is None
            else SPARKS[round((mean - low) / span * (len(SPARKS) - 1)) if span else 0]
        )
        for mean in means
    )
