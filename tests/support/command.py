"""The trainer on a tiny model, in this process or in processes of its own, and what its
run directory then says."""

import contextlib
import functools
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from scripts.faults.chaos import SMALL
from trainer import Callback, Result, compose, train
from trainer.cli.train import main
from trainer.observe.records import read_rows
from trainer.text import merge_overrides

ROOT = Path(__file__).resolve().parents[2]
# One layer: tracing and compiling it is most of what a trainer here takes, and what
# layers do has its own tests.
TINY = [*SMALL, "train.eval_every=15", "train.final_eval_batches=2", "model.n_layer=1"]
# null: golden/cases.py as a program
CACHE = f"compile_cache={os.environ.get('SCALIFY_TEST_CACHE', 'null')}"
type Process = subprocess.Popen[str]


def here(folder: Path, run_dir: str, *args: str, code: int = 0) -> str:
    """What a trainer in this process prints, which imports nothing anew; it ends with
    `code`. It works in `folder`.

    This process has eight devices, so more threads than one with a device: large sums
    of a run have other last bits there.
    """
    printed = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        patch.chdir(folder)
        patch.setattr(logging.root, "handlers", [])  # Hydra's would outlive this output
        actual = main(
            merge_overrides(
                TINY, [f"run_dir={run_dir}", "parallel.data=1", CACHE], args
            )
        )
    assert actual == code, printed.getvalue()
    return printed.getvalue()


def environment(devices: int = 1, **extra: str) -> dict[str, str]:
    # by conftest, and by programs that ran in this process
    set_here = ("WANDB_", "XLA_", "JAX_", "HYDRA_", "TF_CPP_")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(set_here)}
    flags = (
        f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    )
    name = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
    threshold = {name: os.environ[name]} if name in os.environ else {}
    return (
        inherited
        | threshold
        | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags,
            "WANDB_MODE": "offline",
            "PYTHONPATH": str(ROOT),
        }
        | extra
    )


def trainer(
    tmp_path: Path, run_dir: str, *args: str, devices: int = 1, **variables: str
) -> Process:
    """A trainer at work in `tmp_path`, where it finds the data prepared by the one
    before it.

    It takes over what other tests' trainers have compiled. Who kills one while it
    compiles gives it a cache of its own.
    """
    command = [
        sys.executable,
        "-m",
        "trainer",
        *merge_overrides(TINY, [f"run_dir={run_dir}", CACHE], args),
    ]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(
        command, cwd=tmp_path, env=environment(devices, **variables), text=True, **both
    )


def _train_with(
    action: Callable[[], None], step: int, folder: Path, run_dir: str, *args: str
) -> Result:
    """Train in this process, and do something after a step."""
    callback = Callback(
        "action", 1, lambda context: action() if context.step == step else None
    )
    given = merge_overrides(
        TINY, [f"run_dir={run_dir}", "parallel.data=1", CACHE], args
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return train(compose(given), callbacks=[callback])


def stopped_after(folder: Path, run_dir: str, step: int, *args: str) -> None:
    """A run in this process that a signal stops soon after this step, as one from a
    cluster's queue would."""
    stop = functools.partial(os.kill, os.getpid(), signal.SIGTERM)
    actual = _train_with(stop, step, folder, run_dir, *args)
    assert actual.stopped_by == signal.SIGTERM
    assert actual.step >= step


def crashed_after(folder: Path, run_dir: str, step: int, *args: str) -> None:
    """A run in this process that ends without a word after this step: what it has
    saved before is what there is of it."""

    def crash() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        _train_with(crash, step, folder, run_dir, *args)


def finish(process: Process, code: int = 0) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


def values(run_dir: Path) -> list[dict]:
    """The rows without what a clock or the machine's memory decides."""
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if "event" not in row]
    return [
        {k: v for k, v in row.items() if not k.startswith(("perf/", "memory/"))}
        for row in rows
    ]


def parameters(run_dir: Path, step: int) -> dict[str, dict]:
    """Names, shapes, dtypes and checksums of every leaf of the state, as the
    checkpoint's manifest has them."""
    manifest = json.loads(
        next((run_dir / "checkpoints" / str(step) / "manifest").rglob("*")).read_text()
    )
    return manifest["leaves"]


def wait_for_row(run_dir: Path, step: int, process: Process) -> None:
    """Until the run has logged `step`, or has ended."""
    path = run_dir / "metrics.jsonl"
    while process.poll() is None:
        if path.exists() and f'"step": {step},' in path.read_text(errors="replace"):
            return
        time.sleep(0.02)


def several(
    tmp_path: Path,
    run_dir: str,
    *args: str,
    count: int = 2,
    devices: int = 2,
    last: dict[str, str] | None = None,
    last_args: Sequence[str] = (),
) -> list[Process]:
    """The processes of one run, each with so many devices; `last`, `last_args`:
    variables and arguments of the last."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    common = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count)}
    each = [common | {"JAX_PROCESS_ID": str(i)} for i in range(count)]
    each[-1] |= last or {}
    return [
        trainer(
            tmp_path,
            run_dir,
            *args,
            "parallel.distributed=true",
            *own,
            devices=devices,
            **variables,
        )
        for variables, own in zip(each, [()] * (count - 1) + [last_args], strict=True)
    ]
