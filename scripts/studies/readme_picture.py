"""Draw the README's picture: validation losses of two precisions, a line for each seed,
and bytes of state per parameter.

    python -m scripts.studies.readme_picture study=runs/parity out=docs/gain.svg

The curves come from the runs of a parity study, of the seeds that have ended in both
precisions. The bytes come from docs/results.md.
"""

import html
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from scripts.studies.pairs import Outcome, PairedDifference, compare
from scripts.studies.parity import read_outcome
from scripts.studies.runs import Trial, folder
from trainer.cli.arguments import argument, run_script
from trainer.errors import UserError
from trainer.files import write_atomically
from trainer.text import plural

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results.md"
BARS = ("fp32", "bf16", "scalify_fp8", "scalify_fp8_fp16", "scalify_fp8_fp8")
WIDTH, HEIGHT = 960, 290
TOP, BOTTOM = 62, 244  # of all three plots
SHOWN_AT_END = 0.25  # share of the steps that the middle plot enlarges
# Colors of classes: told apart by the color-blind, and with enough contrast on the
# ground of either mode.
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1b1f24 }
.head { font-weight: 600 } .note, .number { fill: #57606a } .number { font-size: 11px }
.ground { fill: #ffffff } .grid { stroke: #d8dee4 } .zoom { stroke: #8c959f; stroke-dasharray: 3 3; fill: none }
.base { stroke: #0072b2 } .ours { stroke: #d55e00 } path.base, path.ours { fill: none; stroke-opacity: .75 }
rect.ours { fill: #d55e00 } rect.others { fill: #8c959f } rect.kin { fill: #e8a27a } rect { stroke: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .note, .number { fill: #9198a1 } .ground { fill: #0d1117 } .grid { stroke: #30363d }
  .base { stroke: #56b4e9 } .ours { stroke: #ff8c42 } rect.ours { fill: #ff8c42 } rect.kin { fill: #9c5a33 }
}
"""


@dataclass(frozen=True)
class Arguments:
    """Settings of the picture; see `--help`."""

    out: str = argument("the SVG file")
    study: str = argument("the directory of a parity study")
    precision: str = argument(
        "the item of the study whose curves are drawn beside the base's",
        "scalify_fp8_fp16",
    )
    base: str = argument("the item that it is compared with", "fp32")
    last: int = argument(
        "last validations of a run that are averaged for the difference", 5
    )


class Study(NamedTuple):
    """The figures of a parity study that are drawn.

    Attributes:
      model: the model's name.
      curves: validation losses (nats) by step, of each item by seed.
      row: the precision's line of the study's table.
    """

    model: str
    curves: dict[str, list[dict[int, float]]]
    row: PairedDifference


class Scale(NamedTuple):
    """A linear map from values to coordinates."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return at most `count` + 1 round numbers within [low, high].

    They are 1, 2 or 5 times a power of ten apart.
    """
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    steps = (power, 2 * power, 5 * power, 10 * power)
    step = next(step for step in steps if step >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


class Plot(NamedTuple):
    """The scales of a plot: steps across, nats up."""

    across: Scale
    up: Scale


def state_bytes(text: str) -> dict[str, float]:
    """Read the bytes of state per parameter by precision from docs/results.md."""
    parts = text.split("## Memory of the precisions")
    rows = re.findall(
        r"^\| (\w+) \| (\d+\.\d{4}) \|", parts[-1].split("\n## ")[0], re.MULTILINE
    )
    by_precision = {name: float(number) for name, number in rows}
    if len(parts) != 2 or (
        missing := [name for name in BARS if name not in by_precision]
    ):
        raise UserError(
            f"{RESULTS} has no table of the precisions' memory with"
            f" {', '.join(missing or BARS)}"
        )
    return by_precision


def read_study(args: Arguments) -> Study:
    """Return the study's pairs of finished runs. UserError without any."""
    out = Path(args.study)
    try:
        fixed = json.loads((out / "study.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"study={out} is no directory of a parity study: {error}"
        ) from error
    outcomes: dict[Trial, Outcome] = {}
    for seed in seeds_of(out, args):
        pair = {
            job: read_outcome(folder(out, job), fixed["steps"])
            for job in (Trial(1.0, item, seed) for item in (args.base, args.precision))
        }
        if all(pair.values()):
            outcomes |= {job: end for job, end in pair.items() if end is not None}
    if not outcomes:
        raise UserError(
            f"study={out}: no seed has ended in both {args.base} and {args.precision}"
        )
    if min(len(outcome.curve) for outcome in outcomes.values()) < 2:
        raise UserError(
            f"study={out}: a curve needs two validations or more; give the study"
            " evaluations="
        )
    (row,) = [
        row
        for row in compare(outcomes, args.base, last=args.last)
        if row.item == args.precision
    ]
    curves = {
        item: [outcome.curve for job, outcome in outcomes.items() if job.item == item]
        for item in (args.base, args.precision)
    }
    return Study(fixed["model"], curves, row)


def seeds_of(out: Path, args: Arguments) -> list[int]:
    """Return the seeds that have runs of the precision."""
    parent = folder(out, Trial(1.0, args.precision, 0)).parent
    return sorted(int(path.name) for path in parent.glob("*") if path.name.isdigit())


def label(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    """Return a line of text as SVG."""
    words = f' class="{kind}"' if kind else ""
    end = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.0f}" y="{y:.0f}"{words}{end}>{html.escape(text)}</text>'


def bars(values: Mapping[str, float], left: float, precision: str) -> Iterator[str]:
    """Yield a bar for each precision."""
    yield label(left, 24, "bytes of state per parameter", "head")
    yield label(left, 42, "weights and optimizer", "note")
    for i, name in enumerate(BARS):
        y = TOP + 10 + 36 * i
        if name == precision:
            kind = "ours"
        else:
            kind = "kin" if name.startswith("scalify") else "others"
        yield label(left + 112, y + 16, name, anchor="end")
        yield (
            f'<rect class="{kind}" x="{left + 120:.0f}" y="{y}"'
            f' width="{8 * values[name]:.0f}" height="22"/>'
        )
        yield label(left + 126 + 8 * values[name], y + 16, f"{values[name]:g}")


def plot(
    curves: Sequence[Mapping[int, float]], first: float, left: float, right: float
) -> Plot:
    """Return the scales that fit all curves from step `first` on."""
    shown = [
        (step, loss)
        for curve in curves
        for step, loss in curve.items()
        if step >= first and math.isfinite(loss)
    ]
    low, high = min(loss for _, loss in shown), max(loss for _, loss in shown)
    margin = 0.06 * (high - low) or 0.06
    steps = [step for step, _ in shown]
    return Plot(
        Scale(min(steps), max(steps), left, right),
        Scale(low - margin, high + margin, BOTTOM, TOP),
    )


def grid(where: Plot) -> Iterator[str]:
    """Yield the lines and numbers of both axes."""
    across, up = where
    for values, kind in (
        (ticks(up.low, up.high, 5), "y"),
        (ticks(across.low, across.high, 4), "x"),
    ):
        for value in values:
            if kind == "y":
                ends = (
                    f'x1="{across.start:.0f}" x2="{across.end:.0f}"'
                    f' y1="{up(value):.1f}" y2="{up(value):.1f}"'
                )
                yield f'<line class="grid" {ends}/>'
                yield label(
                    across.start - 6, up(value) + 4, f"{value:g}", "number", "end"
                )
            else:
                yield label(
                    across(value), BOTTOM + 16, f"{value:,.0f}", "number", "middle"
                )


def lines(
    curves: Sequence[Mapping[int, float]], kind: str, where: Plot, name: str
) -> Iterator[str]:
    """Yield a thin line for each seed, with its name as a tooltip."""
    for seed, curve in enumerate(curves):
        points = [
            (s, loss)
            for s, loss in sorted(curve.items())
            if s >= where.across.low and math.isfinite(loss)
        ]
        path = "L".join(
            f"{where.across(step):.1f},{where.up(loss):.1f}" for step, loss in points
        )
        title = (
            f"<title>{html.escape(name)}, run {seed + 1}: {points[-1][1]:.4f} at the"
            " end</title>"
            if points
            else ""
        )
        yield f'<path class="{kind}" stroke-width="1.2" d="M{path}">{title}</path>'


def key(x: float, kind: str, text: str) -> str:
    """Return an entry of the legend."""
    return (
        f'<line class="{kind}" stroke-width="2.5" x1="{x}" x2="{x + 18}" y1="38"'
        ' y2="38"/>' + label(x + 24, 42, text)
    )


def curves(study: Study, precision: str, base: str) -> Iterator[str]:
    """Yield the left plot, of complete runs, and the middle one, of their last part."""
    every = [curve for of_item in study.curves.values() for curve in of_item]
    *_, second, last = sorted({step for curve in every for step in curve})
    full, end = (
        plot(every, 0, 52, 300),
        plot(every, min(second, (1 - SHOWN_AT_END) * last), 366, 614),
    )
    count = len(study.curves[base])
    yield label(
        20,
        24,
        f"validation loss of {study.model}, {plural(count, 'seed')} each",
        "head",
    )
    yield key(22, "base", base)
    yield key(90, "ours", precision)
    yield label(300, 42, "nats", "note", "end")
    for where in (full, end):
        yield from grid(where)
        for item, kind in ((base, "base"), (precision, "ours")):
            yield from lines(study.curves[item], kind, where, item)
        yield label(
            (where.across.start + where.across.end) / 2,
            BOTTOM + 34,
            "step",
            "note",
            "middle",
        )
    x, y = full.across(end.across.low), full.up(end.up.high)
    size = f'width="{full.across.end - x:.0f}" height="{full.up(end.up.low) - y:.0f}"'
    yield f'<rect class="zoom" x="{x:.0f}" y="{y:.0f}" {size}/>'
    yield label(366, 24, "the framed part, enlarged", "head")
    yield label(366, 42, difference(study.row), "note")


def difference(row: PairedDifference) -> str:
    """Format the mean of the paired differences with its interval."""
    interval = (
        f" ± {100 * row.half_width / row.base_loss:.2f}"
        if math.isfinite(row.half_width)
        else ""
    )
    pairs = f"{row.n} pairs" if row.n > 1 else "one pair"
    return f"at the end {row.percent:+.2f}{interval} %, {pairs}"


def picture(
    study: Study, values: Mapping[str, float], precision: str, base: str
) -> str:
    """Return the SVG."""
    spoken = (
        f"Validation loss over steps of {base} and {precision} on {study.model}, a line"
        f" for each of {len(study.curves[base])} seeds: the lines lie on each other;"
        f" {difference(study.row)}. Bytes of state per parameter: "
        + ", ".join(f"{name} {values[name]:g}" for name in BARS)
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' role="img"'
    )
    parts = [*curves(study, precision, base), *bars(values, 668, precision)]
    ground = f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}"/>'
    style = f"<style>{STYLE}</style>\n{ground}"
    return (
        f'{head} aria-label="{html.escape(spoken)}">\n{style}\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def main(args: Arguments) -> None:
    """Write the picture; print its path and the number of pairs."""
    study = read_study(args)
    values = state_bytes(RESULTS.read_text(encoding="utf-8"))
    write_atomically(Path(args.out), picture(study, values, args.precision, args.base))
    print(f"{args.out}: {difference(study.row)}")


if __name__ == "__main__":
    sys.exit(run_script(Arguments, "studies.readme_picture", __doc__ or "", main))
