"""Plant faults of one line, and see which the tests catch.

    make mutants                                  # draws, maps, runs: hours, resumable
    python -m scripts.mutants draw=100 seed=1     # only a new sample, drawn.jsonl
    python -m scripts.mutants out=runs/mutants    # goes on where it was

The sample is kept in the repository by content, so the same faults measure tests of
another day. The tests run once with coverage (`map=` leaves parts out), which tells the
test functions that execute a line. Each fault is planted in a copy of the repository;
the tests of its line run, those named after its file and the quickest first, and end
at the first that fails. What `make test` runs comes before the rest. A line that only
an import executes gets the tests of its file.

Results are lines of `out`/results.jsonl; the table is printed at the end.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from scripts.mutants.faults import Fault, draw
from trainer.cli.arguments import argument, run_script
from trainer.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
DRAWN = Path(__file__).with_name("drawn.jsonl")
COPIED = ("scalify_core", "trainer", "scripts", "tests", "docs", "examples")
QUICK = "not slow and (not e2e or smoke)"
COVERAGE = """\
[run]
source = scalify_core, trainer
parallel = true
data_file = {out}/lines/data
patch = subprocess
context = ${{SCALIFY_RUNNING_TEST-}}
disable_warnings = no-data-collected, module-not-imported, module-not-measured
"""

type Reach = Literal["test", "test-all", "none"]


@dataclass(frozen=True)
class Arguments:
    """What `key=value` may say."""

    out: str = argument("directory of the lines and the results", "runs/mutants")
    draw: int = argument("draw so many faults anew, and end", 0)
    seed: int = argument("of the draw", 1)
    tests: str = argument("what the map runs; tests, or folders of it", "tests")
    whole: bool = argument("whether make test-all's own tests run, too", True)
    seconds: int = argument("the most that the tests of one fault may take", 1800)


class Executed(NamedTuple):
    """Test functions by what they execute, and the seconds of each.

    Attributes:
      of_line: by file and line.
      of_file: by file, beyond its import.
      seconds: by test function.
    """

    of_line: Mapping[tuple[str, int], frozenset[str]]
    of_file: Mapping[str, frozenset[str]]
    seconds: Mapping[str, float]

    def tests_of(self, file: str, line: int) -> list[str]:
        """Return the test functions of a line.

        Those of a test file with the name of its file come first, then the quickest.
        """
        tests = self.of_line.get((file, line)) or self.of_file.get(file, frozenset())
        test_name = f"test_{Path(file).stem.strip('_')}"

        def order(test: str) -> tuple[bool, float, str]:
            return test_name not in test, self.seconds.get(test, 0.0), test

        return sorted(tests, key=order)


def main(args: Arguments) -> None:
    """Draw, or map and run."""
    if args.draw:
        faults = draw(ROOT, args.draw, args.seed)
        DRAWN.write_text("".join(json.dumps(fault) + "\n" for fault in faults))
        print(f"{len(faults)} faults in {DRAWN.relative_to(ROOT)}")
        return
    out = Path(args.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    executed = map_lines(out, args)
    results = out / "results.jsonl"
    done = {entry["name"]: entry for entry in read_lines(results)}
    faults = read_faults()
    for number, fault in enumerate(faults):
        if fault.name not in done:
            entry = {"name": fault.name} | measure(fault, executed, out, args)
            with results.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            done[fault.name] = entry
            print(f"{number + 1}/{len(faults)} {describe(fault, entry)}", flush=True)
    print("\n".join(table(faults, done)))
    check_passes_without_fault(out, {str(entry["by"]) for entry in done.values()})


def read_faults() -> list[Fault]:
    """Return the sample that is kept in the repository."""
    return [Fault(*entry) for entry in read_lines(DRAWN)]


def read_lines(path: Path) -> list:
    """Return the JSON of each line; none of a file that is not there."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def map_lines(out: Path, args: Arguments) -> Executed:
    """Return which tests execute which line, run once and kept."""
    stored = out / "executed.json"
    if not stored.exists():
        seconds = run_with_coverage(out, args)
        stored.write_text(json.dumps({"lines": contexts_of(out), "seconds": seconds}))
    data = json.loads(stored.read_text())
    of_line = {
        (file, int(line)): frozenset(tests)
        for file, lines in data["lines"].items()
        for line, tests in lines.items()
    }
    of_file: dict[str, frozenset[str]] = {}
    for (file, _), tests in of_line.items():
        of_file[file] = of_file.get(file, frozenset()) | tests
    return Executed(of_line, of_file, data["seconds"])


def run_with_coverage(out: Path, args: Arguments) -> dict[str, float]:
    """Run the tests with coverage; return the processor seconds of each function."""
    rc = out / "coverage.ini"
    rc.write_text(COVERAGE.format(out=out))
    (out / "lines").mkdir(exist_ok=True)
    chosen = [] if args.whole else ["-m", QUICK]
    command = [
        sys.executable, "-m", "coverage", "run", f"--rcfile={rc}",
        "-m", "pytest", "-p", "executed_lines", "-n", "2", "--dist", "loadfile",
        "--max-worker-restart", "0", *chosen, args.tests,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"COVERAGE_RCFILE": str(rc)}
    )
    if done.returncode not in (0, 1):
        raise UserError(f"the tests ended with {done.returncode}; see above")
    cache = ROOT / ".pytest_cache" / "v" / "scalify" / "seconds"
    seconds: Counter[str] = Counter()
    for test, took in json.loads(cache.read_text()).items():
        seconds[test.split("[")[0]] += took
    if not seconds:
        raise UserError("no test ran; see above")
    return dict(seconds)


def contexts_of(out: Path) -> dict[str, dict[str, list[str]]]:
    """Return the test functions of each line, by file and line, of coverage's data."""
    from coverage import CoverageData
    from coverage.exceptions import DataError

    lines: dict[str, dict[str, list[str]]] = {}
    for path in sorted((out / "lines").glob("data.*")):
        data = CoverageData(str(path))
        try:
            data.read()
        except DataError:
            print(f"left out {path.name}: a test killed the process that wrote it")
            continue
        for file in data.measured_files():
            name = os.path.relpath(file, ROOT)
            of_file = lines.setdefault(name, {})
            for line, contexts in data.contexts_by_lineno(file).items():
                # A program that a test starts has one context, beside its own.
                tests = {part for text in contexts for part in text.split("|") if part}
                known = of_file.setdefault(str(line), [])
                known += sorted(tests - set(known))
    return lines


def measure(
    fault: Fault, executed: Executed, out: Path, args: Arguments
) -> dict[str, object]:
    """Plant a fault in a copy of the repository, and run the tests of its line."""
    original = (ROOT / fault.file).read_text() if (ROOT / fault.file).exists() else ""
    planted, line = fault.plant(original), fault.line_number(original)
    if planted is None or line is None:
        return {"caught": "gone", "by": "", "tests": 0, "seconds": 0.0}
    copy = out / "copy"
    make_copy(copy)
    (copy / fault.file).write_text(planted)
    tests, began = executed.tests_of(fault.file, line), time.monotonic()
    caught, by = "none", ""
    for reach, marks in (("test", QUICK), ("test-all", f"not ({QUICK})")):
        if reach == "test" or args.whole:
            by = first_failure(copy, tests, marks, out, args.seconds)
        if by:
            caught = reach
            break
    seconds = round(time.monotonic() - began, 1)
    return {"caught": caught, "by": by, "tests": len(tests), "seconds": seconds}


def make_copy(copy: Path) -> None:
    """Make the copy what the repository is."""
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "runs")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, copy / path.name)


def first_failure(
    copy: Path, tests: list[str], marks: str, out: Path, seconds: int
) -> str:
    """Return the first of the tests that fails in a copy, or an empty string."""
    tests = [test for test in tests if (copy / test.split("::")[0]).exists()]
    if not tests:
        return ""
    command = [
        sys.executable, "-m", "pytest", "-x", "-n", "0", "-m", marks, "-p",
        "no:cacheprovider", "--tb=line", *tests,
    ]  # fmt: skip
    cache = out / "programs"
    cache.mkdir(exist_ok=True)
    environment = os.environ | {"SCALIFY_TEST_CACHE": str(cache)}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True,
            timeout=seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no end within {seconds} s"
    if done.returncode in (0, 5):  # 5: none of them has these marks
        return ""
    failed = [
        text
        for text in done.stdout.splitlines()
        if text.startswith(("FAILED", "ERROR"))
    ]
    return (failed or [f"pytest ended with {done.returncode}"])[0][:200]


def check_passes_without_fault(out: Path, caught_by: set[str]) -> None:
    """Raise UserError for tests that fail in a copy without any fault, too."""
    tests = [text.split()[1] for text in caught_by if text.startswith("FAILED")]
    make_copy(out / "copy")
    failure = first_failure(out / "copy", tests, "unit or not unit", out, 7200)
    if failure:
        raise UserError(f"caught nothing, as it fails without a fault: {failure}")


def describe(fault: Fault, entry: Mapping[str, object]) -> str:
    """Return a line about a fault and what became of it."""
    what = f"{fault.line.strip()} -> {fault.planted.strip()}"
    end = f"{entry['seconds']} s; {entry['by']}"
    return f"{entry['caught']:8} {fault.file}: {what} ({end})"


def table(faults: Iterable[Fault], done: Mapping[str, Mapping]) -> list[str]:
    """Return how many were caught, of each kind, and those that were not."""
    there = [fault for fault in faults if done[fault.name]["caught"] != "gone"]
    lines = [f"{len(there)} faults", "kind        planted  make test  make test-all"]
    for kind in ["all", *sorted({fault.kind for fault in there})]:
        of_kind = [f for f in there if kind in ("all", f.kind)]
        caught = Counter(str(done[f.name]["caught"]) for f in of_kind)
        both = caught["test"] + caught["test-all"]
        lines.append(f"{kind:11} {len(of_kind):7}  {caught['test']:9}  {both:13}")
    left = [f for f in there if done[f.name]["caught"] == "none"]
    return [*lines, "", *(describe(f, done[f.name]) for f in left)]


if __name__ == "__main__":
    sys.exit(run_script(Arguments, "mutants", __doc__ or "", main))
