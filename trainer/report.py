"""report.html: one file, readable without network, that tells who never saw the project whether a run was good.

Three questions come first, each answered in a sentence with its figures: is it learning, is it healthy, is it fast?
"""

import base64
import html
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from trainer.charts import COLOURS, Line, Mark, chart, smoothed
from trainer.display import short
from trainer.errors import UserError
from trainer.records import read_rows, read_samples
from trainer.rundir import flatten, write_atomically
from trainer.tracking import without_layers

GOOD, FAIR, BAD = "good", "fair", "bad"
RISEN = 0.02  # share by which a validation loss above the best one is worth a word
LEARNT = 0.02  # share by which the training loss has to fall
SLOWER = 0.8  # share of its usual speed
WAITING = 0.1  # share of a step spent waiting for data
IDLE = 0.1  # MFU below which no run is called fast
BOUNDED = ("delayed", "current")  # of `precision.scaling`
NARROW = ("weights", "activations", "activation_gradients")  # what is cast to eight bits
# Shares of a tensor in the layer that is worst: from which on to look closer, and from which on it is bad. What dropout
# left out is counted as underflow where a layer is kept in a wide format, hence so much.
LOST = {"underflow": (0.2, 0.5), "saturated": (0.01, 0.1)}
# What an event is about, by a word in it; the first that is found.
KINDS = {
    "stopped": "#b00020",
    "left out": "#b00020",
    "skipped": "#d55e00",
    "spike": "#e69f00",
    "stalled": "#7b3f99",
    "no progress": "#7b3f99",
    "not stopped within": "#7b3f99",
    "new scales": "#7f9fbf",
}
OTHER = "#999999"

STYLE = """
body{font:15px/1.45 system-ui,sans-serif;color:#1b1f24;background:#fff;margin:0 auto;max-width:1200px;padding:20px}
h1{font-size:22px;margin:0} h2{font-size:17px;margin:26px 0 6px} p{margin:4px 0} small,.sub{color:#5b6570}
.cards,.charts{display:grid;gap:14px}
.cards{grid-template-columns:repeat(auto-fit,minmax(300px,1fr));margin:16px 0}
.charts{grid-template-columns:repeat(auto-fit,minmax(480px,1fr))}
.card{border:1px solid #d8dee4;border-left:7px solid;border-radius:6px;padding:10px 14px}
.card b{display:block;font-size:16px} .card i{font-style:normal;float:right;font-weight:600}
.good{border-left-color:#2e7d32} .good i{color:#2e7d32}
.fair{border-left-color:#e69f00} .fair i{color:#8a6000}
.bad{border-left-color:#b00020} .bad i{color:#b00020}
figure{margin:0;border:1px solid #e4e8ec;border-radius:6px;padding:8px 10px}
figcaption span{white-space:nowrap}
figcaption i{display:inline-block;width:11px;height:11px;border-radius:2px;margin:0 4px 0 10px}
svg{width:100%;display:block} svg text{font-size:11px;fill:#5b6570}
svg path{fill:none;stroke-width:1.6;stroke-linejoin:round} svg .faint{opacity:.28;stroke-width:1}
svg .grid{stroke:#eceff2} svg .frame{stroke:#8c959f;stroke-width:1} svg .mark{stroke-width:1.2;stroke-dasharray:4 3}
table{border-collapse:collapse;width:100%}
td,th{text-align:left;padding:3px 10px 3px 0;vertical-align:top;border-bottom:1px solid #eceff2}
td:first-child{white-space:nowrap}
td i{display:inline-block;width:10px;height:10px;border-radius:5px;margin-right:7px}
pre{background:#f6f8fa;padding:10px;overflow:auto;white-space:pre-wrap} img{max-width:100%}
"""


@dataclass(frozen=True)
class Answer:
    """To one of the questions: how good, and why, in words."""

    question: str
    grade: str
    text: str


@dataclass(frozen=True)
class History:
    """What a run directory holds of a run.

    Attributes:
      rows: of steps, each step once, in order.
      events: (step, text).
      config: the text of config.yaml.
    """

    name: str
    rows: Sequence[Mapping[str, Any]]
    events: Sequence[tuple[int, str]]
    config: str

    @classmethod
    def read(cls, run_dir: Path, name: str = "") -> Self:
        """By default it has the directory's name. Raises UserError where there is no log."""
        rows = read_rows(run_dir / "metrics.jsonl")
        if all("event" in row for row in rows):
            raise UserError(
                f"{run_dir} has no metrics.jsonl with rows; give the run_dir of a run with tracker=jsonl or wandb"
            )
        config = run_dir / "config.yaml"
        return cls(
            name or run_dir.resolve().name,
            [without_layers(row) for row in rows if "event" not in row],
            [(row["step"], row["event"]) for row in rows if "event" in row],
            config.read_text(encoding="utf-8") if config.exists() else "",
        )

    def line(self, key: str, name: str = "", colour: str = COLOURS[0], **look: bool) -> Line:
        """The values of a key, of the rows that have it."""
        found = [(row["step"], float(row[key])) for row in self.rows if key in row]
        return Line(name, [x for x, _ in found], [y for _, y in found], colour, **look)

    @property
    def settings(self) -> dict[str, Any]:
        """Dotted keys of the configuration and their values; none where it cannot be read."""
        try:
            tree = yaml.safe_load(self.config)
        except yaml.YAMLError:
            return {}
        return dict(flatten(tree)) if isinstance(tree, dict) else {}

    def last(self, key: str) -> str:
        """The last value, to four digits; `-`: none."""
        ys = self.line(key).ys
        return f"{ys[-1]:.4g}" if ys else "-"

    def best(self, key: str) -> str:
        """The lowest value, to four digits; `-`: none."""
        return f"{min(ys):.4g}" if (ys := _finite(self.line(key))[1]) else "-"

    def median(self, key: str) -> str:
        """To three digits and a unit; `-`: none."""
        return short(statistics.median(ys)) if (ys := _finite(self.line(key))[1]) else "-"

    def smooth(self, key: str, name: str, colour: str = COLOURS[0]) -> list[Line]:
        """The values of a key, faint, and their median over a fiftieth of the run."""
        raw = self.line(key, name, colour, faint=True)
        return [raw, Line(name, raw.xs, smoothed(raw.ys, max(1, len(raw.ys) // 50)), colour)]

    @property
    def marks(self) -> list[Mark]:
        """The events as lines in a chart."""
        return [Mark(step, f"step {step}: {text}", colour_of(text)) for step, text in self.events]


def colour_of(event: str) -> str:
    """By what it is about."""
    return next((colour for word, colour in KINDS.items() if word in event), OTHER)


def ending(h: History) -> str:
    """`N of M steps: how it ended`. A run that was killed has no last word: it may be at work as well."""
    last, steps = h.rows[-1]["step"], h.settings.get("train.steps")
    words = [text for step, text in h.events if step >= last]
    if any(text.startswith("stopped: ") for text in words):
        how = "ended by the watchdog"
    elif any("; ended; checkpoints" in text for text in words):
        how = "ended because it hung"
    elif steps is None:
        how = "not known whether finished"
    else:
        how = "finished" if last >= steps else "not finished: stopped, or still at work"
    return f"{last:,} of {steps:,} steps: {how}" if steps is not None else f"{last:,} steps: {how}"


def learning(h: History) -> Answer:
    """From the validation losses, or the training losses where there are not two."""
    validation = [(int(x), y) for x, y in zip(*_finite(h.line("val/loss")), strict=True)]
    losses, all_losses = _finite(h.line("train/loss"))[1], h.line("train/loss").ys
    question = "Is it learning?"
    late = all_losses[-max(1, len(all_losses) // 10) :]
    if sum(map(math.isfinite, late)) <= len(late) / 2:
        return Answer(question, BAD, f"Of the last {len(late):,} training losses most are not finite.")
    if not all(map(math.isfinite, h.line("val/loss").ys[-1:])):
        return Answer(question, BAD, "The last validation loss is not finite.")
    if len(losses) < 2:
        return Answer(question, FAIR, "Too few steps to tell.")
    tenth = max(1, len(losses) // 10)
    first, last = losses[0], math.fsum(losses[-tenth:]) / tenth
    fell = f"The training loss went from {first:.3f} to {last:.3f} nats a token"
    little = f"That is a fall of less than {LEARNT:.0%}: it has hardly begun, or does not learn."
    if not validation:
        grade = BAD if last >= first else FAIR if last > first * (1 - LEARNT) else GOOD
        return Answer(question, grade, f"{fell}; there was no validation.{f' {little}' if grade == FAIR else ''}")
    end, value = validation[-1]
    best_at, best = min(validation, key=lambda pair: pair[1])
    text = (
        f"{fell}. Validation: {value:.3f} nats after step {end:,}, as unsure as among {math.exp(min(value, 700)):,.1f} "
        "equally likely tokens"
    )
    if value >= first or last >= first:
        return Answer(question, BAD, f"{text}. That is no better than at the start.")
    if last > first * (1 - LEARNT):
        return Answer(question, FAIR, f"{text}. {little}")
    if value > best * (1 + RISEN):
        return Answer(question, FAIR, f"{text}; it was better, {best:.3f}, after step {best_at:,}.")
    return Answer(question, GOOD, f"{text}, its best or close to it.")


def healthy(h: History) -> Answer:
    """From the events, the watchdog's counts and the numerics."""
    question, last = "Is it healthy?", h.rows[-1]
    skipped, rollbacks = int(last.get("watchdog/skipped", 0)), int(last.get("watchdog/rollbacks", 0))
    texts = [text for _, text in h.events]
    counts = {
        "skipped (not finite)": skipped,
        "rolled back": rollbacks,
        "spiking": sum(": spike" in text for text in texts),
        "stalled": sum(text.startswith("stalled") for text in texts),
        "ended because it hung": sum(text.startswith("no progress") for text in texts),
        "ended because it did not stop": sum(text.startswith("not stopped within") for text in texts),
    }
    listed = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    lost, numerics = _lost(h)
    stopped = [text for text in texts if text.startswith("stopped")]
    if stopped:
        return Answer(question, BAD, f"The watchdog stopped it: {stopped[-1].removeprefix('stopped: ')}.")
    if not listed:
        return Answer(question, lost, f"No step was skipped, nothing rolled back, no spike, no stall.{numerics}")
    grade = BAD if skipped > 0.01 * len(h.rows) or lost == BAD else FAIR
    return Answer(question, grade, f"In {len(h.rows):,} steps: {listed}; see the events below.{numerics}")


def _lost(h: History) -> tuple[str, str]:
    """What eight bits lose at the last look, in the layers that lose most: the grade, and a sentence for each kind.

    Underflow is graded where it is known and no upper bound (`numerics`): without FP8, zeros from elsewhere count too.
    """
    grades, text = [GOOD], ""
    settings = h.settings
    bound = settings.get("precision.forward", "") is None or settings.get("precision.scaling") in BOUNDED
    for figure, verb in (("saturated", "saturates"), ("underflow", "underflows")):
        found = {kind: h.line(f"numerics/{kind}/{figure}_max").ys[-1:] for kind in NARROW}
        share, kind = max(((ys[0], kind) for kind, ys in found.items() if ys), default=(0.0, ""))
        fair, bad = LOST[figure]
        if share > 0 and not (bound and figure == "underflow"):
            grades.append(BAD if share >= bad else FAIR if share >= fair else GOOD)
            text += f" The layer that {verb} most: {share:.2%} of its {kind.replace('_', ' ')}."
    return max(grades, key=(GOOD, FAIR, BAD).index), text


def fast(h: History) -> Answer:
    """From throughput, its course, and the time spent waiting for data."""
    question = "Is it fast?"
    _, speeds = _finite(h.line("perf/tokens_per_s"))
    if not speeds:
        return Answer(question, FAIR, "No throughput was recorded.")
    usual, tenth = statistics.median(speeds), max(1, len(speeds) // 10)
    late = statistics.median(speeds[-tenth:])
    step_ms = statistics.median(h.line("perf/step_ms").ys)
    waited = statistics.median(h.line("perf/data_ms").ys) / step_ms
    _, shares = _finite(h.line("perf/mfu"))
    use = f", {statistics.median(shares):.1%} of what the devices can do" if shares else ""
    text = f"{short(usual)} tokens/s, {step_ms:,.1f} ms a step{use}; {waited:.1%} of it waiting for data."
    if late < SLOWER * usual:
        return Answer(question, FAIR, f"{text} It slowed down: {short(late)} tokens/s at the end.")
    if waited > WAITING:
        return Answer(question, FAIR, f"{text} The data hold it up.")
    if (slow := sorted(speeds)[len(speeds) // 10]) < SLOWER * usual:
        return Answer(question, FAIR, f"{text} It is unsteady: every tenth step is at {short(slow)} tokens/s or less.")
    if shares and statistics.median(shares) < IDLE:
        return Answer(question, FAIR, f"{text} That is little; a larger batch or model uses more.")
    return Answer(question, GOOD, f"{text} Steady to the end.")


def _finite(line: Line) -> tuple[list[float], list[float]]:
    pairs = [(x, y) for x, y in zip(line.xs, line.ys, strict=True) if math.isfinite(y)]
    return [x for x, _ in pairs], [y for _, y in pairs]


def charts(h: History) -> list[str]:
    """Loss, learning rate, gradient norm, throughput, memory, scales and losses of precision."""
    span = (min(0, h.rows[0]["step"]), h.rows[-1]["step"])
    validation = h.line("val/loss", "validation", COLOURS[1], dots=True)
    memory = [
        h.line("memory/device_peak_gib", "device"),
        h.line("memory/host_peak_gib", "host", COLOURS[1]),
    ]
    classes = ("weights", "activations", "activation_gradients", "weight_gradients")

    def extremes(figure: str, *ends: str) -> list[Line]:
        """Of every class of tensors, over its layers."""
        return [
            h.line(f"numerics/{kind}/{figure}_{end}", kind.replace("_", " "), COLOURS[i], dots=True)
            for i, kind in enumerate(classes)
            for end in ends
        ]

    def drawn(title: str, lines: Sequence[Line], unit: str, *, from_zero: bool = False) -> str:
        return chart(title, lines, unit=unit, marks=h.marks, from_zero=from_zero, x_range=span)

    return [
        drawn("Loss", [*h.smooth("train/loss", "training"), validation], "nats per token, lower is better"),
        drawn("Learning rate", [h.line("lr")], "", from_zero=True),
        drawn("Gradient norm", h.smooth("grad_norm", "before clipping"), "", from_zero=True),
        drawn("Throughput", h.smooth("perf/tokens_per_s", ""), "tokens per second", from_zero=True),
        drawn("Memory", memory, "GiB, the most so far", from_zero=True),
        drawn("Scales", extremes("exponent", "max", "min"), "log2, largest and smallest of the layers"),
        drawn("Underflow", extremes("underflow", "max"), "share of values lost to zero, worst layer", from_zero=True),
        drawn("Saturation", extremes("saturated", "max"), "share of values cut off, worst layer", from_zero=True),
    ]


def render(h: History, *, pictures: Mapping[str, bytes], sample: str, environment: str) -> str:
    """The page. `pictures`: PNGs by title."""
    answers = [learning(h), healthy(h), fast(h)]
    words = {GOOD: "✓ yes", FAIR: "~ look closer", BAD: "✗ no"}
    cards = "".join(
        f'<div class="card {a.grade}"><i>{words[a.grade]}</i><b>{a.question}</b>{html.escape(a.text)}</div>'
        for a in answers
    )
    last = h.rows[-1]
    what = [f"{key} {h.settings[f'{key}.name']}" for key in ("model", "precision") if f"{key}.name" in h.settings]
    facts = html.escape("; ".join([ending(h), f"{short(last['tokens'])} tokens", *what]))
    sections = [
        f"<h1>{html.escape(h.name)}</h1><p class=sub>{facts}</p>",
        f'<div class="cards">{cards}</div>',
        f'<div class="charts">{"".join(charts(h))}</div>',
        f"<h2>Events <small>dashed lines in the charts</small></h2>{event_table(h.events)}",
    ]
    if sample:
        sections.append(f"<h2>Its last sample</h2><pre>{html.escape(sample)}</pre>")
    for title, png in pictures.items():
        data = base64.b64encode(png).decode()
        image = f'<img alt="{html.escape(title)}" src="data:image/png;base64,{data}">'
        sections.append(f"<details><summary>Numerics of every layer: {html.escape(title)}</summary>{image}</details>")
    for title, text in (("Configuration", h.config), ("What it ran on", environment)):
        sections.append(f"<details><summary>{title}</summary><pre>{html.escape(text)}</pre></details>")
    return page(h.name, sections)


def comparison(histories: Sequence[History], table: Mapping[str, Sequence[str]]) -> str:
    """A page with the curves of several runs over each other, and a table with a column for each."""

    def over(key: str, *, smooth: bool) -> list[Line]:
        pairs = list(zip(histories, COLOURS, strict=False))
        if smooth:
            return [h.smooth(key, h.name, colour)[1] for h, colour in pairs]
        return [h.line(key, h.name, colour, dots=key.startswith("val/")) for h, colour in pairs]

    drawn = [
        chart("Training loss", over("train/loss", smooth=True), unit="nats per token, lower is better"),
        chart("Validation loss", over("val/loss", smooth=False), unit="nats per token, lower is better"),
        chart("Gradient norm", over("grad_norm", smooth=True), unit="before clipping", from_zero=True),
        chart("Throughput", over("perf/tokens_per_s", smooth=True), unit="tokens per second", from_zero=True),
        chart("Learning rate", over("lr", smooth=False), from_zero=True),
        chart("Memory", over("memory/host_peak_gib", smooth=False), unit="GiB of the host", from_zero=True),
    ]
    head = "".join(f"<th>{html.escape(h.name)}</th>" for h in histories)
    rows = "".join(
        f"<tr><td>{html.escape(key)}</td>{''.join(f'<td>{html.escape(value)}</td>' for value in values)}</tr>"
        for key, values in table.items()
    )
    title = f"{len(histories)} runs"
    body = [f"<h1>{title}</h1>", f'<div class="charts">{"".join(drawn)}</div>', "<h2>Figures and differences</h2>"]
    return page(title, [*body, f"<table><tr><th></th>{head}</tr>{rows}</table>"])


def page(title: str, sections: Sequence[str]) -> str:
    """A whole document."""
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(sections)}</body></html>\n'


def event_table(events: Sequence[tuple[int, str]], most: int = 200) -> str:
    """The newest last."""
    if not events:
        return "<p>None: nothing was skipped, rolled back, rescaled or stalled.</p>"
    rows = "".join(
        f'<tr><td><i style="background:{colour_of(text)}"></i>{step:,}</td><td>{html.escape(text)}</td></tr>'
        for step, text in events[-most:]
    )
    left_out = f"<p>{len(events) - most} earlier ones are in metrics.jsonl.</p>" if len(events) > most else ""
    return f"{left_out}<table><tr><th>step</th><th>what</th></tr>{rows}</table>"


def write_report(run_dir: Path) -> Path:
    """`report.html` of a run directory. Raises UserError where there is no log, or no room."""
    samples, environment = read_samples(run_dir / "samples.txt"), run_dir / "environment.txt"
    text = render(
        History.read(run_dir),
        pictures={p.stem.replace("_", " "): p.read_bytes() for p in sorted((run_dir / "numerics").glob("*.png"))},
        sample=samples[-1].text if samples else "",
        environment=environment.read_text(encoding="utf-8", errors="replace") if environment.exists() else "",
    )
    write_atomically(run_dir / "report.html", text)
    return run_dir / "report.html"
