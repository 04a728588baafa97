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
    """A run: its overrides beside COMMON, devices and processes. `after` another: that
    run's directory is `{after}`."""

    name: str
    args: list[str]
    devices: int = 1
    processes: int = 1


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
    Case("resume", ["resume=flagship", "train.steps=6", "run_dir=resumed"]),
    Case(
        "convert",
        [
            "resume=fp32",
            "resume.convert=true",
            "train.steps=6",
            "run_dir=converted",
            FLAGSHIP,
        ],
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
    shown = {
        name: [row[name] for row in rows if name in row]
        for name in ("train/loss", "grad_norm", "val/loss")
    }
    return shown | {
        "rows": digest(rows),
        "state": digest(parameters(run_dir, rows[-1]["step"])),
    }


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

    code = (
        "import json, sys; from trainer.cli.train import main\n"
        "for args in json.loads(sys.argv[1]):\n"
        "    if code := main(args): sys.exit(code)\n"
    )
    cache = f"compile_cache={os.environ.get('SCALIFY_TEST_CACHE', folder / 'cache')}"
    several = cases[0].processes > 1
    shared = ["parallel.distributed=true"] if several else []
    runs = [
        [*COMMON, cache, f"run_dir={case.name}", *shared, *case.args] for case in cases
    ]
    runs = [
        [arg for i, arg in enumerate(args) if key(arg) not in map(key, args[i + 1 :])]
        for args in runs
    ]
    flags = {
        "XLA_FLAGS": (
            f"{XLA_FLAGS} --xla_force_host_platform_device_count={cases[0].devices}"
        )
    }
    address = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(cases[0].processes),
    }
    return [
        subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(runs)],
            cwd=folder,
            env=environment(
                **flags, **(address | {"JAX_PROCESS_ID": str(i)} if several else {})
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(cases[0].processes)
    ]


def key(argument: str) -> str:
    """The key of an override."""
    return argument.partition("=")[0]


def directory(case: Case) -> str:
    """The run directory of a case."""
    return next(
        (arg.partition("=")[2] for arg in case.args if key(arg) == "run_dir"), case.name
    )


def with_their_beginnings(names: Collection[str]) -> list[Case]:
    """The cases of these names, and those whose checkpoints they begin with."""
    begun = {
        arg.partition("=")[2]
        for case in CASES
        if case.name in names
        for arg in case.args
        if key(arg) == "resume"
    }
    return [case for case in CASES if case.name in {*names, *begun}]


def measure(folder: Path, names: Collection[str]) -> dict[str, dict[str, object]]:
    """The figures of these cases, and of those that they begin with, by name; runs go
    to `folder`."""
    import socket

    wanted = with_their_beginnings(names)
    for devices, processes in dict.fromkeys(
        (case.devices, case.processes) for case in wanted
    ):
        cases = [
            case
            for case in wanted
            if (case.devices, case.processes) == (devices, processes)
        ]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        started = run_group(folder, cases, port)
        for process in started:
            output, _ = process.communicate(timeout=500)
            if process.returncode:
                raise RuntimeError(f"{[case.name for case in cases]}: {output}")
    return {case.name: figures(folder / directory(case)) for case in wanted}


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = XLA_FLAGS
    with tempfile.TemporaryDirectory() as made:
        found = measure(Path(made), [case.name for case in CASES])
    FIGURES.write_text(
        json.dumps({"machine": machine(), "cases": found}, indent=1) + "\n"
    )
    print(f"{len(found)} cases written to {FIGURES}")
