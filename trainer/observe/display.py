"""The display of a run: a live line in a terminal, plain lines elsewhere."""

import logging
import math
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

from trainer.errors import DISK_FULL, complain, discard, printable

SPARKS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 60
PLAIN_SECONDS = 5.0  # from line to line where there is no terminal
SPEEDS = ("perf/step_ms", "perf/tokens_per_s", "perf/mfu")
SPEED_STEPS = 64  # steps over which the mean speed is taken


class Output(Console):
    """Standard output that survives a broken pipe (`| head`) and a full disk.

    Text is printed without markup and with control characters spelled out, because it
    may contain names that a stranger chose.
    """

    def __init__(self, **settings: Any) -> None:
        """See `rich.console.Console`."""
        # `[red]` in a name from data is text, and its numbers are not to be colored.
        super().__init__(markup=False, highlight=False, **settings)

    def print(self, *objects: Any, **settings: Any) -> None:
        """Print as Rich does; on a full disk, discard this and all further output."""
        shown = [printable(x) if isinstance(x, str) else x for x in objects]
        try:
            super().print(*shown, **settings)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            # Python flushes standard output once more at exit, which would fail on the
            # same disk and change the exit code.
            self.on_broken_pipe()
            complain(
                f"cannot write to standard output: {error.strerror}; the run continues"
                " without it"
            )

    def on_broken_pipe(self) -> None:
        """Discard all further output; Rich's method would end the run as failed."""
        self.quiet = True
        discard(self.file)


class Display:
    """The display of a run's rows, as a context manager.

    Text that is printed or logged inside appears above the live line.

    Args:
      steps: number of steps of the whole run.
      console: where to print; None: standard output.
      clock: returns seconds; for tests.
    """

    def __init__(
        self,
        steps: int,
        *,
        console: Output | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.steps = steps
        self.step = 0
        # Without a terminal Rich folds lines at 80 columns, which cuts figures apart
        # for `grep`.
        self.console = console or Output(soft_wrap=True)
        self._clock = clock
        self._row: dict[str, Any] = {}
        # Bounded, because the sparkline is drawn again four times a second.
        self._losses: deque[float] = deque(maxlen=4096)
        self._speeds: deque[dict[str, float]] = deque(maxlen=SPEED_STEPS)
        # By callback: its interval in steps, and the seconds of its last call. The
        # first call, which compiles, leaves None.
        self._pauses: dict[str, tuple[int, float | None]] = {}
        self._printed = -math.inf
        self._live: Live | None = None
        # A dumb terminal cannot move the cursor, so a live line would be printed again
        # and again.
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self.render, console=self.console, refresh_per_second=4
            )
        self._handler = _DisplayHandler(self.message)

    def __enter__(self) -> Self:
        logger = logging.getLogger("trainer")
        self._saved_logger = logger.propagate, logger.level
        # Else handlers of the root logger, which a program may have set, print each
        # line again over the live one.
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
            self._live.stop()  # else it would draw over a traceback
        logger = logging.getLogger("trainer")
        logger.removeHandler(self._handler)
        logger.propagate, level = self._saved_logger
        # Loggers cache which levels are enabled, and only `setLevel` clears the cache.
        logger.setLevel(level)

    def update(self, step: int, row: Mapping[str, Any]) -> None:
        """Show the row of a step.

        Without a terminal, only the first row, the last, those with a validation, and
        one every PLAIN_SECONDS are printed.
        """
        self.step = step
        # Merged: a validation's loss stays on the line until the next one.
        self._row |= row
        self._losses.append(row["train/loss"])
        # The first row of a process has no speed: its time is that of the compilation.
        if "perf/step_ms" in row:
            self._speeds.append({key: row[key] for key in SPEEDS if key in row})
        now = self._clock()
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
        """Print a permanent line about a step."""
        self.message(f"step {step}: {text}")

    def message(self, text: str) -> None:
        """Print a line without a step."""
        self.console.print(text)

    def record_pause(self, name: str, every: int, seconds: float) -> None:
        """Note how long a callback held up the steps.

        Args:
          name: the callback's name.
          every: steps from one call to the next; 0: it is called at the end only.
          seconds: duration of this call.
        """
        self._pauses[name] = (every, seconds if name in self._pauses else None)

    def eta(self) -> str:
        """Return the time left, h:mm:ss, or dashes before the first speed.

        It adds the remaining steps at the mean speed, and the remaining callbacks at
        the duration of their last call.
        """
        if not self._speeds:
            return "-:--:--"
        step_ms = mean_speed(self._speeds)["perf/step_ms"]
        seconds = (self.steps - self.step) * step_ms / 1e3
        for every, duration in self._pauses.values():
            # Without an interval a callback is called once, at the end; it has no
            # duration before that.
            if every and duration is not None:
                # The difference of two quotients is the number of calls that are left,
                # also after a resume inside an interval.
                seconds += (self.steps // every - self.step // every) * duration
        return str(timedelta(seconds=round(seconds)))

    def render(self) -> Group:
        """Return the live part: progress bar, figures, and a sparkline of losses."""
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            f"step {self.step}/{self.steps}",
            ProgressBar(total=self.steps, completed=self.step, width=30),
            f"{self.step / self.steps:.0%}",
            f"eta {self.eta()}",
        )
        # Two lines, so that both fit into 80 columns.
        lines = [
            Text("  ".join(part), overflow="ellipsis", no_wrap=True)
            for part in (self._quality(), self._speed())
        ]
        return Group(bar, *lines, Text(sparkline(list(self._losses)), style="cyan"))

    def _quality(self) -> list[str]:
        row = self._row
        figures = [
            ("loss", row.get("train/loss"), "{:.4f}"),
            ("val", row.get("val/loss"), "{:.4f}"),
            ("lr", row.get("lr"), "{:.2e}"),
            ("norm", row.get("grad_norm"), "{:.3g}"),
            # Zero skipped steps are not worth the columns.
            ("skipped", row.get("watchdog/skipped") or None, "{}"),
        ]
        return [
            f"{name} {form.format(value)}"
            for name, value, form in figures
            if value is not None
        ]

    def _speed(self) -> list[str]:
        figures = []
        if self._speeds:
            mean = mean_speed(self._speeds)
            mfu = f"{mean['perf/mfu']:.1%}" if "perf/mfu" in mean else "n/a"
            figures += [
                f"ms/step {mean['perf/step_ms']:.1f}",
                f"{short(mean['perf/tokens_per_s'])} tokens/s",
                f"mfu {mfu}",
            ]
        if len(self._speeds) > 1:
            figures.append(f"(mean of {len(self._speeds)} steps)")
        # CPUs report no device memory.
        host_peak = self._row.get("memory/host_peak_gib")
        peak = self._row.get("memory/device_peak_gib", host_peak)
        if peak is not None:
            figures.append(f"GiB {peak:.2f}")
        return figures


def mean_speed(speeds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean milliseconds of steps, and their mean rates.

    Rates are weighted by the time of each step: tokens/s are all tokens over all time.
    """
    times = [speed["perf/step_ms"] for speed in speeds]
    rates = {
        key: math.sumprod(times, [speed[key] for speed in speeds]) / math.fsum(times)
        for key in SPEEDS
        if all(key in speed for speed in speeds)
    }
    return rates | {"perf/step_ms": math.fsum(times) / len(times)}


class _DisplayHandler(logging.Handler):
    """A logging handler that shows records as lines of the display."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show(self.format(record))


def short(number: float) -> str:
    """Return a number with three digits and a unit: 999, 1.23k, 45.6M."""
    units = ["", "k", "M", "G", "T"]
    # Not 1000: 999.7 would be rounded to three digits as 1e+03.
    while abs(number) >= 999.5 and len(units) > 1:
        number /= 1000
        del units[0]
    return f"{number:.3g}{units[0]}"


def sparkline(values: Sequence[float]) -> str:
    """Draw at most SPARKLINE_WIDTH characters, from low ▁ to high █.

    Each character is the mean of an equal part; x marks a part without a finite value.
    """
    width = min(SPARKLINE_WIDTH, len(values))
    means: list[float | None] = []
    for i in range(width):
        part = values[len(values) * i // width : len(values) * (i + 1) // width]
        finite = [value for value in part if math.isfinite(value)]
        means.append(math.fsum(finite) / len(finite) if finite else None)
    finite_means = [mean for mean in means if mean is not None]
    low = min(finite_means, default=0.0)
    span = max(finite_means, default=0.0) - low
    line = ""
    for mean in means:
        if mean is None:
            line += "x"
        # Equal values would divide zero by zero.
        elif span == 0:
            line += SPARKS[0]
        else:
            line += SPARKS[round((mean - low) / span * (len(SPARKS) - 1))]
    return line
