"""Tabulate gradients under scalify of widely used models against plain FP32, FP16 and
BF16, leaf by leaf.

    python -m scripts.studies.zoo out=zoo.md models=llama,vit formats=fp16,fp8

A row is a model. `worst` is the leaf that is furthest beyond its limit: its error, that
of plain code in the same format (of FP8: of FP32 code with FP8 matmuls at the best
scales), and its zeros where they count. `trace` and `compile` are times, `instructions`
and `temporaries` sizes of the compiled program, over those of plain FP16
code. Each measured row is a JSON line beside the table; called again, the table
continues. Rows that other code has measured are measured again with `again=yes`.
"""

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from scripts.studies import rows
from trainer.cli.arguments import argument, run_script, split
from trainer.errors import UserError
from trainer.files import write_atomically
from trainer.run.environment import code_version
from trainer.text import nearest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))  # where `zoo` is

from zoo import BUILDERS, takes_fp8
from zoo.measure import FORMATS, SCALES, Cost, Subject, cost, measure
from zoo.sizes import inputs_moved, loss_scaled

if TYPE_CHECKING:
    from zoo.measure import Found


@dataclass(frozen=True)
class Arguments:
    """Settings of the table; see `--help`."""

    out: str = argument("the table, Markdown; its rows are beside it as .jsonl")
    models: str = argument("names, separated by commas; empty: all", "")
    formats: str = argument(f"of {', '.join(FORMATS)}", ",".join(FORMATS))
    scales: str = argument(f"of {', '.join(SCALES)}", ",".join(SCALES))
    depth: int = argument("of all models; 0: as deep as each is by itself", 0)
    width: int = argument("of all models; 0: as wide as each is by itself", 0)
    rounds: int = argument(
        "traces and compilations that the ratios are medians of; 0: none", 3
    )
    again: bool = argument("whether rows of other code are measured again", False)


def main(args: Arguments) -> None:
    """Measure the missing rows, and write the table after each model."""
    models, formats, scales = (
        chosen("models", args.models, list(BUILDERS)),
        *columns_of(args),
    )
    out, settings = Path(args.out), {"depth": args.depth, "width": args.width}
    lines = out.with_suffix(".jsonl")
    version = code_version()
    known = {
        row["model"]: row
        for row in rows.read(lines)
        if {key: row[key] for key in settings} == settings
        and (not args.again or row["code"] == version)
    }
    columns = [(format, way) for format in formats for way in scales]
    for number, model in enumerate(models, 1):
        start = time.monotonic()
        row = known.setdefault(
            model,
            {"model": model, **settings, "code": version, "found": {}, "cost": None},
        )
        todo = [
            (f, w)
            for f, w in columns
            if f"{f} {w}" not in row["found"] and (f != "fp8" or takes_fp8(model))
        ]
        if todo or (args.rounds and row["cost"] is None):
            print(f"{number} of {len(models)}: {model} ...", end="", flush=True)
            fill(
                row,
                Subject(model, args.depth or None, args.width or None),
                todo,
                args.rounds,
            )
            rows.append(lines, row)
            print(f" {summary(row)} ({time.monotonic() - start:.0f} s)", flush=True)
            jax.clear_caches()
        write_atomically(
            out, markdown([known[name] for name in models if name in known], columns)
        )
    print(markdown([known[name] for name in models], columns))


def chosen(key: str, text: str, valid: list[str]) -> list[str]:
    """Return the names of a list, all if it is empty; UserError for an invalid one."""
    names = split(text) or valid
    for name in names:
        if name not in valid:
            raise UserError(f"{key}={text}: unknown {name}; {nearest(name, valid)}")
    return names


def columns_of(args: Arguments) -> tuple[list[str], list[str]]:
    """Return the formats and the kinds of scales."""
    return chosen("formats", args.formats, list(FORMATS)), chosen(
        "scales", args.scales, list(SCALES)
    )


def fill(
    row: dict[str, Any], subject: Subject, todo: list[tuple[str, str]], rounds: int
) -> None:
    """Measure the row's missing figures. An exception of a model is its result."""
    for format, scales in todo:
        try:
            measured = measure(subject, format, scales)
            row["found"][f"{format} {scales}"] = figures(measured)
            if format == "fp32":
                worst = max(loss_scaled(subject, scales).values())
                if subject.case.powers is not None:
                    worst = max(worst, *inputs_moved(subject, scales).values())
                row["found"][f"{format} {scales}"]["resized"] = (
                    worst if math.isfinite(worst) else "inf"
                )
        # whatever a model raises is what is to be known of it
        except Exception as error:
            row["found"][f"{format} {scales}"] = {
                "raises": f"{type(error).__name__}: {error}"[:300],
                "fits": False,
            }
    if rounds and row["cost"] is None:
        try:
            row["cost"] = cost(subject, rounds=rounds)._asdict()
        except Exception as error:
            row["cost"] = {"raises": f"{type(error).__name__}: {error}"[:300]}


def figures(measured: "Found") -> dict[str, Any]:
    """Return the stored figures of a measurement."""
    worst = measured.worst

    def number(x: float) -> float | str:
        return x if math.isfinite(x) else "inf"

    return {
        "fits": measured.fits,
        "leaves": len(measured.leaves),
        "failures": len(measured.failures),
        "leaf": worst.path,
        **{
            name: number(getattr(worst, name))
            for name in ("error", "plain", "limit", "zeros", "plain_zeros")
        },
        "most_error": number(
            max(leaf.error for leaf in measured.leaves if leaf.determined)
        ),
        "most_plain": number(
            max(leaf.plain for leaf in measured.leaves if leaf.determined)
        ),
        "most_zeros": number(
            max(leaf.zeros for leaf in measured.leaves if leaf.determined)
        ),
    }


def summary(row: dict[str, Any]) -> str:
    """Describe a row in words, for the progress."""
    failed = [name for name, result in row["found"].items() if not holds(result)]
    ratios = row["cost"]
    times = (
        "".join(f", {name} {ratios[name]:.2f}" for name in Cost._fields)
        if ratios and "trace" in ratios
        else ""
    )
    return ("fails: " + ", ".join(failed) if failed else "fits") + times


def holds(result: dict[str, Any]) -> bool:
    """Return whether a measurement is within its limits, with other loss sizes too."""
    return result["fits"] and float(result.get("resized", 0)) <= 1


def markdown(measured: list[dict[str, Any]], columns: list[tuple[str, str]]) -> str:
    """Format the table; a dash where there is no figure."""
    head = [
        "model",
        *(f"{format} {scales}" for format, scales in columns),
        *Cost._fields,
        "verdict",
    ]
    body = []
    for row in measured:
        results = [row["found"].get(f"{format} {scales}") for format, scales in columns]
        ratios = row["cost"] or {}
        times = [
            f"{ratios[name]:.2f}" if name in ratios else "-" for name in Cost._fields
        ]
        fits = all(holds(x) for x in results if x)
        verdict = "fits" if fits else "**fails**"
        cells = [row["model"], *map(cell, results), *times, verdict]
        body.append(cells)
    return (
        rows.table(head, body)
        + "\nError of the worst leaf / that of plain code in the format, with the"
        " leaves that fail of all, the share of zeros in the leaf with most where"
        " plain code has values, and for FP32 the error over its limit where the loss"
        " or the inputs are multiplied by 2^-120 to 2^120 (resized).\n"
    )


def cell(result: dict[str, Any] | None) -> str:
    """Format one measurement."""
    if result is None:
        return "-"
    if "raises" in result:
        return f"raises {result['raises'].split(':')[0]}"
    text = f"{float(result['error']):.2g} / {float(result['plain']):.2g}"
    if result["failures"]:
        text = f"**{text}**, {result['failures']} of {result['leaves']}"
    if result["most_zeros"]:
        text += f", zeros {float(result['most_zeros']):.1%}"
    if float(result.get("resized", 0)) > 1:
        text += f", resized **{float(result['resized']):.2g}**"
    return text


if __name__ == "__main__":
    sys.exit(run_script(Arguments, "studies.zoo", __doc__ or "", main))
