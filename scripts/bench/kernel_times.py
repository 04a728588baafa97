"""Kernel times of a step by class, from a profile, compared with rooflines.

JAX's profiler records a GPU kernel by kernel, with its instruction unless a CUDA graph
hides it, and a CPU instruction by instruction. The class of an instruction is read from
the compiled program. The class of a kernel without instruction follows from its name.
"""

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from trainer.compiled.classes import CLASSES, GAPS, class_of_name, classes_of
from trainer.compiled.hlo import Program
from trainer.plan.figures import kernel_rooflines
from trainer.plan.targets import TARGETS, Target
from trainer.plan.times import kernel_predictions

CONTAINERS = ("while", "call", "conditional")  # as long as the instructions inside
TOP = 20  # kernels that are printed; `out` has all


@dataclass
class Row:
    """A kernel and those that are the same one, in a step.

    Attributes:
      name: of the first instruction, or of the kernel.
      kind: its class.
      ms: milliseconds of all launches.
      launches: their number.
    """

    name: str
    kind: str
    ms: float = 0.0
    launches: float = 0.0


class Span(NamedTuple):
    """The execution of a kernel, or on a CPU of an instruction.

    Attributes:
      name: the kernel's.
      op: its instruction; empty where the profile lacks it.
      start: nanoseconds.
      end: nanoseconds.
    """

    name: str
    op: str
    start: float
    end: float


def spans_of(folder: Path) -> list[Span]:
    """Return the executions in the newest profile below a folder; ValueError: none."""
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise ValueError(f"the profiler wrote nothing below {folder}")
    planes = list(jax.profiler.ProfileData.from_file(str(files[-1])).planes)
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    spans = []
    for plane in gpus or planes:
        for line in plane.lines:
            if gpus and not line.name.startswith("Stream"):
                continue  # a summary of the streams
            for event in line.events:
                op = str(dict(event.stats).get("hlo_op", ""))
                if gpus or op:
                    end = event.start_ns + event.duration_ns
                    spans.append(Span(event.name, op, event.start_ns, end))
    return spans


def class_of(span: Span, by_op: Mapping[str, str]) -> str:
    """Return the class of an execution by instruction, or else by kernel name."""
    for name in (span.op, span.name):
        if name in by_op:
            return by_op[name]
    return class_of_name(span.name)


def busy(spans: Iterable[Span]) -> float:
    """Return the nanoseconds in which at least one of the kernels is executed."""
    total, until = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return total


def same_kernels(program: Program) -> dict[str, str]:
    """Return, for each instruction, the one whose kernel it runs."""
    same = {}
    for executed in program.executed:
        twin = re.search(r'deduplicated_name="([^"]+)"', executed.instruction.text)
        same[executed.instruction.name] = twin[1] if twin else executed.instruction.name
    return same


def table_of(
    spans: Sequence[Span], program: Program | None, steps: int, target: Target | None
) -> dict[str, Any]:
    """Return a step's milliseconds and launches by class, with roofline and prediction.

    The latter need a target. Kernels of several streams may run at once: the classes
    then add up to more than the step.
    """
    classes = {} if program is None else classes_of(program)
    same = {} if program is None else same_kernels(program)
    # A kernel has its instruction's name, except for characters that are invalid in
    # function names.
    valid = {re.sub(r"\W", "_", name): name for name in classes}
    by_op = {name: classes[twin] for name, twin in valid.items()} | classes
    containers = set()
    if program is not None:
        for computation in program.computations.values():
            for instruction in computation.values():
                if instruction.opcode in CONTAINERS:
                    containers.add(instruction.name)
    spans = [span for span in spans if span.op not in containers]
    ms, launches, roofline, expected, forecast = (
        defaultdict[str, float](float) for _ in range(5)
    )
    kernels: dict[str, Row] = {}
    for span in spans:
        kind = class_of(span, by_op)
        span_ms = (span.end - span.start) / 1e6 / steps
        ms[kind] += span_ms
        launches[kind] += 1 / steps
        # Inside a CUDA graph `op` is the graph.
        name = span.op if span.op in same else valid.get(span.name, span.name)
        name = same.get(name, name)
        row = kernels.setdefault(name, Row(name, kind))
        row.ms += span_ms
        row.launches += 1 / steps
    if program is not None and target is not None:
        for kernel, seconds in kernel_rooflines(program, target):
            roofline[classes[kernel.name]] += 1e3 * seconds
        for kernel, seconds in kernel_predictions(program, target):
            expected[classes[kernel.name]] += 1e3 * seconds
            forecast[same[kernel.name]] += 1e3 * seconds
    total = 0.0
    if spans:
        total = max(s.end for s in spans) - min(s.start for s in spans)
    step_ms = total / 1e6 / steps
    return {
        "step_ms": step_ms,
        "gaps_ms": step_ms - busy(spans) / 1e6 / steps,
        "classes": {
            kind: {
                "ms": ms[kind],
                "launches": launches[kind],
                "roofline_ms": roofline[kind] if target else None,
                "predicted_ms": expected[kind] if target else None,
            }
            for kind in CLASSES
            if ms[kind] or roofline[kind]
        },
        "kernels": [
            asdict(row) | {"predicted_ms": forecast.get(row.name)}
            for row in sorted(kernels.values(), key=lambda row: -row.ms)
        ],
    }


def profiled(
    take: Callable[[int], float], steps: int, text: str, device: jax.Device
) -> dict[str, Any]:
    """Profile some steps after the warm-up; `text` is that of the compiled step."""
    target = next(
        (target for target in TARGETS.values() if target.device == device.device_kind),
        None,
    )
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        with jax.profiler.trace(folder):
            take(steps)
        spans = spans_of(Path(folder))
    return table_of(spans, Program(text) if text else None, steps, target)


def lines_of(name: str, table: Mapping[str, Any]) -> list[str]:
    """Return the table of a case as Markdown lines."""
    step = table["step_ms"] or 1.0
    lines = [f"{name}: {table['step_ms']:.2f} ms a step", ""]
    lines += [
        "| class | ms | share | launches | roofline, ms | predicted, ms |",
        "|---" * 6 + "|",
    ]
    for kind, row in table["classes"].items():
        others = [
            "" if row[name] is None else f"{row[name]:.2f}"
            for name in ("roofline_ms", "predicted_ms")
        ]
        share = f"{row['ms'] / step:.0%}"
        lines.append(
            f"| {kind} | {row['ms']:.2f} | {share} | {row['launches']:.0f} |"
            f" {others[0]} | {others[1]} |"
        )
    gaps = table["gaps_ms"]
    lines += [f"| {GAPS} | {gaps:.2f} | {gaps / step:.0%} | | | |", ""]
    lines += ["| longest kernels | class | ms | launches | predicted, ms |"]
    lines += ["|---" * 5 + "|"]
    for row in table["kernels"][:TOP]:
        predicted = "" if row["predicted_ms"] is None else f"{row['predicted_ms']:.2f}"
        lines.append(
            f"| {row['name'][:60]} | {row['kind']} | {row['ms']:.2f} |"
            f" {row['launches']:.0f} | {predicted} |"
        )
    return lines
