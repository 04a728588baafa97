"""Comparison of cases in processes of their own: `python -m scripts.bench cases=...`.

The first case of a model and batch stays. Every other one is interleaved with it, a few
steps each, and ends before the next starts, so at most two hold a state. Figures are
written after each case, so a case that fails or dies costs no other figures. The next
call with the same `out` continues.
"""

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from scripts.bench.cases import TORCH, VOCAB, Case
from scripts.bench.interleave import Failed, Worker, interleave, torch_worker
from scripts.bench.interleave import figures as speed
from scripts.bench.kernel_times import lines_of
from trainer.errors import UserError
from trainer.files import write_atomically
from trainer.models.flops import flops_per_token
from trainer.observe.peaks import peak_flops
from trainer.observe.throughput import mfu

# The first call of a CUDA program runs kernel by kernel, and the second makes a graph.
WARM_UP = 5
# seconds after the time limit in which a running case may end
GRACE = 90.0


@dataclass(frozen=True)
class Settings:
    """The timing of cases; figures of different settings do not compare.

    Attributes:
      rounds: turns of each case.
      steps: steps in a turn.
      context: tokens of a sequence; None: the model's.
      platform: the platform that JAX must have: gpu, or cpu to rehearse.
    """

    rounds: int
    steps: int
    context: int | None
    platform: str


@dataclass
class Results:
    """Figures by case name, in a file that is written whenever they change.

    Attributes:
      path: of the file, or None.
      settings: of the timing.
      machine: the device and the versions of its software.
      rows: the figures.
      failed: the reason, for each case without figures.
    """

    path: Path | None
    settings: Settings
    machine: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, out: str, settings: Settings) -> "Results":
        """Read the results of an earlier call, whose failures are tried again.

        Raises:
          UserError: results with other settings.
        """
        if not out or not Path(out).exists():
            return cls(Path(out) if out else None, settings)
        saved = json.loads(Path(out).read_text())
        if saved.get("settings") != asdict(settings):
            raise UserError(
                f"out={out} holds figures of other settings, {saved.get('settings')};"
                " choose another out"
            )
        return cls(
            Path(out),
            settings,
            saved["machine"],
            {row["name"]: row for row in saved["rows"]},
        )

    def add(self, row: dict[str, Any]) -> None:
        """Add a row; UserError where it is of another device than the others."""
        machine = {
            key: row.pop(key)
            for key in ("device", "jax", "platform_version", "torch")
            if key in row
        }
        device = self.machine.setdefault("device", machine["device"])
        if device != machine["device"]:
            raise UserError(
                f"{self.path} holds figures of {device}, this is {machine['device']};"
                " choose another out"
            )
        self.machine |= machine
        self.rows[row["name"]] = row
        self.failed.pop(row["name"], None)

    def save(self) -> None:
        """Write the file atomically."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        tree = asdict(self) | {"rows": list(self.rows.values())}
        del tree["path"]
        write_atomically(self.path, json.dumps(tree, indent=1) + "\n")


class RunningCase:
    """A case at work in its process."""

    def __init__(
        self, case: Case, worker: Worker, figures: dict[str, Any], until: float
    ) -> None:
        self.case, self.worker, self.figures, self._until = case, worker, figures, until

    def ask(self, **message: Any) -> dict[str, Any]:
        """Return the worker's answer, or raise Failed."""
        return self.worker.ask(message, max(1.0, self._until - time.monotonic()))

    def take(self, steps: int) -> float:
        """Take steps, and return their seconds."""
        return float(self.ask(take=steps)["seconds"])


class Comparison:
    """A comparison of all cases of a call.

    Args:
      settings: of the timing.
      results: of this and earlier calls.
      minutes: after them no further case starts.
      python: an interpreter with torch; None: torch's cases are left out.
      cache: the directory of compiled programs; None: no cache.
    """

    def __init__(
        self,
        settings: Settings,
        results: Results,
        *,
        minutes: float,
        python: str | None,
        cache: str | None,
    ) -> None:
        self.settings, self.results = settings, results
        self._python, self._cache = python, cache
        self._end = time.monotonic() + 60 * minutes
        self._minutes = minutes

    def run(self, cases: Sequence[Case]) -> None:
        """Time cases without figures against the first of their model and batch."""
        groups: dict[tuple[str, int], list[Case]] = {}
        for case in cases:
            groups.setdefault((case.model, case.batch), []).append(case)
        for group in groups.values():
            todo = [case for case in group if case.name not in self.results.rows]
            for case in group:
                if case not in todo:
                    say(f"{case.name}: measured before")
            if todo:
                self.group([group[0], *(case for case in todo if case != group[0])])

    def group(self, cases: Sequence[Case]) -> None:
        """Interleave each case with the first one that starts."""
        with contextlib.ExitStack() as staying:
            anchor: RunningCase | None = None
            for case in cases:
                if self.is_left_out(case):
                    continue
                try:
                    if anchor is not None:
                        self.against(case, anchor)
                        continue
                    anchor = staying.enter_context(self.started(case))
                    if case.name not in self.results.rows:
                        self.alone(anchor)
                except Failed as error:
                    no_room = (
                        error.out_of_memory
                        and anchor is not None
                        and anchor.case != case
                    )
                    if (
                        no_room
                        or anchor is None
                        or anchor.case == case
                        or not anchor.worker.is_alive
                    ):
                        staying.close()
                        anchor = None  # the next case takes its place
                    if no_room:
                        say(
                            f"{case.name}: no room beside {cases[0].name}, so by itself"
                        )
                        self.by_itself(case)
                    else:
                        self.fails(case, error)

    def against(self, case: Case, anchor: RunningCase) -> None:
        """Time a case interleaved with another, and end it. Raises Failed."""
        with self.started(case) as running:
            takes = {anchor.case.name: anchor.take, case.name: running.take}
            seconds = interleave(takes, self.settings.rounds, self.settings.steps)
            self.record(running, seconds[case.name], faster_than(case.name, seconds))
        self.results.rows[anchor.case.name]["over"] |= faster_than(
            anchor.case.name, seconds
        )
        self.results.save()

    def by_itself(self, case: Case) -> None:
        """Time a case that has the machine to itself, and end it."""
        try:
            with self.started(case) as running:
                self.alone(running)
        except Failed as error:
            self.fails(case, error)

    def alone(self, running: RunningCase) -> None:
        """Time a case without interleaving. Raises Failed."""
        name = running.case.name
        seconds = interleave(
            {name: running.take}, self.settings.rounds, self.settings.steps
        )
        self.record(running, seconds[name], {})

    def record(
        self, running: RunningCase, seconds: list[float], over: dict[str, float]
    ) -> None:
        """Save and print a case's figures."""
        figures = running.figures | running.ask(memory=True)
        row = row_of(running.case, seconds, figures, self.settings.context)
        row["over"] = over
        self.results.add(row)
        self.results.save()
        say(line_of(row))

    def fails(self, case: Case, error: Failed) -> None:
        """Save and print why a case has no figures."""
        self.results.failed[case.name] = str(error)
        self.results.save()
        say(f"{case.name}: FAILED, {error}")

    def is_left_out(self, case: Case) -> bool:
        """Return whether a case has no time or no torch, and print the reason."""
        why = None
        if time.monotonic() > self._end:
            why = f"{self._minutes:g} minutes are over; re-run to continue here"
        elif case.precision == TORCH and self._python is None:
            why = "no torch here (torch_python=PATH names an interpreter that has it)"
        if why is not None:
            say(f"{case.name}: left out, {why}")
        return why is not None

    @contextlib.contextmanager
    def started(self, case: Case, warm_up: int = WARM_UP) -> Iterator[RunningCase]:
        """Yield the compiled case with a state; its process ends with the context.

        Raises:
          Failed: it could not be prepared.
        """
        until, context = self._end + GRACE, self.settings.context
        # Two cases share a GPU, so each only takes what it needs.
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if self.settings.platform == "cpu":
            environment["JAX_PLATFORMS"] = "cpu"
        if case.precision == TORCH:
            assert self._python is not None
            worker, settings = (
                torch_worker(self._python),
                sizes_of(case, context, self.settings.platform),
            )
        else:
            worker = Worker(
                [sys.executable, "-m", "scripts.bench.jax_worker"], environment
            )
            platform, cache = self.settings.platform, self._cache
            settings = {
                "case": list(case),
                "context": context,
                "platform": platform,
                "cache": cache,
            }
        with worker:
            figures = worker.ask(
                {"prepare": settings}, max(1.0, until - time.monotonic())
            )
            from_cache = ", from the cache" * bool(figures.get("from_cache"))
            say(f"{case.name}: compiled in {figures['compile_s']:.0f} s{from_cache}")
            running = RunningCase(case, worker, figures, until)
            if warm_up:
                running.take(warm_up)
            yield running

    def compile_only(self, cases: Sequence[Case]) -> None:
        """Compile the trainer's cases one by one, to fill the cache."""
        for case in cases:
            if case.precision != TORCH and not self.is_left_out(case):
                try:
                    with self.started(case, warm_up=0) as running:
                        say(f"{case.name}: {running.figures['peak_gib']:.2f} GiB")
                except Failed as error:
                    self.fails(case, error)

    def profile(self, cases: Sequence[Case]) -> None:
        """Print and save where the time of the trainer's steps goes, case by case."""
        rows = self.results.rows
        for case in cases:
            if case.name in rows:
                say(f"{case.name}: already profiled")
            elif case.precision == TORCH:
                say(f"{case.name}: left out, only the trainer's steps are profiled")
            elif not self.is_left_out(case):
                try:
                    with self.started(case) as running:
                        table = running.ask(profile=self.settings.steps)
                except Failed as error:
                    self.fails(case, error)
                    continue
                say("\n".join(lines_of(case.name, table)))
                rows[case.name] = {"name": case.name, **table}
                self.results.save()


def sizes_of(case: Case, context: int | None, platform: str) -> dict[str, Any]:
    """Return the settings of `torch_peer.py` for a case."""
    spec = case.spec(context)
    sizes = {name: getattr(spec, name) for name in ("n_layer", "n_head", "d_model")}
    return sizes | {
        "context": spec.context,
        "vocab": VOCAB,
        "batch": case.batch,
        "threads": 2,
        "platform": platform,
    }


def row_of(
    case: Case, seconds: Sequence[float], figures: dict[str, Any], context: int | None
) -> dict[str, Any]:
    """Return the figures of a case: median and extremes of the speed, MFU if known."""
    spec = case.spec(context)
    row: dict[str, Any] = {
        "name": case.name,
        **case._asdict(),
        **speed(list(seconds), case.batch * spec.context),
    }
    row |= {**figures, "seconds": list(seconds)}
    # All cases are measured by the 16-bit rate, so that they compare.
    peak = peak_flops(figures["device"], jnp.bfloat16)
    row["mfu"] = None
    if peak is not None:
        row["mfu"] = mfu(row["tokens_per_s"], flops_per_token(spec), peak, 1)
    return row


def faster_than(name: str, seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return the median over rounds of a case's speed relative to each other one."""
    ratios = {}
    for other, other_seconds in seconds.items():
        if other != name:
            pairs = zip(other_seconds, seconds[name], strict=True)
            ratios[other] = statistics.median(theirs / ours for theirs, ours in pairs)
    return ratios


def line_of(row: dict[str, Any]) -> str:
    """Return a row as text."""
    parts = [
        (
            f"{row['tokens_per_s']:,.0f} tokens/s ({row['tokens_per_s_min']:,.0f} to"
            f" {row['tokens_per_s_max']:,.0f})"
        ),
        f"{row['step_ms']:,.1f} ms",
        f"MFU {row['mfu']:.1%}" if row["mfu"] is not None else "",
        f"{row['peak_gib']:.2f} GiB" if "peak_gib" in row else "",
        (
            f"{row['allocator_peak_gib']:.2f} GiB allocated"
            if "allocator_peak_gib" in row
            else ""
        ),
        f"FP8 {row['fp8_share']:.0%} of FLOPs" if row.get("fp8_share") else "",
    ]
    against = "".join(
        f"\n  {ratio:.2f} x {name}" for name, ratio in row["over"].items()
    )
    return f"{row['name']}: {', '.join(part for part in parts if part)}{against}"


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)
