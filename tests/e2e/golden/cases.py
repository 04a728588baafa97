"""Small training runs whose metrics and final bits are kept, and how they are run.

`python tests/e2e/golden/cases.py` runs them all and writes their figures anew to
`figures.json`: do so when a change of the arithmetic is meant, and say in the commit
which cases changed and why.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Collection
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

FIGURES = Path(__file__).with_name("figures.json")
# With other flags, as the tests' own that compile in one piece, last digits differ.
XLA_FLAGS = (
    "--xla_backend_optimization_level=0"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
COMMON = [
    "model.n_layer=2",
    "model.n_head=2",
    "model.d_model=32",
    "model.context=32",
    "model.dropout=0.1",
    "train.batch_tokens=512",
    "train.steps=4",
    "train.eval_every=0",
    "train.eval_batches=2",
    "train.final_eval_batches=2",
    "checkpoint.every=2",
    "optimizer.lr=6e-4",
    "sample.max_new_tokens=0",
    "metrics.numerics_every=0",
    "tracker=jsonl",
    "seed=3",
]
FLAGSHIP = "precision=scalify_fp8_fp16"


class Case(NamedTuple):
    """A run: its overrides beside COMMON, devices and processes; and the case that it
    begins with, whose directory has that case's name."""

    name: str
    args: list[str]
    devices: int = 1
    processes: int = 1
    begins_with: str | None = None


CASES = [
    Case("fp32", ["precision=fp32"]),
    Case("bf16", ["precision=bf16"]),
    Case("flagship", [FLAGSHIP, "metrics.numerics_every=2"]),
    Case("fp8_fp8", ["precision=scalify_fp8_fp8"]),
    Case("fp8_delayed", ["precision=fp8_delayed"]),
    Case("fp16_loss_scaled", ["precision=fp16_loss_scaled"]),
    Case("smooth_swiglu", [FLAGSHIP, "model.mlp=smooth_swiglu"]),
    Case("accum", [FLAGSHIP, "train.grad_accum_steps=2"]),
    Case("scan", [FLAGSHIP, "model.scan_layers=true", "model.remat=block"]),
    Case("resume", ["resume=flagship", "train.steps=6"], begins_with="flagship"),
    Case(
        "convert",
        ["resume=fp32", "resume.convert=true", "train.steps=6", FLAGSHIP],
        begins_with="fp32",
    ),
    Case("fsdp", [FLAGSHIP, "parallel=fsdp"], devices=8),
    Case("tensor", [FLAGSHIP, "parallel.tensor=2", "parallel.data=4"], devices=8),
    Case(
        "processes",
        [FLAGSHIP, "parallel=fsdp", "parallel.deterministic_reduce=true"],
        devices=4,
        processes=2,
    ),
]


def machine() -> dict[str, str]:
    """What the bits of a program on CPU depend on, beside the program: the versions and
    the processor's features."""
    text = Path("/proc/cpuinfo").read_text() if platform.system() == "Linux" else ""
    flags = next(
        (line for line in text.splitlines() if line.startswith("flags")),
        platform.machine(),
    )
    versions = {name: version(name) for name in ("jax", "jaxlib", "flax", "optax")}
    return versions | {"processor": hashlib.sha256(flags.encode()).hexdigest()[:16]}


def figures(run_dir: Path) -> dict[str, object]:
    """Losses and gradient norms of a run, and digests of its rows and of its last
    state's bits."""
    from command import parameters, values

    rows = values(run_dir)
    shown = {}
    for name in ("train/loss", "grad_norm", "val/loss"):
        shown[name] = [row[name] for row in rows if name in row]
    state = parameters(run_dir, rows[-1]["step"])
    return shown | {"rows": digest(rows), "state": digest(state)}


def digest(values: object) -> str:
    """A short digest of JSON values, to the last digit."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def run_group(
    folder: Path, cases: list[Case], port: int = 0
) -> list[subprocess.Popen[str]]:
    """The cases of one number of devices and processes, one after another in one
    process, or one for each of several.

    A process imports JAX once for all of them.
    """
    from command import environment

    from trainer.text import merge_overrides

    code = (
        "import json, sys; from trainer.cli.train import main\n"
        "for args in json.loads(sys.argv[1]):\n"
        "    if code := main(args): sys.exit(code)\n"
    )
    _, _, devices, processes, _ = cases[0]
    cache = f"compile_cache={os.environ.get('SCALIFY_TEST_CACHE', folder / 'cache')}"
    shared = [cache, "parallel.distributed=true"] if processes > 1 else [cache]
    runs = [
        merge_overrides(COMMON, [*shared, f"run_dir={case.name}"], case.args)
        for case in cases
    ]
    flags = f"{XLA_FLAGS} --xla_force_host_platform_device_count={devices}"
    variables = {"XLA_FLAGS": flags}
    if processes > 1:
        variables["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port}"
        variables["JAX_NUM_PROCESSES"] = str(processes)
    started = []
    for i in range(processes):
        if processes > 1:
            variables["JAX_PROCESS_ID"] = str(i)
        process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(runs)],
            cwd=folder,
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
    return started


def measure(folder: Path, names: Collection[str]) -> dict[str, dict[str, object]]:
    """The figures of these cases, and of those that they begin with, by name; runs go
    to `folder`."""
    import socket

    begun = {case.begins_with for case in CASES if case.name in names}
    wanted = [case for case in CASES if case.name in begun.union(names)]
    groups: dict[tuple[int, int], list[Case]] = {}
    for case in wanted:
        groups.setdefault((case.devices, case.processes), []).append(case)
    for cases in groups.values():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for process in run_group(folder, cases, port):
            output, _ = process.communicate(timeout=500)
            if process.returncode:
                raise RuntimeError(f"{[case.name for case in cases]}: {output}")
    return {case.name: figures(folder / case.name) for case in wanted}


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = XLA_FLAGS
    with tempfile.TemporaryDirectory() as made:
        measured = measure(Path(made), [case.name for case in CASES])
    FIGURES.write_text(
        json.dumps({"machine": machine(), "cases": measured}, indent=1) + "\n"
    )
    print(f"{len(measured)} cases written to {FIGURES}")
