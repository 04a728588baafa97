"""Inject random faults into a run, and compare its end with an undisturbed run.

    python -m scripts.faults.chaos out=runs/chaos faults=50
    python -m scripts.faults.chaos out=runs/chaos faults=300 tracker=jsonl \\
        precision=fp32,scalify_fp8_fp16

Both runs are of a tiny model on the embedded corpus, on CPU, and get the same bad data:
a batch with an invalid id, which is skipped, and weights that become large, from which
the watchdog rolls back. Only one run is killed, terminated, deprived of disk space and
so on (see `scripts.faults.fault_injection`), and restarted. The end must be bit-equal.
Each fault must have happened, and what cannot be survived must be refused in one line.

The same command continues a study that was interrupted: each fault is a line of
`faults.jsonl`.
"""

import json
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.faults.fault_injection import (
    OF_WANDB,
    VALIDATIONS,
    choose_faults,
    unnoticed,
)
from scripts.faults.faulty import HAPPENED
from scripts.faults.victim import Victim, checkpoints, last_step
from trainer.cli.arguments import argument, run_script, split
from trainer.errors import UserError
from trainer.files import parse_json
from trainer.observe.records import read_rows
from trainer.text import note

type Fault = Callable[[Victim], str]

SMALL = [
    "model.n_layer=2",
    "model.n_head=2",
    "model.d_model=32",
    "model.context=32",
    "model.dropout=0.1",
    "train.batch_tokens=512",
    "optimizer.lr=6e-4",
    "train.eval_batches=2",
    "sample.max_new_tokens=8",
    "metrics.numerics_every=0",
]
TINY = [
    *SMALL,
    f"train.eval_every={VALIDATIONS}",
    "train.final_eval_batches=4",
    "checkpoint.every=20",
    "watchdog.max_skips=5",
    "watchdog.spike_window=16",
    "watchdog.spike_steps=3",
    "watchdog.stop_seconds=60",
    "watchdog.hang_seconds=600",
]


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    out: str = argument(
        "a directory, new or of the same command; it gets PRECISION/chaos.json"
    )
    faults: int = argument("how many, of all precisions together", 50)
    steps: int = argument("of each run; 0: 30 for each of its faults, and 150", 0)
    seed: int = argument("of the faults", 0)
    precision: str = argument(
        "of the runs; several, separated by commas, share the faults",
        "scalify_fp8_fp16",
    )
    tracker: str = argument("of the runs: wandb (offline) or jsonl", "wandb")
    kinds: str = argument(
        "names of faults, separated by commas; empty: all of them", ""
    )


LAST = 100  # steps after the last fault, so that it finds the run at work
OWN_EVENTS = re.compile("stalled: |no progress for |.* was removed or replaced while ")


@dataclass(frozen=True)
class Study:
    """The runs of one precision.

    Attributes:
      folder: of both runs.
      faults: how many.
      steps: of each run.
      bad_data: faults of both runs, as settings of `scripts.faults.faulty`.
      overrides: of both runs.
    """

    folder: Path
    faults: int
    steps: int
    bad_data: dict[str, list[int]]
    overrides: list[str]

    def victim(self, name: str) -> Victim:
        """Return one of the runs."""
        return Victim(self.overrides, self.folder, name, self.bad_data)


def make_study(args: Arguments, precision: str, faults: int) -> Study:
    """Return the study of one precision, with its directory."""
    steps = args.steps or 30 * faults + LAST + 50
    if steps < 30 * faults + LAST:
        raise UserError(
            f"steps={steps} is little for {faults} faults; valid: 0, or"
            f" {30 * faults + LAST} or more"
        )
    folder = Path(args.out).resolve() / precision
    folder.mkdir(parents=True, exist_ok=True)
    return Study(
        folder,
        faults,
        steps,
        {"nan": [steps // 3], "corrupt": [steps // 2 + 13]},
        [
            *TINY,
            f"precision={precision}",
            f"train.steps={steps}",
            f"tracker={args.tracker}",
        ],
    )


def figures(run_dir: Path) -> list[dict[str, Any]]:
    """Return all rows and events, without what depends on clock, memory or faults."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("perf/", "memory/"))}
        for row in read_rows(run_dir / "metrics.jsonl")
        if not OWN_EVENTS.match(str(row.get("event", "")))
    ]


def read_wandb_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a W&B transaction log."""
    from trainer.observe.trackers.wandb_files import history_records

    for history in history_records(path):
        yield {
            item.key or "/".join(item.nested_key): parse_json(item.value_json)
            for item in history.item
        }


def compare(study: Study, tracker: str) -> dict[str, Any]:
    """Return which properties are equal in both runs."""
    from trainer.observe.trackers.wandb_files import wandb_files
    from trainer.run.checkpoint import Checkpointer
    from trainer.run.libraries import hide_missing_gpu

    hide_missing_gpu()
    states, rows, bad_data = [], [], []
    for name in ("undisturbed", "disturbed"):
        run_dir = study.folder / name
        with Checkpointer.reading(run_dir / "checkpoints") as checkpointer:
            states.append(checkpointer.manifest().leaves)
        rows.append(figures(run_dir))
        bad_data.append(set((run_dir / HAPPENED).read_text().splitlines()))
    expected = {f"{kind} {step}" for kind, (step,) in study.bad_data.items()}
    every_step = list(range(1, study.steps + 1))
    run_dir = study.folder / "disturbed"
    result = {
        "state_equal": states[0] == states[1],
        "leaves": len(states[0]),
        "rows_equal": rows[0] == rows[1],
        "bad_data_happened": bad_data == [expected, expected],
        "every_step_logged_once": [row["step"] for row in rows[1] if "event" not in row]
        == every_step,
        "newest_checkpoint": checkpoints(run_dir)[-1],
        "skipped": rows[1][-1]["watchdog/skipped"],
        "rollbacks": rows[1][-1]["watchdog/rollbacks"],
        "new_scales": sum(
            str(row.get("event", "")).startswith("new scales") for row in rows[1]
        ),
        "damaged_set_aside": len(list((run_dir / "checkpoints" / "damaged").glob("*"))),
    }
    if tracker == "wandb":
        run_id = (run_dir / "wandb" / "run_id").read_text()
        sent = [
            row["step"]
            for path in wandb_files(run_dir, run_id)
            for row in read_wandb_rows(path)
        ]
        result["every_step_in_wandb_once"] = sorted(sent) == every_step
    return result


def inject(study: Study, args: Arguments, kinds: list[Fault]) -> list[dict[str, Any]]:
    """Disturb a run until all faults have happened and it is done.

    Returns:
      A dictionary for each fault, as in `faults.jsonl`, and one for the end.
    """
    chaos, log = study.victim("disturbed"), study.folder / "faults.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    chaos.damaged = [step for line in lines for step in line["damaged"]]
    order = [kinds[i % len(kinds)] for i in range(study.faults)]
    random.Random(args.seed).shuffle(order)
    window = (study.steps - LAST - 50) / max(1, study.faults)
    try:
        for i, fault in enumerate([*order, finish][len(lines) :], len(lines)):
            began, damages_before = time.monotonic(), len(chaos.damaged)
            chaos.rng = random.Random(f"{args.seed} {i}")
            chaos.target = int(50 + window * (i + chaos.rng.random()))
            chaos.starts, chaos.notes = 0, []
            what = fault(chaos)
            if not what:
                chaos.notes.append("did not happen")
            lines.append(
                {
                    "fault": fault.__name__,
                    "from_step": chaos.target,
                    "what": what,
                    "unexpected": chaos.notes,
                    "damaged": chaos.damaged[damages_before:],
                    "starts": chaos.starts,
                    "seconds": round(time.monotonic() - began, 1),
                }
            )
            with log.open("a", encoding="utf-8") as file:
                print(json.dumps(lines[-1]), file=file)
            note(f"{i + 1} of {study.faults}: {fault.__name__}: {what}")
            for text in chaos.notes:
                note(f"  {text}")
    finally:
        if chaos.process is not None:
            chaos.process.kill()
    lines[-1]["unnoticed"] = unnoticed(chaos)
    return lines


def finish(run: Victim) -> str:
    """Let the run take its last steps."""
    run.running()
    run.ended(0, saying="done: ")
    run.start()  # a finished run only sends the rest to W&B
    run.ended(0, saying="done: ")
    return f"done after step {last_step(run.run_dir)}"


def examine(study: Study, args: Arguments, kinds: list[Fault]) -> tuple[str, bool]:
    """Make both runs of a precision, and compare them.

    Returns:
      A row for docs/measurements.md, and whether all was as it should be.
    """
    if not (study.folder / "faults.jsonl").exists():
        calm = study.victim("undisturbed")
        calm.start()
        calm.ended(0, saying="done: ")
        if calm.notes:
            raise UserError(f"the undisturbed run failed: {calm.notes[0]}")
        (study.folder / "faults.jsonl").touch()
    lines = inject(study, args, kinds)
    unexpected = [
        f"{line['fault']}: {text}" for line in lines for text in line["unexpected"]
    ]
    result = compare(study, args.tracker) | {
        "damage_noticed": not lines[-1]["unnoticed"],
        "every_fault_as_expected": not unexpected,
        "faults": study.faults,
        "kinds": dict(Counter(line["fault"] for line in lines[: study.faults])),
        "starts": sum(line["starts"] for line in lines),
        "seconds": round(sum(line["seconds"] for line in lines)),
        "unexpected": unexpected,
    }
    (study.folder / "chaos.json").write_text(
        json.dumps(result, indent=1) + "\n", encoding="utf-8"
    )
    held = [k for k, v in result.items() if v is True]
    failed = [k for k, v in result.items() if v is False]
    course = (
        f"{study.steps} steps, {result['skipped']} skipped, {result['rollbacks']}"
        f" rolled back, {result['new_scales']} with new scales"
    )
    row = (
        f"| {study.folder.name} | {study.faults} faults of {len(result['kinds'])}"
        f" kinds, {result['starts']} starts, {result['seconds']} s | {course} |"
        f" {', '.join(held)} | {', '.join(failed) or 'nothing'} |"
    )
    return row, not failed


def main(args: Arguments) -> None:
    """Make the study of each precision, and print a row of it for docs/measurements.md.

    Raises:
      UserError: anything was not as it should be.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    without = () if args.tracker == "wandb" else OF_WANDB
    kinds = choose_faults(args.kinds, without)
    precisions = split(args.precision)
    parts = [
        args.faults // len(precisions) + (i < args.faults % len(precisions))
        for i in range(len(precisions))
    ]
    studies = [
        make_study(args, precision, faults)
        for precision, faults in zip(precisions, parts, strict=True)
    ]
    ends = [examine(study, args, kinds) for study in studies]
    print("\n".join(row for row, _ in ends))
    if not all(is_good for _, is_good in ends):
        raise UserError(f"not all was as expected; see {args.out}/*/chaos.json")


if __name__ == "__main__":
    sys.exit(run_script(Arguments, "faults.chaos", __doc__ or "", main))
