"""The README's picture, of figures in docs/results.md: bytes of state per parameter, and what precision costs, by seed.

python -m scripts.studies.readme_picture out=docs/gain.svg
"""

import html
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.arguments import argument, run
from trainer.errors import UserError
from trainer.report.charts import Scale
from trainer.run.rundir import write_atomically

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results.md"
BARS = ("fp32", "bf16", "scalify_fp8", "scalify_fp8_fp16", "scalify_fp8_fp8")
FLAGSHIP = "scalify_fp8_fp16"
INK, GREY, BLUE, ORANGE = "#1b1f24", "#8c959f", "#0072b2", "#d55e00"
STYLE = "font:13px system-ui,sans-serif"


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    out: str = argument("the SVG file")


def state_bytes(text: str) -> dict[str, float]:
    """Bytes of state per parameter by precision, of the table of the precisions' memory."""
    section = text.split("## Memory of the precisions")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\w+) \| (\d+\.\d{4}) \|", section, re.MULTILINE)
    return {name: float(number) for name, number in rows}


def seed_differences(text: str) -> dict[str, list[float]]:
    """Differences of the validation loss to FP32, in %, by precision, a number for each seed."""
    (line,) = re.findall(r"^Seed by seed, in %: (.*)\.$", text, re.MULTILINE)
    parts = (part.split(" ", 1) for part in line.split("; "))
    return {name: [float(number) for number in numbers.split(", ")] for name, numbers in parts}


def label(x: float, y: float, text: str, anchor: str = "start", colour: str = INK, weight: int = 400) -> str:
    """A line of text."""
    place = f'x="{x:.0f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-weight="{weight}"'
    return f"<text {place}>{html.escape(text)}</text>"


def colour_of(name: str) -> str:
    """The flagship's own, another for ours, grey for what they are compared with."""
    return ORANGE if name == FLAGSHIP else BLUE if name.startswith("scalify") else GREY


def bars(values: Mapping[str, float]) -> Iterator[str]:
    """The left half: a bar for each precision."""
    yield label(20, 24, "bytes of weights and optimiser per parameter", weight=600)
    for i, name in enumerate(BARS):
        y = 44 + 34 * i
        yield label(136, y + 16, name, "end")
        yield f'<rect x="144" y="{y}" width="{17 * values[name]:.0f}" height="22" fill="{colour_of(name)}"/>'
        yield label(150 + 17 * values[name], y + 16, f"{values[name]:g}")


def dots(values: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """The right half: a dot for each pair of seeds, a stroke for their mean."""
    largest = max(abs(x) for found in values.values() for x in found)
    across = Scale(-largest, largest, 565, 850)
    yield label(430, 24, "validation loss against FP32, %: seeds and their mean", weight=600)
    yield f'<line x1="{across(0):.0f}" x2="{across(0):.0f}" y1="38" y2="198" stroke="{GREY}"/>'
    for i, (name, found) in enumerate(values.items()):
        y, mean = 56 + 38 * i, sum(found) / len(found)
        yield label(546, y + 4, name, "end")
        for x in found:
            yield f'<circle cx="{across(x):.1f}" cy="{y}" r="4.5" fill="{colour_of(name)}" fill-opacity="0.55"/>'
        yield f'<rect x="{across(mean) - 1:.1f}" y="{y - 12}" width="2.5" height="24" fill="{INK}"/>'
    for x in (-1, 0, 1):
        if abs(x) <= largest:
            yield label(across(x), 212, f"{x:+d}" if x else "0", "middle", GREY)


def picture(text: str) -> str:
    """The SVG of the figures in `text`, which is docs/results.md."""
    try:
        parts = [*bars(state_bytes(text)), *dots(seed_differences(text))]
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(f"{RESULTS} does not hold what the picture shows ({error!r})") from error
    title = "Bytes of state per parameter, and validation losses against FP32, by precision"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 910 222" role="img" aria-label="{title}"'
    background = '<rect width="910" height="222" fill="#ffffff"/>'
    return f'{head} style="{STYLE}">\n{background}\n' + "\n".join(parts) + "\n</svg>\n"


def main(args: Arguments) -> None:
    """Write it and say where."""
    write_atomically(Path(args.out), picture(RESULTS.read_text(encoding="utf-8")))
    print(args.out)


if __name__ == "__main__":
    sys.exit(run(Arguments, "studies.readme_picture", __doc__ or "", main))
