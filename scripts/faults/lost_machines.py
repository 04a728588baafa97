"""Kill workers, nodes and the command of a run under Ray, and compare its end with an
undisturbed run.

    python -m scripts.faults.lost_machines out=runs/lost faults=10

Both runs are of a tiny model on CPU, in two processes. One runs under Ray, on two nodes
of this machine, and is disturbed: a worker gets SIGKILL or freezes (SIGSTOP), a node is
killed and another one started, or the command gets SIGKILL and is called again. Each
must go on from its newest checkpoint, and the end must be bit-equal.
"""

import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from scripts.faults.chaos import SMALL, figures
from scripts.faults.ray_cluster import Nodes, cluster
from scripts.faults.victim import last_step
from trainer.cli.arguments import argument, run_script
from trainer.errors import UserError
from trainer.text import note

BETWEEN = 30  # steps between two faults
PATIENCE = 1800  # seconds that anything may take
WORKERS = 2


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    out: str = argument("a new directory; it gets lost_machines.json")
    faults: int = argument("how many, of all kinds in turn", 10)
    parallel: str = argument("of both runs: fsdp or data", "fsdp")
    precision: str = argument("of both runs", "scalify_fp8_fp16")


@dataclass
class Disturbed:
    """The run under Ray.

    Attributes:
      nodes: of the cluster.
      folder: the parent of its directory.
      words: its settings.
      log: gets what the command prints.
      process: the command.
    """

    nodes: Nodes
    folder: Path
    words: list[str]
    log: IO[str]
    process: "subprocess.Popen[str] | None" = None

    def start(self) -> None:
        """Call the command."""
        self.process = launch(
            self.folder,
            "disturbed",
            [*self.words, "launcher=ray", f"launcher.workers=[{WORKERS},{WORKERS}]"],
            self.log,
            {"RAY_ADDRESS": self.nodes.address},
        )

    def reach(self, step: int) -> None:
        """Wait until the run has logged a step. Raises UserError if it does not."""
        assert self.process is not None
        end = time.monotonic() + PATIENCE
        while last_step(self.folder / "disturbed") < step:
            if self.process.poll() is not None or time.monotonic() > end:
                raise UserError(
                    f"the disturbed run did not reach step {step}; see {self.log.name}"
                )
            time.sleep(0.02)

    def starts(self) -> int:
        """Return how often the run was started, by its workers."""
        path = self.folder / "disturbed" / "environment.txt"
        return path.read_text(encoding="utf-8").count("\nprocesses: ")

    def recover(self, step: int, starts: int) -> None:
        """Wait for a start beyond `starts`, and then for a step that is new.

        Workers outlive a killed command by some steps.
        """
        end = time.monotonic() + PATIENCE
        while self.starts() <= starts:
            step = max(step, last_step(self.folder / "disturbed"))
            if time.monotonic() > end:
                raise UserError(f"workers did not start again; see {self.log.name}")
            time.sleep(0.02)
        self.reach(1 + step)


def kill_worker(run: Disturbed) -> None:
    """Send SIGKILL to a worker."""
    os.kill(run.nodes.workers()[-1], signal.SIGKILL)


def freeze_worker(run: Disturbed) -> None:
    """Send SIGSTOP to a worker, which then is silent and keeps its connections."""
    os.kill(run.nodes.workers()[-1], signal.SIGSTOP)


def kill_node(run: Disturbed) -> None:
    """Kill a node, and start another one."""
    run.nodes.kill()
    run.nodes.add()


def kill_command(run: Disturbed) -> None:
    """Send SIGKILL to the command, and call it again."""
    assert run.process is not None
    run.process.kill()
    run.process.wait()
    run.start()


KINDS: list[Callable[[Disturbed], None]] = [
    kill_worker,
    kill_node,
    kill_command,
    freeze_worker,
]


def launch(
    folder: Path,
    name: str,
    words: list[str],
    log: IO[str],
    variables: dict[str, str],
) -> "subprocess.Popen[str]":
    """Start a trainer on one CPU device in `folder / name`."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    settings = {
        "JAX_PLATFORMS": "cpu",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": "",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", f"run_dir={name}", *words],
        cwd=folder,
        env=inherited | settings | variables,
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
    )


def undisturbed(folder: Path, words: list[str]) -> None:
    """Train in two processes without Ray. Raises UserError where that fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with (folder / "undisturbed.log").open("w", encoding="utf-8") as log:
        processes = [
            launch(
                folder,
                "undisturbed",
                [*words, "parallel.distributed=true"],
                log,
                {
                    "JAX_COORDINATOR_ADDRESS": address,
                    "JAX_NUM_PROCESSES": str(WORKERS),
                    "JAX_PROCESS_ID": str(i),
                },
            )
            for i in range(WORKERS)
        ]
        try:
            codes = [process.wait(PATIENCE) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise UserError(f"the undisturbed run failed; see {log.name}")


def disturb(run: Disturbed, faults: int) -> list[dict[str, Any]]:
    """Do the faults one after the other, and let the run end.

    Returns:
      The kind of each, its step, and seconds from there to the first new step.
    """
    rng, lines = random.Random(0), []
    run.start()
    for i in range(faults):
        fault = KINDS[i % len(KINDS)]
        run.reach((i + 1) * BETWEEN + rng.randrange(BETWEEN // 2))
        step, starts = last_step(run.folder / "disturbed"), run.starts()
        began = time.monotonic()
        fault(run)
        run.recover(step, starts)
        seconds = round(time.monotonic() - began, 1)
        lines.append({"fault": fault.__name__, "step": step, "seconds": seconds})
        note(f"{i + 1} of {faults}: {fault.__name__} after step {step}: {seconds} s")
    assert run.process is not None
    code = run.process.wait(PATIENCE)
    if code:
        raise UserError(
            f"the disturbed run ended with exit code {code}; see {run.log.name}"
        )
    return lines


def states_are_equal(folder: Path) -> bool:
    """Return whether both runs' newest checkpoints hold the same bits."""
    from trainer.run.checkpoint import Checkpointer
    from trainer.run.libraries import hide_missing_gpu

    hide_missing_gpu()
    states = []
    for name in ("undisturbed", "disturbed"):
        with Checkpointer.reading(folder / name / "checkpoints") as checkpointer:
            states.append(checkpointer.manifest().leaves)
    return states[0] == states[1]


def main(args: Arguments) -> None:
    """Make both runs, and print a row for docs/measurements.md.

    Raises:
      UserError: anything was not as it should be.
    """
    folder = Path(args.out).resolve()
    folder.mkdir(parents=True)
    words = [
        *SMALL,
        f"precision={args.precision}",
        f"parallel={args.parallel}",
        f"train.steps={(args.faults + 2) * BETWEEN}",
        f"train.eval_every={BETWEEN}",
        "train.final_eval_batches=4",
        "checkpoint.every=10",
        "tracker=jsonl",
        f"compile_cache={folder / 'cache'}",
    ]
    undisturbed(folder, words)
    with (
        (folder / "disturbed.log").open("w", encoding="utf-8") as log,
        cluster(WORKERS) as nodes,
    ):
        run = Disturbed(nodes, folder, words, log)
        try:
            lines = disturb(run, args.faults)
        finally:
            if run.process is not None:
                run.process.kill()
    rows = [figures(folder / name) for name in ("undisturbed", "disturbed")]
    result = {
        "state_equal": states_are_equal(folder),
        "rows_equal": rows[0] == rows[1],
        "no_traceback": "Traceback" not in (folder / "disturbed.log").read_text(),
        "faults": lines,
    }
    (folder / "lost_machines.json").write_text(
        json.dumps(result, indent=1) + "\n", encoding="utf-8"
    )
    parts = []
    for kind in KINDS:
        name = kind.__name__
        seconds = [line["seconds"] for line in lines if line["fault"] == name]
        if seconds:
            median, most = statistics.median(seconds), max(seconds)
            parts.append(f"{len(seconds)} {name}: {median:.0f} s, at most {most:.0f}")
    held = [name for name, value in result.items() if value is True]
    failed = [name for name, value in result.items() if value is False]
    print(
        f"| {args.precision}, {args.parallel} | {'; '.join(parts)} |"
        f" {', '.join(held)} | {', '.join(failed) or 'nothing'} |"
    )
    if failed:
        raise UserError(f"not all was as expected; see {args.out}")


if __name__ == "__main__":
    sys.exit(run_script(Arguments, "faults.lost_machines", __doc__ or "", main))
