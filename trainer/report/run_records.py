"""The records of a run, read from its directory for reports and comparisons."""

import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from trainer.config.fields import flatten
from trainer.config.renamed import renamed_keys
from trainer.errors import UserError
from trainer.files import (
    MAX_DIGITS,
    check_no_links,
    parse_json,
    parse_mapping,
    read_file,
    well_formed,
)
from trainer.observe.display import short
from trainer.observe.records import read_rows, without_layers
from trainer.report.charts import COLORS, EventMark, Line, StepAxes, smoothed
from trainer.text import override

# Colors of events, by the first of these phrases in them.
EVENT_COLORS = {
    # Before "stopped", which this phrase contains.
    "not stopped within": "#7b3f99",
    "stopped": "#b00020",
    "rolled back": "#b00020",
    "skipped": "#d55e00",
    "spike": "#e69f00",
    "stalled": "#7b3f99",
    "no progress": "#7b3f99",
    "new scales": "#7f9fbf",
}
OTHER_EVENT = "#999999"
# Facts of environment.txt about a run that started from another one.
FORKED, WEIGHTS = "forked from", "weights from"
SCHEDULE_CHANGED = "schedule changed"
# The fact about the number of tokens that the validation after the last step reads.
FINAL_VALIDATION = "final validation tokens"
VALIDATION_DIGEST = "validation digest"  # the fact about the whole validation text
# A validation that reads this share of the validation text counts as reading all of it,
# because an incomplete last batch is left out.
COMPLETE_SHARE = 0.99
AS_TRAINED = "as trained"  # in an evaluation, the precision of the training


class SavedEvaluation(NamedTuple):
    """The content of evaluation.json.

    Attributes:
      step: the step of the evaluated weights.
      tokens: size of the evaluated text.
      losses: nats per token by precision, AS_TRAINED among them; NaN where it was not
          finite.
    """

    step: int
    tokens: int
    losses: dict[str, float]


def read_evaluation(run_dir: Path) -> SavedEvaluation | None:
    """Return the evaluation of a run, or None; raise UserError where it is damaged."""
    text = read_text(run_dir / "evaluation.json")
    if not text:
        return None
    with well_formed(
        f"{run_dir}/evaluation.json",
        "remove it, or let `scalify-trainer evaluate` write it again",
    ):
        document = parse_json(text)
        losses = {
            # JSON has no NaN, so `evaluate` writes null for a loss that is not finite.
            r["precision"]: math.nan if r["loss"] is None else float(r["loss"])
            for r in document["results"]
        }
        evaluation = SavedEvaluation(
            int(document["step"]), int(document["tokens"]), losses
        )
        # The verdicts relate every other loss to this one.
        if AS_TRAINED not in losses:
            raise ValueError(f"it has no result of the precision {AS_TRAINED!r}")
    return evaluation


def check_in_order(rows: Sequence[Mapping[str, Any]], run_dir: Path) -> None:
    """Raise UserError if a row of metrics follows one of the same or a later step."""
    # An event may share its step with a row, or with another event.
    steps = [row["step"] for row in rows if "event" not in row]
    for previous, step in itertools.pairwise(steps):
        # A row that somebody appended, with a step that is there already and a lower
        # loss, would make its run the best of a comparison.
        if step <= previous:
            raise UserError(
                f"{run_dir}/metrics.jsonl: rows are out of order: step {step} follows"
                f" step {previous}. Resume the run ({override('resume', run_dir)}) to"
                " drop rows after its newest checkpoint, or delete that line"
            )


@dataclass(frozen=True)
class RunRecords:
    """The records of a run.

    Attributes:
      name: of the run.
      rows: metrics by step, in order, with the numerics' extremes over the layers, not
          those of every layer.
      events: (step, text).
      config: the text of config.yaml.
      numerics: (step, statistics of every layer, `numerics/CLASS/LAYER/STATISTIC`),
          for the steps at which they were measured.
      evaluation: the losses of its weights in several precisions, if
          `scalify-trainer evaluate` was run.
      facts: the part of environment.txt that the last start wrote.
    """

    name: str
    rows: Sequence[Mapping[str, Any]]
    events: Sequence[tuple[int, str]]
    config: str
    numerics: Sequence[tuple[int, Mapping[str, float]]] = ()
    evaluation: SavedEvaluation | None = None
    facts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, run_dir: Path, name: str = "") -> Self:
        """Read a run directory.

        The default name is the run's `tracker.name`, or else its directory's.

        Raises:
          UserError: no metrics.jsonl, or a damaged file.
        """
        # A report copies texts and pictures into one file that people publish: a link
        # would take in a file from elsewhere.
        if run_dir.is_dir():
            check_no_links(run_dir)
        rows = read_rows(run_dir / "metrics.jsonl")
        check_in_order(rows, run_dir)
        # Also true of an empty log. A run that stopped before its first row may have
        # events.
        if all("event" in row for row in rows):
            raise UserError(
                f"{run_dir} has no metrics.jsonl with rows; give the run_dir of a run"
                " with tracker=jsonl, tensorboard or wandb"
            )
        with well_formed(f"a record in {run_dir}", "repair or remove the file"):
            numerics = []
            for row in rows:
                # `float`, because NaN is text in metrics.jsonl.
                layers = {
                    k: float(v) for k, v in row.items() if k.startswith("numerics/")
                }
                if layers:
                    numerics.append((row["step"], layers))
            # each start of the run adds a paragraph
            environment = read_text(run_dir / "environment.txt")
            last_start = environment.strip().split("\n\n")[-1].splitlines()
            facts = [line.partition(": ") for line in last_start]
            records = cls(
                name,
                # A row with numerics has several figures of every layer; charts show
                # their extremes.
                [without_layers(row) for row in rows if "event" not in row],
                [(row["step"], row["event"]) for row in rows if "event" in row],
                read_text(run_dir / "config.yaml"),
                numerics,
                read_evaluation(run_dir),
                {key: value for key, _, value in facts},
            )
        # Only config.yaml says which settings were trained and what validations read.
        with well_formed(
            run_dir / "config.yaml",
            "restore it: the command that trained this run, given again, does",
        ):
            # An empty text is read as settings without a key, which is no error by
            # itself.
            if not records.config.strip():
                raise ValueError("it is missing or empty")
            run_name = records.settings.get("tracker.name") or run_dir.resolve().name
            return replace(records, name=name or run_name)

    def line(
        self, key: str, name: str = "", color: str = COLORS[0], **look: bool
    ) -> Line:
        """Return the values of a key, from the rows that have it."""
        # NaN stays, to leave a gap in the line.
        points = [(row["step"], float(row[key])) for row in self.rows if key in row]
        steps, values = [x for x, _ in points], [y for _, y in points]
        return Line(name, steps, values, color, **look, axes=self.step_axes)

    def points(self, key: str) -> list[tuple[int, float]]:
        """Return step and value of the rows with a finite value of a key."""
        pairs = [(row["step"], float(row[key])) for row in self.rows if key in row]
        return [(step, value) for step, value in pairs if math.isfinite(value)]

    def values(self, key: str) -> list[float]:
        """Return the finite values of a key."""
        return [value for _, value in self.points(key)]

    @functools.cached_property
    def step_axes(self) -> StepAxes:
        """Tokens and hours of training after each step that has a row."""
        steps = [float(row["step"]) for row in self.rows]
        # A row's time is the mean of the steps since the row before.
        taken = [
            # The first row of a process has no time, which is mostly compilation.
            float(row.get("perf/step_ms", math.nan)) / 3.6e6 * (step - previous)
            for row, step, previous in zip(
                self.rows, steps, [steps[0], *steps], strict=False
            )
        ]
        # NaN would spread into all later sums.
        finite_hours = (hours if math.isfinite(hours) else 0.0 for hours in taken)
        return StepAxes(
            steps,
            [float(row["tokens"]) for row in self.rows],
            list(itertools.accumulate(finite_hours)),
        )

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """The configuration by dotted keys, in the precision of the last row's phase.

        Raises:
          ValueError: it is not a mapping.
        """
        settings = self._saved_settings
        precision = self._phases[-1]["precision"] if self._phases else None
        if precision is None:
            return settings
        return settings | dict(flatten({"precision": precision}))

    @property
    def earlier_precisions(self) -> list[str]:
        """Names of the precisions of the phases before that of the last row."""
        # `settings` has the precision of the last phase.
        first_precision = self._saved_settings.get("precision.name", "?")
        return [
            first_precision
            if phase["precision"] is None
            else phase["precision"]["name"]
            for phase in self._phases[:-1]
        ]

    @functools.cached_property
    def _saved_settings(self) -> dict[str, Any]:
        # Runs of earlier versions have old names of keys.
        tree = parse_mapping(self.config) if self.config else {}
        return dict(flatten(renamed_keys(tree)))

    @functools.cached_property
    def _phases(self) -> list[dict[str, Any]]:
        """The entries of `train.phases`, up to that of the last row."""
        phases = self._saved_settings.get("train.phases") or []
        # The rows tell how far the run came; a stopped one has phases that never began.
        last_step = self.rows[-1]["step"] if self.rows else 0
        # A phase includes its step `until`; the last one may have none.
        ended = [
            phase for phase in phases if phase["until"] and phase["until"] < last_step
        ]
        return phases[: len(ended) + 1]

    def number(self, fact: str) -> int:
        """Return a fact that is an integer; 0: unknown."""
        # Facts are written with thousands separators, for people.
        text = self.facts.get(fact, "").replace(",", "")
        # `int` raises for texts of thousands of digits, and a made-up file may hold
        # them.
        if text.isdecimal() and len(text) <= MAX_DIGITS:
            return int(text)
        return 0

    @property
    def validation_digest(self) -> str:
        """The digest of the validation text. Raises UserError where it is unknown."""
        # Names and lengths of texts do not tell them apart: an edit may keep both.
        if VALIDATION_DIGEST not in self.facts:
            raise UserError(
                f"the run {self.name} does not name its validation text:"
                " environment.txt is missing, or of an earlier version; leave this run"
                " out"
            )
        return self.facts[VALIDATION_DIGEST]

    @functools.cached_property
    def logged_validation_tokens(self) -> dict[int, int]:
        """The tokens of each validation whose row has them, by step."""
        key = "val/tokens"
        return {row["step"]: int(row[key]) for row in self.rows if key in row}

    def validated_tokens(self, step: int) -> int:
        """Return the number of tokens that the validation after a step read; 0:
        unknown.

        A validation that left out only an incomplete last batch counts as the whole
        text. For a step without a row, return the tokens of the run's final validation.
        """
        # Not from the settings: `train.steps` may have grown, so that the former last
        # validation, of the whole text, lies in the middle.
        read = self.logged_validation_tokens.get(step, self.number(FINAL_VALIDATION))
        available = self.number("validation tokens")
        if read >= COMPLETE_SHARE * available > 0:
            return available
        return read

    @property
    def comparable_validations(self) -> list[tuple[int, float]]:
        """Step and loss of the finite validations that read the same text.

        They are those that read the least: the ones during the training, and a final
        one that reads no more.
        """
        # A final validation may read more text, which may be harder or easier.
        points = self.points("val/loss")
        tokens = [self.validated_tokens(step) for step, _ in points]
        return [
            point
            for point, read in zip(points, tokens, strict=True)
            if read == min(tokens)
        ]

    @property
    def started_from(self) -> str:
        """The run that this one started from, in words; empty: from none."""
        for fact in (FORKED, WEIGHTS):
            if fact in self.facts:
                return f"{fact} {self.facts[fact]}"
        return ""

    @property
    def fp8_layers(self) -> list[str]:
        """Patterns of the linear layers whose operands are cast to FP8; empty:
        unknown.
        """
        # The fact may be `none`, which matches no layer.
        return self.facts.get("FP8 layers", "").split()

    @property
    def epochs(self) -> float:
        """Number of passes over the training text; 0: unknown.

        Of a mixture, the mean over its samples.
        """
        latest: dict[str, Any] = {}
        for row in self.rows:
            latest |= {k: v for k, v in row.items() if k.startswith("data/")}
        # Tokens over the sum of all sources would be wrong by far: a small source may
        # be read 36 times beside a large one that is read in part.
        if latest:
            return math.fsum(
                # `data/NAME/share`: its last six characters are the suffix.
                float(share) * float(latest.get(f"{key[:-6]}/epochs", 0))
                for key, share in latest.items()
                if key.endswith("/share")
            )
        tokens = self.number("training tokens")
        if tokens:
            return float(self.rows[-1]["tokens"]) / tokens
        return 0.0

    def last(self, key: str) -> str:
        """Return the last value, to four digits; `-`: none."""
        ys = self.line(key).ys
        if ys:
            return f"{ys[-1]:.4g}"
        return "-"

    def median(self, key: str) -> str:
        """Return the median, to three digits and a unit; `-`: none."""
        # A median, because saves and other programs slow single steps.
        values = self.values(key)
        if values:
            return short(statistics.median(values))
        return "-"

    def smooth(self, key: str, name: str, color: str = COLORS[0]) -> list[Line]:
        """Return the values of a key, faint, and their median over 2% of the run."""
        # The raw values stay visible: a median hides the spikes, which show
        # instability.
        raw = self.line(key, name, color, faint=True)
        return [
            raw,
            replace(raw, ys=smoothed(raw.ys, max(1, len(raw.ys) // 50)), faint=False),
        ]

    @property
    def event_marks(self) -> list[EventMark]:
        """The events as vertical lines of a chart."""
        return [
            EventMark(step, f"step {step}: {text}", color_of(text))
            for step, text in self.events
        ]


def color_of(event: str) -> str:
    """Return the color of an event, by its kind."""
    # Events are sentences with values inside, so a phrase is the only key.
    return next(
        (color for word, color in EVENT_COLORS.items() if word in event), OTHER_EVENT
    )


def read_text(path: Path) -> str:
    """Return the text of a file, or an empty one where there is no file."""
    # evaluation.json exists only after `evaluate`; users may have removed the others.
    if path.is_file():
        # A byte that is not UTF-8 in a text must not cost the whole report.
        return read_file(path).decode(errors="replace")
    return ""
