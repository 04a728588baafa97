"""Cases against each other, each in a process of its own: what
`python -m scripts.bench cases=...` runs.

The first case of a model and batch stays; every other one takes turns with it, a few
steps each, and is gone before the next begins: no more than two hold a state. One that
fails, or dies, costs nobody else's figures, which are written after each case; the next
call with the same `out` goes on behind them.
"""

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scripts.bench.cases import TORCH, VOCAB, Case, parse_case, read_group
from scripts.bench.racing import Failed, Worker, race, torch_worker
from scripts.bench.racing import figures as speed
from trainer.errors import UserError

# Of a CUDA program the first call runs kernel by kernel, and the second makes a graph
# of them.
WARM_UP = 5
# seconds behind the time after which no case is begun, in which one may end
GRACE = 90.0


@dataclass(frozen=True)
class Settings:
    """How cases are timed; figures of other settings do not compare.

    Attributes:
      rounds, steps: turns of each case, and steps in a turn.
      context: tokens of a sequence; None: the model's.
      platform: that JAX must have: gpu, or cpu to rehearse.
    """

    rounds: int
    steps: int
    context: int | None
    platform: str


@dataclass
class Results:
    """Figures by the names of the cases, in a file that is written whenever they
    change.

    Attributes:
      path: None: there is none.
      failed: why, of the cases that have no figures.
    """

    path: Path | None
    settings: Settings
    machine: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, out: str, settings: Settings) -> "Results":
        """What an earlier call has written; its failures are tried again. UserError for
        figures of other settings.
        """
        if not out or not Path(out).exists():
            return cls(Path(out) if out else None, settings)
        before = json.loads(Path(out).read_text())
        if before.get("settings") != asdict(settings):
            raise UserError(
                f"out={out} holds figures of other settings, {before.get('settings')};"
                " choose another out"
            )
        return cls(
            Path(out),
            settings,
            before["machine"],
            {row["name"]: row for row in before["rows"]},
        )

    def add(self, row: dict[str, Any]) -> None:
        """A row, of this machine. UserError for one of another than the rows before."""
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
        """Write the file, in one go, and the picture beside it."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = list(self.rows.values())
        tree = {
            "settings": asdict(self.settings),
            "machine": self.machine,
            "rows": rows,
            "failed": self.failed,
        }
        new = self.path.with_name(f"{self.path.name}.new")
        new.write_text(json.dumps(tree, indent=1) + "\n")
        os.replace(new, self.path)
        if rows:
            draw(rows, self.path.with_suffix(".png"))


class Contestant:
    """A case at work in its process."""

    def __init__(
        self, case: Case, worker: Worker, figures: dict[str, Any], until: float
    ) -> None:
        self.case, self.worker, self.figures, self._until = case, worker, figures, until

    def ask(self, **message: Any) -> dict[str, Any]:
        """Its answer. Raises Failed."""
        return self.worker.ask(message, max(1.0, self._until - time.monotonic()))

    def take(self, steps: int) -> float:
        """Seconds that so many steps take."""
        return float(self.ask(take=steps)["seconds"])


class Contest:
    """All cases of a call.

    Args:
      settings: how they are timed.
      results: of this and earlier calls.
      minutes: after which no other case is begun.
      python: an interpreter with torch; None: there is none, and its cases are left
          out.
      cache: the directory of compiled programs; None: compile anew.
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
        self.settings, self.results, self._python, self._cache = (
            settings,
            results,
            python,
            cache,
        )
        self._end = time.monotonic() + 60 * minutes
        self._minutes = minutes

    def run(self, cases: Sequence[Case]) -> None:
        """Time those that have no figures yet, the cases of one model and batch against
        the first of them.
        """
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
        """The first case that starts stays, and takes turns with each of the others."""
        with contextlib.ExitStack() as staying:
            anchor: Contestant | None = None
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

    def against(self, case: Case, anchor: Contestant) -> None:
        """Time a case in turns with another, and free it. Raises Failed."""
        with self.started(case) as contestant:
            takes = {anchor.case.name: anchor.take, case.name: contestant.take}
            seconds = race(takes, self.settings.rounds, self.settings.steps)
            self.keep(contestant, seconds[case.name], faster_than(case.name, seconds))
        self.results.rows[anchor.case.name]["over"] |= faster_than(
            anchor.case.name, seconds
        )
        self.results.save()

    def by_itself(self, case: Case) -> None:
        """Time a case that has the machine for itself, and free it."""
        try:
            with self.started(case) as contestant:
                self.alone(contestant)
        except Failed as error:
            self.fails(case, error)

    def alone(self, contestant: Contestant) -> None:
        """Time a case that nothing takes turns with. Raises Failed."""
        case = contestant.case
        seconds = race(
            {case.name: contestant.take}, self.settings.rounds, self.settings.steps
        )
        self.keep(contestant, seconds[case.name], {})

    def keep(
        self, contestant: Contestant, seconds: list[float], over: dict[str, float]
    ) -> None:
        """Write a case's figures down."""
        memory = contestant.ask(memory=True)
        row = row_of(
            contestant.case, seconds, contestant.figures | memory, self.settings.context
        ) | {"over": over}
        self.results.add(row)
        self.results.save()
        say(line_of(row))

    def fails(self, case: Case, error: Failed) -> None:
        """Write down that and why a case has no figures."""
        self.results.failed[case.name] = str(error)
        self.results.save()
        say(f"{case.name}: FAILED, {error}")

    def is_left_out(self, case: Case) -> bool:
        """Return whether there is no time, or no torch, for a case; said where it is
        so.
        """
        why = None
        if time.monotonic() > self._end:
            why = f"{self._minutes:g} minutes are over; the same command goes on here"
        elif case.precision == TORCH and self._python is None:
            why = "no torch here (torch_python=PATH names an interpreter that has it)"
        if why is not None:
            say(f"{case.name}: left out, {why}")
        return why is not None

    @contextlib.contextmanager
    def started(self, case: Case, warm_up: int = WARM_UP) -> Iterator[Contestant]:
        """The case compiled, with a state, in a process of its own, which ends with the
        context. Raises Failed.
        """
        until, context = self._end + GRACE, self.settings.context
        # Two share a GPU: each takes what it needs. The rehearsal's numbers are those
        # of one CPU.
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
            worker = Worker([sys.executable, "-m", "scripts.bench.ours"], environment)
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
            contestant = Contestant(case, worker, figures, until)
            if warm_up:
                contestant.take(warm_up)
            yield contestant

    def compile_only(self, cases: Sequence[Case]) -> None:
        """Compile what is ours, one case after the other, so that the cache has it."""
        for case in cases:
            if case.precision != TORCH and not self.is_left_out(case):
                try:
                    with self.started(case, warm_up=0) as contestant:
                        say(f"{case.name}: {contestant.figures['peak_gib']:.2f} GiB")
                except Failed as error:
                    self.fails(case, error)


def run_cases(
    texts: str,
    settings: Settings,
    *,
    minutes: float,
    python: str | None,
    out: str,
    cache: str | None,
    compile_only: bool = False,
) -> Results:
    """Time, or only compile, the cases of a list separated by commas; for the rest see
    `Contest` and `Results`.
    """
    cases = [parse_case(text) for text in texts.split(",")]
    results = Results.open("" if compile_only else out, settings)
    contest = Contest(settings, results, minutes=minutes, python=python, cache=cache)
    (contest.compile_only if compile_only else contest.run)(cases)
    return results


def sizes_of(case: Case, context: int | None, platform: str) -> dict[str, Any]:
    """What `scripts/bench/torch_peer.py` is asked to prepare."""
    tree = read_group("model", case.model)
    sizes = {name: tree[name] for name in ("n_layer", "n_head", "d_model")}
    context = context or tree["context"]
    return sizes | {
        "context": context,
        "vocab": VOCAB,
        "batch": case.batch,
        "threads": 2,
        "platform": platform,
    }


def row_of(
    case: Case, seconds: Sequence[float], figures: dict[str, Any], context: int | None
) -> dict[str, Any]:
    """The figures of a case: of speed the median and the extremes over the rounds; MFU
    where the peak is known.
    """
    import jax.numpy as jnp

    from trainer.config import schema
    from trainer.config.fields import from_tree
    from trainer.models.flops import flops_per_token
    from trainer.observe.metrics import mfu
    from trainer.observe.peaks import peak_flops

    tree = read_group("model", case.model) | (
        {} if context is None else {"context": context}
    )
    row: dict[str, Any] = {
        "name": case.name,
        **case._asdict(),
        **speed(list(seconds), case.batch * tree["context"]),
    }
    row |= {**figures, "seconds": list(seconds)}
    spec = from_tree(schema.MODELS[tree["family"]], tree).spec(VOCAB)
    # Of all cases against the rate of 16 bits, so that they compare.
    peak = peak_flops(figures["device"], jnp.bfloat16)
    row["mfu"] = (
        None
        if peak is None
        else mfu(row["tokens_per_s"], flops_per_token(spec), peak, 1)
    )
    return row


def faster_than(name: str, seconds: dict[str, list[float]]) -> dict[str, float]:
    """How many times as fast a case is as each of the others, the median over the
    rounds.
    """
    own = seconds[name]
    return {
        other: statistics.median(
            theirs / ours for theirs, ours in zip(found, own, strict=True)
        )
        for other, found in seconds.items()
        if other != name
    }


def line_of(row: dict[str, Any]) -> str:
    """A row as text."""
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


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Tokens per second of all rows, medians with extremes; without matplotlib no
    picture.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(8, 1 + 0.4 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    medians = [row["tokens_per_s"] for row in rows]
    below = [m - row["tokens_per_s_min"] for m, row in zip(medians, rows, strict=True)]
    above = [row["tokens_per_s_max"] - m for m, row in zip(medians, rows, strict=True)]
    axes.barh(range(len(rows)), medians, xerr=[below, above], capsize=3)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(
        f"tokens per second, median of {len(rows[0]['seconds'])} rounds with extremes"
    )
    figure.savefig(path)
