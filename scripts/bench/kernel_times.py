"""Where the time of a step goes: kernels by class, as a profile has them, beside their
rooflines.

JAX's profiler writes what ran on a device; on a GPU kernel by kernel, with the
instruction that it is of where no CUDA graph hides it, on a CPU instruction by
instruction. The class of an instruction is read in the compiled program; that of a
kernel whose instruction is not known follows from its name.
"""

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from trainer.compiled.classes import CLASSES, GAPS, class_of_name, classes_of
from trainer.compiled.hlo import Program
from trainer.plan.figures import kernel_rooflines
from trainer.plan.targets import TARGETS, Target
from trainer.plan.times import kernel_predictions

STEPS_APART = ("while", "call", "conditional")  # that last as long as what they hold
TOP = 20


class Span(NamedTuple):
    """A kernel, or on a CPU an instruction, at work.

    Attributes:
      name: the kernel's.
      op: the instruction that it is of; empty where the profile does not say it.
      start, end: nanoseconds.
    """

    name: str
    op: str
    start: float
    end: float


def spans_of(folder: Path) -> list[Span]:
    """What ran on the devices of the newest profile below a folder. ValueError: there
    is none.
    """
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise ValueError(f"the profiler wrote nothing below {folder}")
    planes = list(jax.profiler.ProfileData.from_file(str(files[-1])).planes)
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    found = []
    for plane in gpus or planes:
        for line in plane.lines:
            if gpus and not line.name.startswith("Stream"):
                continue  # the same again, summed up
            for event in line.events:
                op = str(dict(event.stats).get("hlo_op", ""))
                if gpus or op:
                    found.append(
                        Span(
                            event.name,
                            op,
                            event.start_ns,
                            event.start_ns + event.duration_ns,
                        )
                    )
    return found


def class_of(span: Span, by_op: Mapping[str, str]) -> str:
    """The class of a kernel, of its instruction, or of one of the same name, or by its
    name.
    """
    for name in (span.op, span.name):
        if name in by_op:
            return by_op[name]
    return class_of_name(span.name)


def busy(spans: Iterable[Span]) -> float:
    """Nanoseconds in which at least one of them is at work."""
    total, until = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return total


def table_of(
    spans: Sequence[Span], program: Program | None, steps: int, target: Target | None
) -> dict[str, Any]:
    """Milliseconds and launches of a step by class; where the target is known, what
    roofline and time model have.

    Kernels of several streams may be at work at once: the classes then add up to more
    than the step.
    """
    own = {} if program is None else classes_of(program)
    # A kernel has its instruction's name, but for the characters that a function's name
    # cannot have.
    by_op = {re.sub(r"\W", "_", name): kind for name, kind in own.items()} | own
    loops = set()
    if program is not None:
        instructions = (
            i
            for computation in program.computations.values()
            for i in computation.values()
        )
        loops = {i.name for i in instructions if i.opcode in STEPS_APART}
    spans = [span for span in spans if span.op not in loops]
    ms, launches, single, roofline, expected = (
        defaultdict[str, float](float) for _ in range(5)
    )
    for span in spans:
        kind = class_of(span, by_op)
        ms[kind] += (span.end - span.start) / 1e6 / steps
        launches[kind] += 1 / steps
        single[f"{kind}: {span.op or span.name}"] += (
            (span.end - span.start) / 1e6 / steps
        )
    if program is not None and target is not None:
        for kernel, seconds in kernel_rooflines(program, target):
            roofline[own[kernel.name]] += 1e3 * seconds
        for kernel, seconds in kernel_predictions(program, target):
            expected[own[kernel.name]] += 1e3 * seconds
    whole = (
        (max(s.end for s in spans) - min(s.start for s in spans)) / 1e6 / steps
        if spans
        else 0.0
    )
    return {
        "step_ms": whole,
        "gaps_ms": whole - busy(spans) / 1e6 / steps,
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
        "longest": dict(sorted(single.items(), key=lambda item: -item[1])[:TOP]),
    }


def profiled(
    take: Callable[[int], float], steps: int, text: str, device: jax.Device
) -> dict[str, Any]:
    """The table of so many steps, warmed up before; `text`: of the compiled step."""
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
    """The table of a case as Markdown."""
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
    return [*lines, f"| {GAPS} | {gaps:.2f} | {gaps / step:.0%} | | | |"]
