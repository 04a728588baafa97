"""What a run directory holds of a run, as its report and comparisons want it."""

import functools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from trainer.config.fields import flatten
from trainer.config.renamed import renamed_keys
from trainer.errors import UserError
from trainer.files import parse_yaml, refuse_links, well_formed
from trainer.observe.display import short
from trainer.observe.records import read_rows, without_layers
from trainer.report.charts import COLORS, Line, Mark, smoothed

# Colors of events, by the first of these words in them.
KINDS = {
    "stopped": "#b00020",
    "rolled back": "#b00020",
    "left out": "#b00020",  # a rollback, in rows that an earlier version wrote
    "skipped": "#d55e00",
    "spike": "#e69f00",
    "stalled": "#7b3f99",
    "no progress": "#7b3f99",
    "not stopped within": "#7b3f99",
    "new scales": "#7f9fbf",
}
OTHER = "#999999"
# facts of a run that began with something
FORKED, WEIGHTS = "forked from", "weights from"
AS_TRAINED = "as trained"  # in an evaluation, the precision of the run itself


class Evaluation(NamedTuple):
    """What evaluation.json holds.

    Attributes:
      step: whose weights they were.
      tokens: of the text that they were evaluated on.
      losses: nats per token by precision, AS_TRAINED among them; NaN where it was not
          finite.
    """

    step: int
    tokens: int
    losses: dict[str, float]


def read_evaluation(run_dir: Path) -> Evaluation | None:
    """None: there is none. Raises UserError for one that is damaged."""
    text = read_text(run_dir / "evaluation.json")
    if not text:
        return None
    with well_formed(
        f"{run_dir}/evaluation.json",
        "remove it, or let scripts.evaluate write it again",
    ):
        document = json.loads(text)
        losses = {
            r["precision"]: math.nan if r["loss"] is None else float(r["loss"])
            for r in document["results"]
        }
        found = Evaluation(int(document["step"]), int(document["tokens"]), losses)
        if AS_TRAINED not in losses:
            raise ValueError(f"it has no result of the precision {AS_TRAINED!r}")
    return found


@dataclass(frozen=True)
class History:
    """What a run directory holds of a run.

    Attributes:
      rows: of steps, each step once, in order; of numerics only the extremes over the
          layers.
      events: (step, text).
      config: the text of config.yaml.
      looks: (step, figures of every layer, `numerics/CLASS/LAYER/FIGURE`), as often as
          they were taken.
      evaluation: its weights in other precisions, if that was asked of
          `scripts.evaluate`.
      facts: what environment.txt says of the last time it was started.
    """

    name: str
    rows: Sequence[Mapping[str, Any]]
    events: Sequence[tuple[int, str]]
    config: str
    looks: Sequence[tuple[int, Mapping[str, float]]] = ()
    evaluation: Evaluation | None = None
    facts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, run_dir: Path, name: str = "") -> Self:
        """By default it is called what the run was, or its directory is. Raises
        UserError where there is no log.
        """
        if run_dir.is_dir():
            refuse_links(run_dir)
        rows = read_rows(run_dir / "metrics.jsonl")
        if all("event" in row for row in rows):
            raise UserError(
                f"{run_dir} has no metrics.jsonl with rows; give the run_dir of a run"
                " with tracker=jsonl or wandb"
            )
        with well_formed(f"what {run_dir} holds of its run", "mend or remove the file"):
            config, environment = (
                run_dir / "config.yaml",
                read_text(run_dir / "environment.txt"),
            )
            looks = [
                (
                    row["step"],
                    {k: float(v) for k, v in row.items() if k.startswith("numerics/")},
                )
                for row in rows
            ]
            # a resumed run adds a part
            last = environment.strip().split("\n\n")[-1].splitlines()
            found = cls(
                name,
                [without_layers(row) for row in rows if "event" not in row],
                [(row["step"], row["event"]) for row in rows if "event" in row],
                read_text(config),
                [(step, figures) for step, figures in looks if figures],
                read_evaluation(run_dir),
                {
                    key: value
                    for key, _, value in (line.partition(": ") for line in last)
                },
            )
            return replace(
                found,
                name=name
                or found.settings.get("tracker.name")
                or run_dir.resolve().name,
            )

    def line(
        self, key: str, name: str = "", color: str = COLORS[0], **look: bool
    ) -> Line:
        """The values of a key, of the rows that have it."""
        found = [(row["step"], float(row[key])) for row in self.rows if key in row]
        return Line(name, [x for x, _ in found], [y for _, y in found], color, **look)

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """Dotted keys of the configuration and their values; none where it cannot be
        read.
        """
        try:
            tree = parse_yaml(self.config)
        except ValueError:
            return {}
        return dict(flatten(renamed_keys(tree))) if isinstance(tree, dict) else {}

    def number(self, fact: str) -> int:
        """A fact that is a whole number; 0: not known."""
        text = self.facts.get(fact, "").replace(",", "")
        return int(text) if text.isdecimal() else 0

    @property
    def began(self) -> str:
        """What the run began with, in words; empty: with nothing."""
        return next(
            (
                f"{fact} {self.facts[fact]}"
                for fact in (FORKED, WEIGHTS)
                if fact in self.facts
            ),
            "",
        )

    @property
    def wide_layers(self) -> list[str]:
        """Patterns of the linear layers that are not cast to a narrow format, where
        others are; `*`: not known.
        """
        return self.facts.get("wide layers", "*").split()

    @property
    def epochs(self) -> float:
        """How often the training text was read; 0: not known."""
        tokens = self.number("training tokens")
        return float(self.rows[-1]["tokens"]) / tokens if tokens else 0.0

    def last(self, key: str) -> str:
        """The last value, to four digits; `-`: none."""
        ys = self.line(key).ys
        return f"{ys[-1]:.4g}" if ys else "-"

    def best(self, key: str) -> str:
        """The lowest value, to four digits; `-`: none."""
        return f"{min(ys):.4g}" if (ys := finite(self.line(key))[1]) else "-"

    def median(self, key: str) -> str:
        """To three digits and a unit; `-`: none."""
        return (
            short(statistics.median(ys)) if (ys := finite(self.line(key))[1]) else "-"
        )

    def smooth(self, key: str, name: str, color: str = COLORS[0]) -> list[Line]:
        """The values of a key, faint, and their median over a fiftieth of the run."""
        raw = self.line(key, name, color, faint=True)
        return [
            raw,
            Line(name, raw.xs, smoothed(raw.ys, max(1, len(raw.ys) // 50)), color),
        ]

    @property
    def marks(self) -> list[Mark]:
        """The events as lines in a chart."""
        return [
            Mark(step, f"step {step}: {text}", color_of(text))
            for step, text in self.events
        ]


def color_of(event: str) -> str:
    """By what it is about."""
    return next((color for word, color in KINDS.items() if word in event), OTHER)


def finite(line: Line) -> tuple[list[float], list[float]]:
    """The points whose value is finite."""
    pairs = [(x, y) for x, y in zip(line.xs, line.ys, strict=True) if math.isfinite(y)]
    return [x for x, _ in pairs], [y for _, y in pairs]


def read_text(path: Path) -> str:
    """Empty where there is no file."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
