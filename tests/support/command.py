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
from trainer.config.schema import Config
from trainer.data import corpus
from trainer.observe.records import read_rows
from trainer.text import merge_overrides

ROOT = Path(__file__).resolve().parents[2]
# One layer, and no text: tracing and compiling them is most of what a trainer here
# takes, and what layers do has its own tests.
TINY = merge_overrides(
    SMALL,
    ["model.n_layer=1", "sample.max_new_tokens=0", "tracker=jsonl"],
    ["train.eval_every=15", "train.final_eval_batches=2"],
)
# Parsed once in a process, and not in each run
corpus.embedded_corpus = functools.cache(corpus.embedded_corpus)
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
        given = [f"run_dir={run_dir}", "parallel.data=1", CACHE]
        actual = main(merge_overrides(TINY, given, args))
    assert actual == code, printed.getvalue()
    return printed.getvalue()


def tiny_config(*overrides: str) -> Config:
    """Compose the configuration of a run A on a tiny model."""
    given = ["run_dir=A", "parallel.data=1", CACHE]
    return compose(merge_overrides(TINY, given, overrides))


def environment(devices: int = 1, **extra: str) -> dict[str, str]:
    # by conftest, and by programs that ran in this process
    set_here = ("WANDB_", "XLA_", "JAX_", "HYDRA_", "TF_CPP_")
    compile_time_variable = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
    inherited = {
        k: v
        for k, v in os.environ.items()
        if k == compile_time_variable or not k.startswith(set_here)
    }
    devices_flag = f"--xla_force_host_platform_device_count={devices}"
    return inherited | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {devices_flag}",
        "WANDB_MODE": "offline",
        "PYTHONPATH": str(ROOT),
        **extra,
    }


def trainer(
    tmp_path: Path, run_dir: str, *args: str, devices: int = 1, **variables: str
) -> Process:
    """A trainer at work in `tmp_path`, where it finds the data prepared by the one
    before it.

    It takes over what other tests' trainers have compiled. Who kills one while it
    compiles gives it a cache of its own.
    """
    given = merge_overrides(TINY, [f"run_dir={run_dir}", CACHE], args)
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", *given],
        cwd=tmp_path,
        env=environment(devices, **variables),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def _train_with(
    action: Callable[[], None], step: int, folder: Path, run_dir: str, *args: str
) -> Result:
    """Train in this process, and do something after a step."""
    act = lambda context: action() if context.step == step else None
    given = [f"run_dir={run_dir}", "parallel.data=1", CACHE]
    with contextlib.chdir(folder):
        config = compose(merge_overrides(TINY, given, args))
        return train(config, callbacks=[Callback("action", 1, act)])


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
    rows = []
    for row in read_rows(run_dir / "metrics.jsonl"):
        if "event" not in row:
            measured = [k for k in row if k.startswith(("perf/", "memory/"))]
            rows.append({k: v for k, v in row.items() if k not in measured})
    return rows


def parameters(run_dir: Path, step: int) -> dict[str, dict]:
    """Names, shapes, dtypes and checksums of every leaf of the state, as the
    checkpoint's manifest has them."""
    folder = run_dir / "checkpoints" / str(step) / "manifest"
    return json.loads(next(folder.rglob("*")).read_text())["leaves"]


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
    processes = []
    for i in range(count):
        is_last = i == count - 1
        variables = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(count),
            "JAX_PROCESS_ID": str(i),
            **(last or {} if is_last else {}),
        }
        words = [*args, "parallel.distributed=true", *(last_args if is_last else [])]
        processes.append(
            trainer(tmp_path, run_dir, *words, devices=devices, **variables)
        )
    return processes
