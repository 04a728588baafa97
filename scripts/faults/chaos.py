"""Inject random faults into a run, and compare its end with an undisturbed run.

    python -m scripts.faults.chaos out=runs/chaos faults=50 seed=0

Both runs are of a tiny model on the embedded corpus, on CPU, and get the same bad data:
a batch with an invalid id, which is skipped, and weights that become large, from which
the watchdog rolls back. Only one run is killed, terminated, deprived of disk space and
so on (see `scripts.faults.fault_injection`), and restarted. The end must be bit-equal.
"""

import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.faults.fault_injection import (
    VALIDATIONS,
    Victim,
    checkpoints,
    choose_faults,
    launch,
    unnoticed,
)
from scripts.faults.faulty import HAPPENED
from trainer.cli.arguments import argument, run_script
from trainer.errors import UserError
from trainer.observe.records import read_rows

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
        "a directory that does not exist yet; the result is chaos.json in it"
    )
    faults: int = argument("how many", 50)
    steps: int = argument("of each run; at least 30 for each fault", 1500)
    seed: int = argument("of the faults", 0)
    precision: str = argument("of both runs", "scalify_fp8_fp16")
    tracker: str = argument("of both runs: wandb (offline) or jsonl", "wandb")
    kinds: str = argument(
        "names of faults, separated by commas; empty: all of them", ""
    )


def figures(run_dir: Path) -> list[dict[str, Any]]:
    """Return all rows and events, without what depends on clock, memory or stalls."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("perf/", "memory/"))}
        for row in read_rows(run_dir / "metrics.jsonl")
        if not str(row.get("event", "")).startswith(("stalled: ", "no progress for "))
    ]


def bad_data(args: Arguments) -> dict[str, list[int]]:
    """Return the faults of both runs, as settings of `scripts.faults.faulty`."""
    return {"nan": [args.steps // 3], "corrupt": [args.steps // 2 + 13]}


def compare(args: Arguments, folder: Path) -> dict[str, Any]:
    """Return which properties are equal in both runs."""
    from trainer.observe.trackers.wandb_files import read_history, wandb_files
    from trainer.run.checkpoint import Checkpointer
    from trainer.run.libraries import hide_missing_gpu

    hide_missing_gpu()
    states, rows = [], []
    for name in ("undisturbed", "disturbed"):
        with Checkpointer.reading(folder / name / "checkpoints") as checkpointer:
            states.append(checkpointer.described())
        rows.append(figures(folder / name))
    expected = {
        f"{kind} {step}" for kind, steps in bad_data(args).items() for step in steps
    }
    happened = [
        set((folder / name / HAPPENED).read_text().splitlines())
        for name in ("undisturbed", "disturbed")
    ]
    steps = [row["step"] for row in rows[1] if "event" not in row]
    result = {
        "state_equal": states[0] == states[1],
        "leaves": len(states[0]),
        "rows_equal": rows[0] == rows[1],
        "faults_happened": happened == [expected, expected],
        "every_step_logged_once": steps == list(range(1, args.steps + 1)),
        "newest_checkpoint": checkpoints(folder / "disturbed")[-1],
        "skipped": rows[1][-1]["watchdog/skipped"],
        "rollbacks": rows[1][-1]["watchdog/rollbacks"],
        "damaged_set_aside": len(
            list((folder / "disturbed" / "checkpoints" / "damaged").glob("*"))
        ),
    }
    if args.tracker == "wandb":
        run_id = (folder / "disturbed" / "wandb" / "run_id").read_text()
        sent = [
            row["step"]
            for path in wandb_files(folder / "disturbed", run_id)
            for row in read_history(path)
        ]
        result["every_step_in_wandb_once"] = sorted(sent) == list(
            range(1, args.steps + 1)
        )
    return result


def main(args: Arguments) -> None:
    """Run both, compare them, and print a row for docs/results.md.

    Raises:
      UserError: anything was not as it should be.
    """
    folder = Path(args.out).resolve()
    if args.steps < 30 * args.faults:
        raise UserError(
            f"steps={args.steps} is little for {args.faults} faults; valid:"
            f" {30 * args.faults} or more"
        )
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"out={folder} exists; choose another directory") from None
    kinds = choose_faults(args.kinds)
    started, rng = time.monotonic(), random.Random(args.seed)
    bad = bad_data(args)
    overrides = [
        *TINY,
        f"precision={args.precision}",
        f"train.steps={args.steps}",
        f"tracker={args.tracker}",
    ]
    calm = Victim(overrides, folder, rng, bad)
    calm.process = launch(overrides, folder, "undisturbed", bad, calm.log)
    calm.ended(0, saying="done: ")
    if calm.notes:
        raise UserError(f"the undisturbed run failed: {calm.notes[0]}")
    alone = time.monotonic() - started

    chaos = Victim(overrides, folder, rng, bad)
    order = [kinds[i % len(kinds)] for i in range(args.faults)]
    rng.shuffle(order)
    for i, fault in enumerate(order):
        chaos.target = args.steps * i // args.faults + rng.randrange(
            args.steps // args.faults
        )
        print(
            f"fault {i + 1} of {args.faults}, from step {chaos.target} on:"
            f" {fault.__name__}",
            flush=True,
        )
        fault(chaos)
        chaos.notes, notes = [], chaos.notes
        for note in notes:
            print(f"  {note}", flush=True)
            calm.notes.append(f"{fault.__name__}: {note}")
    while (
        checkpoints(chaos.run_dir)[-1:] != [args.steps]
        and chaos.starts < 3 * args.faults + 10
    ):
        chaos.running()
        chaos.ended(0, saying="done: ")
    if chaos.process is not None:
        chaos.ended(0)
    chaos.start()  # a finished run only sends the rest to W&B
    chaos.ended(0, saying="done: ")
    counted = Counter(fault.__name__ for fault in order)
    result = compare(args, folder) | {
        "faults": args.faults,
        "kinds": dict(counted),
        "starts": chaos.starts,
    }
    result |= {"damage_noticed": not unnoticed(chaos), "damaged": len(chaos.damaged)}
    result |= {
        "unexpected": calm.notes + chaos.notes,
        "seconds": round(time.monotonic() - started),
    }
    result |= {"seconds_undisturbed": round(alone)}
    (folder / "chaos.json").write_text(
        json.dumps(result, indent=1) + "\n", encoding="utf-8"
    )
    passed = [k for k, v in result.items() if v is True]
    failed = [k for k, v in result.items() if v is False]
    done = f"{args.faults} faults of {len(counted)} kinds, {chaos.starts} starts"
    course = (
        f"{args.steps} steps, {result['skipped']} skipped, {result['rollbacks']} rolled"
        " back"
    )
    print(
        f"| {args.precision} | {done} | {course} | {', '.join(passed)} |"
        f" {', '.join(failed) or 'nothing'} |"
    )
    if failed or result["unexpected"]:
        raise UserError(
            f"failed: {', '.join(failed)}; {len(result['unexpected'])} unexpected"
            f" events; see {folder}"
        )


if __name__ == "__main__":
    sys.exit(run_script(Arguments, "faults.chaos", __doc__ or "", main))
