"""Measure the loop's wait for a checkpoint, and the time to the first resumed step.

python -m scripts.bench.checkpoint model=gpt2_124m precision=fp32
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import jax

from scripts.bench.cases import without_data
from scripts.bench.memory import filled
from trainer.cli.arguments import argument, run_script
from trainer.errors import UserError
from trainer.observe.records import read_rows
from trainer.run.allocator import keep_freed_memory
from trainer.run.checkpoint import Checkpointer
from trainer.run.libraries import hide_missing_gpu
from trainer.step.checksum import checksums
from trainer.step.state import to_checkpoint_form
from trainer.workload import first_state

TICKS = os.sysconf("SC_CLK_TCK")  # a second


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    model: str = argument("the model", "gpt2_124m")
    precision: str = argument("its precision", "fp32")
    vocab: int = argument("ids of the tokenizer, for the saves", 50257)
    rounds: int = argument("saves", 3)
    folder: str = argument(
        "where checkpoints and runs are written and removed again; empty: the"
        " system's temporary directory",
        "",
    )


def main(args: Arguments) -> None:
    """Print both figures."""
    hide_missing_gpu()
    with tempfile.TemporaryDirectory(dir=args.folder or None) as folder:
        saves(args, Path(folder) / "saves")
        resume(args, Path(folder))


def saves(args: Arguments, folder: Path) -> None:
    """Print for each save how long the loop waits, and how long the save takes."""
    names = [f"model={args.model}", f"precision={args.precision}"]
    w = without_data(names, args.vocab)
    state = to_checkpoint_form(filled(first_state(w, seed=0)))
    jax.block_until_ready(state)
    size = sum(x.nbytes for x in jax.tree.leaves(state) if hasattr(x, "nbytes"))
    shares = []
    for i in range(args.rounds + 1):  # the first compiles
        with Checkpointer(folder) as checkpointer:
            started = time.perf_counter()
            checkpointer.save(1, state, {})
            waited = time.perf_counter() - started
            checkpointer.wait()
            total = time.perf_counter() - started
        shutil.rmtree(folder)
        if i:
            shares.append(waited / total)
            print(
                f"save {i}: the loop waits {waited:.2f} s of {total:.2f} s,"
                f" {waited / total:.1%}",
                flush=True,
            )
    started = time.perf_counter()
    checksums(
        [
            x
            for x in jax.tree.leaves(state)
            if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        ]
    )
    print(f"checksums alone: {time.perf_counter() - started:.2f} s")
    print(
        f"{args.model} {args.precision}, {size / 2**30:.2f} GiB: median stall"
        f" {median(shares):.1%} of the save"
    )


def resume(args: Arguments, folder: Path) -> None:
    """Print the seconds from a resumed process's start to the row of its first step.

    Everything is compiled before.
    """
    overrides = [
        f"model={args.model}",
        f"precision={args.precision}",
        "parallel.data=1",
        "train.batch_tokens=1024",
    ]
    overrides += [
        "tracker=jsonl",
        "train.eval_batches=1",
        "train.final_eval_batches=1",
        "sample.max_new_tokens=0",
    ]
    overrides += [
        "metrics.numerics_every=0",
        "run_dir=run",
        f"compile_cache={folder}/cache",
    ]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    for steps in (1, 3):
        command = [sys.executable, "-m", "trainer", *overrides, f"train.steps={steps}"]
        started = time.perf_counter()
        with (folder / "output.txt").open("w") as output:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=output
            )
        log, seen = folder / "run" / "metrics.jsonl", False
        while process.poll() is None:
            if not seen and log.exists():
                seen = any(row["step"] == 2 for row in read_rows(log))
                if seen:
                    seconds = time.perf_counter() - started
                    stat = Path(f"/proc/{process.pid}/stat").read_text()
                    user, system = stat.rpartition(")")[2].split()[11:13]
                    cpu = (
                        f"{int(user) / TICKS:.1f} s of CPU in user mode,"
                        f" {int(system) / TICKS:.1f} s in the system"
                    )
            time.sleep(0.02)
        if process.returncode:
            raise UserError(
                f"the run failed: {(folder / 'output.txt').read_text()[-500:]}"
            )
    print(f"resumed, to its first step: {seconds:.1f} s; {cpu}")


if __name__ == "__main__":
    keep_freed_memory()  # as the trainer does
    sys.exit(run_script(Arguments, "bench.checkpoint", __doc__ or "", main))
