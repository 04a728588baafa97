"""What a checkpoint costs the loop, and how long a resumed run takes to its first step. On the devices that are there.

python -m scripts.bench_checkpoint model=gpt2_124m precision=fp32
"""

import functools
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np

from scripts.arguments import argument, run
from scripts.memory import filled, without_data
from trainer.allocator import keep_freed_memory
from trainer.checkpoint import Checkpointer
from trainer.errors import UserError
from trainer.leaves import checksums, is_key
from trainer.libraries import hide_missing_gpu
from trainer.records import read_rows
from trainer.state import to_stored
from trainer.workload import first_state

TICKS = os.sysconf("SC_CLK_TCK")  # a second


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    model: str = argument("the model", "gpt2_124m")
    precision: str = argument("its precision", "fp32")
    vocab: int = argument("ids of the tokenizer, for the saves", 50257)
    rounds: int = argument("saves", 3)
    folder: str = argument("where checkpoints and runs are written and removed again; empty: the system's own", "")


def main(args: Arguments) -> None:
    """Print both figures."""
    keep_freed_memory()  # as the trainer does
    hide_missing_gpu()
    with tempfile.TemporaryDirectory(dir=args.folder or None) as folder:
        saves(args, Path(folder) / "saves")
        resume(args, Path(folder))


def saves(args: Arguments, folder: Path) -> None:
    """Each save: what it costs the loop, and how long it is until the checkpoint is whole.

    The loop waits in the call; and where the call had only borrowed memory, the step after it would have to wait: an
    update of the whole state in place is timed behind it, and again when nothing is being saved.
    """
    w = without_data(args.model, args.vocab, [f"precision={args.precision}"])
    state = written_over(filled(first_state(w)))
    size = sum(x.nbytes for x in jax.tree.leaves(to_stored(state)))
    shares = []
    with Checkpointer(folder) as checkpointer:
        for i in range(args.rounds + 1):
            started = time.perf_counter()
            state = written_over(state)
            alone = time.perf_counter() - started
            started = time.perf_counter()
            checkpointer.save(i + 1, to_stored(state), {})
            waited = time.perf_counter() - started
            state = written_over(state)
            late = time.perf_counter() - started - waited - alone
            checkpointer.wait()
            whole = time.perf_counter() - started
            if i:
                shares.append((waited / whole, (waited + late) / whole))
            name = f"save {i}" if i else "first save, which compiles and gets its memory"
            print(f"{name}: the loop waits {waited:.2f} s of {whole:.2f} s, {waited / whole:.1%}", end="; ")
            print(f"the update behind it takes {alone:.2f} s and {late:.2f} s more", flush=True)
    arrays = [x for x in jax.tree.leaves(to_stored(state)) if not is_key(x)]
    started = time.perf_counter()
    checksums(arrays)
    print(f"checksums alone: {time.perf_counter() - started:.2f} s")
    stall, both = (median(share) for share in zip(*shares, strict=True))
    print(f"{args.model} {args.precision}, {size / 2**30:.2f} GiB: median stall {stall:.1%} of the save", end="")
    print(f", {both:.1%} with what the update behind it loses")


def written_over(state: Any) -> Any:
    """The same state in the same memory, every array written once; waits for it."""
    leaves, structure = jax.tree.flatten(state)
    arrays = iter(_times([x for x in leaves if not is_key(x)], np.uint8(1)))
    return jax.block_until_ready(jax.tree.unflatten(structure, [x if is_key(x) else next(arrays) for x in leaves]))


@functools.partial(jax.jit, donate_argnums=0)
def _times(arrays: list[jax.Array], one: np.ndarray) -> list[jax.Array]:
    """The compiler does not know that it is 1."""
    return [x * jax.lax.convert_element_type(one, x.dtype) for x in arrays]


def resume(args: Arguments, folder: Path) -> None:
    """From the start of the resumed process to the row of its first step, everything compiled before."""
    overrides = [f"model={args.model}", f"precision={args.precision}", "parallel.data=1", "train.batch_tokens=1024"]
    overrides += ["tracker=jsonl", "train.eval_batches=1", "train.final_eval_batches=1", "sample.max_new=0"]
    overrides += ["metrics.numerics_every=0", "run_dir=run", f"compile_cache={folder}/cache"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    for steps in (1, 3):
        command = [sys.executable, "-m", "trainer", *overrides, f"train.steps={steps}"]
        started = time.perf_counter()
        with (folder / "output.txt").open("w") as output:
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
        log, seen = folder / "run" / "metrics.jsonl", False
        while process.poll() is None:
            if not seen and log.exists() and any(row["step"] == 2 for row in read_rows(log)):
                seen, seconds = True, time.perf_counter() - started
                user, system = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
                cpu = f"{int(user) / TICKS:.1f} s of CPU in user mode, {int(system) / TICKS:.1f} s in the system"
            time.sleep(0.02)
        if process.returncode:
            raise UserError(f"the run failed: {(folder / 'output.txt').read_text()[-500:]}")
    print(f"resumed, to its first step: {seconds:.1f} s; {cpu}")


if __name__ == "__main__":
    sys.exit(run(Arguments, "bench_checkpoint", __doc__ or "", main))
