"""Measure the loss that DiLoCo costs: replicas that exchange outer gradients now and
then, against one data-parallel run.

    python -m scripts.studies.diloco out=runs/diloco seeds=3 steps=600 \\
        ways="outer_grad=fp8,outer_grad=fp32,outer_grad=fp8+error_feedback=false"

A way is a list of keys of the trainer's group `diloco` with their values, joined by +;
keys of other groups are given in full (`optimizer.lr=8e-3`). The other keys are as in
`parallel=diloco`. `data` is the run without replicas, and so is
`data+optimizer.lr=8e-3`. All ways are compared with `base`: same first weights, same
batches, same schedule, same random bits. With `warm` the first steps are those of
`data`, and each way goes on from there, as published runs do. With `sources=apart`
replicas have data of their own, consecutive parts of two texts, as the clients of
federated learning do: half of them English, half of them Python.

All replicas are computed on the first device, which gives them the same bits as
elsewhere; the inner step is compiled once for all ways. A finished run is a JSON line
in OUT/runs.jsonl; called again, the study continues. OUT/table.md is written anew after
each.
"""

import dataclasses
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scripts.studies import rows
from trainer.assembly.build import (
    build_batch,
    build_learning_rates,
    build_state,
    build_workload,
)
from trainer.cli.arguments import argument, run_script, split
from trainer.compiled.exchange import exchanges_of
from trainer.config.composition import compose_config
from trainer.config.schema import Config
from trainer.data.corpus import EmbeddedSource, PythonSource, open_corpus
from trainer.files import write_atomically
from trainer.parallel.mesh import make_mesh, place_batch
from trainer.parallel.replicas import DiLoCoStep
from trainer.run.rundir import code_version
from trainer.step.state import TrainState, from_stored, to_stored
from trainer.step.step import Hyper, StepFn
from trainer.tasks.intervals import half_width
from trainer.workload import (
    Workload,
    abstract_state,
    compile_step,
    jitted_eval_step,
    lower_exchange,
)

DATA = "data"
MOST = 4_000_000  # characters of a text that is cut into parts: about the Bible
SIZES = "model.n_layer=2 model.d_model=64 model.n_head=2 model.context=64"


@dataclass(frozen=True)
class Arguments:
    """Settings of the study; see `--help`."""

    out: str = argument("where the runs and the table go", "runs/diloco")
    ways: str = argument(
        "what is compared with the base, separated by commas", "outer_grad=fp8"
    )
    base: str = argument("the way that the others are compared with", DATA)
    warm: int = argument("steps of each run that are data parallel, before all else", 0)
    sources: Literal["none", "apart"] = argument(
        "apart: each replica has a text of its own, of the Bible or of Python",
        "none",
    )
    overrides: str = argument(
        "further arguments of the trainer for all runs, separated by spaces", SIZES
    )
    precision: str = argument("of all runs", "fp32")
    replicas: int = argument("how many train apart", 4)
    seeds: int = argument("pairs", 3)
    steps: int = argument("steps of each run", 600)
    batch_tokens: int = argument("tokens per step, of all replicas together", 2048)
    eval_batches: int = argument("batches of the validation of the last weights", 64)


class DiLoCoTrial(NamedTuple):
    """One run: a way and a seed."""

    way: str
    seed: int


class Warm(NamedTuple):
    """The state that runs of a seed start from, stored after some steps, or None."""

    steps: int
    state: TrainState | None


class Compiled:
    """Compiled programs that several ways share: inner steps and the validation."""

    def __init__(self) -> None:
        self._steps: dict[Any, Any] = {}
        self._validations: dict[int, Any] = {}
        self._warm: tuple[int, Warm] = -1, Warm(0, None)

    def step(self, c: Config, w: Workload, state: TrainState) -> StepFn:
        """Return a way's step, compiled for a state's scales."""
        diloco = w.task.diloco
        key = (
            diloco
            and (
                diloco.replicas,
                diloco.participants,
                diloco.participants < diloco.replicas and diloco.steps,
            ),
            jax.tree.structure(state.params),
        )
        if key not in self._steps:
            self._steps[key] = compile_step(w.task, build_batch(c, w.mesh), state)
        step = self._steps[key]
        if diloco is None or step.diloco == diloco:
            return step
        programs = [lower_exchange(w.task, i, state) for i in range(diloco.fragments)]
        return DiLoCoStep(
            step.inner, [program.compile() for program in programs], diloco
        )

    def warm(self, c: Config, seed: int, steps: int) -> Warm:
        """Return the state that the runs of a seed start from."""
        if steps and self._warm[0] != seed:
            c = dataclasses.replace(c, seed=seed)
            w = on_first_device(c, build_workload(c))
            state = to_stored(
                steps_of(c, w, from_stored(build_state(c, w)), 0, steps, self)
            )
            self._warm = seed, Warm(steps, state)
        return self._warm[1]

    def validation(self, w: Workload) -> Any:
        """Return the compiled validation on the mesh of a way."""
        key = len(w.mesh.shape)
        if key not in self._validations:
            self._validations[key] = jitted_eval_step(w.task)
        return self._validations[key]


def main(args: Arguments) -> None:
    """Run what is not finished, one seed after the other, so that pairs come early."""
    jobs = [
        DiLoCoTrial(way, seed)
        for seed in range(args.seeds)
        for way in dict.fromkeys((args.base, *split(args.ways)))
    ]
    # refused now
    configs = {
        way: configuration(args, way)
        for way in (DATA, *dict.fromkeys(job.way for job in jobs))
    }
    out, compiled = Path(args.out), Compiled()
    out.mkdir(parents=True, exist_ok=True)
    keys = (
        "overrides",
        "precision",
        "replicas",
        "steps",
        "batch_tokens",
        "eval_batches",
        "warm",
        "sources",
    )
    settings = {key: getattr(args, key) for key in keys}
    # of rows that were written before a key was
    losses, defaults = {}, {key: getattr(Arguments, key) for key in keys}
    for row in rows.read(out / "runs.jsonl"):
        if {
            key: row.get(key, default) for key, default in defaults.items()
        } == settings:
            losses[DiLoCoTrial(row["way"], row["seed"])] = row["loss"]
    for number, job in enumerate(jobs, 1):
        if job in losses:
            continue
        start = time.monotonic()
        warm = compiled.warm(configs[DATA], job.seed, args.warm)
        losses[job], fewer = train(configs[job.way], job.seed, compiled, warm)
        row = (
            job._asdict()
            | settings
            | {
                "loss": losses[job],
                "fewer": fewer,
                "code": code_version(),
            }
        )
        rows.append(out / "runs.jsonl", row)
        sent = "" if fewer is None else f", {fewer:.1f} times fewer bytes"
        seconds = time.monotonic() - start
        print(
            f"{number} of {len(jobs)}: {job.way}, seed {job.seed}: {losses[job]:.4f}"
            f" nats{sent} ({seconds:.0f} s)",
            flush=True,
        )
        write_atomically(out / "table.md", table(args, losses))
    print(table(args, losses))


def configuration(args: Arguments, way: str) -> Config:
    """Compose the trainer's configuration of a way; UserError where it is invalid."""
    words = [
        f"precision={args.precision}",
        f"train.steps={args.steps}",
        f"train.batch_tokens={args.batch_tokens}",
    ]
    for key in ("eval_batches", "final_eval_batches"):
        words.append(f"train.{key}={args.eval_batches}")
    overrides, (first, *others) = ["parallel.data=1"], way.split("+")
    if args.sources == "apart":
        paths = ",".join(
            map(str, texts_apart(Path(args.out) / "sources", args.replicas))
        )
        overrides += ["data=mix", f"data.sources=[{paths}]", "data.tokenizer=byte"]
        overrides += [] if first == DATA else ["diloco.data=sources"]
    if first == DATA:
        overrides += others
    else:
        overrides += [
            "parallel=diloco",
            f"diloco.replicas={args.replicas}",
            *map(whole_key, (first, *others)),
        ]
    return compose_config([*words, *shlex.split(args.overrides), *overrides])


def texts_apart(folder: Path, count: int) -> list[Path]:
    """Write `count` consecutive parts of two texts, the Bible first, then Python's
    library; return their paths.
    """
    sources: tuple[EmbeddedSource | PythonSource, ...] = (
        EmbeddedSource(),
        PythonSource(),
    )
    paths = [
        folder / f"{['bible', 'python'][i * 2 // count]}{i}.txt" for i in range(count)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    if not all(path.exists() for path in paths):
        for kind, source in enumerate(sources):
            text = "\n".join(
                text
                for rows in open_corpus(source, folder).read(None)
                for text in rows.texts
            )[:MOST]
            mine = [path for i, path in enumerate(paths) if i * 2 // count == kind]
            for part, path in enumerate(mine):
                span = slice(
                    len(text) * part // len(mine), len(text) * (part + 1) // len(mine)
                )
                write_atomically(path, text[span])
    return paths


def whole_key(word: str) -> str:
    """Return an item of a way as an argument of the trainer."""
    return word if "." in word.partition("=")[0] else f"diloco.{word}"


def train(
    c: Config, seed: int, compiled: Compiled, warm: Warm
) -> tuple[float, float | None]:
    """Train; return the final validation loss (nats), and how many times fewer bytes
    were sent (None for one replica).
    """
    c = dataclasses.replace(c, seed=seed)
    w = on_first_device(c, build_workload(c))
    # Copied, as steps take over what they are given.
    stored = (
        build_state(c, w)
        if warm.state is None
        else w.task.with_replicas(jax.tree.map(jnp.copy, warm.state))
    )
    places = jax.tree.map(lambda x: x.sharding, abstract_state(w.task))
    state = steps_of(
        c,
        w,
        from_stored(jax.device_put(stored, places)),
        warm.steps,
        c.train.steps,
        compiled,
    )
    validation = compiled.validation(w)
    losses = [float(validation(state, tokens)) for tokens in batches(c, w)]
    return statistics.fmean(losses), (
        exchanges_of(w.task).fewer
        if w.task.diloco and w.task.diloco.replicas > 1
        else None
    )


def steps_of(
    c: Config, w: Workload, state: TrainState, start: int, end: int, compiled: Compiled
) -> TrainState:
    """Run the steps from `start` on, before `end`; return the state."""
    step, rates = compiled.step(c, w, state), build_learning_rates(c)
    for i in range(start, end):
        tokens = place_batch(
            w.data.train.batch(i), accum=c.train.grad_accum_steps, mesh=w.mesh
        )
        state, metrics = step(
            state, tokens, Hyper(rates[i], np.int32(i), np.uint32(c.seed))
        )
        if i % 8 == 0:  # not all batches at once in flight
            jax.block_until_ready(metrics)
    return state


def on_first_device(c: Config, w: Workload) -> Workload:
    """Return the workload with all its replicas on one device."""
    mesh = make_mesh(1, replicas=c.diloco.replicas, devices=jax.devices()[:1])
    return w._replace(task=w.task._replace(mesh=mesh))


def batches(c: Config, w: Workload) -> Iterator[Any]:
    """Yield the batches of the validation."""
    for i in range(min(w.data.val.steps_per_epoch, c.train.final_eval_batches)):
        yield place_batch(
            w.data.val.batch(i), accum=c.train.grad_accum_steps, mesh=w.mesh
        )


def table(args: Arguments, losses: dict[DiLoCoTrial, float]) -> str:
    """Format a row for each way: mean loss, and mean difference to the base, with 95%
    intervals.
    """
    lines = [
        (
            f"{args.replicas} replicas, {args.precision}, {args.overrides};"
            f" {args.steps} steps of {args.batch_tokens} tokens, {args.warm} of them"
            f" data parallel; validation loss in nats, differences to `{args.base}` of"
            " the same seed with 95% intervals."
        ),
        "",
    ]
    body = []
    for way in dict.fromkeys(job.way for job in losses):
        way_losses = {job.seed: loss for job, loss in losses.items() if job.way == way}
        differences = [
            100 * (loss / losses[DiLoCoTrial(args.base, s)] - 1)
            for s, loss in way_losses.items()
            if DiLoCoTrial(args.base, s) in losses
        ]
        cell = "-"
        if way != args.base and differences:
            cell = (
                f"{statistics.fmean(differences):+.2f} ± {half_width(differences):.2f}"
            )
        mean = statistics.fmean(way_losses.values())
        body.append([way, str(len(way_losses)), f"{mean:.4f}", cell])
    head = ["way", "seeds", "loss", "difference, %"]
    return "\n".join([*lines, rows.table(head, body)])


if __name__ == "__main__":
    sys.exit(run_script(Arguments, "studies.diloco", __doc__ or "", main))
